"""`follow`: in this process where it ends by itself, else as a real process."""

import json
import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest
from support import LONG_S
from support.commands import Out, enter_feed, line, process, refusal, run
from support.helpers import state, write_sharded
from support.replicas import ask, wait_until

import deltasync
from deltasync.cli import main as cli
from deltasync.cli.follow import move_text
from deltasync.feed.log import Log
from deltasync.replica.events import Advance, Seconds
from deltasync.store.local import LocalStore

PHASES = {"plan", "fetch", "decode", "stage", "commit", "pause"}


TOKEN = "some-token"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out) -> Path:
    """A folder to work in: checkpoints c0 to c3, one step apart, and `feed` with the first three."""
    return enter_feed(tmp_path, monkeypatch, capsys)


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
        assert b"deltasync_version 2.0" in ask(address, "GET", "/metrics")[1]
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
        assert ask(address, "GET", "/readyz")[0] == 503
        status = json.loads(ask(address, "GET", "/status")[1])
        assert status["not_ready"] == "the command failed with exit code 1 for version 2"
        assert status["exec"]["failures"] >= 1
        assert b"deltasync_exec_failing 1.0" in ask(address, "GET", "/metrics")[1]
        Path("up").touch()
        wait_until(lambda: ask(address, "GET", "/readyz")[0] == 200)
        assert set(noted()) == {f"2 {folders[2]}"}
        runs = len(noted())
        assert run("publish", "feed", "c3") == 0
        assert line(started)["version"] == 3
        wait_until(lambda: noted()[runs:] == [f"3 {folders[3]}"])
        wait_until(lambda: json.loads(ask(address, "GET", "/status")[1])["exec"]["version"] == 3)
        started.send_signal(signal.SIGTERM)
        assert started.wait(LONG_S) == 0
    with process(*arguments, "--exec", program) as started:
        assert started.stderr is not None
        address = json.loads(started.stderr.readline())["listening"].removeprefix("http://")
        wait_until(lambda: ask(address, "GET", "/readyz")[0] == 200)
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
