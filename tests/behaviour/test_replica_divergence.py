"""A feed that was rolled back, forked or restored from a copy: replicas notice by the digest, report it, and repair."""

import logging
from collections.abc import Callable
from functools import partial

import pytest
from support.feeds import Feed, SpyStore
from support.replicas import Moves, follower, following, quick, target_for

from deltasync.feed.log import Head, Log
from deltasync.format import keys

__all__ = ["quick"]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Followers read a known head again at every poll."""
    monkeypatch.setattr("deltasync.replica.live.Head", partial(Head, check_s=0.0))


def roll_back(feed: Feed, version: int) -> None:
    """The store is restored to what it was when `version` was the newest."""
    for later in range(version + 1, len(feed.states)):
        feed.store.delete(keys.version_key(later))
        feed.store.delete(keys.anchor_key(later))
    feed.states = feed.states[: version + 1]
    feed.head = feed.log.read(version)


def fork(feed: Feed, version: int, versions: int) -> None:
    """After a rollback to `version`, training goes on in another way until there are so many versions."""
    roll_back(feed, version)
    feed.delta(feed.states[0])
    while len(feed.states) < versions:
        feed.delta()


CASES: dict[str, Callable[[Feed], None]] = {
    "rolled back": lambda feed: roll_back(feed, 2),
    "rolled back to the start": lambda feed: roll_back(feed, 0),
    "forked below": lambda feed: fork(feed, 1, 4),
    "forked to the same version": lambda feed: fork(feed, 2, 6),
    "forked by one more": lambda feed: fork(feed, 2, 7),
    "forked far ahead": lambda feed: fork(feed, 2, 10),
}


@pytest.mark.parametrize("change", CASES.values(), ids=CASES.keys())
def test_a_running_follower_recovers_as_a_new_one_does(
    change: Callable[[Feed], None], caplog: pytest.LogCaptureFixture
) -> None:
    feed = Feed.of(6)
    target, moves = target_for(feed), Moves()
    replica = follower(feed.store, target, observer=moves)
    with replica, following(replica) as raised, caplog.at_level(logging.WARNING):
        moves.await_version(5)
        before = len(moves)
        change(feed)
        last = len(feed.states) - 1
        moves.await_next(before, last)
        assert not raised
        assert replica.error is None
    assert target.holds(feed.states[-1])
    reports = [r.getMessage() for r in caplog.records if "no longer in the feed" in r.getMessage()]
    rebuilt = [r.getMessage() for r in caplog.records if "is not that of the feed" in r.getMessage()]
    assert len(reports) <= 1
    assert len(rebuilt) <= 1
    assert reports or rebuilt, "the divergence is reported"


@pytest.mark.parametrize("versions", [4, 6, 7, 9], ids=["below", "the same version", "one more", "more"])
def test_one_advance_repairs_a_mirror_of_another_history(versions: int) -> None:
    feed = Feed.of(6)
    target = target_for(feed)
    with follower(feed.store, target) as replica:
        replica.advance()
        fork(feed, 2, versions)
        moved = replica.advance()
        assert moved is not None
        assert moved.version == versions - 1
        assert replica.advance() is None
    assert target.holds(feed.states[-1])


def test_the_head_is_read_again_only_now_and_then() -> None:
    store = SpyStore()
    Feed.of(3, store)
    now_s = [0.0]
    head = Head(Log(store), check_s=30.0, clock=lambda: now_s[0])
    head.poll()
    store.took()
    head.poll()
    assert len(store.took()) == 1, "one small request"
    now_s[0] = 31.0
    head.poll()
    assert len(store.took()) == 2
    head.poll()
    assert len(store.took()) == 1


def test_a_damaged_head_is_no_rollback(caplog: pytest.LogCaptureFixture) -> None:
    feed = Feed.of(3)
    head = Head(feed.log, check_s=0.0)
    known = head.poll()
    feed.store.put(keys.version_key(2), b"{")
    with caplog.at_level(logging.WARNING):
        assert head.poll() == known
    assert "cannot be read again" in caplog.text


def test_a_version_that_is_missing_below_the_head_does_not_cost_the_mirror() -> None:
    """A gap in the feed says nothing about the replica's bits."""
    feed = Feed.of(4)
    target = target_for(feed)
    with follower(feed.store, target) as replica:
        replica.advance()
        feed.delta()
        feed.delta()
        feed.store.delete(keys.version_key(3))
        moved = replica.advance()
        assert moved is not None
        assert moved.edges == ("delta", "delta")
    assert target.holds(feed.states[-1])
