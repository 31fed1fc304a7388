"""A checkpoint folder as target: one link, one switch for each version, and the command after each of them."""

import json
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import LONG_S
from support.feeds import Feed, same_weights
from support.helpers import state
from support.replicas import follower, long_feed

from deltasync.checkpoint import new_checkpoint, open_checkpoint
from deltasync.errors import InvalidInputError, MismatchError
from deltasync.format import keys
from deltasync.format.companions import write_files
from deltasync.format.sealed import FORMAT, Heartbeat, sealed
from deltasync.format.weights import Weights
from deltasync.replica import folder as folder_module
from deltasync.replica import folder as module
from deltasync.replica.folder import RECORD_NAME, FolderTarget, Hook, HookStatus
from deltasync.replica.follower import Follower
from deltasync.replica.target import Staged
from deltasync.store.memory import MemoryStore
from deltasync.testing.faulty import Crash


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def home(path: Path) -> Path:
    """Where a target keeps its versions."""
    return path.with_name(f".{path.name}.deltasync")


def holds(path: Path, weights: Weights) -> bool:
    return same_weights(open_checkpoint(path).weights, weights)


def feed_with_files(versions: int) -> Feed:
    """Files beside the weights, which change with version 2."""
    feed = Feed()
    new = feed.new

    def with_files(*args: object, **fields: object) -> object:
        config = b'{"model_type": "test"}' if len(feed.states) < 2 else b'{"model_type": "other"}'
        ref = feed.upload.put(write_files({"config.json": config, "sub/vocab.txt": b"a b c"}))
        return new(*args, **{"files": ref, **fields})  # type: ignore[arg-type]

    feed.new = with_files  # type: ignore[assignment, method-assign]
    feed.anchor(state())
    for _ in range(versions - 1):
        feed.delta()
    return feed


def test_version_after_version(tmp_path: Path) -> None:
    feed, path = feed_with_files(4), tmp_path / "model"
    target = FolderTarget(path)
    replica = follower(feed.store, target)
    assert (target.version, target.engine) == (None, "folder")
    for version in (0, 1, 2, 3, 1):
        before = path.resolve()
        replica.advance(to=version)
        assert target.version == version
        assert path.is_symlink()
        assert holds(path, feed.states[version])
        assert (path / "config.json").read_bytes() == (
            b'{"model_type": "test"}' if version < 2 else b'{"model_type": "other"}'
        )
        assert (path / "sub" / "vocab.txt").read_bytes() == b"a b c"
        assert names(tmp_path) == [".model.deltasync", "model"]
        # The one before stays for those that still read it.
        assert names(home(path)) == sorted({path.resolve().name} | ({before.name} if version else set()))
        if version:
            assert (before / "config.json").exists()
    assert replica.scrub() == []


def test_the_link_can_be_moved_with_its_folders(tmp_path: Path) -> None:
    feed = Feed.of(1)
    (tmp_path / "a").mkdir()
    follower(feed.store, FolderTarget(tmp_path / "a" / "model")).advance()
    os.rename(tmp_path / "a", tmp_path / "b")
    assert holds(tmp_path / "b" / "model", feed.states[0])


def test_a_reader_of_the_version_before_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    feed, path = Feed.of(3), tmp_path / "model"
    seen: list[bool] = []

    def write(*args: Any) -> Any:
        seen.append((home(path) / "v0").exists())
        return new_checkpoint(*args)

    monkeypatch.setattr(folder_module, "new_checkpoint", write)
    target = FolderTarget(path)
    replica = follower(feed.store, target)
    replica.advance(to=0)
    reader, folder = open_checkpoint(path).weights, path.resolve()
    replica.advance(to=1)
    assert holds(folder, feed.states[0])
    replica.advance(to=2)
    assert seen == [False, True, True], "it stays until the next one is written"
    assert not folder.exists()
    assert same_weights(reader, feed.states[0]), "what is mapped stays, even so"


