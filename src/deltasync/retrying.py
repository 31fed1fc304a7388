"""Patience with a store that fails for a while."""

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from deltasync.errors import StoreError

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_BACKOFF_FIRST_S = 0.2
_BACKOFF_MOST_S = 10.0


class Retry:
    """Tries store operations again for `limit_s` each; `count` of them were needed. Each is told at `level`."""

    def __init__(self, limit_s: float, *, level: int = logging.WARNING) -> None:
        self.count = 0
        self._limit_s = limit_s
        self._level = level

    def __call__(self, act: Callable[[], _T]) -> _T:
        """The result of `act`, which must be safe to repeat; the last error if the store does not recover."""
        give_up = time.monotonic() + self._limit_s
        pause_s = _BACKOFF_FIRST_S
        while True:
            try:
                return act()
            except StoreError as error:
                if not error.transient or time.monotonic() + pause_s > give_up:
                    raise
                _log.log(self._level, "trying again in %.1f s: %s", pause_s, error)
            self.count += 1
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _BACKOFF_MOST_S)
