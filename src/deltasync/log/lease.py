"""One writer at a time on a store that cannot create-if-absent: a lease that its holder renews.

A lease is as good as the clocks, and as the time between a look and a write is short: it keeps two writers apart, but
not two that race within one round trip. Stores that can fence do not need it.
"""

import time
from collections.abc import Callable

from deltasync.errors import ConflictError, NotFoundError
from deltasync.format import keys
from deltasync.format.records import LeaseRecord
from deltasync.store.protocol import Store

LEASE_S = 120
"""How long a writer that died keeps others out."""


class Lease:
    """The right to write, held in the name of `writer`."""

    def __init__(self, store: Store, writer: str, *, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._writer = writer
        self._clock = clock

    def take(self) -> None:
        """Take or renew the lease; ConflictError if another writer holds it."""
        now = self._clock()
        held = self._read()
        if held is not None and held.writer != self._writer and held.expires_unix_s > now:
            raise ConflictError(
                f"writer {held.writer} holds the lease of {self._store.url} for another "
                f"{held.expires_unix_s - now:.0f} s",
                key=keys.LEASE,
                hint="this store cannot fence writers off: stop the other one, or wait until its lease has run out",
            )
        if held is None or held.writer != self._writer or held.expires_unix_s - now < LEASE_S / 2:
            record = LeaseRecord(self._writer, int(now) + LEASE_S)
            self._store.put(keys.LEASE, record.to_bytes())
            self._require_held(record)

    def release(self) -> None:
        """Let the next writer in at once."""
        held = self._read()
        if held is not None and held.writer == self._writer:
            self._store.delete(keys.LEASE)

    def _require_held(self, record: LeaseRecord) -> None:
        if self._read() != record:
            raise ConflictError(
                f"another writer took the lease of {self._store.url} at the same moment",
                key=keys.LEASE,
                hint="let one trainer publish to a feed",
            )

    def _read(self) -> LeaseRecord | None:
        try:
            return LeaseRecord.from_bytes(self._store.get(keys.LEASE))
        except NotFoundError:
            return None
