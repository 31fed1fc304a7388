"""Two thread pools for the whole process, progress callbacks, and objects that must be closed.

One pool computes, with as many threads as `set_threads` says; a larger one waits for stores. Both are made at their
first use and kept, so that no call starts threads of its own and the kernels keep their scratch memory from call to
call.
"""

import os
import re
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from itertools import islice
from queue import SimpleQueue
from types import TracebackType
from typing import NoReturn, ParamSpec, Protocol, Self, TypeVar

from deltasync.arguments import whole_number
from deltasync.errors import InvalidInputError

VARIABLE = "DELTASYNC_THREADS"
"""Environment variable with the number of threads that compute, for a process that does not call `set_threads`."""

THREADS_MAX = 1024
_WAITING_THREADS = 32
_DIGITS = re.compile(r"[0-9]{1,9}", re.ASCII)

_T = TypeVar("_T")
_R = TypeVar("_R")
_P = ParamSpec("_P")


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
    _pools.wanted = None if count is None else whole_number("count", count, least=1, most=THREADS_MAX)


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

    An error of `work` or of `items` is raised in its turn: after the results before it, and once no work is running any
    more; so does an early end of the iteration wait. Work may itself call `each`.
    """
    pool = _pools.computing() if waiting is None else _pools.waiting()
    window = 2 * threads() if waiting is None else waiting
    source = iter(items)
    started: deque[tuple[_T, Future[_R]]] = deque()
    failure: Exception | None = None

    def start(count: int) -> None:
        nonlocal failure
        if failure is None:
            try:
                for item in islice(source, count):
                    started.append((item, pool.submit(work, item)))
            except Exception as error:  # noqa: BLE001 - it is raised when the results before it have been given
                failure = error

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
        if failure is not None:
            raise failure
    finally:
        # Its traceback refers to this frame.
        failure = None
        # Nothing may still be writing to what the caller gave to `work`.
        wait([future for _, future in started if not future.cancel()])


class Closable(Protocol):
    """Releases what it holds at the end of a `with` block."""

    def close(self) -> None:
        """Release it."""
        ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class ProcessBound(Closable):
    """Has threads, connections and locks that exist only in the process that created it.

    In a fork of it every use is refused, where it would wait without end for threads that were not copied. It cannot be
    pickled or copied.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()

    def _is_here(self) -> bool:
        """Whether this is the process that created it."""
        return os.getpid() == self._pid

    def _require_here(self) -> None:
        """InvalidInputError in any other process than the one that created it."""
        if os.getpid() != self._pid:
            name = type(self).__name__
            raise InvalidInputError(
                f"this {name} was created in process {self._pid} and is used in a fork of it, where its threads do not "
                "exist",
                hint=f"create a {name} in the child",
            )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        name = type(self).__name__
        raise TypeError(
            f"cannot pickle or copy a {name}: its threads and its copy of the weights are in this process only; "
            f"give the other process the URL of the feed, and create a {name} there"
        )


def lower_priority(niceness: int) -> None:
    """Lower the priority of the calling thread and of the pools' threads, where the system has one for each thread."""
    with _pools.lock:
        _pools.niceness = niceness
        _pools.forget()
    _set_niceness(niceness)


class Pool:
    """Daemon threads that do what is submitted, in this order. They start when they are needed, up to `count` of them.

    A thread of ThreadPoolExecutor that waits for a store which never answers keeps its process from exiting, and takes
    no work once the interpreter has begun to exit. These threads do neither.
    """

    def __init__(self, count: int, name: str, *, niceness: int | None = None) -> None:
        self._count = count
        self._name = name
        self._niceness = niceness
        self._lock = threading.Lock()
        self._idle = threading.Semaphore(0)
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._is_shut = False
        # Threads know only the queue: those of a pool that is no longer used end.
        weakref.finalize(self, self._queue.put, None).atexit = False

    def submit(self, work: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs) -> "Future[_R]":
        """Do the work in a thread of the pool.

        Where no thread can be started, such as at exit from Python 3.12 on, it waits for one that runs, or for a caller
        that cancels it and does it, as `each` does. `start` makes sure that there is a thread.
        """
        future: Future[_R] = Future()
        idle = self._idle

        def perform() -> None:
            # The thread counts as idle before the result is there: the caller that gets it may submit more at once, and
            # no other thread is started for that.
            if not future.set_running_or_notify_cancel():
                idle.release()
                return
            try:
                result = work(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
                idle.release()
                future.set_exception(error)
            else:
                idle.release()
                future.set_result(result)

        with self._lock:
            if self._is_shut:
                raise RuntimeError("this pool was shut down")
            self._queue.put(perform)
            if not self._idle.acquire(blocking=False) and len(self._threads) < self._count:
                with suppress(RuntimeError):
                    self._start_thread()
        return future

    def start(self) -> None:
        """Start the first thread now; RuntimeError if that is not possible."""
        with self._lock:
            if not self._threads:
                self._start_thread()
                self._idle.release()

    def shutdown(self) -> None:
        """Take no more work, and wait until what was submitted is done."""
        with self._lock:
            self._is_shut = True
        self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _start_thread(self) -> None:
        thread = threading.Thread(
            target=_work,
            args=(self._queue, self._niceness),
            name=f"{self._name}_{len(self._threads)}",
            daemon=True,
        )
        thread.start()
        self._threads.append(thread)


def _work(queue: "SimpleQueue[Callable[[], None] | None]", niceness: int | None) -> None:
    """A thread of a pool."""
    _set_niceness(niceness)
    while (perform := queue.get()) is not None:
        perform()
        # It keeps what the work refers to alive.
        del perform
    # The other threads end, too.
    queue.put(None)


class _Pools:
    """The two pools, each made at its first use; a forked child makes its own."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.wanted: int | None = None
        self.niceness: int | None = None
        self._computing: tuple[int, Pool] | None = None
        self._waiting: Pool | None = None

    def computing(self) -> Pool:
        count = threads()
        with self.lock:
            if self._computing is None or self._computing[0] != count:
                self._computing = count, self._new(count, "deltasync-compute")
            return self._computing[1]

    def waiting(self) -> Pool:
        with self.lock:
            if self._waiting is None:
                self._waiting = self._new(_WAITING_THREADS, "deltasync-wait")
            return self._waiting

    def forget(self) -> None:
        """Make new pools at the next use. Work that was submitted to the old ones is finished there."""
        self._computing = self._waiting = None

    def _new(self, count: int, name: str) -> Pool:
        return Pool(count, name, niceness=self.niceness)


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
