"""A follower that follows until it is stopped, compares live weights in the background, and goes on after errors."""

import errno
import logging
import os
import threading
import time
from dataclasses import replace
from io import FileIO
from pathlib import Path

import numpy as np
import pytest
from support import LONG_S
from support.feeds import Feed
from support.helpers import state
from support.replicas import (
    Moves,
    TorchTarget,
    fetched,
    follower,
    following,
    long_feed,
    quick,
    small_step,
    target_for,
    wait_until,
)

from deltasync.errors import CorruptError, FormatError, InvalidInputError, MismatchError, NotFoundError, StoreError
from deltasync.format import keys
from deltasync.format.weights import Weights
from deltasync.replica import loop
from deltasync.replica.events import Advance
from deltasync.replica.target import Staged
from deltasync.store import local
from deltasync.store.local import LocalStore
from deltasync.store.memory import MemoryStore
from deltasync.testing.faulty import Fault, FaultyStore, Operation

__all__ = ["quick"]


# Following


def test_following_from_an_empty_feed_to_its_head() -> None:
    store, moves = MemoryStore(), Moves()
    target = TorchTarget(Weights.of(state()).layout)
    replica = follower(store, target, observer=moves)
    with following(replica) as raised:
        wait_until(lambda: replica.status().error is not None)
        feed = Feed.of(1, store)
        moves.await_version(0)
        wait_until(lambda: replica.status().error is None)
        for version in range(1, 6):
            feed.delta()
            moves.await_version(version)
        assert replica.status().is_following
    assert not raised
    assert target.holds(feed.states[5])
    status = replica.status()
    assert (status.version, status.head, status.lag, status.mirror, status.error) == (5, 5, 0, 5, None)
    assert not status.is_following


def test_the_next_version_is_read_while_the_last_is_committed() -> None:
    feed, moves = long_feed(2), Moves()
    payload = feed.payload_keys(feed.log.read(1))[0]

    def publish(operation: Operation) -> None:
        # Too late for the advance in progress, in time for reading ahead.
        if operation.key == payload and len(feed.states) == 2:
            feed.delta(small_step(feed))

    target = target_for(feed)
    replica = follower(FaultyStore(feed.store, publish), target, observer=moves)
    replica.advance(to=0)
    target.fails = lambda staged: wait_until(lambda: replica.status().mirror == 2)
    with following(replica) as raised:
        moves.await_version(2)
    assert not raised
    assert target.shown == [0, 1, 2]
    assert target.whole == [True, False, False]
    assert target.holds(feed.states[2])


def test_a_version_is_told_to_be_live_before_the_read_ahead_ends() -> None:
    """Reading ahead may take an hour: nobody waits for that to learn what is live."""
    feed, moves, served = long_feed(2), Moves(), []
    first = feed.payload_keys(feed.log.read(1))[0]
    later: list[str] = []
    is_reading, is_told = threading.Event(), threading.Event()

    def plan(operation: Operation) -> None:
        if operation.key == first and not later:
            # Too late for the advance in progress, in time for reading ahead.
            later.extend(feed.payload_keys(feed.delta(small_step(feed))))
        elif operation.key in later:
            is_reading.set()
            assert is_told.wait(LONG_S), "it is told only after what was read ahead is there"

    def observe(moved: Advance) -> None:
        moves(moved)
        if moved.version == 1:
            served.append((replica.status().version, is_reading.is_set()))
            is_told.set()

    target = target_for(feed)
    replica = follower(FaultyStore(feed.store, plan), target, observer=observe)
    replica.advance(to=0)
    target.fails = lambda staged: wait_until(lambda: staged.version != 1 or is_reading.is_set())
    with following(replica) as raised:
        moves.await_version(2)
    assert not raised
    assert served == [(1, True)]
    assert target.shown == [0, 1, 2]
    assert target.holds(feed.states[2])


def test_a_nudge_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_POLL_FIRST_S", "_POLL_MOST_S"):
        monkeypatch.setattr(loop, name, 10 * LONG_S)
    feed, moves = long_feed(1), Moves()
    store = FaultyStore(feed.store)
    target = target_for(feed)
    replica = follower(store, target, observer=moves)
    with following(replica):
        moves.await_version(0)
        # It looks once more, finds nothing, and waits.
        wait_until(lambda: store.operations[-1].key == keys.version_key(1))
        feed.delta(small_step(feed))
        replica.nudge()
        moves.await_version(1)
    assert target.holds(feed.states[1])


