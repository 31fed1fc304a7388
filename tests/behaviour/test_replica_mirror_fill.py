"""Filling a mirror before anything follows: by one process, to a version that its digest proves."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support import LONG_S
from support.feeds import Feed, SpyStore
from support.helpers import state, write_sharded

from deltasync.blocks import digest
from deltasync.checkpoint import map_files, open_checkpoint
from deltasync.errors import InvalidInputError, NotFoundError
from deltasync.files import locked
from deltasync.format.manifest import BaseRef
from deltasync.replica import mirror
from deltasync.replica.mirror import fill_mirror


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mirror.safetensors"


def holds(path: Path, feed: Feed, version: int) -> bool:
    return digest(open_checkpoint(path).weights) == digest(feed.states[version])


def payloads(store: SpyStore) -> set[str]:
    return {key for _, key in store.took() if key.startswith("payloads/")}


def test_an_empty_mirror_gets_the_newest_version_and_keeps_it(path: Path) -> None:
    store = SpyStore()
    feed = Feed.of(3, store)
    assert fill_mirror(store, path) == 2
    assert holds(path, feed, 2)
    feed.delta()
    store.took()
    assert fill_mirror(store, path) == 2
    assert payloads(store) == set()
    assert fill_mirror(store, path, version=3) == 3
    assert holds(path, feed, 3)
    assert fill_mirror(store, path, version=1) == 1
    assert holds(path, feed, 1)


def test_bits_of_no_version_are_replaced(path: Path) -> None:
    feed = Feed.of(2)
    fill_mirror(feed.store, path)
    mapped = map_files(open_checkpoint(path).files, writable=True)
    mapped.weights.arrays[0][0] ^= 1
    mapped.flush()
    assert fill_mirror(feed.store, path) == 1
    assert holds(path, feed, 1)


def test_a_feed_without_versions(path: Path) -> None:
    with pytest.raises(NotFoundError, match="there is no version"):
        fill_mirror(Feed().store, path)


def test_a_base_is_read_from_its_copy(path: Path, tmp_path: Path) -> None:
    feed, tensors = Feed(), state()
    feed.base(tensors, BaseRef("elsewhere"))
    feed.delta()
    write_sharded(tmp_path / "copy", tensors)
    assert fill_mirror(feed.store, path, base=tmp_path / "copy") == 1
    assert holds(path, feed, 1)


def test_others_wait_for_the_process_that_fills_it(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    feed, is_waiting = Feed.of(2), threading.Event()
    with ThreadPoolExecutor(1) as threads:
        with locked(path):
            filled = threads.submit(fill_mirror, feed.store, path)
            while "waiting for the process that fills the mirror" not in caplog.text:
                is_waiting.wait(0.01)
            assert not filled.done()
            assert not path.exists()
        assert filled.result(LONG_S) == 1
    assert holds(path, feed, 1)


def test_a_mirror_that_another_server_keeps(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "_WAIT_S", 0.05)
    with locked(path), pytest.raises(InvalidInputError, match="is used by another process"):
        fill_mirror(Feed.of(1).store, path)
