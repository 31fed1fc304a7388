"""What the fault tools count and show: the round trips of a commit, the store after every write."""

import pytest
from known import Author, nth, publish
from support.feeds import WatchedStore

from deltasync.errors import StoreError
from deltasync.feed.log import Log
from deltasync.store.memory import MemoryStore
from deltasync.store.protocol import Store
from deltasync.testing.conformance import StoreConformance
from deltasync.testing.faulty import Fault, FaultyStore, at


class TestFaultyStoreWithoutFaults(StoreConformance):
    @pytest.fixture
    def store(self) -> Store:
        return FaultyStore(MemoryStore())


class TestWatchedStore(StoreConformance):
    @pytest.fixture
    def store(self) -> Store:
        return WatchedStore(MemoryStore(), lambda store: None)


def content(store: Store) -> dict[str, bytes]:
    return {item.key: store.get(item.key) for item in store.list()}


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
