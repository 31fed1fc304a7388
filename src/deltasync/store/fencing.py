"""What a writer asks of a store: does it keep what is put, does it fence writers, what is its time?

Each probe writes and deletes one object under a key that nothing else uses. Where a store has no create-if-absent, it
cannot fence writers, and `create` is to look, put, and read back. One writer of a feed then holds a lease that it
renews. A lease depends on clocks, and does not stop two writers that race within one round trip.
"""

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from deltasync.errors import ConflictError, NotFoundError, StoreError
from deltasync.format import keys
from deltasync.format.sealed import LeaseRecord
from deltasync.store.patient import WrapperStore, get_manifest, get_record, read_parsed
from deltasync.store.protocol import Data, Store

PATIENCE_S = 1.0
"""How long a probe asks a store again that does not answer, where the caller is not patient itself."""

_READS = 3


@contextmanager
def _probe_key(store: Store, key: str | None = None) -> Iterator[str]:
    """A key that no other process knows, or the given one. Its object is deleted at the end of the block."""
    key = keys.probe_key(secrets.token_hex(16)) if key is None else key
    try:
        yield key
    finally:
        # An object that is left behind is harmless, and this error must not hide the result.
        with suppress(StoreError):
            store.delete(key)


def probe_fencing(store: Store, *, key: str | None = None) -> bool:
    """Whether `create` refuses a key that is taken, and leaves the object as it was.

    `key` is one that nothing else uses; by default a random one. The bytes that are stored decide, so that a lost
    response does not make a good store look bad.
    """
    if not store.capabilities.create_if_absent:
        return False
    with _probe_key(store, key) as key:
        # If it exists, a retry of this call has created it.
        store.create(key, b"first")
        refused = not store.create(key, b"second")
        return refused and _read_back(store, key, b"first", b"second") == b"first"


def probe_put(store: Store) -> None:
    """StoreError unless the store has what was just put into it."""
    with _probe_key(store) as key:
        store.put(key, b"put")
        try:
            stored = _read_back(store, key, b"put")
        except NotFoundError:
            stored = b""
    if stored != b"put":
        raise not_kept(store, "an object that was just put")


def probe_clock(store: Store) -> float:
    """The time by the store's clock, in the seconds of a listing."""
    with _probe_key(store) as key:
        store.put(key, b"clock")
        listed = [item.modified_unix_s for item in store.list(key) if item.key == key]
    if not listed:
        raise not_kept(store, "an object that was just put")
    return listed[0]


def not_kept(store: Store, what: str) -> StoreError:
    """The error of a store that reports a put as done, and does not have the object."""
    return StoreError(
        f"{store.url} does not have {what}, although it reported no error",
        transient=False,
        hint="check its quota and the gateway in front of it; `deltasync.testing.StoreConformance` tests a store",
    )


def _read_back(store: Store, key: str, *written: bytes) -> bytes:
    """What a probe holds. Bytes that were never written may have been damaged on the way, and are read again."""
    for _ in range(_READS - 1):
        stored = get_record(store, key)
        if stored in written:
            return stored
    return get_record(store, key)


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
            return read_parsed(self._store, keys.LEASE, LeaseRecord.from_bytes)[0]
        except NotFoundError:
            return None
