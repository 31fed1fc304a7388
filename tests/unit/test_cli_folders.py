"""The commands import, export and publish --watch."""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import LONG_S, processes
from support.helpers import changed, state, write_sharded

import deltasync
from deltasync.cli import main as cli

Out = pytest.CaptureFixture[str]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with checkpoints step_0 to step_2 and `feed`, which has them."""
    monkeypatch.chdir(tmp_path)
    for i in range(3):
        write_sharded(tmp_path / f"step_{i}", changed(state(), seed=i))
        deltasync.publish("feed", f"step_{i}")
    return tmp_path


def lines(capsys: Out) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_feed_goes_through_folders_and_back(place: Path, capsys: Out) -> None:
    assert cli.main(["export", "feed", "folders", "--format", "overwrite", "--checksum", "blake3", "--json"]) == 0
    exported = lines(capsys)
    assert [(e["path"], e["version"], e["base_version"]) for e in exported] == [
        ("folders/weight_v000000", 0, None),
        ("folders/weight_v000001", 1, 0),
        ("folders/weight_v000002", 2, 1),
    ]
    assert cli.main(["import", "folders", "copy", "--base", "folders/weight_v000000", "--json"]) == 0
    imported = lines(capsys)
    assert [(e["version"], e["step"], e["kind"]) for e in imported] == [
        (0, 0, "anchor"),
        (1, 1, "delta"),
        (2, 2, "delta"),
    ]
    assert imported[2]["digest"] == deltasync.digest("step_2").hex
    assert cli.main(["export", "feed", "folders"]) == 0
    assert cli.main(["import", "folders", "copy"]) == 0
    assert capsys.readouterr().out == ""


def test_text_names_the_folder_and_the_version(place: Path, capsys: Out) -> None:
    assert cli.main(["export", "feed", "folders", "--from", "1"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("folders/weight_v000001: all weights, ")
    assert second.startswith("folders/weight_v000002: the change from version 1, ")
    assert cli.main(["publish", "watched", "--watch", "step_*", "--once", "--settle-s", "0.1"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("version 0, step 0: all weights, ")
    assert out[2].startswith("version 2, step 2: ")
    assert "elements changed" in out[2]


def test_one_long_look_is_not_the_last(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the first look can take longer than files need to settle."""
    clock = SimpleNamespace(monotonic=count(0, 10).__next__, sleep=time.sleep)
    monkeypatch.setattr("deltasync.cli.folders.time", clock)
    assert cli.main(["publish", "watched", "--watch", "step_*", "--once", "--settle-s", "0.1"]) == 0


def test_errors_have_their_exit_codes(place: Path, capsys: Out) -> None:
    assert cli.main(["export", "feed", "folders"]) == 0
    (place / "folders" / "weight_v000003").mkdir()
    assert cli.main(["import", "folders", "copy", "--base", "step_0"]) == 1
    assert "weight_v000003 is not complete" in capsys.readouterr().err
    assert cli.main(["import", "folders", "other", "--base", "step_1"]) == 3
    assert "nothing was published" in capsys.readouterr().err
    assert cli.main(["import", "nowhere", "copy"]) == 1
    assert cli.main(["import", "step_0", "copy"]) == 1
    assert "step_0 has no folder weight_v" in capsys.readouterr().err
    assert cli.main(["publish", "new", "--watch", "stpe_*", "--once"]) == 1
    assert "no folder matches stpe_*" in capsys.readouterr().err
    assert not (place / "new").exists()
    assert cli.main(["publish", "new", "--watch", "step_0", "--once"]) == 1
    assert "in quotes" in capsys.readouterr().err
    assert cli.main(["publish", "feed", "step_0", "--settle-s", "3"]) == 1
    assert "--settle-s has no effect without --watch" in capsys.readouterr().err
    assert cli.main(["publish", "feed", "step_0", "--once"]) == 1
    assert "--once has no effect without --watch" in capsys.readouterr().err
    assert cli.main(["publish", "feed", "--watch", "step_*", "--anchor"]) == 1
    assert "--anchor has no meaning with --watch" in capsys.readouterr().err
    (place / "step_2" / "model-00001-of-00002.safetensors").unlink()
    assert cli.main(["publish", "new", "--watch", "step_*", "--once", "--settle-s", "0.1"]) == 1
    assert "step_2 is not complete" in capsys.readouterr().err


def test_a_watch_goes_on_until_a_signal(place: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "deltasync",
        "publish",
        "watched",
        "--watch",
        "step_*",
        "--settle-s",
        "0.1",
        "--json",
    ]
    with processes.running(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert [json.loads(process.stdout.readline())["step"] for _ in range(3)] == [0, 1, 2]
        write_sharded(place / "step_10", changed(state(), seed=9))
        assert json.loads(process.stdout.readline())["step"] == 10
        process.send_signal(signal.SIGTERM)
        assert process.wait(LONG_S) == 0
    deltasync.restore("watched", "out")
    assert deltasync.digest("out") == deltasync.digest("step_10")


def test_a_watch_ends_where_another_one_publishes(place: Path) -> None:
    command = [sys.executable, "-m", "deltasync", "publish", "new", "--watch", "step_*", "--settle-s", "0.1"]
    with processes.running([*command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert [json.loads(process.stdout.readline())["step"] for _ in range(3)] == [0, 1, 2]
        deltasync.publish("new", "step_0")
        write_sharded(place / "step_10", changed(state(), seed=9))
        _, err = process.communicate(timeout=LONG_S)
    assert process.returncode == 4
    assert "stop one of the two" in json.loads(err.splitlines()[-1])["error"]["hint"]


FOLLOWING = {
    "publish": ["publish", "new", "--watch", "step_*", "--settle-s", "0.1", "--shadow", "shadow"],
    "export": ["export", "feed", "new", "--follow"],
    "import": ["import", "folders", "new", "--follow", "--base", "step_0"],
    "relay": ["relay", "feed", "new", "other", "--follow"],
    "compact": ["compact", "feed", "--levels", "2", "--follow"],
    "prune": ["prune", "feed", "--keep-anchors", "1", "--keep-versions", "1", "--yes", "--follow"],
    "follow": ["follow", "feed", "--target", "new", "--mirror", "mirror"],
}


@pytest.mark.parametrize("argv", FOLLOWING.values(), ids=FOLLOWING.keys())
def test_a_command_that_follows_ends_when_its_reader_has_gone(place: Path, argv: list[str]) -> None:
    """It says nothing: the exit code is that of a closed pipe."""
    deltasync.publish("feed", "step_0", anchor=True)
    assert cli.main(["export", "feed", "folders"]) == 0
    reading, writing = os.pipe()
    os.close(reading)
    assert ended(argv, writing) == (141, "")
    os.close(writing)
    assert not list(place.rglob("*.tmp"))


@pytest.mark.parametrize("argv", FOLLOWING.values(), ids=FOLLOWING.keys())
def test_a_command_that_follows_ends_when_its_output_has_no_space(place: Path, argv: list[str]) -> None:
    deltasync.publish("feed", "step_0", anchor=True)
    assert cli.main(["export", "feed", "folders"]) == 0
    with open("/dev/full", "w") as full:
        code, err = ended([*argv, "--json"], full.fileno())
    assert code == 1
    assert json.loads(err)["error"]["hint"] == "the disk is full: free some space, or choose another place"


def ended(argv: list[str], output: int) -> tuple[int, str]:
    """The exit code and the standard error of a command with this standard output."""
    command = [sys.executable, "-m", "deltasync", *argv]
    done = processes.run(command, stdout=output)
    return done.returncode, done.stderr
