"""Copy a feed to another store, version by version, so that replicas read from near.

The copy has the manifests of all versions, byte for byte, and the payloads of the edges that were sent. It is a feed
like any other, with the same id. Where the link is slower than training, edges are sent that lead over several
versions: those between cannot be restored from the copy, and its floor says so.
"""

import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any

from deltasync.errors import (
    ConflictError,
    CorruptError,
    DeltasyncError,
    FormatError,
    InvalidInputError,
    NotFoundError,
)
from deltasync.feed.fetch import fetch
from deltasync.feed.log import READ_THREADS, RELAY_ENGINE, Log, is_live, read_manifest, read_stored
from deltasync.feed.plan import Edge
from deltasync.feed.route import Blocked, Route
from deltasync.feed.upload import LATE_S, RESUME_S, Upload
from deltasync.format import keys
from deltasync.format.manifest import Kind, Manifest, PayloadRef
from deltasync.format.sealed import FeedRecord, FloorRecord, Heartbeat
from deltasync.parallel import each
from deltasync.store import Feed, opened
from deltasync.store.patient import PatientStore, get_manifest
from deltasync.store.protocol import Store
from deltasync.upkeep.stats import MaintenanceStats

logger = logging.getLogger(__name__)

RETRY_S = 60.0
LAG_MAX = 4
"""A destination that is further behind gets the cheapest edges, which may lead over versions; otherwise every delta."""

OTHERS_S = 10.0
"""Seconds between two looks for anchors and skips that are not copied yet."""

BEAT_S = 5.0
"""Seconds between two looks at the heartbeats of a destination."""


