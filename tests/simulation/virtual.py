"""Stand-ins for `time`, `threading`, executors and the like, and a context in which deltasync uses them."""

import contextlib
import inspect
import logging
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from functools import lru_cache
from itertools import count
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, Self
from unittest import mock

from deltasync import files, parallel
from deltasync.errors import InvalidInputError
from deltasync.format import payload
from deltasync.format.manifest import Manifest
from deltasync.trainer import exit, versions
from deltasync.trainer.pipeline import Pipeline

from .scheduler import POLL, Death, Process, Task, Waiter, scheduler


class Lock:
    """`threading.Lock`, and `RLock` if reentrant."""

    is_reentrant = False

    def __init__(self) -> None:
        self._owner: Task | None = None
        self._count = 0
        self._waiting: deque[Waiter] = deque()

    def acquire(self, blocking: bool = True) -> bool:
        task = scheduler().current
        while self._owner is not None and not (self.is_reentrant and self._owner is task):
            if not blocking:
                return False
            self._waiting.append(scheduler().waiter())
            scheduler().park()
        self._owner = task
        self._count += 1
        return True

    def release(self) -> None:
        if self._owner is not scheduler().current:
            # Only while a dead process is unwound can it be that the lock was given up in a wait.
            return
        self._count -= 1
        if self._count == 0:
            self._owner = None
            if self._waiting:
                scheduler().wake(self._waiting.popleft())

    def locked(self) -> bool:
        return self._owner is not None

    def release_all(self) -> int:
        held, self._count = self._count, 1
        self.release()
        return held

    def acquire_all(self, held: int) -> None:
        self.acquire()
        self._count = held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class RLock(Lock):
    is_reentrant = True


class Condition:
    """`threading.Condition`."""

    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = RLock() if lock is None else lock
        self._waiting: list[Waiter] = []

    def wait(self, timeout: float | None = None) -> bool:
        held = self._lock.release_all()
        self._waiting.append(scheduler().waiter())
        is_woken = scheduler().park(timeout)
        self._lock.acquire_all(held)
        return is_woken

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        until_s = None if timeout is None else scheduler().now_s + timeout
        while not predicate():
            left_s = None if until_s is None else until_s - scheduler().now_s
            if left_s is not None and left_s <= 0:
                return False
            self.wait(left_s)
        return True

    def notify_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            scheduler().wake(waiter)

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


