"""The gate between batches and switches: a switch waits for one batch of each thread, and a batch for one switch."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from support import LONG_S
from support.feeds import Feed
from support.replicas import TorchTarget, follower, wait_until

from deltasync.errors import InvalidInputError
from deltasync.replica.target import Gate

READERS = 35


@contextmanager
def started(*works: Callable[[], object]) -> Iterator[None]:
    """Each in a thread; all of them have ended without an error at the end of the block."""
    errors: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive(), "it hangs"
    assert errors == []


def test_a_switch_waits_for_the_batches_that_run_and_for_no_other() -> None:
    """All readers are in a batch when the switch comes, and begin the next one as soon as they can."""
    gate, switched, may_end = Gate(), threading.Event(), threading.Event()
    permits = [threading.Semaphore(0) for _ in range(READERS)]
    begun = [0] * READERS
    seen: list[list[int]] = []

    def read(number: int) -> None:
        for _ in range(2):
            with gate:
                begun[number] += 1
                assert permits[number].acquire(timeout=LONG_S)

    def switch() -> None:
        with gate.switch():
            seen.append(list(begun))
            switched.set()
            assert may_end.wait(LONG_S)
            seen.append(list(begun))

    with started(*(lambda n=n: read(n) for n in range(READERS))):
        wait_until(lambda: begun == [1] * READERS)
        with started(switch):
            wait_until(lambda: gate._is_switching)
            assert not switched.is_set(), "batches run"
            for permit in permits:
                permit.release()
            assert switched.wait(LONG_S)
            wait_until(lambda: gate._queued == READERS)
            may_end.set()
        for permit in permits:
            permit.release()
    assert seen == [[1] * READERS] * 2, "no reader has begun another batch before or during the switch"
    assert begun == [2] * READERS


def test_batches_that_queued_run_before_the_next_switch() -> None:
    """Switches come one after another, and still each reader has its turn."""
    gate, batches, is_over = Gate(), [0] * 4, threading.Event()
    inside = [0]

    def read(number: int) -> None:
        while not is_over.is_set():
            with gate:
                assert not inside[0], "a switch is in progress"
                batches[number] += 1

    def switch() -> None:
        try:
            for _ in range(200):
                with gate.switch():
                    inside[0] += 1
                    had = list(batches)
                    queued = gate._queued
                    inside[0] -= 1
                with gate.switch():
                    # Those that queued behind the first switch have run before the second one.
                    assert sum(batches) - sum(had) >= queued
        finally:
            is_over.set()

    with started(*(lambda n=n: read(n) for n in range(4)), switch):
        pass
    assert all(batches)


def test_two_switches_at_once_come_one_after_the_other() -> None:
    gate, inside, most = Gate(), [0], [0]

    def switch() -> None:
        for _ in range(50):
            with gate.switch():
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                inside[0] -= 1

    with started(switch, switch, switch):
        pass
    assert most == [1]


def test_a_batch_may_enter_again_while_a_switch_waits() -> None:
    gate, switched = Gate(), threading.Event()

    def switch() -> None:
        with gate.switch():
            switched.set()

    with gate:
        waiting = threading.Thread(target=switch, daemon=True)
        waiting.start()
        wait_until(lambda: gate._is_switching)
        with gate:
            assert not switched.is_set()
        assert not switched.is_set(), "the outer block counts"
    assert switched.wait(LONG_S)
    waiting.join(LONG_S)


def test_a_switch_inside_a_batch_is_refused() -> None:
    """With a lock it would wait for itself."""
    gate = Gate()
    with gate, pytest.raises(InvalidInputError, match="inside a batch"), gate.switch():
        pass
    with gate.switch():
        pass


def test_errors_leave_the_gate_open() -> None:
    gate = Gate()
    with pytest.raises(ZeroDivisionError), gate:
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), gate.switch():
        raise ZeroDivisionError
    with gate:
        pass
    with gate.switch():
        pass


@pytest.mark.parametrize("hold", [Gate(), threading.Lock(), threading.RLock()], ids=type)
def test_a_target_switches_between_batches(hold: AbstractContextManager[object]) -> None:
    """With eager readers, through a whole follower; the weights never change inside a batch."""

    def sums() -> list[float]:
        return [tensor.reshape(-1).view(torch.uint8).long().sum().item() for tensor in target.state.values()]

    feed = Feed.of(4)
    target = TorchTarget(feed.states[0].layout, hold=hold)
    is_over, ready = threading.Event(), threading.Semaphore(0)

    def read() -> None:
        while not is_over.is_set():
            with hold:
                version, before = target.version, sums()
                assert (target.version, sums()) == (version, before)
            ready.release()

    with follower(feed.store, target) as replica:
        replica.advance(to=0)
        with started(read, read):
            for version in range(1, 4):
                assert ready.acquire(timeout=LONG_S)
                replica.advance(to=version)
                assert target.holds(feed.states[version])
            is_over.set()