@dataclass(frozen=True, slots=True)
class Relayed:
    """One edge that was sent to a destination, or that it had already."""

    destination: str
    kind: Kind
    version: int
    parent: int | None
    payload_bytes: int
    """Bytes of payloads that were sent: 0 if the destination had all of them."""
    manifest_bytes: int
    left_out: int
    """Versions between that cannot be restored from the copy."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def relay(
    source: Feed,
    *destinations: Feed,
    every: bool = False,
    anchors: bool = True,
    skips: bool = False,
    heartbeats: bool = False,
    retry_s: float = RETRY_S,
) -> tuple[tuple[Relayed, ...], ...]:
    """Copy a feed to other stores up to its newest version. Returns what was sent to each of them, in this order.

    What a destination has is not sent again, so that an interrupted copy goes on where it ended. Publishers, replicas,
    `prune` and compactors may work on the source, and all but publishers on the destinations.

    `every`: copy every version that the source can restore, from its floor on. Otherwise the copy of a new destination
    begins with the cheapest plan for the newest version, and one that is far behind gets skips, or an anchor, instead
    of every delta. `anchors`: also copy the newest anchor (with `every`, all of them) that was added to a version.
    `skips`: also copy skips. `heartbeats`: let the source know the replicas of the destinations.

    InvalidInputError, before anything is written, if a destination is a feed of another run; ConflictError if it has
    another version under the same number. NotFoundError if the source has no version.
    """
    if not destinations:
        raise InvalidInputError("relay needs at least one destination")
    with ExitStack() as held:
        store = held.enter_context(opened(source))
        relays = [
            Relay(
                store,
                held.enter_context(opened(destination)),
                every=every,
                anchors=anchors,
                skips=skips,
                heartbeats=heartbeats,
                retry_s=retry_s,
            )
            for destination in destinations
        ]
        for each_relay in relays:
            each_relay.check()
        with ThreadPoolExecutor(len(relays)) as pool:
            return tuple(pool.map(lambda each_relay: tuple(each_relay.advance()), relays))


class Relay:
    """Copies one feed to one destination. `advance` continues where the last call ended, also after an error."""

    def __init__(
        self,
        source: Store,
        destination: Store,
        *,
        every: bool = False,
        anchors: bool = True,
        skips: bool = False,
        heartbeats: bool = False,
        retry_s: float = RETRY_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.destination = destination.url
        self.upkeep = MaintenanceStats()
        self._upload = Upload(destination, retry_s=retry_s, clock=clock)
        self._stores = PatientStore(source, retry_s), self._upload.patient
        self._is_same = source is destination or source.url == destination.url != "memory://"
        self._source = Log(self._stores[0])
        self._copy = self._upload.log
        self._every = every
        self._has_anchors = anchors
        self._has_skips = skips
        self._has_heartbeats = heartbeats
        self._clock = clock
        self._is_open = False
        self._record: FeedRecord | None = None
        self._versions: set[int] = set()
        """The versions of the copy when it was looked at last."""
        self._others_due_unix_s = 0.0
        self._at: Manifest | None = None
        """The newest version of the copy."""
        self._head: Manifest | None = None
        """The newest version of the source."""
        self._floor = 0
        self._beats_due_unix_s = 0.0
        self._beats: dict[str, Heartbeat] = {}
        """The heartbeats of the copy that the source has, by their replicas there."""

    @property
    def version(self) -> int | None:
        """The newest version of the copy; None if it has none, or was not opened."""
        return None if self._at is None else self._at.version

    def check(self) -> None:
        """Find out whether the destination can be a copy of the source. Nothing is written."""
        source, copy = self._source, self._copy
        if self._is_same:
            raise InvalidInputError(f"{copy.store.url} is the source itself", hint="choose another destination")
        self._head = source.require_head()
        record = source.feed()
        if record is None:
            hint = "put the object back from a copy of the feed"
            raise CorruptError(f"{source.store.url} has versions, but no {keys.FEED}", key=keys.FEED, hint=hint)
        ours, versions = copy.feed(), set(copy.versions())
        if (ours is None and versions) or (ours is not None and ours.feed != record.feed):
            raise InvalidInputError(
                f"{copy.store.url} has the feed {None if ours is None else ours.feed!r:.40}, and cannot be a copy of "
                f"{source.store.url}, which is {record.feed!r:.40}",
                rule="relay.feed",
                hint="choose an empty destination; nothing was written",
            )
        top = max(versions, default=-1)
        if top >= 0:
            self._require_same(keys.version_key(top), top)
        if ours is None:
            self._upload.require_own_folder()
        self._record, self._versions = record, versions

    def _open(self) -> None:
        """Begin the copy, or complete what an earlier relay has begun."""
        self.check()
        copy, record, versions = self._copy, self._record, self._versions
        if record is None:
            return
        copy.store.create(keys.FEED, record.to_bytes())
        top = max(versions, default=-1)
        self._floor = copy.floor()
        # A relay that is interrupted while it leaves versions out has created the last of them first.
        missing = [version for version in range(top, -1, -1) if version not in versions]
        if missing:
            self._raise_floor(top)
            self._copy_versions(missing)
        self._at = None if top < 0 else copy.read(top)
        payloads = list(copy.store.list(keys.PAYLOADS))
        if payloads:
            self._upload.resume(RESUME_S, listed=payloads)
        self._is_open = True

    def advance(self) -> Iterator[Relayed]:
        """Send what is new, and return each edge once it is part of the copy.

        If there is nothing new, this is one small request to the source.
        """
        with self.upkeep.attempt(*self._stores):
            if not self._is_open:
                self._open()
            for sent in chain(self._send_versions(), self._send_others()):
                self.upkeep.count(f"{sent.kind}_edges")
                self.upkeep.count("manifest_bytes", sent.manifest_bytes)
                self.upkeep.count("left_out", sent.left_out)
                yield sent

    def _send_versions(self) -> Iterator[Relayed]:
        """Send deltas up to the head, or the cheapest edges to it where the copy is new or far behind."""
        while True:
            self._beat()
            at, head = self._at, self._source.head(after=None if self._head is None else self._head.version)
            self._head = head = head or self._head
            self.upkeep.version, self.upkeep.head = self.version, None if head is None else head.version
            if head is None or (at is not None and at.version >= head.version):
                return
            target = head
            if at is None and self._every:
                # The oldest version that the source promises to keep.
                target = self._source.read(self._source.floor())
            elif at is not None and (self._every or head.version - at.version <= LAG_MAX):
                target = self._source.read(at.version + 1)
            try:
                yield from self._send_to(target)
            except NotFoundError as error:
                # The source has pruned it, or is a copy that left it out: a later version may have a way to it.
                if target is head:
                    raise
                logger.info("version %d is left out: %s", target.version, error)
                yield from self._send_to(head)

    def _send_to(self, target: Manifest) -> Iterator[Relayed]:
        """Send the cheapest edges to a version, and others where one of them cannot be used."""
        route = Route(self._source, target)
        while self.version != target.version:
            with suppress(Blocked):
                for edge in route.plan(self.version).edges:
                    with route.using(edge):
                        sent = self._send(edge)
                    yield sent

    def _send(self, edge: Edge) -> Relayed:
        """Make an edge part of the copy: payloads, its own manifest, then those of all versions up to its end."""
        at, version = self._at, self._source.read(edge.end)
        if version.digest != edge.manifest.digest:
            raise CorruptError(f"{edge.key} leads to another digest than version {edge.end}", key=edge.key)
        if at is not None:
            is_next = edge.start == at.version
            digest = edge.manifest.parent_digest if is_next else self._source.read(at.version).digest
            if digest != at.digest:
                raise ConflictError(
                    f"version {at.version} of {self._source.store.url} has the digest {digest}, and that of "
                    f"{self._copy.store.url} has {at.digest}",
                    rule="relay.version",
                    version=at.version,
                    hint="the source was rolled back or replaced: choose an empty destination",
                )
        refs = list(edge.manifest.payloads)
        if version.files is not None and (at is None or at.files != version.files):
            refs.append(version.files)
        payload_bytes = sum(self._put(ref) for ref in refs)
        payload_bytes += self._put_again(refs, within_s=LATE_S)
        manifest_bytes = 0
        between = range(edge.end - 1, -1 if at is None else at.version, -1)
        with self.upkeep.phase("commit"):
            if edge.key != keys.version_key(edge.end):
                manifest_bytes += self._copy_manifest(edge.key)
            manifest_bytes += self._copy_manifest(keys.version_key(edge.end))
            if between:
                # Before the versions between: while they are not there, no reader that follows sees this one.
                self._raise_floor(edge.end)
                manifest_bytes += self._copy_versions(between)
        payload_bytes += self._put_again(refs, within_s=math.inf)
        self._upload.forget(refs)
        self._at = version
        self.upkeep.version = version.version
        return Relayed(
            destination=self._copy.store.url,
            kind=edge.manifest.kind,
            version=edge.end,
            parent=edge.start,
            payload_bytes=payload_bytes,
            manifest_bytes=manifest_bytes,
            left_out=len(between),
        )

    def _send_others(self) -> Iterator[Relayed]:
        """Send anchors and skips, payload by payload: a new version goes first, and they go on after it."""
        now_unix_s = self._clock()
        if 0 < self._others_due_unix_s - now_unix_s <= OTHERS_S:
            return
        for edge in self._others():
            sent_bytes, route = 0, Route(self._source, edge.manifest)
            try:
                for ref in edge.manifest.payloads:
                    with route.using(edge):
                        sent_bytes += self._put(ref)
                    yield from self._send_versions()
                with route.using(edge):
                    sent_bytes += self._put_again(edge.manifest.payloads, within_s=LATE_S)
                    with self.upkeep.phase("commit"):
                        manifest_bytes = self._copy_manifest(edge.key)
                    sent_bytes += self._put_again(edge.manifest.payloads, within_s=math.inf)
            except Blocked as error:
                logger.info("%s is not copied: %s", edge.key, error.cause)
                continue
            self._upload.forget(edge.manifest.payloads)
            yield Relayed(
                self._copy.store.url, edge.manifest.kind, edge.end, edge.start, sent_bytes, manifest_bytes, left_out=0
            )
        self._others_due_unix_s = now_unix_s + OTHERS_S

    def _others(self) -> list[Edge]:
        """The anchors and skips of versions of the copy that it does not have, as asked for."""
        if self._at is None or not (self._has_anchors or self._has_skips):
            return []
        source, copy, newest = self._source, self._copy, self._at.version
        # A pruner of the copy raises its floor: what it has deleted is not sent again.
        self._floor = max(self._floor, copy.floor())
        wanted: list[str] = []
        if self._has_anchors:
            there = source.anchors()
            known = set(copy.anchors()) if there else set()
            fitting = [v for v in there if self._floor <= v <= newest]
            newest_known = max((v for v in known if v <= newest), default=-1)
            fitting = fitting if self._every else [v for v in fitting[-1:] if v > newest_known]
            wanted += [keys.anchor_key(version) for version in fitting if version not in known]
        if self._has_skips:
            pairs = source.skips(start=self._floor)
            have = set(copy.skips(start=self._floor)) if pairs else set()
            wanted += [keys.skip_key(*pair) for pair in pairs if pair[1] <= newest and pair not in have]

        def usable(key: str) -> Edge | None:
            try:
                manifest = read_manifest(source.store, key)
                digest = copy.read(manifest.version).digest
            except (CorruptError, FormatError, NotFoundError) as error:
                logger.info("%s is not copied: %s", key, error)
                return None
            return Edge(key, manifest) if manifest.digest == digest else None

        return [edge for edge in each(usable, wanted, waiting=READ_THREADS) if edge is not None]

    def _put(self, ref: PayloadRef) -> int:
        """Put a payload, proved by its SHA-256, unless the copy has it. Returns the bytes that were sent."""
        if self._upload.has(ref):
            return 0
        with self.upkeep.phase("fetch"):
            data = fetch(self._source.store, ref)
        with self.upkeep.phase("put"):
            self._upload.put(data, ref)
        # Here, as it is not sent again after an error, or when a new version goes first.
        self.upkeep.count("payload_bytes", ref.nbytes)
        return ref.nbytes

    def _put_again(self, refs: Sequence[PayloadRef], *, within_s: float) -> int:
        """Put again what a pruner may have deleted, if some were put hours ago. Returns the bytes that were sent.

        What the copy got within the last `within_s` is left out.
        """
        if not self._upload.is_late(refs):
            return 0
        self._upload.resume(within_s)
        return sum(self._put(ref) for ref in refs)

    def _copy_versions(self, versions: "range | list[int]") -> int:
        """Copy the manifests of these versions, descending. The lowest comes last: with it readers see the highest."""
        if not versions:
            return 0
        names = [keys.version_key(version) for version in versions]
        manifest_bytes = sum(each(self._copy_manifest, names[:-1], waiting=READ_THREADS))
        return manifest_bytes + self._copy_manifest(names[-1])

    def _copy_manifest(self, key: str) -> int:
        """Copy a manifest, byte for byte; ConflictError if the copy has another one. Returns its size."""
        _, data = read_stored(self._source.store, key)
        if not self._copy.store.create(key, data):
            self._require_same(key, None, data)
        return len(data)

    def _require_same(self, key: str, version: int | None, data: bytes | None = None) -> None:
        """ConflictError unless both stores have the same manifest."""
        copied = get_manifest(self._copy.store, key)
        try:
            wanted = get_manifest(self._source.store, key) if data is None else data
        except NotFoundError:
            wanted = b""
        if copied != wanted:
            raise ConflictError(
                f"{key} of {self._copy.store.url} is not that of {self._source.store.url}",
                key=key,
                version=version,
                rule="relay.version",
                hint="one of the two was rolled back, or has another publisher: choose an empty destination",
            )

    def _raise_floor(self, version: int) -> None:
        """Versions before this one cannot be restored from the copy. A pruner has a record of its own."""
        if version > self._copy.floor_of(keys.COPY):
            self._copy.store.put(keys.COPY, FloorRecord(version).to_bytes())
        self._floor = max(self._floor, version)

    def _beat(self) -> None:
        """Now and then, let the source know the live replicas of the destination, and how far the copy is."""
        now_unix_s = self._clock()
        if not self._has_heartbeats or 0 <= self._beats_due_unix_s - now_unix_s <= BEAT_S:
            return
        self._beats_due_unix_s = now_unix_s + BEAT_S
        name = re.sub(r"[^A-Za-z0-9]+", "-", self.destination).strip("-")[-48:].lstrip("-") or "copy"
        facts = {"engine": RELAY_ENGINE} | ({} if self._at is None else {"digest": self._at.digest.hex})
        try:
            found = [beat for beat in self._copy.heartbeats() if is_live(beat, now_unix_s)]
            live = {f"{name}.{beat.replica}"[:128]: beat for beat in found}
            live[f"{name}.relay"] = Heartbeat("relay", self.version, int(now_unix_s), facts)
            for replica, beat in live.items():
                # One that was not written again since expires at the source as it does at the destination.
                if self._beats.get(replica) != beat:
                    self._source.beat(replace(beat, replica=replica))
            for replica in self._beats.keys() - live.keys():
                self._source.store.delete(keys.replica_key(replica))
            self._beats = live
        except DeltasyncError as error:
            # The copy goes on without them: at worst the source prunes what it needs, and it gets an anchor.
            self.upkeep.count("heartbeat_failures")
            logger.warning("cannot copy the heartbeats of %s: %s", self.destination, error)
