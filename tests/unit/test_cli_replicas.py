"""`follow`, `status` and `serve`: in this process where they end by themselves, else as real processes."""

import http.client
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support import LONG_S, processes
from support.helpers import changed, state, write_sharded
from support.replicas import wait_until

import deltasync
from deltasync.cli import main as cli
from deltasync.cli.follow import move_text
from deltasync.cli.output import Column, Output
from deltasync.cli.serve import prepare_launch
from deltasync.errors import InvalidInputError
from deltasync.feed.log import LIVE_S, Log
from deltasync.format.keys import replica_key
from deltasync.format.sealed import Heartbeat
from deltasync.replica.events import Advance, Seconds
from deltasync.replica.folder import FolderTarget
from deltasync.replica.follower import Follower
from deltasync.store.local import LocalStore
from deltasync.vllm.settings import Settings

Out = pytest.CaptureFixture[str]

PHASES = {"plan", "fetch", "decode", "stage", "commit", "pause"}


TOKEN = "some-token"


def run(*argv: str) -> int:
    return cli.main(argv)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out) -> Path:
    """A folder to work in: checkpoints c0 to c3, one step apart, and `feed` with the first three."""
    tensors = state()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DELTASYNC_TOKEN", raising=False)
    for i in range(4):
        write_sharded(tmp_path / f"c{i}", tensors)
        tensors = changed(tensors, seed=i)
    for i in range(3):
        assert run("publish", "feed", f"c{i}") == 0
    capsys.readouterr()
    return tmp_path


