"""The command after each switch of a folder: its words, its exit code, retries, restarts."""

import json
import shlex
import sys
import threading
import time
from pathlib import Path

import pytest
from support import LONG_S
from support.feeds import Feed

from deltasync.errors import InvalidInputError
from deltasync.replica import folder as module
from deltasync.replica.folder import FolderTarget, Hook, HookStatus
from deltasync.replica.follower import Follower

NOTE = "import json, sys; open(sys.argv[1], 'a').write(json.dumps(sys.argv[2:]) + chr(10))"
"""Writes its arguments to the file that the first one names."""


def command(*words: str) -> str:
    return shlex.join([sys.executable, "-c", NOTE, "notes", *words])


def notes() -> list[list[str]]:
    path = Path("notes")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def feed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Feed:
    monkeypatch.chdir(tmp_path)
    return Feed.of(2)


def advance(feed: Feed, target: str = "live") -> None:
    folder = FolderTarget(target)
    with Follower(feed.store, folder) as follower:
        follower.advance()
    folder.close()


def hook(text: str, *, target: str = "live", timeout_s: float = LONG_S) -> Hook:
    return Hook(text, Path(target), timeout_s=timeout_s)


def test_it_runs_once_for_each_version(feed: Feed, tmp_path: Path) -> None:
    advance(feed)
    ours = hook(command("{path}", "v{version}", "{version}{version}", "plain"))
    assert ours.is_due()
    assert ours.run() is None
    folder = str(tmp_path / ".live.deltasync/v1")
    assert notes() == [[folder, "v1", "11", "plain"]]
    assert ours.status == HookStatus(version=1)
    assert ours.run() is None
    assert not ours.is_due()
    feed.delta()
    advance(feed)
    assert ours.run() is None
    assert notes()[1:] == [[str(tmp_path / ".live.deltasync/v2"), "v2", "22", "plain"]]


def test_a_restart_does_not_repeat_it(feed: Feed) -> None:
    advance(feed)
    assert hook(command()).run() is None
    again = hook(command())
    assert not again.is_due()
    assert again.status.version == 1, "what an earlier process did counts"
    assert again.run() is None
    assert len(notes()) == 1
    assert hook(command("other")).run() is None
    assert notes()[1:] == [["other"]], "another command has not run yet"


def test_another_feed_with_the_same_version_is_another_version(feed: Feed, tmp_path: Path) -> None:
    advance(feed)
    assert hook(command()).run() is None
    (tmp_path / "live").unlink()
    other = Feed()
    other.anchor({"x": feed.states[0].arrays[0]})
    other.delta()
    advance(other)
    assert hook(command()).is_due()


def test_no_folder_nothing_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ours = hook(command())
    assert not ours.is_due()
    assert ours.run() is None
    (tmp_path / "live").mkdir()
    assert not ours.is_due(), "a folder of the user is none of ours"


@pytest.mark.parametrize(
    "evil", ["; touch pwned", "$(touch pwned)", "`touch pwned`", "&& touch pwned", "| touch pwned", "a\nb", "{version}"]
)
def test_a_path_is_one_word_whatever_it_contains(feed: Feed, tmp_path: Path, evil: str) -> None:
    """There is no shell, and what replaces a word is not split or replaced again."""
    target = f"x {evil}".replace("/", "_")
    advance(feed, target)
    assert hook(command("{path}"), target=target).run() is None
    assert notes() == [[str(tmp_path / f".{target}.deltasync/v1")]]
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("text", ["", "  ", "echo 'open"])
def test_a_command_that_is_none(text: str) -> None:
    with pytest.raises(InvalidInputError, match="--exec"):
        hook(text)


@pytest.mark.parametrize(
    ("text", "exit_code", "error"),
    [
        ("false", 1, "failed with exit code 1"),
        ("sh -c 'exit 7'", 7, "failed with exit code 7"),
        ("sh -c 'kill -9 $$'", -9, "was ended by signal 9"),
        ("no-such-program-here", None, "cannot be started: No such file or directory"),
        (".", None, "cannot be started: Permission denied"),
    ],
)
def test_a_failure_is_reported_and_retried(
    feed: Feed, caplog: pytest.LogCaptureFixture, text: str, exit_code: int | None, error: str
) -> None:
    advance(feed)
    ours = hook(text)
    assert [ours.run() for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert ours.status == HookStatus(None, 1, exit_code, error, failures=8)
    assert ours.status.is_failing
    assert f"the command for version 1 {error} (try 3), retrying in 4 s" in caplog.text
    feed.delta()
    advance(feed)
    assert ours.run() == 1, "another version starts over"


def test_it_recovers(feed: Feed) -> None:
    advance(feed)
    ours = hook("test -e ready")
    assert ours.run() == 1
    Path("ready").touch()
    assert ours.run() is None
    assert ours.status == HookStatus(version=1, failures=1)


def test_a_command_that_hangs_is_ended(feed: Feed) -> None:
    advance(feed)
    ours = hook("sleep 600", timeout_s=0.2)
    assert ours.run() == 1
    assert ours.status.error == "took longer than 0.2 s and was ended"


def test_a_stop_ends_it_after_a_while(feed: Feed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GRACE_S", 0.1)
    advance(feed)
    ours = hook("sleep 600")
    timer = threading.Timer(0.2, ours.stop)
    timer.start()
    since = time.monotonic()
    assert ours.run() == 1
    assert time.monotonic() - since < LONG_S
    assert ours.status.error == "was stopped"
