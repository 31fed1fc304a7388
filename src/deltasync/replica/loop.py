"""The poll loop of a follower with its back-off, the scrub schedule, and heartbeats."""

import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from deltasync.errors import DeltasyncError, FormatError, InvalidInputError, MismatchError, StoreError
from deltasync.feed.log import Log
from deltasync.format.keys import replica_key
from deltasync.format.sealed import Heartbeat

logger = logging.getLogger(__name__)

_POLL_FIRST_S = 0.1
_POLL_MOST_S = 2.0
_OUTAGE_MOST_S = 5.0


class Loop:
    """A poll loop with back-off. `run` works in the thread that calls it; other threads call `nudge` and `stop`.

    A stop is for good. `has_failed` says whether an error has ended the loop.
    """

    def __init__(self) -> None:
        self.has_failed = False
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._running = threading.Lock()

    @property
    def is_running(self) -> bool:
        return self._running.locked()

    @property
    def is_stopping(self) -> bool:
        return self._stop.is_set()

    def nudge(self) -> None:
        """Poll at once."""
        self._wake.set()

    def stop(self) -> None:
        """Let `run` return after the step in progress."""
        self._stop.set()
        self._wake.set()

    def run(self, step: Callable[[], bool], on_error: Callable[[Exception | None], None]) -> None:
        """Call `step`, which returns whether there was anything new, until `stop`.

        An error that a retry cannot fix is raised. Any other is logged once, until a step succeeds or fails with
        another type. `on_error` is called with every error, and with None when a step succeeds again.
        """
        if not self._running.acquire(blocking=False):
            raise InvalidInputError("this follower follows already", hint="create another one for another target")
        try:
            self._run(step, on_error)
        finally:
            self._running.release()

    def _run(self, step: Callable[[], bool], on_error: Callable[[Exception | None], None]) -> None:
        pause_s, has_worked = _POLL_FIRST_S, False
        failing: type[Exception] | None = None
        while not self._stop.is_set():
            self._wake.clear()
            try:
                is_new = step()
            except Exception as error:
                # Whatever a target or a store raises, the live version is still served.
                on_error(error)
                if _is_final(error, has_worked=has_worked, is_again=failing is type(error)):
                    self.has_failed = True
                    raise
                if failing is not type(error):
                    trace = None if isinstance(error, DeltasyncError) else error
                    logger.warning("cannot follow, retrying: %s", error, exc_info=trace)
                failing, pause_s = type(error), min(2 * pause_s, _OUTAGE_MOST_S)
            else:
                if failing is not None:
                    logger.warning("following again")
                    on_error(None)
                pause_s = _POLL_FIRST_S if is_new or failing is not None else min(2 * pause_s, _POLL_MOST_S)
                failing, has_worked = None, True
                if is_new:
                    continue
            self._wake.wait(pause_s)


def _is_final(error: Exception, *, has_worked: bool, is_again: bool) -> bool:
    """Whether a retry cannot fix the error: another model, another format, no permission, a wrong call."""
    if isinstance(error, StoreError):
        return not error.transient
    if isinstance(error, FormatError):
        # A bit that flips in transit can look like a later release, but not twice.
        return is_again
    # Wrong input fails at once. Later on, it may be a disk that is full for a while.
    return isinstance(error, MismatchError) or (isinstance(error, InvalidInputError) and not has_worked)


class ScrubSchedule:
    """Decides which tensors to compare, so that one round over the model takes about `round_s`."""

    def __init__(self, round_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._round_s = round_s
        self._clock = clock
        self._next = 0
        self._last_s = clock()

    def due(self, elements: Sequence[int]) -> list[int]:
        """Ordinals of the tensors that became due since the last call; `elements` has their sizes. 0 starts a round."""
        now_s = self._clock()
        budget = sum(elements) * min(1.0, (now_s - self._last_s) / self._round_s)
        self._last_s = now_s
        ordinals: list[int] = []
        while budget > 0 and len(ordinals) < len(elements):
            ordinal = self._next % len(elements)
            ordinals.append(ordinal)
            budget -= elements[ordinal]
            self._next = ordinal + 1
        return ordinals


BEAT_S = 30.0
"""Seconds between heartbeats while the version stays: far below the 15 minutes until a replica counts as gone."""


class Heartbeats:
    """Writes heartbeats when they are due. A failure is logged and not raised: the replica serves without them."""

    def __init__(
        self, log: Log, replica: str, *, beat_s: float = BEAT_S, clock: Callable[[], float] = time.time
    ) -> None:
        self._log = log
        self._replica = replica
        self._key = replica_key(replica)
        self._beat_s = beat_s
        self._clock = clock
        self._last: tuple[int | None, float] | None = None
        self._is_failing = False
        self._has_left = False
        self._lock = threading.Lock()

    def beat(self, version: int | None, facts: Callable[[], Mapping[str, str]]) -> None:
        """Write a heartbeat if the last one is old or has another version."""
        with self._lock:
            now = self._clock()
            last = self._last
            is_fresh = last is not None and last[0] == version and 0 <= now - last[1] < self._beat_s
            if is_fresh or self._has_left:
                return
            # After a failure the store is not called again before the next heartbeat is due.
            self._last = version, now
            try:
                self._log.beat(Heartbeat(self._replica, version, int(now), facts()))
            except DeltasyncError as error:
                if not self._is_failing:
                    logger.warning("cannot write the heartbeat of %s, continuing without it: %s", self._replica, error)
                self._is_failing = True
            else:
                self._is_failing = False

    def leave(self) -> None:
        """Delete the heartbeat of a replica that ends for good, so that `prune` keeps nothing for it."""
        with self._lock:
            self._has_left = True
            if self._last is None:
                return
            try:
                self._log.store.delete(self._key)
            except DeltasyncError as error:
                message = "cannot delete the heartbeat of %s, which counts as live until it expires: %s"
                logger.warning(message, self._replica, error)


def new_replica_id() -> str:
    """Host name, process id and a random suffix, in the form that keys allow."""
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:60].lstrip("-")
    return f"{host}-{os.getpid()}-{secrets.token_hex(3)}".lstrip("-")
