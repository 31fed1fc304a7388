"""The publisher of weights in memory: going on where another one stopped, and what goes beside the weights."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import LONG_S
from support.feeds import SpyStore, nth, publish, publisher, require_steps
from support.helpers import State, state, write_sharded

from deltasync.errors import ConflictError, InvalidInputError, NotFoundError, StoreError
from deltasync.feed.fetch import fetch
from deltasync.feed.files import fetch_files
from deltasync.feed.log import Log
from deltasync.format import keys
from deltasync.format.layout import TensorSpec
from deltasync.format.manifest import BaseRef
from deltasync.format.weights import Bits, Weights
from deltasync.store.local import LocalStore
from deltasync.store.memory import MemoryStore
from deltasync.testing.faulty import Fault, FaultyStore, Operation, at
from deltasync.trainer.capture import StreamSource, WeightsSource
from deltasync.trainer.publisher import PublisherOptions
from deltasync.upkeep.restore import restore

pytestmark = pytest.mark.usefixtures("no_pauses")


def feed(steps: int, **options: Any) -> FaultyStore:
    """A feed of so many steps, whose publisher is gone."""
    store = FaultyStore(MemoryStore())
    to = publisher(store, wait=True, **options)
    for number in range(steps):
        publish(to, number)
    to.close()
    store.operations.clear()
    return store


def payload_reads(store: FaultyStore) -> list[Operation]:
    return [op for op in store.operations if op.verb.startswith("get") and op.key.startswith(keys.PAYLOADS)]


def go_on(store: FaultyStore, *steps: int, **options: Any) -> None:
    to = publisher(store, wait=True, **options)
    publications = [publish(to, step) for step in steps]
    to.close()
    for publication in publications:
        publication.wait(LONG_S)


def test_resumes_from_the_feed() -> None:
    store = feed(4)
    go_on(store, 4, 5)
    assert len(payload_reads(store)) >= 4
    manifests = require_steps(store, dict(enumerate(range(6))))
    assert [m.kind for m in manifests] == ["anchor"] + ["delta"] * 5
    assert len({m.writer for m in manifests}) == 2


def test_a_restart_with_the_same_weights_publishes_no_change() -> None:
    store = feed(4)
    go_on(store, 3)
    last = require_steps(store, {0: 0, 1: 1, 2: 2, 3: 3, 4: 3})[-1]
    assert (last.changed, last.payloads) == (0, ())


def test_going_back_in_steps() -> None:
    """A trainer that restarts from an older checkpoint of its own."""
    store = feed(5)
    go_on(store, 2, 3)
    require_steps(store, {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 2, 6: 3})


def test_a_feed_that_must_exist(tmp_path: Path) -> None:
    """A folder that is not mounted must not become a new feed."""
    new = publisher(LocalStore(tmp_path / "feed"), must_exist=True)
    with pytest.raises(NotFoundError, match="there is no version in"):
        publish(new, 0)
    new.close()
    assert list(tmp_path.iterdir()) == []
    store = feed(2)
    go_on(store, 2, must_exist=True)
    require_steps(store, {0: 0, 1: 1, 2: 2})


def test_resumes_from_the_mapped_file(tmp_path: Path) -> None:
    path = tmp_path / "shadow"
    store = feed(4, shadow_path=path)
    go_on(store, 4, 5, shadow_path=path)
    assert payload_reads(store) == []
    store.operations.clear()
    go_on(store, 6, shadow_path=path)
    assert payload_reads(store) == []
    require_steps(store, dict(enumerate(range(7))))


def test_a_mapped_shadow_is_used_by_one_publisher_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "shadow"
    to = publisher(FaultyStore(MemoryStore()), shadow_path=path)
    publish(to, 0)
    other = publisher(FaultyStore(MemoryStore()), shadow_path=path)
    for _ in range(2):
        with pytest.raises(InvalidInputError, match="is used by another process"):
            publish(other, 5)
    publish(to, 1).wait(LONG_S)
    to.close()
    # Given back: the same one can go on, and does so with its own feed.
    publish(other, 5).wait(LONG_S)
    publish(other, 6).wait(LONG_S)
    other.close()


def test_the_layout_is_all_that_is_read_for_tensors_that_come_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "shadow"
    store = feed(4, shadow_path=path)
    to = publisher(store, shadow_path=path)
    to.publish(StreamSource(tensors_of(nth(4))), step=4)
    to.close()
    assert {op.verb for op in payload_reads(store)} == {"get_range"}
    require_steps(store, dict(enumerate(range(5))))


def tensors_of(tensors: State) -> Iterator[tuple[TensorSpec, Bits]]:
    weights = Weights.of(tensors)
    return iter(zip(weights.layout.tensors, weights.arrays, strict=True))


def flip_a_bit(path: Path, store: FaultyStore) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def publish_elsewhere(path: Path, store: FaultyStore) -> None:
    go_on(store, 4)


SPOILT: dict[str, tuple[Callable[[Path, FaultyStore], object], int]] = {
    "torn": (flip_a_bit, 4),
    "stale": (publish_elsewhere, 5),
    "cut off": (lambda path, store: path.write_bytes(path.read_bytes()[:-9]), 4),
    "of another feed": (lambda path, store: path.unlink() or feed(2, shadow_path=path), 4),
    "gone": (lambda path, store: path.unlink(), 4),
}


@pytest.mark.parametrize(("spoil", "following"), SPOILT.values(), ids=SPOILT.keys())
def test_a_mapped_file_of_no_use_is_rebuilt(spoil: Any, following: int, tmp_path: Path) -> None:
    path = tmp_path / "shadow"
    store = feed(4, shadow_path=path)
    spoil(path, store)
    store.operations.clear()
    go_on(store, following, shadow_path=path)
    assert payload_reads(store)
    store.operations.clear()
    go_on(store, following + 1, shadow_path=path)
    assert payload_reads(store) == []
    require_steps(store, dict(enumerate(range(following + 2))))


def test_a_stale_trainer_is_fenced_off(tmp_path: Path) -> None:
    """It was suspended while a new one took over, and comes back. Its shadow file is not the new one's."""
    store = FaultyStore(MemoryStore())
    stale = publisher(store, shadow_path=tmp_path / "stale")
    publish(stale, 0).wait(LONG_S)
    go_on(store, 1, 2)
    with pytest.raises(ConflictError, match="was committed by writer"):
        publish(stale, 9).wait(LONG_S)
    with pytest.raises(ConflictError, match="has stopped"):
        publish(stale, 10)
    stale.close()
    go_on(store, 3)
    require_steps(store, dict(enumerate(range(4))))


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("kind", ["refuse", "cut", "lose"])
def test_errors_while_a_feed_is_opened_are_tried_again(kind: Any) -> None:
    prepared = feed(3)
    go_on(counting := FaultyStore(copy_of(prepared)), 3)
    count = len(counting.operations)
    assert count > 10
    for number in range(1, count + 1):
        store = FaultyStore(copy_of(prepared), at(number, Fault(kind)))
        go_on(store, 3)
        require_steps(store, dict(enumerate(range(4))))