def refusal(capsys: Out) -> str:
    """The one line of an error, with nothing on stdout."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


# --- follow -----------------------------------------------------------------------------------------------------------


def test_follow_a_folder_once(place: Path, capsys: Out) -> None:
    assert run("follow", "feed", "--target", "live", "--once", "--threads", "1") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert re.match(r"[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9:]{8}  version 2 is live, .* after its commit: ", out)
    assert ": all weights, 1 anchor and 2 deltas of " in out
    assert ", pause " in out
    assert deltasync.digest("live") == deltasync.digest("c2")
    assert run("follow", "feed", "--target", "live", "--once", "--mirror", "mirror") == 0
    capsys.readouterr()
    assert run("follow", "feed", "--target", "live", "--once", "--mirror", "mirror") == 0
    assert capsys.readouterr().out.endswith("  version 2 is already live\n")
    assert run("follow", "feed", "--target", "live", "--once", "--mirror", "mirror", "--json") == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["version"], again["from_version"], again["edges"], again["bytes"]) == (2, 2, [], 0)
    assert run("publish", "feed", "c3") == 0
    capsys.readouterr()
    assert run("follow", "feed", "--target", "live", "--once", "--mirror", "mirror", "--json", "--replica", "r") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    found = json.loads(lines[0])
    assert found.keys() == {
        "time_unix_s", "version", "from_version", "lag", "lag_s", "edges", "bytes", "changed", "seconds"
    }  # fmt: skip
    assert (found["lag"], abs(found["time_unix_s"] - time.time()) < LONG_S) == (0, True)
    assert 0 <= found["lag_s"] < LONG_S
    assert (found["version"], found["from_version"], found["edges"]) == (3, 2, ["delta"])
    assert found["bytes"] > 0
    assert found["changed"] > 0
    assert found["seconds"].keys() == PHASES
    assert deltasync.digest("live") == deltasync.digest("c3")
    # A follower that ends deletes its heartbeat.
    assert Log(LocalStore("feed")).heartbeats() == []


def test_follow_from_a_base(place: Path, capsys: Out) -> None:
    assert run("publish", "based", "c0", "--base", "nowhere/at-all") == 0
    assert run("publish", "based", "c1", "--parent", "c0") == 0
    assert run("follow", "based", "--target", "live", "--once", "--base", "c0") == 0
    assert deltasync.digest("live") == deltasync.digest("c1")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere", "--target", "live", "--once"], 1, "there is no version"),
        (["feed", "--target", "c0", "--once"], 1, "not a link"),
        (["feed", "--target", "live", "--once", "--listen", "127.0.0.1:0"], 1, "--listen has no effect with --once"),
        (["feed", "--target", "live", "--metrics"], 1, "--metrics needs an address"),
        (["feed", "--target", "live", "--ready-s", "5"], 1, "--ready-s needs an address"),
        (["feed", "--target", "live", "--exec", "echo 'open"], 1, "cannot be split: No closing quotation"),
        (["feed", "--target", "live", "--replica", "a b"], 1, "replica"),
        (["feed", "--target", "live", "--listen", "256.0.0.1:1"], 1, "cannot listen on 256.0.0.1 port 1"),
        (["feed", "--target", "live", "--listen", "0.0.0.0:0"], 1, "there is no token"),
        (["feed", "--target", "live", "--once", "--mirror", "c0"], 1, "not a mirror"),
        (["feed", "--target", "live", "--once", "--only-changes"], 1, "--only-changes has no effect without --sglang"),
        (["feed", "--target", "live", "--once", "--keep-cache"], 1, "--keep-cache has no effect without --sglang"),
        (
            ["feed", "--target", "live", "--once", "--sglang-path", "x"],
            1,
            "--sglang-path has no effect without --sglang",
        ),
        (["feed", "--target", "live", "--once", "--pause", "abort"], 1, "--pause has no effect without --sglang"),
        (
            ["feed", "--target", "live", "--once", "--exec-timeout-s", "9"],
            1,
            "--exec-timeout-s has no effect without --exec",
        ),
    ],
)
def test_follow_refuses(place: Path, capsys: Out, arguments: list[str], code: int, message: str) -> None:
    assert run("follow", *arguments) == code
    assert message in refusal(capsys)


@pytest.mark.parametrize(
    "arguments",
    [
        ["feed"],
        ["feed", "--vllm", "http://127.0.0.1:1"],
        ["feed", "--target", "live", "--listen", "8080"],
        ["feed", "--target", "live", "--scrub-s", "0"],
        ["feed", "--target", "live", "--scrub-s", "inf"],
        ["feed", "--target", "live", "--scrub-s", "never"],
        ["feed", "--target", "live", "--exec-timeout-s", "0"],
        ["feed", "--target", "live", "--ready-s", "inf"],
    ],
)
def test_follow_usage(place: Path, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run("follow", *arguments)
    assert caught.value.code == 2


@contextmanager
def process(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """The command as a process, which is ended in any case."""
    command = [sys.executable, "-m", "deltasync", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with processes.running(command, env={**os.environ, **environment}, **pipes) as started:
        yield started
        processes.kill(started)


def line(started: subprocess.Popen[str]) -> Any:
    """The next line of JSON."""
    assert started.stdout is not None
    text = started.stdout.readline()
    if not text:
        assert started.stderr is not None
        raise AssertionError(started.stderr.read())
    return json.loads(text)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_follow_until_a_signal(place: Path, number: signal.Signals) -> None:
    with process("follow", "feed", "--target", "live", "--json", "--replica", "r-1", "--threads", "1") as started:
        assert line(started)["version"] == 2
        assert run("publish", "feed", "c3") == 0
        assert line(started)["version"] == 3
        assert [beat.replica for beat in Log(LocalStore("feed")).heartbeats()] == ["r-1"]
        started.send_signal(number)
        out, err = started.communicate(timeout=LONG_S)
        assert (started.returncode, out, err) == (0, "", "")
    assert deltasync.digest("live") == deltasync.digest("c3")
    assert Log(LocalStore("feed")).heartbeats() == []


def test_follow_ends_when_its_reader_has_gone(place: Path) -> None:
    with process("follow", "feed", "--target", "live", "--threads", "1") as started:
        assert started.stdout is not None
        assert "  version 2 is live" in started.stdout.readline()
        started.stdout.close()
        assert run("publish", "feed", "c3") == 0
        assert started.wait(LONG_S) == cli.EXIT_BROKEN_PIPE
    assert Log(LocalStore("feed")).heartbeats() == []


def test_follow_a_feed_of_another_model(place: Path, capsys: Out) -> None:
    assert run("follow", "feed", "--target", "live", "--once") == 0
    write_sharded(place / "other", {"embed": state()["embed"]})
    assert run("publish", "another", "other") == 0
    capsys.readouterr()
    assert run("follow", "another", "--target", "live", "--threads", "1") == 3
    assert "error: " in capsys.readouterr().err
    assert deltasync.digest("live") == deltasync.digest("c2")


def test_follow_repairs_its_folder(place: Path) -> None:
    with process("follow", "feed", "--target", "live", "--json", "--scrub-s", "0.2", "--threads", "1") as started:
        assert line(started)["version"] == 2
        (file, *_) = sorted((place / "live").glob("*.safetensors"))
        with file.open("r+b") as opened:
            opened.seek(-1, os.SEEK_END)
            last = opened.read(1)[0]
            opened.seek(-1, os.SEEK_END)
            opened.write(bytes([last ^ 1]))
        deadline = time.monotonic() + LONG_S
        while deltasync.digest("live") != deltasync.digest("c2") and time.monotonic() < deadline:
            time.sleep(0.05)
        assert deltasync.digest("live") == deltasync.digest("c2")


def test_follow_and_listen(place: Path) -> None:
    arguments = ("follow", "feed", "--target", "live", "--json", "--listen", "127.0.0.1:0", "--metrics")
    with process(*arguments, DELTASYNC_TOKEN=TOKEN) as started:
        assert started.stderr is not None
        address = json.loads(started.stderr.readline())["listening"].removeprefix("http://")
        assert address.startswith("127.0.0.1:")
        assert line(started)["version"] == 2
        status = json.loads(ask(address, "GET", "/status", TOKEN)[1])
        assert (status["version"], status["head"], status["counts"]["moves"]) == (2, 2, 1)
        assert ask(address, "GET", "/status", "wrong")[0] == 401
        assert b"deltasync_version 2.0" in ask(address, "GET", "/metrics", None)[1]
        assert ask(address, "POST", "/nudge", TOKEN)[0] == 404
        started.send_signal(signal.SIGTERM)
        assert started.wait(LONG_S) == 0


NOTE = """
import os, sys
with open("notes", "a") as file:
    file.write(" ".join(sys.argv[1:]) + chr(10))
