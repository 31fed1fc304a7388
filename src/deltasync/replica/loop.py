"""When a follower works: the poll loop with its back-off, and the schedule of the scrub."""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from deltasync.errors import (
    DeltasyncError,
    FormatError,
    InvalidInputError,
    MismatchError,
    StoreError,
)

logger = logging.getLogger(__name__)

_POLL_FIRST_S = 0.05
_POLL_MOST_S = 2.0
_POLL_SHARE = 1 / 8
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

    def run(self, step: Callable[[], bool], *, final: tuple[type[Exception], ...] = ()) -> None:
        """Call `step`, which returns whether there was anything new, until `stop`.

        An error that a retry cannot fix, such as a `final` one, is raised. Any other is logged once, until a step
        succeeds or fails with another type.
        """
        if not self._running.acquire(blocking=False):
            raise InvalidInputError("this follower follows already", hint="create another one for another target")
        pause_s, has_worked = _POLL_FIRST_S, False
        cadence = Cadence()
        failing: type[Exception] | None = None
        try:
            while not self._stop.is_set():
                self._wake.clear()
                try:
                    is_new = step()
                except Exception as error:
                    # Whatever a target or a store raises, the live version is still served.
                    is_again = failing is type(error)
                    if isinstance(error, final) or _is_final(error, has_worked=has_worked, is_again=is_again):
                        self.has_failed = True
                        raise
                    if not is_again:
                        trace = None if isinstance(error, DeltasyncError) else error
                        logger.warning("cannot follow, retrying: %s", error, exc_info=trace)
                    failing, pause_s = type(error), min(2 * pause_s, _OUTAGE_MOST_S)
                else:
                    if failing is not None:
                        logger.warning("following again")
                    failing, has_worked = None, True
                    if is_new:
                        cadence.note()
                        pause_s = _POLL_FIRST_S
                        continue
                    pause_s = cadence.pause_s()
                self._wake.wait(pause_s)
        finally:
            self._running.release()


def poll_pause_s(away_s: float) -> float:
    """Seconds between two polls, if the next version is expected in `away_s`, or is overdue by so much.

    So a poll delays a version by a small share of the time by which it comes earlier or later than expected.
    """
    return min(_POLL_MOST_S, max(_POLL_FIRST_S, _POLL_SHARE * away_s))


class Cadence:
    """When to poll next. A version is expected as long after the last one as that came after the one before.

    With fewer than two versions, the next one is expected at once.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_s = clock()
        self._interval_s: float | None = None
        self._has_version = False

    def note(self) -> None:
        """A version has just arrived."""
        now_s = self._clock()
        if self._has_version:
            self._interval_s = now_s - self._last_s
        self._last_s, self._has_version = now_s, True

    def pause_s(self) -> float:
        """Seconds until the next poll."""
        return poll_pause_s(abs(self._last_s + (self._interval_s or 0.0) - self._clock()))


def _is_final(error: Exception, *, has_worked: bool, is_again: bool) -> bool:
    """Whether a retry cannot fix the error: another model, another format, no permission, a wrong call."""
    if isinstance(error, StoreError):
        return not error.transient
    if isinstance(error, FormatError):
        # A bit that flips in transit can look like a later release, but not twice.
        return is_again
    # Wrong input fails at once. Later on, it may be a disk that is full for a while.
    return isinstance(error, MismatchError) or (isinstance(error, InvalidInputError) and not has_worked)


SCRUB_S = 3600.0
"""Seconds for one round of the scrub over all weights."""


class ScrubSchedule:
    """Decides which tensors to compare, so that one round over the model takes about `round_s`."""

    def __init__(self, round_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._round_s = round_s
        self._clock = clock
        self._next = 0
        self._last_s = clock()
        self._budget = 0.0

    def due(self, elements: Sequence[int]) -> list[int]:
        """Ordinals of the tensors that became due since the last call; `elements` has their sizes. 0 starts a round."""
        now_s = self._clock()
        # A tensor is compared as a whole: what it takes beyond the budget is paid back before the next one.
        self._budget = min(self._budget, 0.0) + sum(elements) * min(1.0, (now_s - self._last_s) / self._round_s)
        self._last_s = now_s
        ordinals: list[int] = []
        while self._budget > 0 and len(ordinals) < len(elements):
            ordinal = self._next % len(elements)
            ordinals.append(ordinal)
            self._budget -= elements[ordinal]
            self._next = ordinal + 1
        return ordinals