def copy_of(store: FaultyStore) -> MemoryStore:
    copy = MemoryStore()
    for item in store.list():
        copy.put(item.key, store.get(item.key))
    return copy


def test_a_lasting_error_is_reported_at_once() -> None:
    store = FaultyStore(copy_of(feed(2)), at(1, Fault("refuse", transient=False)))
    to = publisher(store)
    with pytest.raises(StoreError, match="operation 1, "):
        publish(to, 2)
    # Nothing has begun: the same publisher may try again.
    assert publish(to, 2).wait(LONG_S).version == 2
    to.close()
    require_steps(store, dict(enumerate(range(3))))


def test_resumes_from_a_base(tmp_path: Path) -> None:
    write_sharded(tmp_path, nth(0))
    store = feed(3, base=BaseRef(str(tmp_path)))
    assert Log(store).read(0).kind == "base"
    go_on(store, 3)
    require_steps(store, dict(enumerate(range(4))))


def test_a_base_that_is_not_available_is_named(tmp_path: Path) -> None:
    store = feed(2, base=BaseRef(str(tmp_path / "gone")))
    with pytest.raises(NotFoundError, match="gone"):
        go_on(store, 2)


@pytest.mark.parametrize("fault", [None, Fault("refuse"), Fault("lose")], ids=["no fault", "refused", "answer lost"])
def test_files_come_along_with_every_version(fault: Fault | None, tmp_path: Path) -> None:
    files = {"config.json": b'{"model_type": "test"}', "sub/tokenizer.txt": b"a b c"}
    is_first = iter([True])
    store = FaultyStore(
        MemoryStore(),
        lambda op: fault if op.verb == "put" and op.key.startswith(keys.PAYLOADS) and next(is_first, False) else None,
    )
    to = publisher(store, files=files, wait=True)
    for step in range(3):
        publish(to, step)
    to.close()
    restore(store, tmp_path / "out")
    assert {name: (tmp_path / "out" / name).read_bytes() for name in files} == files
    assert len({m.files for m in require_steps(store, {0: 0, 1: 1, 2: 2})}) == 1