sys.exit(not os.path.exists("up"))
"""
"""Notes its arguments, and fails while there is no file `up`."""


def noted() -> list[str]:
    path = Path("notes")
    return path.read_text().splitlines() if path.exists() else []


def test_a_command_after_each_switch(place: Path) -> None:
    """It is retried until it succeeds, and reported on the way; no other version goes live while it runs."""
    arguments = ["follow", "feed", "--target", "live", "--json", "--listen", "127.0.0.1:0", "--replica", "r"]
    program = shlex.join([sys.executable, "-c", NOTE, "{version}", "{path}"])
    folders = {version: str(place / f".live.deltasync/v{version}") for version in (2, 3)}
    with process(*arguments, "--exec", program) as started:
        assert started.stderr is not None
        address = json.loads(started.stderr.readline())["listening"].removeprefix("http://")
        assert line(started)["version"] == 2
        failure = json.loads(started.stderr.readline())["log"]
        assert failure["level"] == "warning"
        assert "the command for version 2 failed with exit code 1 (try 1), retrying in 1 s" in failure["message"]
        assert ask(address, "GET", "/readyz", None)[0] == 503
        status = json.loads(ask(address, "GET", "/status", None)[1])
        assert status["not_ready"] == "the command failed with exit code 1 for version 2"
        assert status["exec"]["failures"] >= 1
        assert b"deltasync_exec_failing 1.0" in ask(address, "GET", "/metrics", None)[1]
        Path("up").touch()
        wait_until(lambda: ask(address, "GET", "/readyz", None)[0] == 200)
        assert set(noted()) == {f"2 {folders[2]}"}
        runs = len(noted())
        assert run("publish", "feed", "c3") == 0
        assert line(started)["version"] == 3
        wait_until(lambda: noted()[runs:] == [f"3 {folders[3]}"])
        wait_until(lambda: json.loads(ask(address, "GET", "/status", None)[1])["exec"]["version"] == 3)
        started.send_signal(signal.SIGTERM)
        assert started.wait(LONG_S) == 0
    with process(*arguments, "--exec", program) as started:
        assert started.stderr is not None
        address = json.loads(started.stderr.readline())["listening"].removeprefix("http://")
        wait_until(lambda: ask(address, "GET", "/readyz", None)[0] == 200)
        assert len(noted()) == runs + 1, "it has succeeded for this version before"


def test_no_other_version_goes_live_while_the_command_runs(place: Path) -> None:
    """Two more switches would remove the folder that it loads."""
    script = 'touch began; while [ ! -e go ]; do sleep 0.1; done; test -d "$0" && echo "$0" >> loaded'
    program = shlex.join(["sh", "-c", script, "{path}"])
    with process("follow", "feed", "--target", "live", "--json", "--replica", "r", "--exec", program) as started:
        assert line(started)["version"] == 2
        wait_until(Path("began").exists)
        for checkpoint in ("c3", "c0"):
            assert run("publish", "feed", checkpoint) == 0
            time.sleep(2.5)  # longer than the follower waits between two polls
        assert os.readlink("live").endswith("v2")
        Path("go").touch()
        assert line(started)["version"] == 4
        wait_until(lambda: Path("loaded").exists() and len(Path("loaded").read_text().splitlines()) == 2)
    assert [Path(text).name for text in Path("loaded").read_text().splitlines()] == ["v2", "v4"]


def test_a_command_that_an_earlier_process_could_not_run(place: Path) -> None:
    """The folder is at the newest version already: nothing switches, and the command is still due."""
    program = shlex.join([sys.executable, "-c", NOTE, "{version}"])
    assert run("follow", "feed", "--target", "live", "--once") == 0
    Path("up").touch()
    with process("follow", "feed", "--target", "live", "--exec", program):
        wait_until(lambda: noted() == ["2"])


def test_the_engine_of_a_folder_says_how_its_command_does(place: Path) -> None:
    with process("follow", "feed", "--target", "live", "--exec", "false", "--replica", "r") as started:
        assert started.stderr is not None
        started.stderr.readline()
        assert run("publish", "feed", "c3") == 0
        wait_until(lambda: [beat.version for beat in Log(LocalStore("feed")).heartbeats()] == [3])
        (beat,) = Log(LocalStore("feed")).heartbeats()
        assert beat.facts["engine"] == "folder; the command failed with exit code 1 for version 2"


def test_a_signal_waits_for_the_command(place: Path) -> None:
    program = "sh -c 'trap : TERM; touch began; sleep 2; touch ended'"
    with process("follow", "feed", "--target", "live", "--exec", program) as started:
        wait_until(Path("began").exists)
        started.send_signal(signal.SIGTERM)
        assert started.wait(LONG_S) == 0
    assert Path("ended").exists()


def test_a_command_with_once(place: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltasync.cli.follow.time.sleep", lambda s: None)
    program = shlex.join([sys.executable, "-c", NOTE, "{version}"])
    assert run("follow", "feed", "--target", "live", "--once", "--exec", program, "-q", "--json") == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["version"] == 2
    found = json.loads(err)["error"]
    assert (found["kind"], found["version"]) == ("engine", 2)
    assert noted() == ["2", "2", "2"]
    Path("up").touch()
    for _ in range(2):
        assert run("follow", "feed", "--target", "live", "--once", "--exec", program) == 0
    assert noted() == ["2"] * 4, "it runs until it has succeeded, and no more"


def test_lines_of_a_follower() -> None:
    seconds = Seconds(fetch=2.5, pause=0.0042)
    first = Advance(None, 7, ("anchor", "delta", "delta"), 1_234_567, None, seconds, 100)
    assert move_text(first, lag=2, lag_s=192.4) == (
        "version 7 is live, 2 versions behind, 3 min 12 s after its commit: "
        "all weights, 1 anchor and 2 deltas of 1.23 MB; "
        "plan 0 ms, fetch 2.5 s, decode 0 ms, stage 0 ms, commit 0 ms, pause 4.2 ms"
    )
    again = Advance(6, 7, (), 0, 1_234_567, seconds, 100)
    assert move_text(again, lag=0, lag_s=0.3).startswith(
        "version 7 is live after 6, under 1 s after its commit: 1,234,567 elements, nothing to fetch; "
    )
    assert move_text(Advance(7, 7, (), 0, 0, seconds), lag=None, lag_s=None) == "version 7 is already live"


def ask(address: str, method: str, path: str, token: str | None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(address, timeout=LONG_S)
    try:
        connection.request(method, path, headers={} if token is None else {"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


# --- status -----------------------------------------------------------------------------------------------------------


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


def test_alarming_rows_are_red_on_a_terminal(capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    out = Output.of(is_json=False, is_plain=False, is_quiet=False)
    out.table("t", (Column("a"),), [("good",), ("bad",)], alarming=[1])
    good, bad = (text for text in capsys.readouterr().out.splitlines() if "good" in text or "bad" in text)
    assert "\x1b[31m" in bad
    assert "\x1b[31m" not in good


# --- serve ------------------------------------------------------------------------------------------------------------

OURS = ("--weight-transfer-config", '{"backend": "deltasync"}')
GIVEN = {"FEED": "s3://bucket/run", "TOKEN": "t"}


def test_the_token_is_in_no_repr() -> None:
    launch = prepare_launch([], {"FEED": "s3://bucket/run", "TOKEN": TOKEN}, environment={}, plugins=[])
    assert launch.environment["DELTASYNC_TOKEN"] == TOKEN
    settings = Settings.from_environment(launch.environment)
    assert settings.token == TOKEN
    assert TOKEN not in repr(launch) + repr(settings)


@pytest.mark.parametrize(
    ("arguments", "added"),
    [
        ([], OURS),
        (["--model", "m"], OURS),
        (list(OURS), ()),
        ([f"{OURS[0]}={OURS[1]}"], ()),
        (["--weight_transfer_config", OURS[1], "--port", "1"], ()),
        (["--weight-transfer-config.backend", "deltasync"], ()),
        (["--weight-transfer-config.backend=deltasync"], ()),
    ],
)
def test_serve_adds_the_backend(arguments: list[str], added: tuple[str, ...]) -> None:
    launch = prepare_launch(arguments, GIVEN, environment={}, plugins=[])
    assert launch.command == (sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments, *added)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--weight-transfer-config", '{"backend": "nccl"}'], "'nccl'"),
        (['--weight-transfer-config={"backend": "nccl"}'], "'nccl'"),
        (["--weight-transfer-config.backend", "ipc"], "'ipc'"),
        ([*OURS, "--weight-transfer-config.backend=ipc"], "'ipc'"),
        (["--weight-transfer-config", "{}"], "names no backend"),
        (["--weight-transfer-config", "nccl"], "names no backend"),
        (["--weight-transfer-config"], "names no backend"),
    ],
)
def test_serve_refuses_another_backend(arguments: list[str], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as caught:
        prepare_launch(arguments, GIVEN, environment={}, plugins=[])
    assert caught.value.hint is not None


@pytest.mark.parametrize(
    ("before", "plugins", "allowed"),
    [
        (None, [], "deltasync"),
        (None, ["deltasync"], "deltasync"),
        (None, ["other", "deltasync", "lora", "other"], "deltasync,lora,other"),
        ("", ["other"], "deltasync"),
        ("other", ["third"], "other,deltasync"),
        ("other,deltasync", [], "other,deltasync"),
    ],
)
def test_serve_allows_the_plugin_and_keeps_the_others(before: str | None, plugins: list[str], allowed: str) -> None:
    environment = {} if before is None else {"VLLM_PLUGINS": before}
    assert prepare_launch([], GIVEN, environment=environment, plugins=plugins).environment["VLLM_PLUGINS"] == allowed


def test_the_environment_of_a_server() -> None:
    before = {"PATH": "/bin", "DELTASYNC_WAY": "push", "DELTASYNC_PAUSE": "wait", "DELTASYNC_TOKEN": "old"}
    given = {**GIVEN, "WAY": None, "PAUSE": "abort", "MIRROR": "m", "SCRUB_S": "60", "REPLICA": "r"}
    assert prepare_launch([], given, environment=before, plugins=[]).environment == {
        "PATH": "/bin",
        "VLLM_PLUGINS": "deltasync",
        "DELTASYNC_FEED": "s3://bucket/run",
        "DELTASYNC_TOKEN": "t",
        "DELTASYNC_WAY": "push",
        "DELTASYNC_PAUSE": "abort",
        "DELTASYNC_MIRROR": "m",
        "DELTASYNC_SCRUB_S": "60",
        "DELTASYNC_REPLICA": "r",
    }
    assert before["DELTASYNC_TOKEN"] == "old"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is no feed to follow (pass --feed URL or --adapter NAME=URL, or set DELTASYNC_FEED)"),
        (["--adapter", "a=x", "--adapter", "a=y"], "--adapter a is given twice"),
        (["--feed", "feed", "--replica", "a/b"], "'a/b' is not a replica id"),
        (["--feed", "ftp://x"], "ftp:// is not a kind of store"),
        (["--feed", "feed", "--token-file", "none"], "none"),
        (["--feed", "feed", "--token-file", "empty"], "empty is empty"),
        (["--feed", "feed"], "vLLM is not installed here (pip install 'deltasync[vllm]')"),
    ],
)
def test_serve_refuses(
    place: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (place / "empty").write_text("\n")
    assert run("serve", *arguments) == 1
    assert message in refusal(capsys)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--scrub-s", "often", "'often' is not a number of seconds above 0, or off"),
        ("--ready-s", "0", "'0' is not a number of seconds above 0, or off"),
        ("--adapter", "math", "'math' is not NAME=URL without spaces"),
        ("--adapter", "a=x b=y", "'a=x b=y' is not NAME=URL without spaces"),
    ],
)
def test_serve_names_the_option_and_not_its_variable(
    place: Path, capsys: Out, option: str, value: str, message: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        run("serve", "--feed", "feed", option, value)
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"error: argument {option}: {message} (see `deltasync serve --help`)\n"


SERVER = """
import json, os, sys
print(json.dumps([os.getpid(), sys.argv[1:], {k: v for k, v in os.environ.items() if k.startswith("DELTASYNC_")}]))
"""


@pytest.mark.parametrize("has_token", [True, False])
def test_serve_becomes_the_server(place: Path, has_token: bool) -> None:
    """A package in vLLM's place says what it was started with."""
    package = place / "path/vllm/entrypoints/openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(SERVER)
    (place / "token").write_text("secret\n")
    token = ["--token-file", "token"] if has_token else []
    options = ["--push", "--pause", "wait", "--cache", "keep", "--on-refused", "serve", "--ready-s", "9", *token]
    arguments = ["serve", "--feed", "feed", *options, "--", "--model", "c0", "--port", "1"]
    with process(*arguments, PYTHONPATH=str(place / "path")) as started:
        pid, given, environment = line(started)
        assert started.stderr is not None
        err = started.stderr.read()
        assert pid == started.pid
        assert started.wait(LONG_S) == 0
    assert given == ["--model", "c0", "--port", "1", *OURS]
    wanted = {"FEED": "feed", "WAY": "push", "PAUSE": "wait", "CACHE": "keep", "ON_REFUSED": "serve", "READY_S": "9"}
    assert environment.items() >= {f"DELTASYNC_{name}": value for name, value in wanted.items()}.items()
    if has_token:
        assert environment["DELTASYNC_TOKEN"] == "secret"
        assert err == ""
    else:
        assert len(environment["DELTASYNC_TOKEN"]) >= 32
        assert err == f"the control routes require the token {environment['DELTASYNC_TOKEN']}\n"
