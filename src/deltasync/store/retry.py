"""Retries of store operations, with exponential back-off."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from deltasync.errors import StoreError
from deltasync.store.protocol import ObjectInfo, Store, WrapperStore

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

_BACKOFF_FIRST_S = 0.2
_BACKOFF_MOST_S = 10.0


class Retry:
    """Retries an operation for up to `limit_s` seconds. `count` is the number of retries; each is logged at `level`.

    Several threads may use it at once.
    """

    def __init__(self, limit_s: float, *, level: int = logging.WARNING) -> None:
        self.count = 0
        self._limit_s = limit_s
        self._level = level
        self._counting = threading.Lock()

    def __call__(self, act: Callable[[], _T]) -> _T:
        """The result of `act`, which must be safe to repeat; its last error if the store does not recover in time."""
        deadline = time.monotonic() + self._limit_s
        pause_s = _BACKOFF_FIRST_S
        while True:
            try:
                return act()
            except StoreError as error:
                if not error.transient or time.monotonic() + pause_s > deadline:
                    raise
                logger.log(self._level, "retrying in %.1f s: %s", pause_s, error)
            with self._counting:
                self.count += 1
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _BACKOFF_MOST_S)


class RetryingStore(WrapperStore):
    """Retries each read for up to `limit_s` seconds; writes are passed on as they are. `retries` counts them."""

    def __init__(self, store: Store, *, limit_s: float) -> None:
        super().__init__(store)
        # At INFO: the caller warns once that the store is unreachable, not for every read.
        self._retry = Retry(limit_s, level=logging.INFO)

    @property
    def retries(self) -> int:
        return self._retry.count

    def get(self, key: str) -> bytes:
        return self._retry(lambda: self._store.get(key))

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        return self._retry(lambda: self._store.get_range(key, offset, length))

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectInfo]:
        # Collected at once: a listing that breaks off is started again.
        return iter(self._retry(lambda: [*self._store.list(prefix, after=after)]))
