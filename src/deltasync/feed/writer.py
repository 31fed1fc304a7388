"""Write to a feed: payloads first, then the manifest, whose creation is the commit and the fence."""

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import copy

from deltasync.errors import ConflictError, InvalidInputError, NotFoundError, StoreError
from deltasync.feed.log import Log, manifest_key, parse_manifest
from deltasync.format import keys
from deltasync.format.manifest import Manifest, PayloadRef
from deltasync.format.sealed import FeedRecord
from deltasync.store import file_path
from deltasync.store.leased import LeasedStore, UnfencedStore
from deltasync.store.patient import PatientStore
from deltasync.store.probe import probe_fencing, probe_put
from deltasync.store.protocol import Data, Store
from deltasync.store.reading import get_manifest, with_reread

logger = logging.getLogger(__name__)

_FOLDER_NAMES = frozenset({
    keys.FLOOR, keys.COPY, keys.LEASE, "lost+found",
    *(prefix.rstrip("/") for prefix in (
        keys.VERSIONS, keys.ANCHORS, keys.SKIPS, keys.PAYLOADS, keys.REPLICAS, keys.PINS, keys.PROBES
    )),
})  # fmt: skip
"""What may be in the folder of a new feed: the root of a file system, and what was left by an attempt that failed."""


LATE_S = 6 * 3600
"""What was put longer ago is put again when a manifest names it: `prune` removes payloads without one after a day."""


class Writer:
    """The only writer of a feed. Its random `id` distinguishes its commits from those of other writers."""

    def __init__(
        self,
        store: Store,
        *,
        retry_s: float = 0.0,
        require_fencing: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.id = secrets.token_hex(8)
        self.clock = clock
        self._require_fencing = require_fencing
        self._patient = PatientStore(store, retry_s)
        self._lease: LeasedStore | None = None
        self._files: tuple[Data, float] | None = None
        """The files beside the weights that no manifest may name yet, and when they were put."""

    @property
    def store(self) -> Store:
        return self._patient if self._lease is None else self._lease

    @property
    def log(self) -> Log:
        return Log(self.store)

    @property
    def retries(self) -> int:
        """How often a request to the store was repeated."""
        return self._patient.retries

    def beside(self) -> "Writer":
        """The same writer for another thread, which counts its own retries."""
        other = copy(self)
        other._patient = self._patient.beside()
        if self._lease is not None:
            other._lease = LeasedStore(other._patient, self.id, clock=self.clock)
        return other

    def open(self) -> Manifest | None:
        """Check that the store keeps objects and can fence writers, create the feed if it is new, return its head.

        A store that only claims to fence is used by one writer under a lease, with a warning; with `require_fencing`
        it is refused. ConflictError if another writer holds the lease.
        """
        self.require_own_folder()
        probe_put(self._patient)
        if not self._fences():
            self._lease = LeasedStore(self._patient, self.id, clock=self.clock)
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
        if self._patient.capabilities.create_if_absent:
            if probe_fencing(self._patient):
                return True
            message = f"{self.store.url} ignores create-if-absent"
        else:
            message = f"{self.store.url} has no create-if-absent"
        if self._require_fencing:
            raise StoreError(
                message, transient=False, hint="use a store with conditional puts, or leave out require_fencing"
            )
        if self._patient.capabilities.create_if_absent:
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
            store = self._patient if self._lease is None else UnfencedStore(self._patient)
            if store.create(keys.FEED, record.to_bytes()):
                logger.info("a new feed begins at %s", self.store.url)

    def _create(self, key: str, data: bytes) -> None:
        if not self.store.create(key, data):
            self._settle(key, data)

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
