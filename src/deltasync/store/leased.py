"""`create` for stores without create-if-absent, which cannot fence writers: look, put, and read back.

One writer of a feed then holds a lease that it renews. A lease depends on clocks, and does not stop two writers that
race within one round trip.
"""

import time
from collections.abc import Callable

from deltasync.errors import ConflictError, NotFoundError
from deltasync.format import keys
from deltasync.format.sealed import LeaseRecord
from deltasync.store.protocol import Data, Store, WrapperStore
from deltasync.store.reading import get_manifest, get_record, with_reread

LEASE_S = 120
"""Seconds for which the lease of a writer that died keeps others out."""


class UnfencedStore(WrapperStore):
    """Creates manifests and records by a look, a put and a read: of two that do it at once, both may seem to win."""

    def create(self, key: str, data: Data) -> bool:
        if self._stored(key) is not None:
            return False
        self._store.put(key, data)
        return self._stored(key) == data

    def _stored(self, key: str) -> bytes | None:
        try:
            return get_manifest(self._store, key)
        except NotFoundError:
            return None


def creating(store: Store) -> Store:
    """The store itself if it can create, else one that does it without a fence."""
    return store if store.capabilities.create_if_absent else UnfencedStore(store)


class LeasedStore(UnfencedStore):
    """Creates objects only while `writer` has the lease of the feed: the right to write to it."""

    def __init__(self, store: Store, writer: str, *, clock: Callable[[], float] = time.time) -> None:
        super().__init__(store)
        self._writer = writer
        self._clock = clock

    def create(self, key: str, data: Data) -> bool:
        self.take()
        return super().create(key, data)

    def take(self) -> None:
        """Take or renew the lease; ConflictError if another writer holds it."""
        now = self._clock()
        held = self._read()
        if held is not None and held.writer != self._writer and held.expires_unix_s > now:
            raise ConflictError(
                f"writer {held.writer} holds the lease of {self._store.url} for another "
                f"{held.expires_unix_s - now:.0f} s",
                key=keys.LEASE,
                hint="this store cannot fence writers: stop the other one, or wait until its lease expires",
            )
        if held is None or held.writer != self._writer or held.expires_unix_s - now < LEASE_S / 2:
            self._store.put(keys.LEASE, LeaseRecord(self._writer, int(now) + LEASE_S).to_bytes())
            self._require_held()

    def release(self) -> None:
        """Let the next writer in at once."""
        held = self._read()
        if held is not None and held.writer == self._writer:
            self._store.delete(keys.LEASE)

    def _require_held(self) -> None:
        # Another thread of this writer, which adds an anchor, may have renewed it in the meantime.
        held = self._read()
        if held is None or held.writer != self._writer:
            raise ConflictError(
                f"another writer took the lease of {self._store.url} at the same time",
                key=keys.LEASE,
                hint="let only one trainer publish to a feed",
            )

    def _read(self) -> LeaseRecord | None:
        try:
            return with_reread(lambda: LeaseRecord.from_bytes(get_record(self._store, keys.LEASE)))
        except NotFoundError:
            return None
