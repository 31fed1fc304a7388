import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from support import LONG_S
from support.replicas import wait_until

from deltasync import parallel
from deltasync.errors import InvalidInputError
from deltasync.parallel import Pool, counting, each, set_threads, threads


@pytest.fixture(autouse=True)
def four_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(parallel.VARIABLE, raising=False)
    set_threads(4)
    yield
    set_threads(None)


@pytest.mark.parametrize("waiting", [None, 1, 3, 40])
def test_results_come_in_order(waiting: int | None) -> None:
    def work(n: int) -> int:
        time.sleep(0.001 * (7 - n % 8))
        return n * n

    done: list[int] = []
    results = each(work, range(60), waiting=waiting, on_done=done.append)
    for n, result in enumerate(results):
        assert result == n * n
        assert done == list(range(n + 1)), "on_done comes before the result"


def test_no_items() -> None:
    assert list(each(str, [])) == []


@pytest.mark.parametrize(("waiting", "window"), [(None, 8), (1, 1), (5, 5)])
def test_the_window_is_bounded(waiting: int | None, window: int) -> None:
    taken = given = 0

    def items() -> Iterator[int]:
        nonlocal taken
        while True:
            taken += 1
            # One result more than was given: the one that the caller is about to get.
            assert taken <= given + window + 1
            yield taken

    for result in each(str, items(), waiting=waiting):
        given += 1
        assert result == str(given)
        if given == 100:
            break


def test_at_most_so_many_wait_at_once() -> None:
    lock, now, most = threading.Lock(), 0, 0

    def work(_: int) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.005)
        with lock:
            now -= 1

    list(each(work, range(30), waiting=3))
    assert 2 <= most <= 3


class Slow:
    """Work that a test watches: item 0 fails at once, the others run until they have been waited for."""

    def __init__(self) -> None:
        self.running = threading.Semaphore(0)
        self.lock = threading.Lock()
        self.begun = self.ended = 0

    def __call__(self, n: int) -> None:
        if n == 0:
            # Not before another thread is at work.
            assert self.running.acquire(timeout=LONG_S)
            raise ZeroDivisionError
        with self.lock:
            self.begun += 1
        self.running.release()
        time.sleep(0.05)
        with self.lock:
            self.ended += 1


@pytest.mark.parametrize("waiting", [None, 4])
def test_an_error_of_the_work_is_raised_after_running_work_has_ended(waiting: int | None) -> None:
    work = Slow()
    with pytest.raises(ZeroDivisionError):
        list(each(work, range(100), waiting=waiting))
    assert work.begun == work.ended < 100
    time.sleep(0.1)
    assert work.begun == work.ended, "nothing was begun afterwards"


@pytest.mark.parametrize("good", [2, 20])
def test_an_error_of_the_items_is_raised_after_running_work_has_ended(good: int) -> None:
    """Also when it comes while the first items are taken."""
    work = Slow()

    def items() -> Iterator[int]:
        yield from range(1, good + 1)
        assert work.running.acquire(timeout=LONG_S)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(each(work, items()))
    assert 1 <= work.begun == work.ended <= good


@pytest.mark.parametrize("good", [0, 1, 3, 50])
@pytest.mark.parametrize("waiting", [None, 4])
def test_an_error_of_the_items_comes_after_the_results_before_it(waiting: int | None, good: int) -> None:
    def items() -> Iterator[int]:
        yield from range(good)
        raise ZeroDivisionError

    found: list[str] = []
    with pytest.raises(ZeroDivisionError):
        found.extend(each(str, items(), waiting=waiting))
    assert found == [str(number) for number in range(good)]


def test_an_early_end_waits_for_running_work() -> None:
    work = Slow()
    results = each(work, range(1, 100))
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert 1 <= work.begun == work.ended < 99


