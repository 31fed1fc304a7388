"""A checkpoint folder as target: one link, one switch for each version, nothing half written."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.feeds import Feed, same_weights
from support.helpers import state
from support.replicas import follower

from deltasync.checkpoint import open_checkpoint, write_checkpoint
from deltasync.errors import InvalidInputError, MismatchError
from deltasync.format.companions import write_files
from deltasync.format.weights import Weights
from deltasync.replica import folder as folder_module
from deltasync.replica.folder import RECORD_NAME, FolderTarget
from deltasync.store.memory import MemoryStore
from deltasync.testing.faulty import Crash


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def holds(path: Path, weights: Weights) -> bool:
    return same_weights(open_checkpoint(path).weights, weights)


def feed_with_files(versions: int) -> Feed:
    """Files beside the weights, which change with version 2."""
    feed = Feed()
    new = feed.new

    def with_files(*args: object, **fields: object) -> object:
        config = b'{"model_type": "test"}' if len(feed.states) < 2 else b'{"model_type": "other"}'
        ref = feed.writer.put(write_files({"config.json": config, "sub/vocab.txt": b"a b c"}))
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
        folders = [name for name in names(tmp_path) if name != "model"]
        # The one before stays for those that still read it.
        assert folders == sorted({path.resolve().name} | ({before.name} if version else set()))
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

    def write(*args: Any) -> None:
        seen.append((tmp_path / "model.v0").exists())
        write_checkpoint(*args)

    monkeypatch.setattr(folder_module, "write_checkpoint", write)
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


def test_found_again_after_a_restart(tmp_path: Path) -> None:
    feed, path = Feed.of(3), tmp_path / "model"
    first = FolderTarget(path)
    with follower(feed.store, first, mirror=tmp_path / "mirror") as replica:
        replica.advance(to=1)
    first.close()
    second = FolderTarget(path)
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


def test_what_was_left_half_written_goes(tmp_path: Path) -> None:
    feed, path = Feed.of(2), tmp_path / "model"
    leftovers = [".model.v0.0123456789ab.tmp", "model.v7", "model.v7.0011aabb"]
    for name in leftovers:
        (tmp_path / name / "sub").mkdir(parents=True)
    (tmp_path / ".model.0123456789ab.tmp").symlink_to("model.v7")
    strangers = ["model.vocabulary", "models", ".model.v0.txt", "other.v3"]
    for name in strangers:
        (tmp_path / name).mkdir()
    (tmp_path / "model.v8").write_text("a file")
    follower(feed.store, FolderTarget(path)).advance()
    assert names(tmp_path) == sorted(["model", "model.v1", "model.v8", *strangers])
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
    assert again.version == 0
    follower(feed.store, again).advance()
    assert holds(path, feed.states[1])
    assert names(tmp_path) == ["model", "model.v0", "model.v1"]


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


def test_a_place_that_is_not_ours(tmp_path: Path) -> None:
    feed = Feed.of(1)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "precious").write_text("")
    with pytest.raises(InvalidInputError, match="not a link"):
        follower(feed.store, FolderTarget(tmp_path / "model")).advance()
    assert (tmp_path / "model" / "precious").exists()
    with pytest.raises(InvalidInputError, match="not a folder"):
        follower(feed.store, FolderTarget(tmp_path / "nowhere" / "model")).advance()


def test_one_process_for_each_folder(tmp_path: Path) -> None:
    feed = Feed.of(1)
    first, second = FolderTarget(tmp_path / "model"), FolderTarget(tmp_path / "model")
    follower(feed.store, first).advance()
    with pytest.raises(InvalidInputError, match="another process"):
        follower(feed.store, second).advance()
    first.close()
    follower(feed.store, second).advance()