@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_mirror_that_is_ahead(is_pinned: bool) -> None:
    """What was read ahead is not fetched twice, and a pin holds all the same."""
    feed = long_feed(3)
    store = FaultyStore(feed.store)
    target = target_for(feed)
    replica = follower(store, target)
    replica.advance(to=1)
    replica._delivery._advance(feed.log.read(2))
    before = len(fetched(store))
    assert replica.advance(to=1) is None
    assert (replica.status().mirror, len(fetched(store))) == (2, before)
    if is_pinned:
        replica.pin(1)
    assert replica.scrub() == []
    assert target.version == (1 if is_pinned else 2)
    assert target.holds(feed.states[1 if is_pinned else 2])
    replica.pin(None)
    replica.advance()
    assert target.holds(feed.states[2])
    assert target.whole[1:] == [False] * len(target.whole[1:])


def test_pin_pause_resume() -> None:
    feed, moves = long_feed(4), Moves()
    target = target_for(feed)
    replica = follower(feed.store, target, observer=moves)
    with following(replica):
        moves.await_version(3)
        replica.pin(1)
        moves.await_version(1)
        feed.delta(small_step(feed))
        wait_until(lambda: replica.status().head == 4)
        status = replica.status()
        assert (status.version, status.pinned, status.lag) == (1, 1, 3)
        replica.pause()
        replica.pin(None)
        assert replica.status().is_paused
        replica.resume()
        moves.await_version(4)
    assert target.shown == [3, 1, 4]
    assert target.holds(feed.states[4])


def test_a_follower_looks_at_its_target_even_while_it_is_paused() -> None:
    """An engine may lose its version by itself. Heartbeats say so, and it gets the version again."""

    class Forgetful(TorchTarget):
        is_lost = False

        def look(self) -> None:
            if self.is_lost:
                self.version, self.is_lost = None, False

    feed, moves = long_feed(1), Moves()
    target = Forgetful(feed.states[0].layout)
    replica = follower(feed.store, target, observer=moves, beat_s=0.0, replica="one")
    with following(replica) as raised:
        moves.await_version(0)
        replica.pause()
        target.is_lost = True
        wait_until(lambda: [beat.version for beat in feed.log.heartbeats()] == [None])
        assert target.whole == [True]
        replica.resume()
        wait_until(lambda: target.whole == [True, True])
    assert not raised
    assert target.version == 0


def test_follow_goes_on_after_a_target_that_failed(caplog: pytest.LogCaptureFixture) -> None:
    feed, moves = long_feed(2), Moves()
    target = target_for(feed)
    left = [5]

    def fail(staged: Staged) -> None:
        if staged.version == 2 and left[0]:
            left[0] -= 1
            target.version = None
            raise RuntimeError("no memory on the device")

    target.fails = fail
    replica = follower(feed.store, target, observer=moves)
    with following(replica) as raised, caplog.at_level(logging.WARNING):
        moves.await_version(1)
        feed.delta(small_step(feed))
        moves.await_version(2)
    assert not raised
    assert target.holds(feed.states[2])
    assert caplog.text.count("cannot follow") == 1
    assert caplog.text.count("following again") == 1


def test_an_outage_is_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltasync.replica.follower._PATIENCE_S", 0.0)
    feed, moves = long_feed(2), Moves()
    is_away = threading.Event()
    store = FaultyStore(feed.store, lambda operation: Fault("refuse") if is_away.is_set() else None)
    target = target_for(feed)
    replica = follower(store, target, observer=moves)
    with following(replica) as raised, caplog.at_level(logging.WARNING):
        moves.await_version(1)
        is_away.set()
        feed.delta(small_step(feed))
        count = len(store.operations)
        wait_until(lambda: len(store.operations) > count + 20)
        assert replica.status().error is not None
        is_away.clear()
        moves.await_version(2)
    assert not raised
    assert caplog.text.count("cannot follow") == 1
    assert replica.status().error is None


