"""Any store, read with patience: what fails for a moment is asked for again."""

import logging
from collections.abc import Iterator

from deltasync.retrying import Retry
from deltasync.store.passing import PassingStore
from deltasync.store.protocol import ObjectInfo, Store


class PatientStore(PassingStore):
    """Reads are tried again for `limit_s` each; writes are passed on as they are."""

    def __init__(self, store: Store, *, limit_s: float) -> None:
        super().__init__(store)
        self._limit_s = limit_s

    def get(self, key: str) -> bytes:
        return self._retry()(lambda: self._store.get(key))

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        return self._retry()(lambda: self._store.get_range(key, offset, length))

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectInfo]:
        # All of it at once: a listing that breaks off is begun again.
        return iter(self._retry()(lambda: [*self._store.list(prefix, after=after)]))

    def _retry(self) -> Retry:
        # Whoever waits for this tells once that the store is away, and not for every read.
        return Retry(self._limit_s, level=logging.INFO)
