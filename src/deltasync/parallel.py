"""Two thread pools for the whole process, and progress callbacks.

One pool computes, with as many threads as `set_threads` says; a larger one waits for stores. Both are made at their
first use and kept, so that no call starts threads of its own and the kernels keep their scratch memory from call to
call.
"""

import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import Protocol, TypeVar

from deltasync.errors import InvalidInputError

VARIABLE = "DELTASYNC_THREADS"
"""Environment variable with the number of threads that compute, for a process that does not call `set_threads`."""

THREADS_MAX = 1024
_WAITING_THREADS = 32
_DIGITS = re.compile(r"[0-9]{1,9}", re.ASCII)

_T = TypeVar("_T")
_R = TypeVar("_R")


class Progress(Protocol):
    """A callback for long-running operations: the phase, and how many of its elements are done."""

    def __call__(self, phase: str, done: int, total: int) -> None: ...


def counting(progress: Progress | None, phase: str, total: int) -> Callable[[int], None] | None:
    """A function that adds up the elements done and calls `progress` with the sum; None if `progress` is None."""
    if progress is None:
        return None
    done = 0

    def count(elements: int) -> None:
        nonlocal done
        done += elements
        progress(phase, done, total)

    return count


def set_threads(count: int | None) -> None:
    """Compute with `count` threads from now on. With None: as DELTASYNC_THREADS says, or one thread per core."""
    if count is not None and not 1 <= count <= THREADS_MAX:
        raise InvalidInputError(f"the number of threads must be from 1 to {THREADS_MAX}, not {count}")
    _pools.wanted = count


def threads() -> int:
    """The number of threads that compute."""
    if _pools.wanted is not None:
        return _pools.wanted
    text = os.environ.get(VARIABLE)
    if text is None:
        return min(os.cpu_count() or 1, THREADS_MAX)
    if _DIGITS.fullmatch(text) is None or not 1 <= int(text) <= THREADS_MAX:
        raise InvalidInputError(
            f"{VARIABLE} must be a whole number from 1 to {THREADS_MAX}, not {text!r:.80}", hint="correct or unset it"
        )
    return int(text)


def each(
    work: Callable[[_T], _R],
    items: Iterable[_T],
    *,
    waiting: int | None = None,
    on_done: Callable[[_T], None] | None = None,
) -> Iterator[_R]:
    """Call `work` with every item in the pool's threads, and give the results in the order of `items`.

    Without `waiting`, the work computes, and at most two items per thread are in progress or finished ahead of the
    caller. With `waiting`, the work waits for a store, and at most that many items are. So `items` may be endless, and
    memory stays bounded. `on_done` is called with each item, in the caller's thread, before its result is given.

    An error of `work` or of `items` is raised once no work is running any more; so does an early end of the iteration
    wait. Work may itself call `each`.
    """
    pool = _pools.computing() if waiting is None else _pools.waiting()
    window = 2 * threads() if waiting is None else waiting
    source = iter(items)
    started: deque[tuple[_T, Future[_R]]] = deque()

    def start(count: int) -> None:
        started.extend((item, pool.submit(work, item)) for item in islice(source, count))

    try:
        start(window)
        while started:
            item, future = started[0]
            # The caller does what no thread has begun: otherwise work that calls `each` could wait for itself.
            result = work(item) if future.cancel() else future.result()
            started.popleft()
            start(1)
            if on_done is not None:
                on_done(item)
            yield result
    finally:
        # Nothing may still be writing to what the caller gave to `work`.
        wait([future for _, future in started if not future.cancel()])


def lower_priority(niceness: int) -> None:
    """Lower the priority of the calling thread and of the pools' threads, where the system has one for each thread."""
    with _pools.lock:
        _pools.niceness = niceness
        _pools.forget()
    _set_niceness(niceness)


class _Pools:
    """The two pools, each made at its first use; a forked child makes its own."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.wanted: int | None = None
        self.niceness: int | None = None
        self._computing: tuple[int, ThreadPoolExecutor] | None = None
        self._waiting: ThreadPoolExecutor | None = None

    def computing(self) -> ThreadPoolExecutor:
        count = threads()
        with self.lock:
            if self._computing is None or self._computing[0] != count:
                self._computing = count, self._new(count, "deltasync-compute")
            return self._computing[1]

    def waiting(self) -> ThreadPoolExecutor:
        with self.lock:
            if self._waiting is None:
                self._waiting = self._new(_WAITING_THREADS, "deltasync-wait")
            return self._waiting

    def forget(self) -> None:
        """Make new pools at the next use. Work that was submitted to the old ones is finished there."""
        self._computing = self._waiting = None

    def _new(self, count: int, name: str) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(count, name, _set_niceness, (self.niceness,))


def _set_niceness(niceness: int | None) -> None:
    if niceness is not None and hasattr(os, "PRIO_PROCESS"):
        thread = threading.get_native_id()
        # Only root may raise a priority: a process that is nicer already stays so.
        os.setpriority(os.PRIO_PROCESS, thread, max(niceness, os.getpriority(os.PRIO_PROCESS, thread)))


_pools = _Pools()


def _after_fork() -> None:
    _pools.lock = threading.Lock()
    _pools.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
