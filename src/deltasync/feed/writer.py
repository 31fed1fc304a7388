"""Write to a feed: payloads first, then the manifest, whose creation is the commit and the fence.

A store without create-if-absent cannot fence. One writer then holds a lease that it renews. A lease depends on clocks,
and does not stop two writers that race within one round trip.
"""

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from deltasync.errors import ConflictError, InvalidInputError, NotFoundError, StoreError
from deltasync.feed.log import Log, get_manifest, get_record, manifest_key, parse_manifest, with_reread
from deltasync.format import keys
from deltasync.format.manifest import Manifest, PayloadRef
from deltasync.format.sealed import FeedRecord, LeaseRecord
from deltasync.store import file_path
from deltasync.store.protocol import Data, Store

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_TRIES = 3

_FOLDER_NAMES = frozenset({
    keys.FLOOR, keys.COPY, keys.LEASE, "lost+found",
    *(prefix.rstrip("/") for prefix in (
        keys.VERSIONS, keys.ANCHORS, keys.SKIPS, keys.PAYLOADS, keys.REPLICAS, keys.PINS, keys.PROBES
    )),
})  # fmt: skip
"""What may be in the folder of a new feed: the root of a file system, and what was left by an attempt that failed."""


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
    """Whether `create` refuses a key that is taken, and leaves the object as it was. Writes and deletes one object.

    `key` is one that nothing else uses; by default a random one. The bytes that are stored decide, so that a lost
    response does not make a good store look bad.
    """
    if not store.capabilities.create_if_absent:
        return False
    with _probe_key(store, key) as key:
        # If it exists, a retry of this call has created it.
        _retried(lambda: store.create(key, b"first"))
        refused = not _retried(lambda: store.create(key, b"second"))
        return refused and _read_back(store, key, b"first", b"second") == b"first"


def probe_put(store: Store) -> None:
    """StoreError unless the store has what was just put into it. Writes and deletes one object."""
    with _probe_key(store) as key:
        _retried(lambda: store.put(key, b"put"))
        try:
            stored = _read_back(store, key, b"put")
        except NotFoundError:
            stored = b""
    if stored != b"put":
        raise not_kept(store, "an object that was just put")


def _read_back(store: Store, key: str, *written: bytes) -> bytes:
    """What a probe holds. Bytes that were never written may have been damaged on the way, and are read again."""
    for _ in range(_TRIES - 1):
        stored = _retried(lambda: get_record(store, key))
        if stored in written:
            return stored
    return _retried(lambda: get_record(store, key))


def probe_clock(store: Store) -> float:
    """The time by the store's clock, in the seconds of a listing. Writes and deletes one object."""
    with _probe_key(store) as key:
        _retried(lambda: store.put(key, b"clock"))
        listed = _retried(lambda: [item.modified_unix_s for item in store.list(key) if item.key == key])
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


def _retried(act: Callable[[], _T]) -> _T:
    """The result of an operation of a probe, retried if the store does not answer: that says nothing about it."""
    for _ in range(_TRIES - 1):
        try:
            return act()
        except StoreError as error:
            if not error.transient:
                raise
    return act()


LATE_S = 6 * 3600
"""What was put longer ago is put again when a manifest names it: `prune` removes payloads without one after a day."""

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


class Writer:
    """The only writer of a feed. Its random `id` distinguishes its commits from those of other writers."""

    def __init__(self, store: Store, *, require_fencing: bool = False, clock: Callable[[], float] = time.time) -> None:
        self.id = secrets.token_hex(8)
        self.store = store
        self.log = Log(store)
        self.clock = clock
        self._require_fencing = require_fencing
        self._lease: Lease | None = None
        self._files: tuple[Data, float] | None = None
        """The files beside the weights that no manifest may name yet, and when they were put."""

    def open(self) -> Manifest | None:
        """Check that the store keeps objects and can fence writers, create the feed if it is new, return its head.

        A store that only claims to fence is used by one writer under a lease, with a warning; with `require_fencing`
        it is refused. ConflictError if another writer holds the lease.
        """
        self.require_own_folder()
        probe_put(self.store)
        if not self._fences():
            self._lease = Lease(self.store, self.id, clock=self.clock)
            self._lease.take()
        self._require_feed()
        return self.log.head()

    def put(self, data: Data, ref: PayloadRef | None = None) -> PayloadRef:
        """Store a payload under its SHA-256. It is part of the feed once a manifest that names it is committed.

        `ref`: its reference, where the caller has computed it already.
        """
        ref = PayloadRef.of(data) if ref is None else ref
        self.store.put(keys.payload_key(ref.sha256), data)
        return ref

    def put_files(self, data: Data) -> PayloadRef:
        """Put the files beside the weights, and keep them for `renew_files` until `release_files`."""
        self._files = data, self.clock()
        return self.put(data)

    def renew_files(self, *, after_s: float) -> None:
        """Put the files that are kept again if that was so long ago: `prune` may have removed them."""
        if self._files is not None and abs(self.clock() - self._files[1]) > after_s:
            self.put_files(self._files[0])

    def release_files(self) -> None:
        """Keep the files no longer: a committed manifest names them."""
        self._files = None

    def missing(self, refs: Iterable[PayloadRef]) -> list[str]:
        """The keys of those of these payloads that are not listed with their sizes."""
        sizes = {item.key: item.nbytes for item in self.store.list(keys.PAYLOADS)}
        return [key for ref in refs if sizes.get(key := keys.payload_key(ref.sha256)) != ref.nbytes]

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

    def require_own_folder(self) -> None:
        """InvalidInputError for a new feed in a folder that has other things in it, such as a checkpoint."""
        if not self.store.url.startswith("file:"):
            return
        folder = file_path(self.store.url)
        names: list[str] = []
        # A folder that is not there yet, or cannot be read: the first operation of the store reports that.
        with suppress(OSError):
            names = sorted(os.listdir(folder))
        others = [name for name in names if not name.startswith(".") and name not in _FOLDER_NAMES]
        if not others or self.log.feed() is not None:
            return
        is_checkpoint = any(name == "config.json" or name.endswith(".safetensors") for name in others)
        found = ", ".join(repr(name) for name in others[:3]) + (", …" if len(others) > 3 else "")
        hint = (
            "it looks like a checkpoint: are the feed and the checkpoint swapped?"
            if is_checkpoint
            else (f"choose an empty or a new folder, such as {folder / 'feed'}")
        )
        raise InvalidInputError(f"{folder} is not empty and has no feed: it has {found}", hint=hint)

    def _require_feed(self) -> None:
        if self.log.feed() is None:
            record = FeedRecord(secrets.token_hex(8), int(self.clock()))
            if self._write_new(keys.FEED, record.to_bytes()):
                logger.info("a new feed begins at %s", self.store.url)

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

        def read() -> tuple[bytes | None, str]:
            stored = self._stored(key)
            if stored is None or stored == data:
                return stored, "an unknown writer"
            return stored, f"writer {parse_manifest(key, stored).writer}"

        stored, writer = with_reread(read)
        if stored == data:
            return
        hint = "another trainer writes to this feed: stop one of the two"
        if writer == f"writer {self.id}":
            hint = "an earlier attempt of this writer succeeded: reopen the feed and continue from its head"
        raise ConflictError(f"{key} was committed by {writer}, this is writer {self.id}", key=key, hint=hint)

    def _stored(self, key: str) -> bytes | None:
        try:
            return get_manifest(self.store, key)
        except NotFoundError:
            return None
