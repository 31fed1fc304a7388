"""Following in a thread of its own: start, wait_live, error, stop and close."""

import threading

import pytest
from support import LONG_S, join
from support.feeds import Feed
from support.replicas import TorchTarget, follower, long_feed, quick, small_step, target_for, wait_until

from deltasync.errors import InvalidInputError, MismatchError, StoreError
from deltasync.format.layout import Layout
from deltasync.replica.events import Advance
from deltasync.replica.follower import Follower
from deltasync.replica.target import Damage
from deltasync.store.memory import MemoryStore

__all__ = ["quick"]


def following_threads() -> list[threading.Thread]:
    return [
        thread for thread in threading.enumerate() if thread.name.startswith(("deltasync-follow", "deltasync-ahead"))
    ]


def test_wait_live_returns_the_live_version() -> None:
    feed = long_feed(3)
    target = target_for(feed)
    with follower(feed.store, target) as replica:
        replica.start()
        assert replica.wait_live(LONG_S) == 2
        assert replica.error is None
        feed.delta(small_step(feed))
        wait_until(lambda: replica.status().version == 3)
        assert replica.wait_live(0.0) == 3
    assert target.holds(feed.states[3])


def test_wait_live_after_an_advance_needs_no_thread() -> None:
    feed = long_feed(1)
    with follower(feed.store, target_for(feed)) as replica:
        replica.advance()
        assert replica.wait_live(0.0) == 0


def test_wait_live_raises_the_error_that_ended_following() -> None:
    feed = long_feed(1)
    with follower(feed.store, TorchTarget(Layout.of(feed.states[0].layout.tensors[1:]))) as replica:
        replica.start()
        with pytest.raises(MismatchError) as caught:
            replica.wait_live(LONG_S)
        assert replica.error is caught.value
        assert not replica.status().is_following


def test_wait_live_times_out_and_names_the_last_error() -> None:
    with follower(MemoryStore(), target_for(Feed.of(1))) as replica:
        replica.start()
        wait_until(lambda: replica.error is not None)
        with pytest.raises(
            StoreError, match=r"no version went live within 0\.01 s; .* no version in memory:"
        ) as caught:
            replica.wait_live(0.01)
        assert caught.value.transient
        assert caught.value.hint == "wait longer"


def test_wait_live_without_start() -> None:
    feed = long_feed(1)
    with follower(feed.store, target_for(feed)) as replica, pytest.raises(StoreError) as caught:
        replica.wait_live(0.01)
    assert caught.value.hint == "call start() first"


def test_stop_before_start() -> None:
    feed = long_feed(1)
    target = target_for(feed)
    with follower(feed.store, target) as replica:
        replica.stop()
        with pytest.raises(StoreError, match="was stopped"):
            replica.wait_live()
        replica.start()
        with pytest.raises(StoreError, match="was stopped"):
            replica.wait_live()
    assert target.version is None


def test_stop_wakes_a_waiting_thread() -> None:
    replica = follower(MemoryStore(), target_for(Feed.of(1)))
    replica.start()
    timer = threading.Timer(0.05, replica.stop)
    timer.start()
    with pytest.raises(StoreError, match="was stopped"):
        replica.wait_live(LONG_S)
    join(timer)
    replica.close()


def test_start_twice() -> None:
    feed = long_feed(1)
    with follower(feed.store, target_for(feed)) as replica:
        replica.start()
        with pytest.raises(InvalidInputError, match="was started before"):
            replica.start()


def test_close_joins_the_thread() -> None:
    feed = long_feed(1)
    before = following_threads()
    replica = follower(feed.store, target_for(feed))
    replica.start()
    replica.wait_live(LONG_S)
    replica.close()
    assert following_threads() == before
    assert not replica.status().is_following


def test_an_observer_may_use_the_follower() -> None:
    """Its calls come while the mirror is read ahead; the mirror is used by one thread at a time all the same."""
    feed = long_feed(2)
    target = target_for(feed)
    calls: list[int] = []
    damages: list[Damage] = []

    def observe(advanced: Advance) -> None:
        calls.append(advanced.version)
        damages.extend(replica.scrub())
        if advanced.version == 4:
            replica.close()

    replica: Follower = follower(feed.store, target, observer=observe)
    replica.start()
    for version in range(2, 5):
        replica.wait_live(LONG_S)
        feed.delta(small_step(feed))
        replica.nudge()
        wait_until(lambda version=version: target.version == version)  # type: ignore[misc]
    replica.close()
    assert calls[-1] == 4
    assert damages == []
    assert target.holds(feed.states[4])


@pytest.mark.parametrize("error", [RuntimeError("no dashboard"), SystemExit("no dashboard")])
def test_an_observer_that_fails_changes_nothing(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    """The version is live: it is no failure of the advance, and heartbeats go on."""
    feed, calls = long_feed(3), []

    def observe(advanced: Advance) -> None:
        calls.append(advanced.version)
        raise error

    target = target_for(feed)
    with follower(feed.store, target, observer=observe, beat_s=1000.0, replica="one") as replica:
        moved = replica.advance(to=0)
        assert moved is not None
        assert moved.version == 0
        assert [beat.version for beat in feed.log.heartbeats()] == [0]
        replica.start()
        wait_until(lambda: calls == [0, 2])
        wait_until(lambda: replica.status().is_following and replica.status().version == 2)
        status = replica.status()
        assert (status.error, status.counts.failures, status.counts.moves) == (None, 0, 2)
    assert target.whole == [True, False]
    assert target.holds(feed.states[2])
    assert caplog.text.count("an observer failed: ") == 2