def test_the_link_leads_to_a_whole_version_at_any_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a reader finds it after each change of a name."""
    feed, path = Feed.of(3), tmp_path / "model"
    replica = follower(feed.store, FolderTarget(path))
    replica.advance(to=0)
    seen: list[bool] = []

    def watched(change: Callable[..., None]) -> Callable[..., None]:
        def change_and_look(*args: Any, **options: Any) -> None:
            change(*args, **options)
            seen.append(path.exists() and any(holds(path, weights) for weights in feed.states))

        return change_and_look

    for name in ("rename", "replace", "symlink", "unlink"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    for version in (1, 2, 0):
        replica.advance(to=version)
    assert len(seen) > 9
    assert all(seen)


def test_found_again_after_a_restart(tmp_path: Path) -> None:
    feed, path = Feed.of(3), tmp_path / "model"
    first = FolderTarget(path)
    with follower(feed.store, first, mirror=tmp_path / "mirror") as replica:
        replica.advance(to=1)
    first.close()
    second = FolderTarget(path)
    second.open()
    assert second.version == 1
    with follower(feed.store, second, mirror=tmp_path / "mirror") as replica:
        moved = replica.advance()
        assert moved is not None
        assert moved.from_version == 1
        assert moved.changed is not None, "it is proved, so that changes are enough"
    assert holds(path, feed.states[2])


SPOILED: dict[str, Callable[[Path], object]] = {
    "no record": lambda path: (path / RECORD_NAME).unlink(),
    "an altered record": lambda path: (path / RECORD_NAME).write_bytes(b'{"version":1}'),
    "no weights": lambda path: (path / "model.safetensors").unlink(),
    "weights cut off": lambda path: os.truncate(path / "model.safetensors", 300),
    "another bit": lambda path: _flip(path / "model.safetensors"),
    "no folder": lambda path: os.rename(path.resolve(), path.with_name("elsewhere")),
}


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED.keys())
def test_a_spoiled_folder_is_written_anew(spoil: Callable[[Path], object], tmp_path: Path) -> None:
    feed, path = Feed.of(2), tmp_path / "model"
    first = FolderTarget(path)
    with follower(feed.store, first, mirror=tmp_path / "mirror") as replica:
        replica.advance()
    first.close()
    spoil(path)
    with follower(feed.store, FolderTarget(path), mirror=tmp_path / "mirror") as replica:
        replica.advance()
    assert holds(path, feed.states[1])


def record(version: int) -> bytes:
    return sealed({"format": FORMAT, "version": version, "digest": "00" * 16})


def test_only_what_carries_a_record_is_removed(tmp_path: Path) -> None:
    feed, path = Feed.of(2), tmp_path / "model"
    for name in (".v0.0123456789ab.tmp", "v7", "v7.0011aabb"):
        (home(path) / name / "sub").mkdir(parents=True)
        (home(path) / name / RECORD_NAME).write_bytes(record(7))
    (home(path) / ".link.0123456789ab.tmp").symlink_to(".model.deltasync/v7")
    strangers = ["v9", ".v9.0123456789ab.tmp", "notes"]
    for name in strangers:
        (home(path) / name).mkdir()
    (home(path) / "v9" / RECORD_NAME).write_bytes(record(9).replace(b"9", b"8"))
    (home(path) / "v8").write_text("a file")
    (home(path) / "elsewhere").symlink_to(tmp_path)
    beside = ["model.v2", "model.v17", "model.v17.0011aabb", "model.vocabulary", ".model.v0.0123456789ab.tmp"]
    for name in beside:
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").touch()
        # Even with a record: a user may keep a copy of a version under such a name.
        (tmp_path / name / RECORD_NAME).write_bytes(record(17))
    follower(feed.store, FolderTarget(path)).advance()
    assert names(home(path)) == sorted(["v1", "v8", "elsewhere", *strangers])
    assert names(tmp_path) == sorted([".model.deltasync", "model", *beside])
    assert all((tmp_path / name / "precious").exists() for name in beside)
    assert holds(path, feed.states[1])


def test_a_crash_between_stage_and_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    feed, path = Feed.of(2), tmp_path / "model"
    target = FolderTarget(path)
    replica = follower(feed.store, target)
    replica.advance(to=0)

    def crash(*args: object) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(FolderTarget, "commit", crash)
        with pytest.raises(Crash):
            replica.advance()
    target.close()
    assert holds(path, feed.states[0])
    again = FolderTarget(path)
    again.open()
    assert again.version == 0
    follower(feed.store, again).advance()
    assert holds(path, feed.states[1])
    assert names(home(path)) == ["v0", "v1"]


def test_scrub_repairs_in_place(tmp_path: Path) -> None:
    feed, path = Feed.of(2), tmp_path / "model"
    target = FolderTarget(path)
    replica = follower(feed.store, target)
    replica.advance()
    _flip(path / "model.safetensors")
    folder = path.resolve()
    (damage,) = replica.scrub(repair=False)
    assert (damage.tensor, damage.elements) == ("packed", 1)
    assert not holds(path, feed.states[1])
    replica.scrub()
    assert path.resolve() == folder
    assert holds(path, feed.states[1])
    (path / "model.safetensors").write_bytes(b"")
    assert len(replica.scrub()) == len(feed.states[1].layout.tensors)
    assert holds(path, feed.states[1])
    assert target.version == 1


def test_another_model_is_refused(tmp_path: Path) -> None:
    one, path = Feed.of(1), tmp_path / "model"
    other = Feed(MemoryStore())
    other.anchor({**state(), "zz": np.zeros(2, np.float32)})
    target = FolderTarget(path)
    follower(one.store, target).advance()
    with pytest.raises(MismatchError, match="'zz'"):
        follower(other.store, target).advance()
    assert target.version == 0
    assert holds(path, one.states[0])


def a_folder(path: Path) -> None:
    path.mkdir()
    (path / "precious").touch()


def a_link(path: Path) -> None:
    a_folder(path.with_name("other"))
    path.symlink_to("other")


def a_link_to_a_version_of_the_user(path: Path) -> None:
    a_folder(path.with_name("model.v2"))
    path.symlink_to("model.v2")


def a_link_to_a_folder_with_another_record(path: Path) -> None:
    a_link_to_a_version_of_the_user(path)
    (path / RECORD_NAME).write_bytes(record(3))


def a_home_that_is_a_link(path: Path) -> None:
    a_folder(path.with_name("other"))
    home(path).symlink_to("other")


FOREIGN: list[Callable[[Path], object]] = [
    a_folder,
    a_link,
    a_link_to_a_version_of_the_user,
    a_link_to_a_folder_with_another_record,
    a_home_that_is_a_link,
    lambda path: path.symlink_to("nowhere"),
    lambda path: path.symlink_to("model.v2"),
    lambda path: path.write_text("precious"),
    lambda path: home(path).write_text("precious"),
    lambda path: path.with_name("model.lock").write_text("precious"),
]


@pytest.mark.parametrize("make", FOREIGN)
def test_a_place_that_is_not_ours(make: Callable[[Path], object], tmp_path: Path) -> None:
    feed, path = Feed.of(1), tmp_path / "model"
    make(path)
    before = contents(tmp_path)
    with pytest.raises(InvalidInputError, match=r"not a link|not a folder|not the lock"):
        follower(feed.store, FolderTarget(path)).advance()
    assert contents(tmp_path) == before


def contents(folder: Path) -> dict[Path, object]:
    """Every path below a folder, with what a file or a link says."""
    return {p: os.readlink(p) if p.is_symlink() else p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="not a folder"):
        follower(Feed.of(1).store, FolderTarget(tmp_path / "nowhere" / "model")).advance()


@pytest.mark.parametrize("is_staged", [False, True])
def test_a_link_that_the_user_puts_in_place_while_it_runs(is_staged: bool, tmp_path: Path) -> None:
    class Slow(FolderTarget):
        def stage(self, staged: Staged) -> bool:
            if staged.version == 1 and not is_staged:
                put_link()
            is_proved = super().stage(staged)
            if staged.version == 1 and is_staged:
                put_link()
            return is_proved

    def put_link() -> None:
        path.unlink()
        a_link(path)

    feed, path = Feed.of(2), tmp_path / "model"
    replica = follower(feed.store, Slow(path))
    replica.advance(to=0)
    with pytest.raises(InvalidInputError, match="not a link"):
        replica.advance()
    assert os.readlink(path) == "other"


# Proof


def test_rot_in_the_live_folder_is_not_carried_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    feed, path = long_feed(3), tmp_path / "model"
    target = FolderTarget(path)
    replica = follower(feed.store, target)
    replica.advance(to=0)
    _flip(path / "model.safetensors")
    moved = replica.advance(to=1)
    assert moved is not None
    assert holds(path, feed.states[1])
    assert "is rewritten with all weights" in caplog.text
    moved = replica.advance()
    assert moved is not None
    assert moved.changed is not None, "the next one is a change again"
    assert holds(path, feed.states[2])
    assert len(names(home(path))) == 2


def test_rot_in_the_mirror_does_not_go_live(tmp_path: Path) -> None:
    feed, path = long_feed(2), tmp_path / "model"
    target = FolderTarget(path)
    replica = follower(feed.store, target)
    replica.advance(to=0)
    weights = replica._mirror.weights
    assert weights is not None
    weights.arrays[weights.layout.ordinals["packed"]][-1] ^= 1
    target.version = None
    replica.advance(to=1)
    assert holds(path, feed.states[1])
    assert replica.status().counts.rebuilt == 1


def test_what_was_proved_and_when(tmp_path: Path) -> None:
    feed, path = long_feed(3), tmp_path / "model"
    replica = follower(feed.store, FolderTarget(path), beat_s=1000.0, replica="one")
    assert replica.status().proved_version is None
    since = int(time.time())
    for version in (0, 1):
        replica.advance(to=version)
        status = replica.status()
        assert status.proved_version == version
        assert status.proved_unix_s is not None
        assert since <= status.proved_unix_s <= time.time()
        (beat,) = feed.log.heartbeats()
        assert beat.facts["proved_version"] == str(version)
        assert int(beat.facts["proved_unix_s"]) == status.proved_unix_s
        assert Heartbeat.from_bytes(beat.to_bytes()) == beat


def test_one_process_for_each_folder(tmp_path: Path) -> None:
    feed = Feed.of(1)
    first, second = FolderTarget(tmp_path / "model"), FolderTarget(tmp_path / "model")
    follower(feed.store, first).advance()
    with pytest.raises(InvalidInputError, match="another process"):
        follower(feed.store, second).advance()
    first.close()
    follower(feed.store, second).advance()


def test_a_follower_that_is_closed_lets_go_of_its_target(tmp_path: Path) -> None:
    feed, target = Feed.of(2), FolderTarget(tmp_path / "model")
    for version, taker in ((0, target), (1, FolderTarget(tmp_path / "model"))):
        with follower(feed.store, taker) as replica:
            replica.advance(to=version)
    assert holds(tmp_path / "model", feed.states[1])
    with follower(feed.store, target) as replica:
        replica.advance(to=0)
    assert holds(tmp_path / "model", feed.states[0]), "the same one can be used again"


def test_damaged_files_do_not_stop_a_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Those of the version before are used, with a warning."""
    feed, path = feed_with_files(3), tmp_path / "model"
    newest = feed.log.read(2).files
    assert newest is not None
    feed.store.delete(keys.payload_key(newest.sha256))
    with follower(feed.store, FolderTarget(path)) as replica:
        replica.advance()
        assert replica.status().version == 2
    assert holds(path, feed.states[2])
    assert (path / "config.json").read_bytes() == b'{"model_type": "test"}'
    assert "version 2 cannot be read, those of version 1 are used" in caplog.text


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
