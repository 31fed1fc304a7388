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
    """`run` works in the thread that calls it; `nudge` and `stop` are for the others. A stop is for good."""

    def __init__(self) -> None:
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
        """Do not wait any longer."""
        self._wake.set()

    def stop(self) -> None:
        """Let `run` return after the step that is under way."""
        self._stop.set()
        self._wake.set()

    def run(self, step: Callable[[], bool], note: Callable[[Exception | None], None]) -> None:
        """Call `step`, which says whether there was news, until `stop`. `note` is told every error, and its end.

        Raises what trying again cannot help. Everything else is logged once, until it is over or becomes another error.
        """
        if not self._running.acquire(blocking=False):
            raise InvalidInputError("this follower follows already", hint="make another one for another target")
        try:
            self._run(step, note)
        finally:
            self._running.release()

    def _run(self, step: Callable[[], bool], note: Callable[[Exception | None], None]) -> None:
        pause_s, has_worked = _POLL_FIRST_S, False
        failing: type[Exception] | None = None
        while not self._stop.is_set():
            self._wake.clear()
            try:
                is_news = step()
            except Exception as error:
                # Whatever a target or a store does, what is live goes on being served.
                note(error)
                if _is_final(error, has_worked=has_worked, is_again=failing is type(error)):
                    raise
                if failing is not type(error):
                    trace = None if isinstance(error, DeltasyncError) else error
                    logger.warning("cannot follow, trying again: %s", error, exc_info=trace)
                failing, pause_s = type(error), min(2 * pause_s, _OUTAGE_MOST_S)
            else:
                if failing is not None:
                    logger.warning("following again")
                    note(None)
                pause_s = _POLL_FIRST_S if is_news or failing is not None else min(2 * pause_s, _POLL_MOST_S)
                failing, has_worked = None, True
                if is_news:
                    continue
            self._wake.wait(pause_s)


def _is_final(error: Exception, *, has_worked: bool, is_again: bool) -> bool:
    """Whether trying again cannot help: another model, another format, no permission, a wrong call."""
    if isinstance(error, StoreError):
        return not error.transient
    if isinstance(error, FormatError):
        # A bit that flips on the wire can look like a later release, but not twice.
        return is_again
    # Input is wrong at once. Later on it is a disk that is full for a while.
    return isinstance(error, MismatchError) or (isinstance(error, InvalidInputError) and not has_worked)


class ScrubSchedule:
    """Which tensors are due for a look, so that one round over the model takes about `round_s`."""

    def __init__(self, round_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._round_s = round_s
        self._clock = clock
        self._next = 0
        self._last_s = clock()

    def due(self, elements: Sequence[int]) -> list[int]:
        """Ordinals of the tensors, which have so many elements, that are due since the last call; 0 begins a round."""
        now_s = self._clock()
        budget = sum(elements) * min(1.0, (now_s - self._last_s) / self._round_s)
        self._last_s = now_s
        wanted: list[int] = []
        while budget > 0 and len(wanted) < len(elements):
            ordinal = self._next % len(elements)
            wanted.append(ordinal)
            budget -= elements[ordinal]
            self._next = ordinal + 1
        return wanted


BEAT_S = 30.0
"""Between two heartbeats of a replica whose version stays: well below the 15 minutes after which it counts as gone."""


class Heartbeats:
    """Writes heartbeats when they are due. No failure of theirs reaches the caller: serving goes on without them."""

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
            # A store that fails is not asked again before the next is due.
            self._last = version, now
            try:
                self._log.beat(Heartbeat(self._replica, version, int(now), facts()))
            except DeltasyncError as error:
                if not self._is_failing:
                    logger.warning("cannot write the heartbeat of %s, going on without: %s", self._replica, error)
                self._is_failing = True
            else:
                self._is_failing = False

    def leave(self) -> None:
        """The replica ends for good: nothing needs to be kept for it, and nobody waits for it."""
        with self._lock:
            self._has_left = True
            if self._last is None:
                return
            try:
                self._log.store.delete(self._key)
            except DeltasyncError as error:
                message = "cannot delete the heartbeat of %s, it counts as alive for a while: %s"
                logger.warning(message, self._replica, error)


def new_replica_id() -> str:
    """Host, process and something random, in the form that keys allow."""
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:60].lstrip("-")
    return f"{host}-{os.getpid()}-{secrets.token_hex(3)}".lstrip("-")
