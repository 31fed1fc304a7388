"""Skips, written by a publisher while its publications go on.

The compactor reads the feed like any other one: it shares nothing with the shadow, and no publication waits for it. If
its process ends at any point, the next one writes what is missing.
"""

import logging
import threading
from collections.abc import Iterator, Sequence

from deltasync.errors import DeltasyncError, StoreError
from deltasync.feed.compact import Compactor
from deltasync.format.manifest import Manifest
from deltasync.parallel import Pool
from deltasync.store.protocol import ObjectInfo, Store, WrapperStore

logger = logging.getLogger(__name__)


class Skips:
    """Writes the skips of a feed in a worker thread. It needs memory for the weights of one version."""

    def __init__(self, store: Store, levels: Sequence[int], *, retry_s: float) -> None:
        self._store = _Stoppable(store)
        self._compactor = Compactor(self._store, levels=levels, retry_s=retry_s)
        self._lowest = levels[0]
        self._pool = Pool(1, "deltasync-skips")
        self._lock = threading.Lock()
        self._is_due = False

    def start(self) -> None:
        """Start the worker thread."""
        self._pool.start()

    def note(self, manifest: Manifest) -> None:
        """A version was committed. This only wakes the worker thread, if a skip can end at the version."""
        if manifest.version % self._lowest:
            return
        with self._lock:
            is_waiting, self._is_due = self._is_due, True
        if not is_waiting:
            self._pool.submit(self._advance)

    def close(self) -> None:
        """Stop at the next read of the feed: a skip that is being put is finished."""
        self._store.is_stopped = True
        self._pool.shutdown()

    def _advance(self) -> None:
        with self._lock:
            self._is_due = False
        try:
            for skip in self._compactor.advance():
                logger.info("a skip leads from version %s to %d", skip.parent, skip.version)
        except (DeltasyncError, MemoryError) as error:
            # The feed is complete without it.
            if not self._store.is_stopped:
                logger.warning("no skip was written, the next versions get one: %s", error)


class _Stoppable(WrapperStore):
    """A store that refuses to be read once it is stopped."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.is_stopped = False

    def get(self, key: str) -> bytes:
        self._require_running()
        return super().get(key)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        self._require_running()
        return super().get_range(key, offset, length)

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectInfo]:
        self._require_running()
        return super().list(prefix, after=after)

    def _require_running(self) -> None:
        if self.is_stopped:
            raise StoreError("the publisher is closed", transient=False)