def test_an_interrupt_waits_for_running_work() -> None:
    begun, interrupted, ended = threading.Event(), threading.Event(), threading.Event()

    def work(_: int) -> None:
        begun.set()
        assert interrupted.wait(LONG_S)
        time.sleep(0.1)
        ended.set()

    def items() -> Iterator[int]:
        yield 0
        assert begun.wait(LONG_S)
        # The caller waits for the work when the signal comes.
        signal.setitimer(signal.ITIMER_REAL, 0.02)

    def interrupt(*_: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            list(each(work, items()))
        assert ended.is_set()
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("waiting", [None, 8])
@pytest.mark.parametrize("count", [1, 2])
def test_nested_work_does_not_deadlock(waiting: int | None, count: int) -> None:
    set_threads(count)

    def level(depth: int) -> int:
        if depth == 0:
            return 1
        return sum(each(level, [depth - 1] * 4, waiting=waiting))

    results: list[int] = []
    runner = threading.Thread(target=lambda: results.append(level(4)), daemon=True)
    runner.start()
    runner.join(LONG_S)
    assert results == [4**4]


@pytest.mark.parametrize("waiting", [None, 8])
def test_the_same_work_again_starts_no_thread(waiting: int | None) -> None:
    def run() -> set[int]:
        # More at once than there are threads: all of them are started.
        return set(each(lambda _: time.sleep(0.01) or threading.get_ident(), range(64), waiting=waiting))

    run()
    before = {thread.ident for thread in threading.enumerate()}
    for _ in range(5):
        assert run() <= before
    # Threads of other tests may end meanwhile.
    assert {thread.ident for thread in threading.enumerate()} <= before


@pytest.mark.parametrize("fails", [False, True])
def test_work_that_is_submitted_for_a_result_needs_no_other_thread(fails: bool) -> None:
    """The thread that gives the result is free for it, however early it comes."""
    pool, may_end, then = Pool(4, "deltasync-test"), threading.Event(), list[Future[int]]()

    def work() -> None:
        assert may_end.wait(LONG_S)
        if fails:
            raise ZeroDivisionError

    pool.submit(work).add_done_callback(lambda _: then.append(pool.submit(threading.get_ident)))
    may_end.set()
    wait_until(lambda: bool(then))
    assert then[0].result(LONG_S) == pool._threads[0].ident
    assert len(pool._threads) == 1


def test_threads_that_compute() -> None:
    set_threads(3)
    assert threads() == 3
    idents: set[int] = set()

    def work(_: int) -> None:
        idents.add(threading.get_ident())
        wait_until(lambda: len(idents - {caller}) >= 3)

    caller = threading.get_ident()
    list(each(work, range(60)))
    assert len(idents - {caller}) == 3


def test_the_number_of_threads_may_change_while_work_runs() -> None:
    results = []
    for result in each(lambda n: time.sleep(0.001) or n, range(50)):
        results.append(result)
        set_threads(1 + result % 5)
        assert list(each(str, range(9))) == [str(n) for n in range(9)]
    assert results == list(range(50))


@pytest.mark.parametrize("count", [0, -1, 1025, 10**30])
def test_a_number_of_threads_out_of_range_is_refused(count: int) -> None:
    with pytest.raises(InvalidInputError, match="from 1 to 1024"):
        set_threads(count)
    assert threads() == 4


def test_the_number_of_threads_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(parallel.VARIABLE, "7")
    assert threads() == 4, "set_threads has the last word"
    set_threads(None)
    assert threads() == 7
    monkeypatch.delenv(parallel.VARIABLE)
    assert threads() == os.cpu_count()


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "many", "٣", " 2", "1025", "9" * 5000])
def test_a_bad_number_of_threads_in_the_environment_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_threads(None)
    monkeypatch.setenv(parallel.VARIABLE, text)
    with pytest.raises(InvalidInputError, match="DELTASYNC_THREADS must be a whole number from 1 to 1024") as caught:
        list(each(str, range(9)))
    assert len(caught.value.message) < 200


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_has_pools_of_its_own() -> None:
    def use_pools() -> bool:
        squares = [n * n for n in range(50)]
        return squares == list(each(lambda n: n * n, range(50))) == list(each(lambda n: n * n, range(50), waiting=8))

    assert use_pools()
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        os._exit(0 if use_pools() and threads() == 4 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert use_pools()


def test_counting() -> None:
    calls: list[tuple[str, int, int]] = []
    count = counting(lambda phase, done, total: calls.append((phase, done, total)), "digest", 9)
    assert count is not None
    for elements in (4, 0, 5):
        count(elements)
    assert calls == [("digest", 4, 9), ("digest", 4, 9), ("digest", 9, 9)]
    assert counting(None, "digest", 9) is None
