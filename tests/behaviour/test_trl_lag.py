"""Who is behind, and waiting for them, on a clock that the test moves."""

from collections.abc import Callable, Iterator

import pytest
from support.feeds import paper

from deltasync.errors import StoreError
from deltasync.feed.log import LIVE_S, RELAY_ENGINE, Log
from deltasync.format import keys
from deltasync.format.manifest import Manifest
from deltasync.format.sealed import Heartbeat
from deltasync.replica.events import serving
from deltasync.store.memory import MemoryStore
from deltasync.store.protocol import ObjectInfo
from deltasync.torch import FeedReader
from deltasync.trl import wait_for_replicas

NOW_S = 1_700_000_000


class Clock:
    """Time passes only during sleeps; `at[n]` happens during the nth sleep."""

    def __init__(self, *at: Callable[[], None]) -> None:
        self.now_s = float(NOW_S)
        self.slept_s: list[float] = []
        self.at = list(at)

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.slept_s.append(seconds)
        if self.at:
            self.at.pop(0)()


def chain() -> list[Manifest]:
    return [paper("anchor", 0, 9), *(paper("delta", version, 9) for version in range(1, 10))]


def feed(store: MemoryStore | None = None, *, clock: Callable[[], float] = lambda: NOW_S, **beats: int | None) -> Log:
    """A feed of ten versions with replicas that have just reported the versions that they serve."""
    log = Log(MemoryStore(clock=clock) if store is None else store)
    for manifest in chain():
        log.store.put(keys.version_key(manifest.version), manifest.to_bytes())
    for replica, version in beats.items():
        log.beat(Heartbeat(replica, version, NOW_S))
    return log


def beat(log: Log, replica: str, version: int) -> Callable[[], None]:
    return lambda: log.beat(Heartbeat(replica, version, NOW_S))


@pytest.mark.parametrize(
    ("versions", "age_s", "expected"),
    [
        ({}, 0, []),
        ({"a": 3, "b": 1, "c": 2}, 0, ["b", "c", "a"]),
        ({"a": 3, "b": 3}, 0, ["a", "b"]),
        ({"a": None, "b": 5}, 0, ["b"]),
        ({"a": 1}, LIVE_S - 1, ["a"]),
        ({"a": 1}, LIVE_S, []),
    ],
)
def test_live_replicas_that_serve_a_version(versions: dict[str, int | None], age_s: int, expected: list[str]) -> None:
    log = feed(**versions)
    found = serving(log, clock=lambda: NOW_S + age_s)
    assert list(found) == expected


def test_a_relay_makes_no_rollouts() -> None:
    """Its heartbeat keeps what it needs, and training does not wait for it."""
    log = feed(a=9)
    log.beat(Heartbeat("eu.relay", 2, NOW_S, {"engine": RELAY_ENGINE}))
    assert list(serving(log, clock=lambda: NOW_S)) == ["a"]


def test_one_that_is_gone_does_not_hide_a_live_one() -> None:
    now_s = [float(NOW_S)]
    log = feed(clock=lambda: now_s[0], dead=0)
    now_s[0] += 100
    log.beat(Heartbeat("live", 7, NOW_S))
    found = serving(log, live_s=60, clock=lambda: NOW_S + 100)
    assert list(found) == ["live"]


@pytest.mark.parametrize(
    ("versions", "replicas"), [({"a": 4, "b": 5}, 2), ({"a": 9}, 1), ({}, 0), ({"loading": None}, 0)]
)
def test_nothing_to_wait_for(versions: dict[str, int | None], replicas: int) -> None:
    clock = Clock()
    wait_for_replicas(
        FeedReader(feed(**versions).store), 4, replicas=replicas, timeout_s=10, clock=clock, sleep=clock.sleep
    )
    assert clock.slept_s == []


def test_waits_for_the_slowest() -> None:
    log = feed(a=3, b=2)
    clock = Clock(beat(log, "b", 3), beat(log, "a", 4), beat(log, "b", 4))
    wait_for_replicas(FeedReader(log.store), 4, replicas=1, timeout_s=10, clock=clock, sleep=clock.sleep)
    assert len(clock.slept_s) == 3
    assert clock.slept_s == sorted(clock.slept_s)


def test_waits_for_the_first_replica() -> None:
    log = feed()
    clock = Clock(lambda: None, beat(log, "a", 4))
    wait_for_replicas(FeedReader(log.store), 4, replicas=1, timeout_s=10, clock=clock, sleep=clock.sleep)
    assert len(clock.slept_s) == 2


