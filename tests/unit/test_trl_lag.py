"""Who is behind, and waiting for them, on a clock that the test moves."""

from collections.abc import Callable, Iterator

import pytest

from deltasync.errors import StoreError
from deltasync.feed.log import Log
from deltasync.feed.prune import LIVE_S
from deltasync.format import keys
from deltasync.format.sealed import Heartbeat
from deltasync.store.memory import MemoryStore
from deltasync.store.protocol import ObjectInfo
from deltasync.trl import serving, slowest, wait_for_replicas

NOW_S = 1_700_000_000


class Clock:
    """Time passes only while somebody sleeps; `at[n]` happens during the nth sleep."""

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


def feed(**versions: int | None) -> Log:
    """A feed with replicas that have just told the versions that they serve."""
    log = Log(MemoryStore())
    for replica, version in versions.items():
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
    assert [beat.replica for _, beat in found] == expected
    first = slowest(log, clock=lambda: NOW_S + age_s)
    assert (None if first is None else first.replica) == (expected[0] if expected else None)


def test_one_that_is_gone_does_not_hide_a_live_one() -> None:
    log = feed(dead=0)
    log.beat(Heartbeat("live", 7, NOW_S + 100))
    found = slowest(log, live_s=60, clock=lambda: NOW_S + 100)
    assert found is not None
    assert found.replica == "live"


@pytest.mark.parametrize(
    ("versions", "replicas"), [({"a": 4, "b": 5}, 2), ({"a": 9}, 1), ({}, 0), ({"loading": None}, 0)]
)
def test_nothing_to_wait_for(versions: dict[str, int | None], replicas: int) -> None:
    clock = Clock()
    wait_for_replicas(feed(**versions), 4, replicas=replicas, timeout_s=10, clock=clock, sleep=clock.sleep)
    assert clock.slept_s == []


def test_waits_for_the_slowest() -> None:
    log = feed(a=3, b=2)
    clock = Clock(beat(log, "b", 3), beat(log, "a", 4), beat(log, "b", 4))
    wait_for_replicas(log, 4, replicas=1, timeout_s=10, clock=clock, sleep=clock.sleep)
    assert len(clock.slept_s) == 3
    assert clock.slept_s == sorted(clock.slept_s)


def test_waits_for_the_first_replica() -> None:
    log = feed()
    clock = Clock(lambda: None, beat(log, "a", 4))
    wait_for_replicas(log, 4, replicas=1, timeout_s=10, clock=clock, sleep=clock.sleep)
    assert len(clock.slept_s) == 2


def test_a_replica_that_died_is_left_behind() -> None:
    log = feed(dead=1)
    log.beat(Heartbeat("live", 4, NOW_S + 1000))
    clock = Clock()
    wait_for_replicas(log, 4, replicas=1, timeout_s=100, live_s=20, clock=clock, sleep=clock.sleep)
    assert 20 <= sum(clock.slept_s) < 23


@pytest.mark.parametrize(
    ("versions", "replicas", "told"),
    [
        ({"a": 3, "b": 4}, 1, "'a' serves version 3"),
        (dict.fromkeys("abcde", 1), 1, "'c' serves version 1 and 2 others"),
        ({"a": 9}, 2, "1 live replicas serve a version, at least 2 are required"),
        ({"a": None}, 1, "0 live replicas"),
    ],
)
def test_time_out_names_what_is_missing(versions: dict[str, int | None], replicas: int, told: str) -> None:
    clock = Clock()
    with pytest.raises(StoreError, match=told) as caught:
        wait_for_replicas(feed(**versions), 4, replicas=replicas, timeout_s=7, clock=clock, sleep=clock.sleep)
    assert "version 4" in str(caught.value)
    assert caught.value.hint is not None
    assert clock.now_s == NOW_S + 7


class FailingStore(MemoryStore):
    """Listings fail as often as `failures` says."""

    def __init__(self, *, failures: int, transient: bool) -> None:
        super().__init__()
        self.failures = failures
        self.transient = transient

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectInfo]:
        if prefix == keys.REPLICAS and self.failures:
            self.failures -= 1
            raise StoreError("no answer", transient=self.transient)
        return super().list(prefix, after=after)


def test_a_store_that_fails_for_a_moment_is_asked_again() -> None:
    log = Log(FailingStore(failures=2, transient=True))
    beat(log, "a", 4)()
    clock = Clock()
    wait_for_replicas(log, 4, replicas=1, timeout_s=10, clock=clock, sleep=clock.sleep)
    assert len(clock.slept_s) == 2


def test_a_store_that_fails_until_the_time_out_is_named() -> None:
    clock = Clock()
    log = Log(FailingStore(failures=1000, transient=True))
    with pytest.raises(StoreError, match="cannot be read: no answer"):
        wait_for_replicas(log, 4, replicas=0, timeout_s=10, clock=clock, sleep=clock.sleep)


def test_a_store_that_refuses_is_not_asked_again() -> None:
    clock = Clock()
    log = Log(FailingStore(failures=1, transient=False))
    with pytest.raises(StoreError, match="no answer"):
        wait_for_replicas(log, 4, replicas=0, timeout_s=10, clock=clock, sleep=clock.sleep)
    assert clock.slept_s == []
