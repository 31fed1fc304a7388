"""A store that is given time to recover: what fails for the moment is tried again, with exponential back-off.

And small objects, which are read up to a bound, and once more if they arrive damaged.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from deltasync.errors import CorruptError, FormatError, NotFoundError, StoreError
from deltasync.format import limits
from deltasync.store.protocol import Capabilities, Data, ObjectInfo, Store

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0


def get_record(store: Store, key: str) -> bytes:
    """A small record. Of an object that is too large for one, only as much as a reader needs to refuse it."""
    return store.get_range(key, 0, limits.RECORD_BYTES_MAX + 1)


def get_manifest(store: Store, key: str) -> bytes:
    """A manifest, read up to its limit as `get_record` does. Most are short: one range is enough for them."""
    start = store.get_range(key, 0, limits.RECORD_BYTES_MAX + 1)
    if len(start) <= limits.RECORD_BYTES_MAX:
        return start
    return start + store.get_range(key, len(start), limits.MANIFEST_BYTES_MAX + 1 - len(start))


def read_parsed(
    store: Store, key: str, parse: Callable[[bytes], _T], *, get: Callable[[Store, str], bytes] = get_record
) -> tuple[_T, bytes]:
    """A small object as `parse` reads it, and its bytes. It is read once more if what arrived is damaged."""
    data = get(store, key)
    try:
        return parse(data), data
    except (CorruptError, FormatError) as error:
        require_rereadable(error)
    data = get(store, key)
    return parse(data), data


def require_rereadable(error: CorruptError | FormatError) -> None:
    """Raise the error of what was read unless the wire may be to blame, and it should be read once more.

    It is not to blame for an object that is too large, which is read once.
    """
    if error.rule is not None and error.rule.endswith(".size"):
        raise error
    logger.info("reading it again: %s", error)


class WrapperStore(Store):
    """Passes every call on to `store`; subclasses override some of them."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def capabilities(self) -> Capabilities:
        return self._store.capabilities

    def put(self, key: str, data: Data) -> None:
        self._store.put(key, data)

    def create(self, key: str, data: Data) -> bool:
        return self._store.create(key, data)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        return self._store.get_range(key, offset, length)

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectInfo]:
        return self._store.list(prefix, after=after)

    def delete(self, key: str) -> None:
        self._store.delete(key)

    def close(self) -> None:
        self._store.close()


class PatientStore(WrapperStore):
    """Repeats operations that fail with a transient error, for up to `limit_s` seconds after their first failure.

    It also settles a `create` whose answer was lost: equal bytes under the key are ours. `retries` counts what was
    repeated; each time is logged at `level`. Once `stop` is set, nothing more is read, and nothing is waited for.
    Several threads may use it at once.
    """

    def __init__(
        self, store: Store, limit_s: float, *, level: int = logging.WARNING, stop: threading.Event | None = None
    ) -> None:
        super().__init__(store)
        self.retries = 0
        self._limit_s = limit_s
        self._level = level
        self._stop = threading.Event() if stop is None else stop
        self._counting = threading.Lock()

    def beside(self) -> "PatientStore":
        """The same store for another task, which counts its own retries."""
        return PatientStore(self._store, self._limit_s, level=self._level, stop=self._stop)

    def put(self, key: str, data: Data) -> None:
        self._repeat(self._store.put, key, data)

    def create(self, key: str, data: Data) -> bool:
        def create() -> bool:
            try:
                return self._store.create(key, data)
            except StoreError as error:
                # The answer may be lost although the object was created. A lasting error, such as of a disk that
                # cannot sync, is not a lost answer: the object can be read back now and still be lost later.
                if error.transient and self._has(key, data):
                    return True
                raise

        # What the object names was checked before. After a sleep of this process that may no longer hold: `prune` may
        # have removed payloads that no manifest named. The caller checks them again.
        return self._repeat(create, most_s=2 * self._limit_s)

    def get(self, key: str) -> bytes:
        self._require_running()
        return self._repeat(self._store.get, key)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        self._require_running()
        return self._repeat(self._store.get_range, key, offset, length)

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectInfo]:
        self._require_running()
        # Collected at once: a listing that breaks off is started again.
        return iter(self._repeat(lambda: [*self._store.list(prefix, after=after)]))

    def delete(self, key: str) -> None:
        self._repeat(self._store.delete, key)

    def _has(self, key: str, data: Data) -> bool:
        try:
            return self._store.get_range(key, 0, len(data) + 1) == data
        except NotFoundError:
            return False

    def _require_running(self) -> None:
        if self._stop.is_set():
            raise StoreError(f"{self.url} is no longer used: it was closed", transient=False)

    def _repeat(self, act: Callable[..., _T], *arguments: Any, most_s: float = math.inf) -> _T:
        """The result of `act`, which is safe to repeat; its last error if the store does not recover in time.

        `most_s`: it is not repeated once it has taken this long by the clock on the wall, which counts sleep.
        """
        began_unix_s = time.time()
        deadline_s: float | None = None
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return act(*arguments)
            except StoreError as error:
                now_s = time.monotonic()
                deadline_s = now_s + self._limit_s if deadline_s is None else deadline_s
                if not error.transient or now_s + pause_s > deadline_s:
                    raise
                logger.log(self._level, "retrying in %.1f s: %s", pause_s, error)
                with self._counting:
                    self.retries += 1
                if self._stop.wait(pause_s) or abs(time.time() - began_unix_s) > most_s:
                    raise
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
