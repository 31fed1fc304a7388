"""The threads of this process, shared by all work, and progress callbacks.

There are two pools: one for computing, as large as `set_threads` says, and a larger one for work that waits for a
store. Both are made at their first use and kept, so that no call starts threads of its own and the kernels keep their
scratch memory from call to call.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import Protocol, TypeVar

from deltasync.errors import InvalidInputError

VARIABLE = "DELTASYNC_THREADS"
"""Environment variable with the number of threads that compute, for a process that does not call `set_threads`."""

_WAITING_THREADS = 32

_T = TypeVar("_T")
_R = TypeVar("_R")


class Progress(Protocol):
    """A callback for long-running operations: the phase, and how many of its elements are done."""

    def __call__(self, phase: str, done: int, total: int) -> None: ...


def counting(progress: Progress | None, phase: str, total: int) -> Callable[[int], None] | None:
    """A function that takes the number of elements just done and calls `progress` with the sum; None without one."""
    if progress is None:
        return None
    done = 0

    def count(elements: int) -> None:
        nonlocal done
        done += elements
        progress(phase, done, total)

    return count


def set_threads(count: int | None) -> None:
    """Compute with `count` threads from now on; None is one per core, or what DELTASYNC_THREADS says."""
    if count is not None and count < 1:
        raise InvalidInputError(f"the number of threads must be at least 1, not {count}")
    with _pools.lock:
        _pools.wanted = count


def threads() -> int:
    """The number of threads that compute."""
    if _pools.wanted is not None:
        return _pools.wanted
    text = os.environ.get(VARIABLE)
    if text is not None and not (text.isdecimal() and int(text) > 0):
        raise InvalidInputError(f"{VARIABLE} is {text!r:.80}", hint="set it to a whole number from 1 on")
    cores = os.cpu_count() if text is None else int(text)
    return 1 if cores is None else cores


def each(
    work: Callable[[_T], _R],
    items: Iterable[_T],
    *,
    waiting: int | None = None,
    on_done: Callable[[_T], None] | None = None,
) -> Iterator[_R]:
    """Results of `work` in the order of `items`, in bounded memory. `on_done` is called with an item before its result.

    Without `waiting`, the work computes: it runs on all threads, and two items per thread are in progress or finished.
    With `waiting`, the work waits for a store: that many items are in progress at once. Work may itself call `each`.
    """
    pool = _pools.computing() if waiting is None else _pools.waiting()
    window = 2 * threads() if waiting is None else waiting
    source = iter(items)
    started: deque[tuple[_T, Future[_R]]] = deque((item, pool.submit(work, item)) for item in islice(source, window))
    try:
        while started:
            item, future = started.popleft()
            # What no thread has begun is done here: otherwise work that calls `each` could wait for itself.
            result = work(item) if future.cancel() else future.result()
            started.extend((following, pool.submit(work, following)) for following in islice(source, 1))
            if on_done is not None:
                on_done(item)
            yield result
    finally:
        # After an error or an early end, nothing may still be writing to what the caller gave to `work`.
        wait([future for _, future in started if not future.cancel()])


def lower_priority(niceness: int) -> None:
    """Let the calling thread and the threads of the pools yield to other work, where the system can do that."""
    with _pools.lock:
        _pools.niceness = niceness
        _pools.forget()
    _be_nice(niceness)


class _Pools:
    """The two pools, made at their first use in a process; a forked child makes its own."""

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
        return ThreadPoolExecutor(count, name, _be_nice, (self.niceness,))


def _be_nice(niceness: int | None) -> None:
    if niceness is not None and hasattr(os, "PRIO_PROCESS"):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


_pools = _Pools()


def _after_fork() -> None:
    _pools.lock = threading.Lock()
    _pools.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