def test_files_that_cannot_be_put_are_put_by_the_next() -> None:
    is_first = iter([True])
    hard = Fault("refuse", transient=False)
    store = FaultyStore(MemoryStore(), lambda op: hard if op.verb == "put" and next(is_first, False) else None)
    to = publisher(store, files={"config.json": b"{}"})
    with pytest.raises(StoreError):
        publish(to, 0)
    assert publish(to, 1).wait(LONG_S).version == 0
    to.close()
    (manifest,) = require_steps(store, {0: 1})
    assert manifest.files is not None
    assert fetch(store, manifest.files)


@pytest.mark.parametrize("files", [{"config.json": b"{}"}, {"config.json": b"other"}, {}])
def test_a_publisher_that_resumes_repairs_damaged_files(
    files: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """With the files that it was given; versions that name others keep theirs."""
    store = MemoryStore()
    with closing(publisher(store, files={"config.json": b"{}"})) as to:
        first = publish(to, 0).wait(LONG_S)
    store.delete(keys.payload_key(first.files.sha256))
    with closing(publisher(store, files=files)) as to:
        second = publish(to, 1).wait(LONG_S)
        third = publish(to, 2).wait(LONG_S)
    assert second.files == third.files
    assert (second.files == first.files) == (files != {"config.json": b"other"})
    assert ("none were given to repair them" in caplog.text) == (not files)
    if files:
        assert fetch_files(store, second) == files


def test_files_that_are_whole_are_not_put_again() -> None:
    store = SpyStore()
    for number in range(2):
        with closing(publisher(store, files={"config.json": b"{}"})) as to:
            manifest = publish(to, number).wait(LONG_S)
        puts = [key for verb, key in store.took() if verb == "put"]
        assert puts.count(keys.payload_key(manifest.files.sha256)) == (number == 0)


def test_the_head_is_known() -> None:
    store = feed(3)
    to = publisher(store)
    assert to.head is None
    assert to.wait(0)
    assert to.open() == Weights.of(state()).layout
    assert to.head == Log(store).read(2)
    to.close()


def test_a_new_feed_has_no_layout_yet() -> None:
    to = publisher(MemoryStore())
    assert to.open() is None
    to.close()


OTHERS: dict[str, tuple[State, str]] = {
    "vanished": ({n: a for n, a in state().items() if n != "embed"}, "'embed'"),
    "appeared": ({**state(), "extra": np.zeros(3, np.float32)}, "'extra'"),
    "another shape": ({**state(), "embed": state()["embed"].reshape(32, 64)}, "'embed'"),
    "another type": ({**state(), "embed": state()["embed"].view(np.float16)}, "'embed'"),
}


@pytest.mark.parametrize("is_resumed", [False, True], ids=["between two publications", "after a restart"])
@pytest.mark.parametrize(("other", "named"), OTHERS.values(), ids=OTHERS.keys())
def test_other_tensors_are_refused_by_name(other: State, named: str, is_resumed: bool) -> None:
    store = FaultyStore(MemoryStore())
    to = publisher(store)
    publish(to, 0).wait(LONG_S)
    if is_resumed:
        to.close()
        to = publisher(store)
    for attempt in (
        lambda: to.publish(WeightsSource(Weights.of(other)), step=1),
        lambda: to.publish(StreamSource(tensors_of(other)), step=1),
    ):
        with pytest.raises(InvalidInputError) as caught:
            attempt()
        assert named.strip("'") in str(caught.value)
        assert "--anchor" in str(caught.value)
    # Nothing has happened: the right ones go on.
    assert publish(to, 2).wait(LONG_S).version == 1
    to.close()
    require_steps(store, {0: 0, 1: 2})


@pytest.mark.parametrize("is_mapped", [False, True], ids=["memory", "mapped"])
def test_tensors_that_come_one_by_one(is_mapped: bool, tmp_path: Path) -> None:
    store = MemoryStore()
    to = publisher(store, wait=True, shadow_path=tmp_path / "shadow" if is_mapped else None)
    for step in range(4):
        to.publish(StreamSource(tensors_of(nth(step))), step=step)
    to.close()
    require_steps(store, dict(enumerate(range(4))))


def test_a_source_that_fails_half_way_changes_nothing() -> None:
    def broken(step: int) -> Iterator[tuple[TensorSpec, Bits]]:
        for number, tensor in enumerate(tensors_of(nth(step))):
            if number == 3:
                raise RuntimeError("the gather failed")
            yield tensor

    store = MemoryStore()
    to = publisher(store)
    for step, following in ((9, 0), (8, 1), (7, 2)):
        with pytest.raises(RuntimeError, match="the gather failed"):
            to.publish(StreamSource(broken(step)), step=step)
        to.publish(StreamSource(tensors_of(nth(following))), step=following).wait(LONG_S)
    to.close()
    require_steps(store, dict(enumerate(range(3))))


def test_a_manifest_carries_extra_metadata() -> None:
    store = MemoryStore()
    to = publisher(store, wait=True)
    for step in range(3):
        publish(to, step, extra={"reward": f"0.{step}"} if step != 1 else None)
    to.publish(StreamSource(tensors_of(nth(3))), step=3, extra={"note": "last"})
    to.close()
    manifests = require_steps(store, dict(enumerate(range(4))))
    assert [m.extra for m in manifests] == [{"reward": "0.0"}, {}, {"reward": "0.2"}, {"note": "last"}]


@pytest.mark.parametrize("extra", [{"a": 1}, {1: "a"}, {"a": None}, {"a": "x" * (64 << 10)}], ids=repr)
def test_extra_metadata_that_a_manifest_cannot_carry(extra: Any) -> None:
    store = MemoryStore()
    to = publisher(store)
    with pytest.raises(InvalidInputError, match=r"extra (must map strings to strings|may have at most)"):
        publish(to, 0, extra=extra)
    assert publish(to, 1).wait(LONG_S).version == 0
    to.close()
    require_steps(store, {0: 1})


def test_publications_start_no_threads_of_their_own() -> None:
    to = publisher(MemoryStore(), wait=True)
    for step in range(4):
        publish(to, step, anchor=step == 1).wait(LONG_S)
    before = {thread.ident for thread in threading.enumerate()}
    started: list[threading.Thread] = []
    with pytest.MonkeyPatch.context() as patch:
        start = threading.Thread.start
        patch.setattr(threading.Thread, "start", lambda thread: (started.append(thread), start(thread)))
        for step in range(4, 12):
            publish(to, step).wait(LONG_S)
    assert started == []
    # Threads of other tests may end meanwhile.
    assert {thread.ident for thread in threading.enumerate()} <= before
    to.close()


@pytest.mark.parametrize("options", [{"capture_on": "gpu"}, {"retry_s": -1}], ids=str)
def test_options_that_make_no_sense(options: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"(capture_on|retry_s) must be"):
        PublisherOptions(**options)
