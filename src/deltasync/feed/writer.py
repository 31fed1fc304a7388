"""Write to a feed: payloads first, then the manifest, whose creation is the commit and the fence.

A store without create-if-absent cannot fence. One writer then holds a lease that it renews. A lease depends on clocks:
it keeps two writers apart, but not two that race within one round trip.
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

_TRIES = 3


def probe_fencing(store: Store) -> bool:
    """Whether `create` refuses a key that is taken, and leaves the object as it was. Writes and deletes one object.

    A lost response does not make a good store look bad: what counts is which bytes stay.
    """
    if not store.capabilities.create_if_absent:
        return False
    key = keys.probe_key(secrets.token_hex(16))
    try:
        # Nobody else knows the key: if it is taken, it was taken by this very call, made twice.
        _create(store, key, b"first")
        refused = not _create(store, key, b"second")
        return refused and store.get(key) == b"first"
    finally:
        # What stays behind is harmless, and must not hide the answer.
        with suppress(StoreError):
            store.delete(key)


def _create(store: Store, key: str, data: Data) -> bool:
    """Until the store answers: from a request that nobody answered nothing can be learned."""
    for _ in range(_TRIES - 1):
        try:
            return store.create(key, data)
        except StoreError as error:
            if not error.transient:
                raise
    return store.create(key, data)


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


logger = logging.getLogger(__name__)


class Writer:
    """The one publisher of a feed. `id` is random: it tells this writer's commits from those of any other."""

    def __init__(self, store: Store, *, require_fencing: bool = False) -> None:
        self.id = secrets.token_hex(8)
        self.store = store
        self.log = Log(store)
        self._require_fencing = require_fencing
        self._lease: Lease | None = None

    def open(self) -> Manifest | None:
        """Check that the store keeps writers apart, make the feed if it is new, and give its head.

        A store that only claims to fence is used by one writer under a lease, with a warning; with `require_fencing`
        it is refused. ConflictError if another writer holds the lease.
        """
        if not self._fences():
            self._lease = Lease(self.store, self.id)
            self._lease.take()
        self._require_feed()
        return self.log.head()

    def put(self, data: Data) -> PayloadRef:
        """Store a payload under its own SHA-256. Without a commit nobody ever looks at it."""
        ref = PayloadRef.of(data)
        self.store.put(keys.payload_key(ref.sha256), data)
        return ref

    def commit(self, manifest: Manifest) -> None:
        """Commit a version or a skip whose payloads are in the store. Trying again after an error is safe.

        ConflictError if another writer was there first: stop. StoreError: it is not known whether the commit happened;
        commit the same manifest again, or open the feed anew.
        """
        self._create(manifest_key(manifest), manifest.to_bytes())

    def add_anchor(self, manifest: Manifest) -> None:
        """Add an anchor to a version that is committed."""
        self._create(keys.anchor_key(manifest.version), manifest.to_bytes())

    def close(self) -> None:
        """Give back the lease, if there is one."""
        if self._lease is None:
            return
        try:
            self._lease.release()
        except StoreError as error:
            # It runs out by itself, and whatever was committed is committed.
            logger.warning("the lease of %s was not given back: %s", self.store.url, error)

    def _fences(self) -> bool:
        if self.store.capabilities.create_if_absent:
            if probe_fencing(self.store):
                return True
            message = f"{self.store.url} ignores create-if-absent"
        else:
            message = f"{self.store.url} has no create-if-absent"
        if self._require_fencing:
            raise StoreError(
                message, transient=False, hint="use a store that has conditional puts, or do without require_fencing"
            )
        if self.store.capabilities.create_if_absent:
            logger.warning("%s: two writers at once can destroy each other's versions; a lease must do", message)
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
        """Whether the key is surely ours. False: it was taken, perhaps by ourselves."""
        if self._lease is None:
            try:
                return self.store.create(key, data)
            except StoreError as error:
                # The response may be lost while the object is there. An error that stays, as of a disk that cannot
                # sync, is no lost response: what can be read back then may still be gone tomorrow.
                if error.transient and self._stored(key) == data:
                    return True
                raise
        if self._stored(key) is not None:
            return False
        self.store.put(key, data)
        return self._stored(key) == data

    def _settle(self, key: str, data: bytes) -> None:
        """The key was taken. Equal bytes mean that it was ours: a response got lost."""
        found = self._stored(key)
        if found == data:
            return
        who = "nobody" if found is None else parse_manifest(key, found).writer
        hint = "another trainer writes to this feed: stop one of the two"
        if who == self.id:
            hint = "an earlier attempt of this writer went through: open the feed again and go on from its head"
        raise ConflictError(f"{key} was committed by writer {who}, we are {self.id}", key=key, hint=hint)

    def _stored(self, key: str) -> bytes | None:
        try:
            return self.store.get(key)
        except NotFoundError:
            return None