class Event:
    """`threading.Event`. A wait with a timeout is a poll."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[Waiter] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            scheduler().wake(waiter)

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            self._waiting.append(scheduler().waiter())
            scheduler().park(timeout, idleness=POLL)
        return self._is_set


class Executor:
    """`ThreadPoolExecutor`, and `Pool`, with one thread."""

    def __init__(self, max_workers: int, *args: object, **options: object) -> None:
        self._process = scheduler().current.process
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._task: Task | None = None
        self._is_closed = False

    def submit(self, work: Callable[..., Any], /, *args: Any, **options: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        self._jobs.append((future, lambda: work(*args, **options)))
        if self._task is None:
            self._task = scheduler().spawn(self._process, self._run)
        else:
            scheduler().wake((self._task, self._task.parks))
        return future

    def start(self) -> None:
        """A thread starts when there is work for it."""

    def shutdown(self, wait: bool = True) -> None:
        self._is_closed = True
        task = self._task
        if task is not None:
            scheduler().wake((task, task.parks))
            while not task.is_done:
                task.joining.append(scheduler().waiter())
                scheduler().park()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def _run(self) -> None:
        while self._jobs or not self._is_closed:
            if not self._jobs:
                scheduler().park()
                continue
            future, work = self._jobs.popleft()
            try:
                result = work()
            except Death:
                raise
            except BaseException as error:  # noqa: BLE001 - a future takes any error
                scheduler().on_error(self._process, error)
                future.set_exception(error)
            else:
                future.set_result(result)


class _InCaller:
    """The pools of `parallel`: no thread ever begins the work, so that the caller does it."""

    def __init__(self, *args: object, **options: object) -> None:
        pass

    def submit(self, work: object, item: object) -> "Future[Any]":
        return Future()


def wait(waited_for: Sequence["Future[Any]"]) -> None:
    """`concurrent.futures.wait`."""
    for future in waited_for:
        if not future.done():
            waiter = scheduler().waiter()
            future.add_done_callback(lambda _, waiter=waiter: scheduler().wake(waiter))
            scheduler().park()


_locked: dict[Path, Process] = {}


@contextlib.contextmanager
def locked(path: Path, *, wait_s: float = 0.0) -> Iterator[None]:
    """`files.locked`. The death of the process releases the lock."""
    holder = _locked.get(path)
    if holder is not None and not holder.is_dead:
        raise InvalidInputError(f"{path} is used by another process, or twice in this one")
    _locked[path] = scheduler().current.process
    try:
        yield
    finally:
        if _locked.get(path) is scheduler().current.process:
            del _locked[path]


def _clock() -> float:
    return scheduler().now_s + scheduler().current.process.clock_offset_s


def _monotonic() -> float:
    return scheduler().now_s


_time = SimpleNamespace(
    time=_clock, monotonic=_monotonic, perf_counter=_monotonic, sleep=lambda s: scheduler().sleep(s)
)
_threading = SimpleNamespace(
    Lock=Lock, RLock=RLock, Condition=Condition, Event=Event, Thread=threading.Thread,
    current_thread=threading.current_thread, get_native_id=threading.get_native_id,
)  # fmt: skip
_tokens = count()
_secrets = SimpleNamespace(token_hex=lambda nbytes: f"{next(_tokens):0{2 * nbytes}x}")

_STAND_INS: tuple[tuple[object, object], ...] = (
    (time, _time),
    (time.time, _clock),
    (time.monotonic, _monotonic),
    (threading, _threading),
    (secrets, _secrets),
    (futures.ThreadPoolExecutor, Executor),
    (parallel.Pool, Executor),
    # Processes of the simulation die without closing their publishers, and the real process must not wait for them.
    (exit.finish_at_exit, lambda pipeline, limit_s: None),
    (futures.wait, wait),
    (files.locked, locked),
)


def reset() -> None:
    """Forget what a simulation before has left: random names and locks."""
    global _tokens  # noqa: PLW0603
    _tokens = count(1)
    _secrets.token_hex = lambda nbytes, tokens=_tokens: f"{next(tokens):0{2 * nbytes}x}"
    _locked.clear()


@contextlib.contextmanager
def virtual() -> Iterator[None]:
    """Let all modules of deltasync that are imported use the stand-ins: as globals, and as defaults of arguments.

    They log nothing: each seed would fill pages with warnings about its faults.
    """
    stand_ins = {id(real): stand_in for real, stand_in in _STAND_INS}
    with contextlib.ExitStack() as patches:
        for name, module in sorted(sys.modules.items()):
            if name == "deltasync" or name.startswith("deltasync."):
                for attribute, value in list(vars(module).items()):
                    if id(value) in stand_ins:
                        patches.enter_context(mock.patch.object(module, attribute, stand_ins[id(value)]))
                for function in _functions(module):
                    defaults = function.__kwdefaults__ or {}
                    replaced = {key: stand_ins.get(id(value), value) for key, value in defaults.items()}
                    if replaced != defaults:
                        patches.callback(setattr, function, "__kwdefaults__", defaults)
                        function.__kwdefaults__ = replaced
        patches.enter_context(mock.patch.object(parallel, "Pool", _InCaller))
        patches.enter_context(mock.patch.object(Pipeline, "__del__", mock.Mock(), create=True))
        # The same few bytes are parsed many times, which is most of the work.
        patches.enter_context(
            mock.patch.object(Manifest, "from_bytes", staticmethod(lru_cache(512)(Manifest.from_bytes)))
        )
        patches.enter_context(mock.patch.object(payload, "decode_index", lru_cache(512)(payload.decode_index)))
        logger = logging.getLogger("deltasync")
        patches.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.CRITICAL + 1)
        # A delta has several payloads, small as it is.
        patches.enter_context(mock.patch.multiple(versions, DELTA_BYTES_LEAST=1, INDEX_SHARE=0))
        pools = parallel._Pools()
        pools.wanted = 1
        patches.enter_context(mock.patch.object(parallel, "_pools", pools))
        yield


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """The functions and methods that a module defines."""
    for value in list(vars(module).values()):
        owners = [value] if inspect.isfunction(value) else list(vars(value).values()) if inspect.isclass(value) else []
        for function in owners:
            if inspect.isfunction(function) and function.__module__ == module.__name__:
                yield function
