"""The event feed of a bucket: the real client's session against the stand-in."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Queue

import pytest
from feeds import Feed
from hub import Hub
from replicas import LONG_S, Moves, TorchTarget, follower, following

from deltasync.errors import StoreError
from deltasync.following.nudging import watching
from deltasync.format import keys
from deltasync.store import bucket_events
from deltasync.store.buckets import BucketStore
from deltasync.store.memory import MemoryStore
from deltasync.store.watching import Watchable


class Heard:
    """What a thread got from `watch`."""

    def __init__(self, store: BucketStore, stop: threading.Event) -> None:
        self.keys: Queue[str] = Queue()
        self.raised: StoreError | None = None
        self.thread = threading.Thread(target=self._run, args=(store, stop))
        self.thread.start()

    def _run(self, store: BucketStore, stop: threading.Event) -> None:
        try:
            for key in store.watch(stop):
                self.keys.put(key)
        except StoreError as error:
            self.raised = error

    def take(self, count: int) -> list[str]:
        return [self.keys.get(timeout=LONG_S) for _ in range(count)]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_events, "_PAUSE_FIRST_S", 0.01)
    monkeypatch.setattr(bucket_events, "_PAUSE_MOST_S", 0.1)


@pytest.fixture
def store(standin: Hub) -> BucketStore:
    return BucketStore(standin.create_bucket(), "run-1")


@contextmanager
def heard(store: BucketStore, standin: Hub) -> Iterator[Heard]:
    """Watch in a thread, which is connected and ends with the block."""
    stop = threading.Event()
    found = Heard(store, stop)
    try:
        await_connections(standin, 1)
        yield found
    finally:
        stop.set()
        found.thread.join(LONG_S)
        assert not found.thread.is_alive()


def await_connections(standin: Hub, count: int) -> None:
    waiting = threading.Event()
    for _ in range(int(LONG_S / 0.01)):
        with standin.lock:
            if len(standin.cursors) >= count:
                return
        waiting.wait(0.01)
    raise AssertionError(f"{standin.cursors} connections, not {count}")


def test_who_can_be_watched(store: BucketStore) -> None:
    assert isinstance(store, Watchable)
    assert not isinstance(MemoryStore(), Watchable)


def test_keys_are_told_as_they_are_put(store: BucketStore, standin: Hub) -> None:
    store.put("before", b"1")
    with heard(store, standin) as news:
        store.put("versions/a", b"1")
        BucketStore("user/feeds", "run-10").put("of-another-feed", b"1")
        store.delete("before")
        store.put("versions/a", b"2")
        store.put("last", b"1")
        assert news.take(3) == ["versions/a", "versions/a", "last"]


def test_lost_connections_lose_nothing(store: BucketStore, standin: Hub) -> None:
    with heard(store, standin) as news:
        store.put("first", b"1")
        assert news.take(1) == ["first"]
        # What is put while nobody is connected comes by the cursor.
        standin.fail("events", status=503, times=2)
        standin.fail("events", status=None, times=1)
        standin.end_events()
        store.put("second", b"1")
        assert news.take(1) == ["second"]
        assert standin.cursors[0] is None
        assert standin.cursors[1] == "1"


@pytest.mark.parametrize("how", ["reset", "refused"])
def test_a_cursor_that_is_too_old_is_dropped(store: BucketStore, standin: Hub, how: str) -> None:
    with heard(store, standin) as news:
        store.put("first", b"1")
        assert news.take(1) == ["first"]
        if how == "reset":
            standin.oldest = 2
        else:
            standin.fail("events", status=400)
        standin.end_events()
        await_connections(standin, 3 if how == "reset" else 2)
        assert standin.cursors[-1] is None
        standin.oldest = 0
        store.put("second", b"1")
        assert news.take(1) == ["second"]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("news", {}),
        ("changes", {"cursor": 7, "changes": "none"}),
        ("changes", {"changes": [3, {"op": "add"}, {"op": "add", "path": 5}, {"op": "burn", "path": "run-1/a"}]}),
        ("changes", {"changes": [{"op": "add", "path": "run-1/../b"}, {"op": "add", "path": "run-1/"}]}),
    ],
)
def test_strange_events_are_passed_over(standin: Hub, monkeypatch: pytest.MonkeyPatch, name: str, data: object) -> None:
    store, stop = BucketStore("user/feeds", "run-1"), threading.Event()

    def events(*_: object) -> Iterator[tuple[str, object]]:
        yield name, data
        yield "changes", {"cursor": "1", "changes": [{"op": "add", "path": "run-1/good"}]}

    monkeypatch.setattr(bucket_events, "_events", events)
    assert next(iter(store.watch(stop))) == "good"


@pytest.mark.parametrize("status", [401, 403, 404, 501])
def test_a_refusal_ends_it(store: BucketStore, standin: Hub, status: int) -> None:
    standin.fail("events", status=status, times=100)
    with pytest.raises(StoreError, match=str(status)) as caught:
        next(iter(store.watch(threading.Event())))
    assert not caught.value.transient
    assert standin.requests["events"] == 1


def test_a_page_is_no_event_feed(store: BucketStore, standin: Hub) -> None:
    standin.fail("events", status=200)
    with pytest.raises(StoreError, match="no events"):
        next(iter(store.watch(threading.Event())))


def test_only_versions_nudge(store: BucketStore, standin: Hub) -> None:
    nudges: Queue[None] = Queue()
    with watching(store, lambda: nudges.put(None)):
        await_connections(standin, 1)
        store.put("payloads/x", b"1")
        store.put(keys.replica_key("r"), b"1")
        store.put(keys.version_key(3), b"1")
        nudges.get(timeout=LONG_S)
        assert nudges.empty()
    store.put(keys.version_key(4), b"1")
    assert nudges.empty()


@pytest.mark.parametrize("has_feed", [True, False])
def test_a_follower_hears_of_versions_but_needs_no_events(
    store: BucketStore, standin: Hub, monkeypatch: pytest.MonkeyPatch, has_feed: bool
) -> None:
    if not has_feed:
        standin.fail("events", status=404)
    # With events it must not need to look by itself, without them it must.
    monkeypatch.setattr("deltasync.following.loop._POLL_MOST_S", 10 * LONG_S if has_feed else 0.2)
    monkeypatch.setattr("deltasync.following.loop._POLL_FIRST_S", 10 * LONG_S if has_feed else 0.1)
    feed, moves = Feed.of(2, store), Moves()
    target = TorchTarget(feed.states[0].layout)
    replica = follower(store, observer=moves)
    with replica, following(replica, target):
        moves.await_version(1)
        if has_feed:
            await_connections(standin, 1)
        feed.delta()
        moves.await_version(2)
    assert target.holds(feed.states[2])
