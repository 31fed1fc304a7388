"""`ui`, `report`, `watch` and `status`: what they show of a feed."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from support import LONG_S, processes
from support.commands import Out, enter_feed, refusal, run
from support.feeds import Feed

import deltasync
from deltasync.cli import main as cli
from deltasync.feed.log import LIVE_S, Log
from deltasync.format.keys import replica_key
from deltasync.format.sealed import Heartbeat
from deltasync.replica.folder import FolderTarget
from deltasync.replica.follower import Follower
from deltasync.store.local import LocalStore

PHASES = {"plan", "fetch", "decode", "stage", "commit", "pause"}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out) -> Path:
    """A folder to work in: checkpoints c0 to c3, one step apart, and `feed` with the first three."""
    return enter_feed(tmp_path, monkeypatch, capsys)


def beat(replica: str, version: int | None, *, age_s: int = 10, **facts: str) -> None:
    """A heartbeat that the store got so long ago; the time in it is wrong."""
    Log(LocalStore("feed")).beat(Heartbeat(replica, version, 2**62, facts))
    modified_s = time.time() - age_s
    os.utime(Path("feed", replica_key(replica)), (modified_s, modified_s))


def status_json(capsys: Out) -> tuple[int, Any]:
    code = run("status", "feed", "--json")
    return code, json.loads(capsys.readouterr().out)


def test_status_of_a_feed_without_replicas(place: Path, capsys: Out) -> None:
    payloads = [path.stat().st_size for path in Path("feed/payloads").iterdir()]
    size = {"stored_bytes": sum(payloads), "stored_payloads": len(payloads)}
    assert status_json(capsys) == (0, {"head": 2, "floor": 0, **size, "replicas": []})
    assert run("status", "feed") == 0
    out = capsys.readouterr().out
    assert "version 2 is the newest; 0 live replicas, 0 silent; " in out
    assert f" in {len(payloads)} payloads, anchors included" in out
    assert run("status", "nowhere") == 1
    assert "there is no version" in refusal(capsys)


def test_status(place: Path, capsys: Out) -> None:
    digest = deltasync.digest("c1").hex
    beat("new", None)
    beat("b", 2, engine="folder", proved_version="2", proved_unix_s=str(int(time.time()) - 40), scrubbed_unix_s="1")
    beat("a", 1, engine="vllm 0.32", digest=digest, fetch_s="0.25", pause_s="0.0040", commit_s="soon", stage_s="nan")
    beat("gone", 0, age_s=LIVE_S + 5, digest="00" * 16)
    beat("ahead", 9, digest=digest, proved_version="9", proved_unix_s="yesterday")
    beat("future", 0, age_s=-10 * LIVE_S)
    Path("feed", replica_key("junk")).write_bytes(b"{")
    code, found = status_json(capsys)
    assert code == 3
    assert (found["head"], found["floor"]) == (2, 0)
    rows = {row["id"]: row for row in found["replicas"]}
    assert list(rows) == ["new", "a", "b", "ahead", "future", "gone"]
    assert 10 <= rows["a"].pop("age_s") < LIVE_S
    assert rows["a"] == {
        "id": "a",
        "version": 1,
        "lag": 1,
        "live": True,
        "engine": "vllm 0.32",
        "digest_equal": True,
        "proved_version": None,
        "proved_age_s": None,
        "seconds": {"fetch": 0.25, "pause": 0.004},
    }
    assert [row["lag"] for row in rows.values()] == [None, 1, 0, 0, 2, 2]
    assert [row["live"] for row in rows.values()] == [True, True, True, True, False, False]
    assert [row["digest_equal"] for row in rows.values()] == [None, True, None, False, None, False]
    capsys.readouterr()
    assert run("status", "feed") == 3
    out, err = capsys.readouterr()
    assert "such as 'ahead'" in err, "the feed does not have that version"
    lines = out.splitlines()
    assert lines[0].startswith("# version 2 is the newest; 4 live replicas, 2 silent; ")
    cells = {row[0]: row for row in (text.split("\t") for text in lines[1:])}
    assert cells["a"][4:] == ["live", "equal", "-", "vllm 0.32", "fetch 250 ms, pause 4 ms"]
    assert cells["b"][4:6] == ["live", "unknown"]
    assert cells["b"][6].startswith("2, 4")
    assert cells["b"][7:] == ["folder", "-"]
    assert cells["gone"][4:] == ["silent", "DIFFERENT", "-", "-", "-"]
    assert [row["proved_version"] for row in rows.values()] == [None, None, 2, None, None, None]
    assert 40 <= rows["b"]["proved_age_s"] < LIVE_S
    assert cells["new"][1:3] == ["-", "-"]


def test_a_replica_with_other_bits_is_an_error(place: Path, capsys: Out) -> None:
    beat("good", 2, digest=deltasync.digest("c2").hex)
    beat("bad", 2, digest=deltasync.digest("c1").hex)
    code = run("status", "feed")
    out, err = capsys.readouterr()
    assert code == 3
    assert "DIFFERENT" in out
    assert err.startswith("error: feed: 1 replica with another digest than that of the version served, or with")
    assert "such as 'bad'" in err
    assert run("status", "feed", "--json") == 3
    assert json.loads(capsys.readouterr().out)["replicas"][0]["digest_equal"] is False


def test_status_of_a_real_replica(place: Path, capsys: Out) -> None:
    target = FolderTarget("live")
    with Follower("feed", target, replica="real") as replica:
        replica.advance()
        code, found = status_json(capsys)
    target.close()
    assert code == 0
    (row,) = found["replicas"]
    assert (row["id"], row["version"], row["lag"], row["engine"], row["digest_equal"]) == ("real", 2, 0, "folder", True)
    assert row["seconds"].keys() == PHASES
    assert row["proved_version"] == 2


HOSTILE = "</script><script>alert(1)</script>\x1b[31m"


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("DELTASYNC_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)
    feed = Feed.of(12, LocalStore(tmp_path / "feed"))
    feed.log.beat(Heartbeat("late", 2, 1, {"engine": HOSTILE, "digest": feed.log.read(2).digest.hex}))
    return tmp_path


def test_report_command(watched: Path, capsys: Out) -> None:
    assert cli.main(["report", "feed", "-o", "report.html", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["head"] == "11"
    assert (watched / "report.html").stat().st_size == printed["bytes"]
    assert cli.main(["report", "feed", "-o", "feed"]) == 1
    assert "is a folder" in capsys.readouterr().err
    assert cli.main(["report", "nowhere", "-o", "other.html"]) == 1
    assert not (watched / "other.html").exists()


def test_a_report_replaces_an_earlier_one_and_nothing_else(watched: Path, capsys: Out) -> None:
    assert cli.main(["report", "feed", "-o", "report.html"]) == 0
    assert cli.main(["report", "feed", "-o", "report.html"]) == 0
    (watched / "index.html").write_text("<!doctype html>precious")
    (watched / "latest.html").symlink_to("report.html")
    os.mkfifo("pipe")
    for name in ("index.html", "latest.html", "pipe"):
        capsys.readouterr()
        assert cli.main(["report", "feed", "-o", name]) == 1
        assert f"{name} exists and is not a report that deltasync wrote" in capsys.readouterr().err
    assert (watched / "index.html").read_text() == "<!doctype html>precious"
    assert (watched / "latest.html").is_symlink()


def test_watch_once(watched: Path, capsys: Out) -> None:
    assert cli.main(["watch", "feed", "--once"]) == 0
    plain = capsys.readouterr().out
    assert "head\tversion 11" in plain
    assert "Replica late is 9 versions" in plain
    assert cli.main(["watch", "feed", "--once", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["head"] == 11
    assert cli.main(["watch", "nowhere", "--once"]) == 1


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_watch_fits_the_terminal(watched: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert cli.main(["watch", "feed", "--once"]) == 0
    text = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert "version 11" in text
    assert max(map(len, text.splitlines())) <= columns
    assert "\x1b" not in text


def started(*argv: str, cwd: Path) -> "AbstractContextManager[subprocess.Popen[str]]":
    environment = {name: value for name, value in os.environ.items() if name != "DELTASYNC_TOKEN"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return processes.running([sys.executable, "-m", "deltasync", *argv], cwd=cwd, env=environment, **pipes)


def test_watch_prints_what_changes_until_a_signal(watched: Path) -> None:
    with started("watch", "feed", "--json", cwd=watched) as process:
        assert process.stdout is not None
        events = [json.loads(process.stdout.readline()) for _ in range(3)]
        assert {e["event"] for e in events} >= {"head", "replica"}
        process.send_signal(signal.SIGTERM)
        assert process.wait(LONG_S) == 0


def test_ui_serves_until_a_signal(watched: Path) -> None:
    with started("ui", "feed", "--listen", "127.0.0.1:0", "--json", cwd=watched) as process:
        assert process.stderr is not None
        url = json.loads(process.stderr.readline())["listening"]
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=LONG_S)
        connection.request("GET", "/")
        assert b"deltasync" in connection.getresponse().read()
        connection.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(LONG_S) == 0


@pytest.mark.parametrize("command", ["ui", "watch", "report"])
def test_a_mistyped_feed_is_refused(watched: Path, capsys: Out, command: str) -> None:
    options = {"ui": ["--listen", "127.0.0.1:0"], "watch": [], "report": ["-o", "report.html"]}
    assert cli.main([command, "fed", *options[command]]) == 1
    assert "fed (check that this is the URL of a feed" in capsys.readouterr().err
    assert not (watched / "report.html").exists()


def test_ui_refuses_to_listen_for_all_without_a_token(watched: Path, capsys: Out) -> None:
    assert cli.main(["ui", "feed", "--listen", "0.0.0.0:0"]) == 1
    assert "DELTASYNC_TOKEN" in capsys.readouterr().err