def test_a_replica_that_died_is_left_behind() -> None:
    clock = Clock()
    now_s = [float(NOW_S)]
    log = feed(clock=lambda: now_s[0], dead=1)
    now_s[0] += 19
    log.beat(Heartbeat("live", 4, NOW_S))
    wait_for_replicas(FeedReader(log.store), 4, replicas=1, timeout_s=100, live_s=20, clock=clock, sleep=clock.sleep)
    assert 20 <= sum(clock.slept_s) < 23


@pytest.mark.parametrize(
    ("versions", "replicas", "message"),
    [
        ({"a": 3, "b": 4}, 1, "'a' serves version 3"),
        (dict.fromkeys("abcde", 1), 1, "'c' serves version 1 and 2 others"),
        ({"a": 9}, 2, "1 live replicas serve a version, at least 2 are required"),
        ({"a": None}, 1, "0 live replicas"),
    ],
)
def test_time_out_names_what_is_missing(versions: dict[str, int | None], replicas: int, message: str) -> None:
    clock = Clock()
    with pytest.raises(StoreError, match=message) as caught:
        wait_for_replicas(
            FeedReader(feed(**versions).store), 4, replicas=replicas, timeout_s=7, clock=clock, sleep=clock.sleep
        )
    assert "version 4" in str(caught.value)
    assert caught.value.hint is not None
    assert clock.now_s == NOW_S + 7


JUNK: dict[str, tuple[str, bytes]] = {
    "not JSON": ("junk", b"{"),
    "of another key": ("junk", Heartbeat("other", 0, NOW_S).to_bytes()),
    "a time in the future": ("junk", Heartbeat("junk", 0, 2**62).to_bytes()),
    "a version above the head": ("junk", Heartbeat("junk", 2**62, NOW_S).to_bytes()),
    "another digest": ("junk", Heartbeat("junk", 4, NOW_S, {"digest": "00" * 16}).to_bytes()),
}


@pytest.mark.parametrize(("replica", "data"), JUNK.values(), ids=JUNK.keys())
def test_one_small_object_does_not_stop_training(replica: str, data: bytes) -> None:
    """At the latest when it has expired."""
    clock = Clock()
    log = feed(good=4)
    log.store.put(keys.replica_key(replica), data)
    store = log.store
    assert isinstance(store, MemoryStore)
    wait_for_replicas(FeedReader(log.store), 4, replicas=0, timeout_s=LIVE_S + 10, clock=clock, sleep=clock.sleep)


@pytest.mark.parametrize("version", [4, 9, 10, 2**62])
@pytest.mark.parametrize("facts", [{}, {"digest": "00" * 16}])
def test_only_versions_of_this_feed_are_confirmed(version: int, facts: dict[str, str]) -> None:
    """A replica above the head, or with other bits, serves nothing that this trainer has published."""
    clock = Clock()
    log = feed()
    log.beat(Heartbeat("a", version, NOW_S, facts))
    is_of_feed = version < 10 and not facts
    assert bool(serving(log, clock=clock)) == is_of_feed
    if is_of_feed:
        wait_for_replicas(FeedReader(log.store), 4, replicas=1, timeout_s=5, clock=clock, sleep=clock.sleep)
    else:
        with pytest.raises(StoreError, match="0 live replicas"):
            wait_for_replicas(FeedReader(log.store), 4, replicas=1, timeout_s=5, clock=clock, sleep=clock.sleep)


class FailingStore(MemoryStore):
    """Listings fail as often as `failures` says."""

    def __init__(self, *, failures: int, transient: bool) -> None:
        super().__init__(clock=lambda: NOW_S)
        self.failures = failures
        self.transient = transient

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectInfo]:
        if prefix == keys.REPLICAS and self.failures:
            self.failures -= 1
            raise StoreError("no answer", transient=self.transient)
        return super().list(prefix, after=after)


def test_a_store_that_fails_for_a_moment_is_asked_again() -> None:
    log = feed(FailingStore(failures=2, transient=True))
    beat(log, "a", 4)()
    clock = Clock()
    wait_for_replicas(FeedReader(log.store), 4, replicas=1, timeout_s=10, clock=clock, sleep=clock.sleep)
    assert len(clock.slept_s) == 2


def test_a_store_that_fails_until_the_time_out_is_named() -> None:
    clock = Clock()
    log = Log(FailingStore(failures=1000, transient=True))
    with pytest.raises(StoreError, match="cannot be read: no answer"):
        wait_for_replicas(FeedReader(log.store), 4, replicas=0, timeout_s=10, clock=clock, sleep=clock.sleep)


def test_a_store_that_refuses_is_not_asked_again() -> None:
    clock = Clock()
    log = Log(FailingStore(failures=1, transient=False))
    with pytest.raises(StoreError, match="no answer"):
        wait_for_replicas(FeedReader(log.store), 4, replicas=0, timeout_s=10, clock=clock, sleep=clock.sleep)
    assert clock.slept_s == []