@pytest.mark.parametrize("has_begun", [True, False])
def test_an_error_that_a_retry_cannot_fix_ends_it(has_begun: bool) -> None:
    feed, moves = long_feed(1), Moves()
    is_refused = threading.Event()
    plan_of = lambda operation: Fault("refuse", transient=False) if is_refused.is_set() else None  # noqa: E731
    target = target_for(feed)
    replica = follower(FaultyStore(feed.store, plan_of), target, observer=moves)
    if not has_begun:
        is_refused.set()
    with following(replica) as raised:
        if has_begun:
            moves.await_version(0)
            is_refused.set()
        wait_until(lambda: bool(raised))
    assert isinstance(raised[0], StoreError)
    assert replica.status().error is not None


PASSING = (
    "EIO",
    "ENFILE",
    "EMFILE",
    "ENETUNREACH",
    "ENOTCONN",
    "EHOSTUNREACH",
    "ESTALE",
    "ETIMEDOUT",
    "ENOBUFS",
    "EAGAIN",
)


@pytest.mark.parametrize("name", PASSING)
def test_errors_of_the_system_that_pass_do_not_end_following(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A feed in a folder, on a disk or a network that fails for a while."""
    monkeypatch.setattr("deltasync.replica.follower._PATIENCE_S", 0.0)
    feed, moves, code = Feed.of(1, LocalStore(tmp_path / "feed")), Moves(), getattr(errno, name)
    target, failed = target_for(feed), [0]

    def fail(path: Path) -> FileIO:
        failed[0] += 1
        raise OSError(code, os.strerror(code))

    replica = follower(LocalStore(tmp_path / "feed"), target, observer=moves)
    with following(replica) as raised:
        moves.await_version(0)
        with monkeypatch.context() as patch:
            patch.setattr(local, "_open_file", fail)
            wait_until(lambda: failed[0] > 5 or bool(raised))
        feed.delta()
        moves.await_version(1)
    assert not raised
    assert target.holds(feed.states[1])


FINAL = {
    "a format that is not known": (FormatError("later"), 2),
    "another model": (MismatchError("other"), 1),
    "a wrong call": (InvalidInputError("taken"), 1),
    "a store that refuses": (StoreError("no", transient=False), 1),
}


@pytest.mark.parametrize(("error", "times"), FINAL.values(), ids=FINAL.keys())
def test_errors_that_end_the_loop(error: Exception, times: int) -> None:
    """A bit that flips on the wire can look like another format: once is not enough."""
    running, calls = loop.Loop(), []

    def step() -> bool:
        calls.append(error)
        if len(calls) > times:
            running.stop()
        raise error

    with pytest.raises(type(error)):
        running.run(step)
    assert len(calls) == times


def test_errors_that_do_not_end_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    running = loop.Loop()
    steps: list[Exception | bool] = [
        True,
        FormatError("a flipped bit"),
        True,
        FormatError("another one"),
        InvalidInputError("the disk is full"),
        CorruptError("damaged"),
        NotFoundError("pruned"),
        StoreError("away", transient=True),
        RuntimeError("out of memory"),
        False,
    ]

    def step() -> bool:
        found = steps.pop(0)
        if not steps:
            running.stop()
        if isinstance(found, Exception):
            raise found
        return found

    running.run(step)
    assert not steps
    assert not running.has_failed
    # Each is reported once, and so is its end.
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == [
        "a flipped bit",
        "following again",
        "another one",
        "the disk is full",
        "damaged",
        "pruned",
        "away",
        "out of memory",
        "following again",
    ]


def test_only_one_follow() -> None:
    feed, moves = long_feed(1), Moves()
    target = target_for(feed)
    replica = follower(feed.store, target, observer=moves)
    with following(replica):
        moves.await_version(0)
        with pytest.raises(InvalidInputError, match="follows already"):
            replica.follow()


def test_calls_from_several_threads_while_following() -> None:
    """advance, pin and scrub of routes beside `follow`: no mixture, and the end is the head."""
    feed, moves = long_feed(8), Moves()
    target = target_for(feed)
    replica = follower(feed.store, target, observer=moves)
    errors: list[BaseException] = []

    def routes(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(15):
                version = int(rng.integers(0, 8))
                match int(rng.integers(0, 4)):
                    case 0:
                        replica.advance(to=version)
                    case 1:
                        replica.pin(version if version % 2 else None)
                    case 2:
                        assert replica.scrub() == []
                    case _:
                        assert replica.status().counts.damaged == 0
        except BaseException as error:  # noqa: BLE001 - checked below
            errors.append(error)

    with following(replica) as raised:
        moves.await_version(7)
        threads = [threading.Thread(target=routes, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG_S)
        replica.pin(None)
        feed.delta(small_step(feed))
        moves.await_version(8)
    assert not raised
    assert not errors
    assert target.holds(feed.states[8])


# Scrub


def test_scrub_in_the_background() -> None:
    feed, moves = long_feed(2), Moves()
    target = target_for(feed)
    replica = follower(feed.store, target, observer=moves, scrub_s=0.01)
    with following(replica):
        moves.await_version(1)
        target.state["packed"][0, 0] ^= 1
        wait_until(lambda: replica.status().counts.repaired == 1)
        elements = feed.states[1].layout.elements
        wait_until(lambda: replica.status().counts.scrubbed > 2 * elements)
    assert target.holds(feed.states[1])


def test_scrub_is_on_by_default() -> None:
    feed, moves = long_feed(2), Moves()
    target = target_for(feed)
    replica = follower(feed.store, target, observer=moves)
    assert replica._schedule is not None
    assert replica._schedule._round_s == loop.SCRUB_S
    with pytest.raises(InvalidInputError, match="scrub_s must be above 0, not 0"):
        follower(feed.store, target, scrub_s=0.0)
    assert follower(feed.store, target, scrub_s=None)._schedule is None


def test_a_status_says_when_the_last_scrub_was_complete() -> None:
    feed, moves = long_feed(2), Moves()
    target, since = target_for(feed), int(time.time())
    replica = follower(feed.store, target, observer=moves, scrub_s=0.05, beat_s=0.01, replica="one")
    assert replica.status().scrubbed_unix_s is None
    with following(replica):
        wait_until(lambda: replica.status().scrubbed_unix_s is not None)
        wait_until(lambda: any("scrubbed_unix_s" in beat.facts for beat in feed.log.heartbeats()))
    assert since <= (replica.status().scrubbed_unix_s or 0) <= time.time()


def test_a_large_tensor_is_paid_back() -> None:
    """However often it is asked, a schedule does not compare more than its rate."""
    now = [0.0]
    rounds = loop.ScrubSchedule(100.0, clock=lambda: now[0])
    compared: list[int] = []
    while now[0] < 99.0:
        now[0] += 0.1
        compared += rounds.due([10, 10, 10, 10])
    assert compared == [0, 1, 2, 3]


def test_a_scrub_round_takes_about_its_time() -> None:
    now = [0.0]
    rounds = loop.ScrubSchedule(100.0, clock=lambda: now[0])
    elements = [10, 0, 30, 60]
    assert rounds.due(elements) == []
    now[0] = 10.0
    assert rounds.due(elements) == [0]
    now[0] = 30.0
    assert rounds.due(elements) == [1, 2]
    now[0] = 1000.0
    assert rounds.due(elements) == [3, 0, 1, 2], "never more than all of them"
    assert rounds.due([]) == []


# Heartbeats


@pytest.mark.parametrize("what", ["the folder", "all that is in it"])
def test_a_folder_feed_that_vanishes_is_an_error(tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is in the status and in the log, and it goes when the feed is back."""
    path, away = tmp_path / "feed", tmp_path / "away"
    feed = long_feed(2, LocalStore(path))
    target = target_for(feed)
    with follower(LocalStore(path), target, beat_s=0.0) as replica:
        replica._live.head._check_s = 0.0
        with following(replica):
            wait_until(lambda: replica.status().version == 1)
            path.rename(away)
            if what != "the folder":
                path.mkdir()
            wait_until(lambda: replica.status().error is not None)
            # The loop logs an error once the step that has met it is over, with its heartbeat.
            wait_until(lambda: "cannot follow, retrying" in caplog.text)
            assert target.holds(feed.states[1]), "what is live stays live"
            assert not path.exists() or not list(path.iterdir()), "nothing is written in its place"
            if path.exists():
                path.rmdir()
            away.rename(path)
            wait_until(lambda: replica.status().error is None)


def test_the_fields_of_an_advance() -> None:
    feed, moves = long_feed(3), Moves()
    target = target_for(feed)
    replica = follower(feed.store, target, observer=moves)
    replica.advance(to=0)
    replica.advance()
    (_, second) = moves
    assert second == replace(second, from_version=0, version=2, edges=("delta", "delta"))
    assert second.nbytes == feed.log.read(1).nbytes + feed.log.read(2).nbytes
    assert "version 2 is live, from version 0" in str(second)
