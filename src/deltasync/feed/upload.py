"""Write to a feed: payloads first, then the manifest, whose creation is the commit and the fence."""

import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import copy
from typing import Literal

from deltasync.errors import ConflictError, InvalidInputError, NotFoundError, StoreError
from deltasync.feed.log import Log, manifest_key, read_stored
from deltasync.format import keys
from deltasync.format.manifest import Manifest, PayloadRef
from deltasync.format.sealed import FeedRecord
from deltasync.store import file_path
from deltasync.store.fencing import (
    LeasedStore,
    UnfencedStore,
    creating,
    not_kept,
    probe_clock,
    probe_fencing,
    probe_put,
)
from deltasync.store.patient import PatientStore
from deltasync.store.protocol import Data, ObjectInfo, Store

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

RESUME_S = 3600
"""A payload that has been in the store for longer is put again by a new attempt: `prune` may be about to remove it."""


Outcome = Literal["done", "put again first", "put again"]
"""Of a commit: whether its payloads must be put again, as `prune` may have removed them; first: it was not created."""


class Upload:
    """What one writer puts into a feed and commits. Its random `id` distinguishes its commits from those of others.

    It knows when it put each payload that no manifest names yet: hours later, `prune` may have removed it. Nothing is
    read once `stop` is set. Threads that commit at the same time each use one of their own: see `beside`.
    """

    def __init__(
        self,
        store: Store,
        *,
        retry_s: float = 0.0,
        require_fencing: bool = False,
        stop: threading.Event | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.id = secrets.token_hex(8)
        self.clock = clock
        self.patient = PatientStore(store, retry_s, stop=stop)
        self.store: Store = creating(self.patient)
        self._require_fencing = require_fencing
        self._lease: LeasedStore | None = None
        self._there: dict[str, tuple[int, float]] = {}
        """Sizes of payloads that no manifest may name yet, and when they were put, by our clock; by their SHA-256."""
        self._kept: dict[PayloadRef, Data] = {}

    @property
    def log(self) -> Log:
        return Log(self.store)

    def beside(self) -> "Upload":
        """The same writer for another thread, which counts its own retries."""
        other = copy(self)
        other.patient = self.patient.beside()
        other.store = creating(other.patient)
        other._there, other._kept = {}, {}
        if self._lease is not None:
            other.store = other._lease = LeasedStore(other.patient, self.id, clock=self.clock)
        return other

    def open(self) -> Manifest | None:
        """Check that the store keeps objects and can fence writers, create the feed if it is new, return its head.

        A store that only claims to fence is used by one writer under a lease, with a warning; with `require_fencing`
        it is refused. ConflictError if another writer holds the lease.
        """
        self.require_own_folder()
        probe_put(self.patient)
        if not self._fences():
            self.store = self._lease = LeasedStore(self.patient, self.id, clock=self.clock)
            self._lease.take()
        if self.log.feed() is None:
            record = FeedRecord(secrets.token_hex(8), int(self.clock()))
            store = self.patient if self._lease is None else UnfencedStore(self.patient)
            if store.create(keys.FEED, record.to_bytes()):
                logger.info("a new feed begins at %s", self.store.url)
        return self.log.head()

    def put(self, data: Data, ref: PayloadRef | None = None, *, keep: bool = False) -> PayloadRef:
        """Store a payload under its SHA-256. It is part of the feed once a manifest that names it is committed.

        `ref`: its reference, where the caller has computed it already. `keep` the bytes for `renew` until `forget`.
        """
        ref = PayloadRef.of(data) if ref is None else ref
        put_unix_s = self.clock()
        self.store.put(keys.payload_key(ref.sha256), data)
        self._there[ref.sha256] = ref.nbytes, put_unix_s
        if keep:
            self._kept[ref] = data
        return ref

    def has(self, ref: PayloadRef) -> bool:
        """Whether the payload was put, or found by `resume`, and not forgotten since."""
        nbytes, _ = self._there.get(ref.sha256, (None, 0.0))
        return nbytes == ref.nbytes

    def resume(self, within_s: float, *, listed: Iterable[ObjectInfo] | None = None) -> None:
        """Find out which payloads the store got within the last `within_s`, by its own clock: the others do not count.

        They may come from an attempt that was interrupted, in this process or before it. `listed`: all payloads, where
        the caller has listed them already.
        """
        # Before the requests: what this process may sleep in them counts as age.
        ours_unix_s = self.clock()
        now_unix_s = probe_clock(self.store)
        listed = self.store.list(keys.PAYLOADS) if listed is None else listed
        ages_s = ((keys.parse_payload_key(i.key), i.nbytes, now_unix_s - i.modified_unix_s) for i in listed)
        self._there = {
            sha256: (nbytes, ours_unix_s - age_s)
            for sha256, nbytes, age_s in ages_s
            if sha256 is not None and age_s < within_s
        }

    def renew(self) -> None:
        """Put what is kept again unless that was done within `RESUME_S`: `prune` may have removed it."""
        for ref, data in self._kept.items():
            _, put_unix_s = self._there.get(ref.sha256, (0, -math.inf))
            if abs(self.clock() - put_unix_s) > RESUME_S:
                self.put(data, ref, keep=True)

    def put_unix_s(self, refs: Iterable[PayloadRef]) -> list[float]:
        """When those of these payloads were put that wait for a manifest, by our clock."""
        return [self._there[ref.sha256][1] for ref in refs if ref.sha256 in self._there]

    def is_late(self, refs: Iterable[PayloadRef], *, since_unix_s: float | None = None) -> bool:
        """Whether these payloads were put so long ago that they must be put again: `prune` may have removed them.

        `since_unix_s`: when other processes put theirs. Their clocks may differ; by hours, that counts as late, too.
        """
        put_unix_s = [*self.put_unix_s(refs), *([] if since_unix_s is None else [since_unix_s])]
        return any(abs(self.clock() - at) > LATE_S for at in put_unix_s)

    def commit(
        self,
        manifest: Manifest,
        *,
        key: str | None = None,
        since_unix_s: float | None = None,
        is_last: bool = False,
        must_be_listed: bool = False,
    ) -> Outcome:
        """Create a manifest whose payloads are in the store: a version, a skip, or under `key`. A retry is safe.

        `prune` removes payloads that no manifest names after a day. If this process, or its machine, slept for that
        long, they must be put again, by each process that put some: `since_unix_s` is when the first of them did. In
        the last attempt the manifest is created all the same. `must_be_listed`: StoreError if payloads are not listed
        with their sizes: some stores report a `put` as done and keep nothing.

        ConflictError if another writer was first: stop. After a StoreError it is not known whether the commit happened:
        commit the same manifest again, or reopen the feed.
        """
        key, data = manifest_key(manifest) if key is None else key, manifest.to_bytes()
        missing: list[str] = []
        if must_be_listed:
            sizes = {item.key: item.nbytes for item in self.store.list(keys.PAYLOADS)}
            wanted = {keys.payload_key(ref.sha256): ref.nbytes for ref in manifest.payloads}
            missing = [name for name, nbytes in wanted.items() if sizes.get(name) != nbytes]
        # Right before the creation: this process may also have slept in the listing.
        if not is_last and self.is_late(manifest.refs, since_unix_s=since_unix_s):
            return "put again first"
        if missing:
            raise not_kept(self.store, f"{len(missing)} payloads that were just put, such as {missing[0]}")
        if not self.store.create(key, data):
            self._settle(key, data)
        return "put again" if self.is_late(manifest.refs, since_unix_s=since_unix_s) else "done"

    def forget(self, refs: Iterable[PayloadRef]) -> None:
        """A committed manifest names these payloads: they stay, and need not be put again."""
        for ref in refs:
            self._there.pop(ref.sha256, None)
            self._kept.pop(ref, None)

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
        if self.patient.capabilities.create_if_absent:
            if probe_fencing(self.patient):
                return True
            message = f"{self.store.url} ignores create-if-absent"
        else:
            message = f"{self.store.url} has no create-if-absent"
        if self._require_fencing:
            raise StoreError(
                message, transient=False, hint="use a store with conditional puts, or leave out require_fencing"
            )
        if self.patient.capabilities.create_if_absent:
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

    def _settle(self, key: str, data: bytes) -> None:
        """The object exists: equal bytes mean that we created it, and a response was lost. Else ConflictError."""
        stored: bytes | None = None
        writer = "an unknown writer"
        with suppress(NotFoundError):
            manifest, stored = read_stored(self.store, key)
            writer = f"writer {manifest.writer}"
        if stored == data:
            return
        hint = "another trainer writes to this feed: stop one of the two"
        if writer == f"writer {self.id}":
            hint = "an earlier attempt of this writer succeeded: reopen the feed and continue from its head"
        raise ConflictError(f"{key} was committed by {writer}, this is writer {self.id}", key=key, hint=hint)
