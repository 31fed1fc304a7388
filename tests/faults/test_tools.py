"""The fault tools themselves, and what they count: the round trips of a commit."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from known import Author, nth, publish
from support.feeds import WatchedStore

from deltasync.errors import NotFoundError, StoreError
from deltasync.feed.log import Log
from deltasync.store.memory import MemoryStore
from deltasync.store.protocol import Store
from deltasync.testing.conformance import StoreConformance
from deltasync.testing.faulty import Crash, Fault, FaultyStore, Operation, at, at_random, never


class TestFaultyStoreWithoutFaults(StoreConformance):
    @pytest.fixture
    def store(self) -> Store:
        return FaultyStore(MemoryStore())


class TestWatchedStore(StoreConformance):
    @pytest.fixture
    def store(self) -> Store:
        return WatchedStore(MemoryStore(), lambda store: None)


CALLS: dict[str, Callable[[Store], object]] = {
    "put": lambda store: store.put("a", b"new"),
    "create": lambda store: store.create("b", b"new"),
    "get": lambda store: store.get("a"),
    "get of nothing": lambda store: store.get("none"),
    "get_range": lambda store: store.get_range("a", 1, 2),
    "list": lambda store: list(store.list()),
    "delete": lambda store: store.delete("a"),
}
# What the caller sees, and whether the operation happened.
OUTCOMES: dict[Any, tuple[type[BaseException], bool]] = {
    "refuse": (StoreError, False),
    "cut": (StoreError, False),
    "lose": (StoreError, True),
    "crash_before": (Crash, False),
    "crash_after": (Crash, True),
}


def with_one_object() -> MemoryStore:
    store = MemoryStore()
    store.put("a", b"old")
    return store


def content(store: Store) -> dict[str, bytes]:
    return {item.key: store.get(item.key) for item in store.list()}


@pytest.mark.parametrize("transient", [True, False])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("kind", OUTCOMES)
def test_faults(kind: Any, call: Callable[[Store], object], transient: bool) -> None:
    seen, happens = OUTCOMES[kind]
    store, expected = with_one_object(), with_one_object()
    if happens:
        with suppress(NotFoundError):
            call(expected)
    faulty = FaultyStore(store, at(2, Fault(kind, transient=transient)))
    faulty.get("a")
    with pytest.raises(seen) as caught:
        call(faulty)
    assert content(store) == content(expected)
    if isinstance(caught.value, StoreError):
        assert caught.value.transient is transient
        assert caught.value.hint is not None
        faulty.put("later", b"works again")
        store.delete("later")
    else:
        with pytest.raises(Crash):
            faulty.get("a")
    assert content(store) == content(expected)


def test_delay() -> None:
    slept: list[float] = []
    faulty = FaultyStore(with_one_object(), at(1, Fault("delay", delay_s=2.5)), sleep=slept.append)
    assert faulty.get("a") == b"old"
    assert faulty.get("a") == b"old"
    assert slept == [2.5]


@pytest.mark.parametrize("call", [lambda store: store.get("a"), lambda store: store.get_range("a", 0, 9)])
def test_flip_changes_one_bit_of_what_is_read(call: Callable[[Store], bytes]) -> None:
    store = with_one_object()
    faulty = FaultyStore(store, at(1, Fault("flip")))
    damaged = call(faulty)
    assert (int.from_bytes(damaged) ^ int.from_bytes(b"old")).bit_count() == 1
    assert call(faulty) == b"old"
    again = FaultyStore(store, at(1, Fault("flip")))
    assert call(again) == damaged, "always the same way"


def test_flip_of_nothing_and_of_writes() -> None:
    store = MemoryStore()
    faulty = FaultyStore(store, lambda op: Fault("flip"))
    faulty.put("a", b"")
    assert faulty.get("a") == b""
    assert [item.key for item in faulty.list()] == ["a"]


def test_random_faults_depend_on_the_seed_alone() -> None:
    operations = [Operation(n, "get", "a") for n in range(1, 2001)]
    faults = [Fault("refuse"), Fault("lose")]

    def drawn(seed: int) -> list[Fault | None]:
        plan = at_random(0.1, faults, seed=seed)
        return [plan(op) for op in operations]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert 100 < sum(fault is not None for fault in drawn(1)) < 300
    assert {fault for fault in drawn(1) if fault is not None} == set(faults)
    assert at_random(0.0, faults, seed=1)(operations[0]) is None
    assert never(operations[0]) is None


def test_operations_are_counted() -> None:
    faulty = FaultyStore(with_one_object())
    for call in CALLS.values():
        with suppress(NotFoundError):
            call(faulty)
    operations = [(op.number, op.verb, op.key) for op in faulty.operations]
    assert operations == [
        (1, "put", "a"), (2, "create", "b"), (3, "get", "a"), (4, "get", "none"), (5, "get_range", "a"),
        (6, "list", ""), (7, "delete", "a"),
    ]  # fmt: skip


def test_a_commit_of_one_payload_is_two_requests() -> None:
    counting = FaultyStore(MemoryStore())
    publish(counting, 0)
    author = Author(counting)
    before = len(counting.operations)
    author.commit(nth(1))
    assert [op.verb for op in counting.operations[before:]] == ["put", "create"]


def test_a_head_check_is_one_request() -> None:
    store = MemoryStore()
    publish(store, 0)
    publish(store, 1)
    counting = FaultyStore(store)
    assert Log(counting).head(after=1) is None
    assert [op.verb for op in counting.operations] == ["get_range"]


def test_the_store_is_shown_after_every_write() -> None:
    seen: list[dict[str, bytes]] = []
    watched = WatchedStore(MemoryStore(), lambda store: seen.append(content(store)))
    watched.put("a", b"1")
    assert watched.create("b", b"2")
    assert not watched.create("b", b"3")
    assert watched.get("a") == b"1"
    assert watched.get_range("a", 0, 1) == b"1"
    assert [item.key for item in watched.list()] == ["a", "b"]
    watched.delete("a")
    assert seen == [{"a": b"1"}, {"a": b"1", "b": b"2"}, {"a": b"1", "b": b"2"}, {"b": b"2"}]


def test_the_store_is_shown_after_a_write_whose_answer_was_lost() -> None:
    seen: list[dict[str, bytes]] = []
    lossy = FaultyStore(MemoryStore(), at(1, Fault("lose")))
    watched = WatchedStore(lossy, lambda store: seen.append(content(store)))
    with pytest.raises(StoreError):
        watched.put("a", b"1")
    assert seen == [{"a": b"1"}]


def test_an_error_of_the_watcher_is_raised() -> None:
    def look(store: Store) -> None:
        raise AssertionError("not like this")

    with pytest.raises(AssertionError, match="not like this"):
        WatchedStore(MemoryStore(), look).put("a", b"1")


def test_author_writes_what_publish_writes() -> None:
    """The helper of these tests commits the same payload as the real publisher."""
    first, second = MemoryStore(), MemoryStore()
    publish(first, 0)
    publish(second, 0)
    ours = Author(first).commit(nth(1))
    theirs = publish(second, 1)
    assert (ours.digest, ours.payloads, ours.changed) == (theirs.digest, theirs.payloads, theirs.changed)
