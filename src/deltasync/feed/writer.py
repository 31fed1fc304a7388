"""Write to a feed: payloads first, then the manifest, whose creation is the commit and the fence.

A store without create-if-absent cannot fence. One writer then holds a lease that it renews. A lease depends on clocks,
and does not stop two writers that race within one round trip.
"""

import logging
import secrets
import time
from collections.abc import Callable
from contextlib import suppress

from deltasync.errors import ConflictError, NotFoundError, StoreError
from deltasync.feed.log import Log, manifest_key, parse_manifest
from deltasync.format import keys
from deltasync.format.manifest import Manifest, PayloadRef
from deltasync.format.sealed import FeedRecord, LeaseRecord
from deltasync.store.protocol import Data, Store

logger = logging.getLogger(__name__)

_TRIES = 3


def probe_fencing(store: Store) -> bool:
    """Whether `create` refuses a key that is taken, and leaves the object as it was. Writes and deletes one object.

    The bytes that are stored decide, so that a lost response does not make a good store look bad.
    """
    if not store.capabilities.create_if_absent:
        return False
    key = keys.probe_key(secrets.token_hex(16))
    try:
        # No other process knows the key: if it exists, a retry of this call has created it.
        _create(store, key, b"first")
        refused = not _create(store, key, b"second")
        return refused and store.get(key) == b"first"
    finally:
        # An object that is left behind is harmless, and this error must not hide the result.
        with suppress(StoreError):
            store.delete(key)


def _create(store: Store, key: str, data: Data) -> bool:
    """Create an object; retry while the store does not answer, because that says nothing about fencing."""
    for _ in range(_TRIES - 1):
        try:
            return store.create(key, data)
        except StoreError as error:
            if not error.transient:
                raise
    return store.create(key, data)


LEASE_S = 120
"""Seconds for which the lease of a writer that died keeps others out."""


class Lease:
    """The right of `writer` to write to a feed."""

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
                hint="this store cannot fence writers: stop the other one, or wait until its lease expires",
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
                f"another writer took the lease of {self._store.url} at the same time",
                key=keys.LEASE,
                hint="let only one trainer publish to a feed",
            )

    def _read(self) -> LeaseRecord | None:
        try:
            return LeaseRecord.from_bytes(self._store.get(keys.LEASE))
        except NotFoundError:
            return None


class Writer:
    """The only writer of a feed. Its random `id` distinguishes its commits from those of other writers."""

    def __init__(self, store: Store, *, require_fencing: bool = False) -> None:
        self.id = secrets.token_hex(8)
        self.store = store
        self.log = Log(store)
        self._require_fencing = require_fencing
        self._lease: Lease | None = None

    def open(self) -> Manifest | None:
        """Check that the store can fence writers, create the feed if it is new, and return its head.

        A store that only claims to fence is used by one writer under a lease, with a warning; with `require_fencing`
        it is refused. ConflictError if another writer holds the lease.
        """
        if not self._fences():
            self._lease = Lease(self.store, self.id)
            self._lease.take()
        self._require_feed()
        return self.log.head()

    def put(self, data: Data) -> PayloadRef:
        """Store a payload under its SHA-256. It is part of the feed once a manifest that names it is committed."""
        ref = PayloadRef.of(data)
        self.store.put(keys.payload_key(ref.sha256), data)
        return ref

    def commit(self, manifest: Manifest) -> None:
        """Commit a version or a skip whose payloads are in the store. A retry after an error is safe.

        ConflictError if another writer was first: stop. After a StoreError it is not known whether the commit happened:
        commit the same manifest again, or reopen the feed.
        """
        self._create(manifest_key(manifest), manifest.to_bytes())

    def add_anchor(self, manifest: Manifest) -> None:
        """Add an anchor to a committed version."""
        self._create(keys.anchor_key(manifest.version), manifest.to_bytes())

    def close(self) -> None:
        """Release the lease, if there is one."""
        if self._lease is None:
            return
        try:
            self._lease.release()
        except StoreError as error:
            # The lease expires by itself, and every commit stays.
            logger.warning("cannot release the lease of %s: %s", self.store.url, error)

    def _fences(self) -> bool:
        if self.store.capabilities.create_if_absent:
            if probe_fencing(self.store):
                return True
            message = f"{self.store.url} ignores create-if-absent"
        else:
            message = f"{self.store.url} has no create-if-absent"
        if self._require_fencing:
            raise StoreError(
                message, transient=False, hint="use a store with conditional puts, or leave out require_fencing"
            )
        if self.store.capabilities.create_if_absent:
            logger.warning(
                "%s: two writers at once can overwrite each other's versions; using a lease instead", message
            )
        return False

    def _require_feed(self) -> None:
        if self.log.feed() is None:
            record = FeedRecord(secrets.token_hex(8), int(time.time()))
            self._write_new(keys.FEED, record.to_bytes())

    def _create(self, key: str, data: bytes) -> None:
        if self._lease is not None:
            self._lease.take()
        if not self._write_new(key, data):
            self._settle(key, data)

    def _write_new(self, key: str, data: bytes) -> bool:
        """Whether this call has created the object. False if it exists, perhaps from an earlier attempt of ours."""
        if self._lease is None:
            try:
                return self.store.create(key, data)
            except StoreError as error:
                # The response may be lost although the object was created. A permanent error, such as of a disk that
                # cannot sync, is not a lost response: the object can be read back now and still be lost later.
                if error.transient and self._stored(key) == data:
                    return True
                raise
        if self._stored(key) is not None:
            return False
        self.store.put(key, data)
        return self._stored(key) == data

    def _settle(self, key: str, data: bytes) -> None:
        """The object exists: equal bytes mean that we created it, and a response was lost. Else ConflictError."""
        stored = self._stored(key)
        if stored == data:
            return
        writer = "an unknown writer" if stored is None else f"writer {parse_manifest(key, stored).writer}"
        hint = "another trainer writes to this feed: stop one of the two"
        if writer == f"writer {self.id}":
            hint = "an earlier attempt of this writer succeeded: reopen the feed and continue from its head"
        raise ConflictError(f"{key} was committed by {writer}, this is writer {self.id}", key=key, hint=hint)

    def _stored(self, key: str) -> bytes | None:
        try:
            return self.store.get(key)
        except NotFoundError:
            return None
