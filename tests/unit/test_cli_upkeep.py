"""`prune`, `compact`, `relay` and pins: what they do and print, once and while they follow."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support import LONG_S, processes
from support.commands import Out, read_json, run, text, write_checkpoints
from support.feeds import paper
from support.replicas import ask, wait_until

import deltasync
from deltasync.feed.log import Log
from deltasync.format.manifest import Manifest
from deltasync.format.sealed import Heartbeat
from deltasync.store.local import LocalStore
from deltasync.upkeep.compact import Compactor
from deltasync.upkeep.relay import Relay, Relayed


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out) -> Path:
    """A folder to work in: checkpoints c0 to c5, one step apart, and `feed` with the first five, an anchor at 3."""
    monkeypatch.chdir(tmp_path)
    write_checkpoints(tmp_path, 6)
    for i in range(5):
        assert run("publish", "feed", f"c{i}", "--step", str(10 * i), *(["--anchor"] if i == 3 else [])) == 0
    capsys.readouterr()
    return tmp_path


KEEP_ONE = ["--keep-anchors", "1", "--keep-versions", "1"]


# --- prune ------------------------------------------------------------------------------------------------------------


def test_prune_is_a_dry_run(place: Path, capsys: Out) -> None:
    before = {p for p in (place / "feed").rglob("*") if p.is_file()}
    assert run("prune", "feed", *KEEP_ONE) == 0
    out = text(capsys).splitlines()
    assert {p for p in (place / "feed").rglob("*") if p.is_file()} == before
    assert all(line.startswith("payloads/") for line in out[:-2])
    assert len(out) == 6
    assert out[-2] == "versions 0-2 could no longer be restored"
    assert "nothing was deleted: pass --yes" in out[-1]
    assert "versions from 3 on stay" in out[-1]
    assert run("prune", "feed", *KEEP_ONE, "--yes") == 0
    done = text(capsys).splitlines()
    assert done[:-2] == out[:-2]
    assert done[-2] == "versions 0-2 can no longer be restored"
    gone = {p.relative_to(place / "feed").as_posix() for p in before if not p.exists()}
    assert gone == set(out[:-2])


def test_prune_json(place: Path, capsys: Out) -> None:
    Log(LocalStore(place / "feed")).beat(Heartbeat("replica-7", 2, 4 * 10**9))
    for option, deleted in (([], False), (["--yes"], True)):
        assert run("prune", "feed", *KEEP_ONE, "--json", *option) == 0
        found = read_json(capsys)
        assert found.keys() == {
            "floor", "keys", "payload_bytes", "orphans", "held_by", "versions", "young_orphans", "young_orphan_bytes",
            "pinned", "deleted", "kept_orphans", "kept_pinned",
        }  # fmt: skip
        assert found["versions"] == [0, 1, 2]
        assert (found["floor"], found["held_by"], found["deleted"]) == (3, ["replica-7"], deleted)
        assert len(found["keys"]) == 3
    assert run("prune", "feed", *KEEP_ONE) == 0
    assert "replica replica-7 is behind" in text(capsys)


# --- compact ----------------------------------------------------------------------------------------------------------


def test_compact(place: Path, capsys: Out) -> None:
    assert run("compact", "feed", "--levels", "2,4") == 0
    out = text(capsys)
    assert re.findall(r"skip from version (\d) to (\d): [0-9,]+ elements", out) == [("0", "2"), ("2", "4"), ("0", "4")]
    assert out.endswith("3 skips written\n")
    assert run("verify", "feed", "--deep") == 0
    capsys.readouterr()
    assert run("compact", "feed", "--levels", "2,4", "--json") == 0
    assert read_json(capsys) == {"skips": []}
    (place / "feed/skips").rename(place / "gone")
    assert run("compact", "feed", "--levels", "4", "--json") == 0
    (found,) = read_json(capsys)["skips"]
    assert (found["kind"], found["parent"], found["version"]) == ("skip", 0, 4)
    assert (place / "feed" / found["key"]).exists()


@pytest.mark.parametrize(("levels", "code"), [("4,6", 1), ("1", 1), ("x", 2), ("4,,8", 2), ("0", 2)])
def test_compact_refuses_levels_that_do_not_nest(place: Path, levels: str, code: int, capsys: Out) -> None:
    try:
        found = run("compact", "feed", "--levels", levels)
    except SystemExit as exit:
        found = int(str(exit.code))
    assert found == code
    assert "levels" in capsys.readouterr().err
    assert not (place / "feed/skips").exists()


def test_compact_follows_until_it_is_stopped(place: Path) -> None:
    command = [sys.executable, "-m", "deltasync", "compact", "feed", "--levels", "2", "--follow", "--json"]
    with processes.running(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        found = [json.loads(process.stdout.readline())["version"] for _ in range(2)]
        for checkpoint in ("c0", "c1"):
            deltasync.publish("feed", checkpoint)
        found.append(json.loads(process.stdout.readline())["version"])
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == ""
        assert process.wait(LONG_S) == 0
    assert found == [2, 4, 6]


# --- pins -------------------------------------------------------------------------------------------------------------


def test_pins_of_a_feed(place: Path, capsys: Out) -> None:
    assert run("pin", "feed", "1", "--name", "best", "--note", "\x1b[31mreward\x1b[0m 0.71") == 0
    assert text(capsys) == "version 1 is pinned as best: `prune` keeps it\n"
    assert run("prune", "feed", *KEEP_ONE, "--yes") == 0
    assert "pin best is of an older version: what it needs stays" in text(capsys)
    assert run("restore", "feed", "-o", "out", "--version", "best") == 0
    assert "(version 1)" in text(capsys)
    assert run("show", "feed", "best", "--json") == 0
    assert read_json(capsys)["manifest"]["version"] == 1
    assert run("pins", "feed", "--json") == 0
    (pinned,) = read_json(capsys)["pins"]
    assert pinned.keys() == {"name", "version", "digest", "note", "created_unix_s"}
    for command in ("pins", "log"):
        assert run(command, "feed") == 0
        shown = text(capsys)
        assert "\x1b" not in shown
        assert "\\x1b[31mreward" in shown
    assert run("unpin", "feed", "best") == 0
    assert text(capsys) == "version 1 is no longer pinned as best\n"


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["pin", "feed", "2"], 1),
        (["pin", "feed", "99"], 1),
        (["pin", "feed", "4", "--name", "\x1b[31m"], 1),
        (["pin", "feed", "4", "--name", "best"], 4),
        (["unpin", "feed", "nobody"], 1),
        (["show", "feed", "nobody"], 1),
        (["pins", "nowhere"], 1),
    ],
)
def test_pins_that_are_refused(argv: list[str], code: int, place: Path, capsys: Out) -> None:
    assert run("pin", "feed", "3", "--name", "best") == 0
    assert run("prune", "feed", *KEEP_ONE, "--yes") == 0
    capsys.readouterr()
    assert run(*argv) == code
    assert "\x1b" not in capsys.readouterr().err
    assert [path.name for path in (place / "feed" / "pins").iterdir()] == ["best.json"]


def test_prune_follows_a_feed(place: Path, capsys: Out) -> None:
    """Until SIGTERM: it deletes what new versions make superfluous, and prints what."""
    assert run("prune", "feed", *KEEP_ONE, "--follow") == 1
    assert "add --yes" in capsys.readouterr().err
    options = ["--yes", "--follow", "--every-s", "0.1", "--json"]
    argv = [sys.executable, "-m", "deltasync", "prune", "feed", *KEEP_ONE, *options]
    with processes.running(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["floor"] == 3
        assert run("publish", "feed", "c5", "--anchor") == 0
        second = json.loads(process.stdout.readline())
        assert second.keys() == {"time_unix_s", "deleted_objects", "payload_bytes", "floor", "held_by", "pinned"}
        assert (second["floor"], second["deleted_objects"] > 0) == (5, True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LONG_S) == 0
    capsys.readouterr()
    assert run("verify", "feed", "--deep") == 0


# --- relay ------------------------------------------------------------------------------------------------------------


def test_relay_copies_a_feed(place: Path, capsys: Out) -> None:
    assert run("relay", "feed", "near", "far", "--json", "--every") == 0
    found = read_json(capsys)
    near, far = found["destinations"]
    assert near.keys() == {"destination", "edges", "bytes"}
    assert near["bytes"] == far["bytes"] > 0
    fields = {"destination", "kind", "version", "parent", "payload_bytes", "manifest_bytes", "left_out"}
    assert all(sent.keys() == fields for sent in found["sent"])
    total = sum(sent["payload_bytes"] + sent["manifest_bytes"] for sent in found["sent"])
    assert total == near["bytes"] + far["bytes"]
    for name in ("near", "far"):
        assert run("verify", name, "--deep") == 0
        assert "5 versions decoded and proved: 0-4" in text(capsys)
    assert run("relay", "feed", "near") == 0
    assert "0 edges, 0 B sent" in text(capsys)


def test_relay_refuses_a_feed_of_another_run(place: Path, capsys: Out) -> None:
    assert run("publish", "other", "c0") == 0
    before = sorted(path for path in (place / "other").rglob("*"))
    assert run("relay", "feed", "new", "./new") == 1
    assert "a destination is given twice" in capsys.readouterr().err
    assert not (place / "new").exists()
    assert run("relay", "feed", "new", "other") == 1
    assert "relay.feed" in capsys.readouterr().err
    assert sorted(path for path in (place / "other").rglob("*")) == before
    assert not (place / "new").exists()
    with pytest.raises(SystemExit):
        run("relay", "feed")


def test_relay_follows_and_goes_on_after_a_kill(place: Path, capsys: Out) -> None:
    argv = [sys.executable, "-m", "deltasync", "relay", "feed", "copy", "--follow", "--json", "--heartbeats"]
    for signal_number, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 0)):
        with processes.running(argv, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            if signal_number == signal.SIGKILL:
                assert json.loads(process.stdout.readline())["kind"] == "anchor"
            else:
                assert run("publish", "feed", "c5", "--step", "50") == 0
                while json.loads(process.stdout.readline()).get("version") != 5:
                    pass
            process.send_signal(signal_number)
            assert process.wait(LONG_S) == code
    capsys.readouterr()
    assert run("verify", "copy", "--deep") == 0
    assert run("show", "copy", "--json") == 0
    capsys.readouterr()
    assert run("status", "feed") == 0
    assert "relay" in text(capsys)


# --- health and metrics of what follows a feed ------------------------------------------------------------------------


FOLLOWS = {
    "pruner": ["prune", "feed", *KEEP_ONE, "--yes", "--every-s", "0.1"],
    "compactor": ["compact", "feed", "--levels", "2"],
    "relay": ["relay", "feed", "copy"],
}


@pytest.mark.parametrize(("role", "version"), [("pruner", 3), ("compactor", 4), ("relay", 4)])
def test_what_follows_a_feed_listens(place: Path, role: str, version: int) -> None:
    argv = [*FOLLOWS[role], "--follow", "--json", "--listen", "127.0.0.1:0", "--metrics"]
    command = [sys.executable, "-m", "deltasync", *argv]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with processes.running(command, env={**os.environ, "DELTASYNC_TOKEN": "t"}, **pipes) as process:
        address = json.loads(process.stderr.readline())["listening"].removeprefix("http://")
        wait_until(lambda: ask(address, "GET", "/readyz")[0] == 200)
        assert json.loads(ask(address, "GET", "/readyz")[1]) == {"ready": True, "version": version}
        assert ask(address, "GET", "/status")[0] == ask(address, "GET", "/status", "wrong")[0] == 401
        status = json.loads(ask(address, "GET", "/status", "t")[1])
        assert (status["version"], status["not_ready"]) == (version, None)
        text = ask(address, "GET", "/metrics")[1].decode()
        found = {s.name: s.value for f in text_string_to_metric_families(text) for s in f.samples}
        assert found[f"deltasync_{role}_version"] == version
        assert found[f"deltasync_{role}_failing"] == 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(LONG_S) == 0


@pytest.mark.parametrize("role", ["compactor", "relay"])
def test_what_always_has_more_to_do_ends_at_a_signal(
    place: Path, capsys: Out, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training is faster than the link of a relay, or a compactor has a long feed to catch up with."""
    done: list[int] = []

    def advance(one: Compactor | Relay) -> Iterator[Manifest | Relayed]:
        for number in range(1000):
            if number == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            done.append(number)
            time.sleep(0.001)
            yield paper("skip", 4, 10, start=0) if role == "compactor" else Relayed("copy", "delta", 4, 3, 1, 1, 0)

    monkeypatch.setattr(Compactor, "advance", advance)
    monkeypatch.setattr(Relay, "advance", advance)
    assert run(*FOLLOWS[role], "--follow") == 0
    assert 3 < len(done) < 500


@pytest.mark.parametrize("role", FOLLOWS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--listen", "127.0.0.1:0"], "--listen has no effect without --follow"),
        (["--follow", "--metrics"], "--metrics needs an address"),
        (["--follow", "--listen", "0.0.0.0:0"], "there is no token"),
    ],
)
def test_what_cannot_listen(place: Path, capsys: Out, role: str, options: list[str], message: str) -> None:
    assert run(*FOLLOWS[role], *options) == 1
    assert message in capsys.readouterr().err
    assert run("verify", "feed") == 0
    assert "5 versions" in text(capsys)
    assert not (place / "copy").exists()
