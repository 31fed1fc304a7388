"""The mirror: the replica host's copy of the weights of a version, in memory or in a mapped file.

`Mirror.advance` plans, fetches, verifies and applies, and collects what changed for the next hand-off to the target. A
small record beside a mapped file says what the file should hold. The record is only a hint: when the file is opened
again, the digest of all weights decides.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from deltasync import blocks
from deltasync.blocks import detect, overwrite, overwrite_all
from deltasync.checkpoint import mapped_layout, mapped_weights, require_mapped
from deltasync.errors import CorruptError, FormatError, InvalidInputError, MismatchError, NotFoundError
from deltasync.feed.fetch import fetch_payloads
from deltasync.feed.log import Log
from deltasync.feed.plan import Edge, Plan
from deltasync.feed.replay import (
    BlockedError,
    Start,
    blocking,
    decode_edge,
    open_start,
    require_digest,
    staged_changes,
    with_fallback,
    zeros,
)
from deltasync.files import locked, remove_abandoned_files, temporary_beside
from deltasync.format import limits
from deltasync.format.digest import StateDigest
from deltasync.format.layout import Layout
from deltasync.format.manifest import Kind, Manifest
from deltasync.format.payload import Payload
from deltasync.format.sealed import FORMAT, read_sealed, sealed
from deltasync.format.weights import Changes, Region, Runs, Weights
from deltasync.replica.events import Counts
from deltasync.store import Feed, opened
from deltasync.store.patient import PatientStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MirrorRecord:
    """What a mapped file should hold: `version`, or `writing` if that was finished.

    `applied` names the payloads of an anchor to `writing` that were written already.
    """

    version: int | None = None
    writing: int | None = None
    applied: frozenset[str] = frozenset()

    def to_bytes(self) -> bytes:
        fields = {"version": self.version, "writing": self.writing, "applied": sorted(self.applied)}
        return sealed({"format": FORMAT, **fields})

    @classmethod
    def from_bytes(cls, data: bytes) -> "MirrorRecord":
        """The inverse of `to_bytes`; CorruptError or FormatError on anything else."""
        names, what = ("version", "writing", "applied"), "the record of the mirror"
        fields = read_sealed(data, "mirror", names, what=what, bytes_max=limits.MANIFEST_BYTES_MAX)
        version, writing = fields.optional_count("version"), fields.optional_count("writing")
        return cls(version, writing, frozenset(fields.sha256s("applied")))


WHOLE_SHARE = 4
"""If more than one element in this many changed, a target takes all weights: changes would use more memory."""

_ATTEMPTS = 2
"""How often one advance may find that the mirror lost its bits."""

_WAIT_S = 3600.0
"""How long to wait for another process that fills the same mirror: as long as a large model takes to fetch."""
_PATIENCE_S = 60.0
"""How long a read is retried while a mirror is filled."""

Require = Callable[[Layout], None]
"""Raises MismatchError for a layout that the target cannot take."""


@dataclass(slots=True)
class Handoff:
    """What the mirror applied since the last hand-off, and what that took.

    `changes` lead from version `start` to the mirror's version, in order; None means that only all weights will do.
    """

    start: int | None = None
    changes: list[Changes] | None = None
    changed: int = 0
    edges: list[Kind] = field(default_factory=list)
    nbytes: int = 0
    plan_s: float = 0.0
    fetch_s: float = 0.0
    decode_s: float = 0.0


class Mirror:
    """The weights of one version of a feed. Not thread-safe: its follower guards it.

    `weights` are those of `version`, whose state digest is `digest`. Both are None while the weights are of no version;
    `weights` is None until a layout is known.
    """

    def __init__(
        self, log: Log, *, path: Path | None = None, base: Path | None = None, counts: Counts | None = None
    ) -> None:
        self.log = log
        self.path = path
        self.weights: Weights | None = None
        self.version: int | None = None
        self.digest: StateDigest | None = None
        self._base = base
        self._counts = Counts() if counts is None else counts
        self._record = MirrorRecord()
        self._handoff = Handoff()
        self._is_open = path is None

    def require_ours(self) -> None:
        """InvalidInputError if something is in the place of the file or its record that no mirror has written."""
        if self.path is None:
            return
        record = _record_path(self.path)
        if os.path.lexists(record) and not _is_record(record):
            raise InvalidInputError(
                f"{record} exists and is not the record of a mirror",
                hint="choose another path: the record is beside it",
            )
        # A mirror of an earlier release has no mark of its own.
        if _read_record(self.path) is None:
            require_mapped(self.path)

    def open(self) -> None:
        """Once, look for the mirror that an earlier process left in the file, and check it against the feed.

        Weights that have the digest of no version that the record names are of no version, and will be replaced.
        """
        if self._is_open or self.path is None:
            return
        self.require_ours()
        remove_abandoned_files(_record_path(self.path), _is_record)
        layout = mapped_layout(self.path)
        if layout is not None:
            weights, record = mapped_weights(layout, self.path), _read_record(self.path) or MirrorRecord()
            # The manifests are read first, so that a store that fails does not cost a digest at every attempt.
            candidates = dict(_candidates(self.log, record))
            digest = blocks.digest(weights)
            self.weights, self._record = weights, record
            version = next((version for version, promised in candidates.items() if promised == digest), None)
            if version is not None:
                self._hold(version, digest)
                logger.info("the mirror %s holds version %d", self.path, version)
            else:
                named = ", ".join(map(str, candidates)) if candidates else "it names none"
                message = "the mirror %s has the digest %s, which no version of its record has (%s): rebuilding it"
                logger.warning(message, self.path, digest, named)
                self._counts.rebuilt += not record.applied
        self._is_open = True
        self.hand_off()

    def advance(self, goal: Manifest, require: Require) -> None:
        """Bring the mirror to a version by the cheapest plan, and by others where an edge cannot be used.

        `require` is called with a layout before weights of it are written. An error leaves the mirror at a version of
        the plan, or at none.
        """
        self.open()
        if self._has_diverged(goal):
            logger.warning("version %s of the mirror is not that of the feed: rebuilding it", self.version)
            self.discard()
        if self.version == goal.version:
            return
        handoff, since = self._handoff, time.perf_counter()
        busy_s = handoff.fetch_s + handoff.decode_s
        try:
            self._advance(goal, require)
        finally:
            handoff.plan_s += time.perf_counter() - since - (handoff.fetch_s + handoff.decode_s - busy_s)

    def _has_diverged(self, goal: Manifest) -> bool:
        """Whether the feed has the mirror's version with another digest: it was rolled back and went on differently.

        To go back to an older version is to start from nothing anyway.
        """
        if self.version is None or goal.version < self.version:
            return False
        if goal.version == self.version:
            return goal.digest != self.digest
        if goal.parent == self.version and goal.parent_digest == self.digest:
            return False
        try:
            return self.log.read(self.version).digest != self.digest
        except (CorruptError, FormatError, NotFoundError):
            return False

    def hand_off(self) -> Handoff:
        """Return what was collected since the last hand-off, and collect what comes after the present version."""
        collected = self._handoff
        self._handoff = Handoff(self.version, None if self.version is None else [])
        return collected

    def is_sound(self) -> bool:
        """Whether the weights have the digest of their version, if they are of one; reads all of them."""
        if self.weights is None or self.digest is None or blocks.digest(self.weights) == self.digest:
            return True
        logger.warning("the mirror no longer has the digest of version %s: rebuilding it", self.version)
        return False

    def discard(self) -> None:
        """Give up weights that turned out to be of no version. The next advance starts from nothing."""
        self._counts.rebuilt += 1
        self._handoff.changes = None
        self.version = self.digest = None
        if self.weights is not None:
            self._note(MirrorRecord())

    @contextmanager
    def writing(self, version: int, digest: StateDigest, *, resume: bool = False) -> Iterator[None]:
        """Overwrite the weights with another version in the block.

        If the block fails, the weights are of no version, and the collected changes are lost. `resume` keeps the
        record of the payloads that were applied before an interruption.
        """
        self._note(MirrorRecord(self.version, version, self._record.applied if resume else frozenset()))
        self.version = self.digest = None
        try:
            yield
        except BaseException:
            self._handoff.changes = None
            raise
        self._hold(version, digest)

    def applied(self, edge: Edge) -> frozenset[str]:
        """The payloads of an anchor that an interrupted attempt has written already."""
        if self.version is not None or self._record.writing != edge.end:
            return frozenset()
        return self._record.applied & {ref.sha256 for ref in edge.manifest.payloads}

    def _advance(self, goal: Manifest, require: Require) -> None:
        for _ in range(_ATTEMPTS):
            try:
                with_fallback(
                    self.log,
                    goal,
                    partial(self._apply, require=require),
                    start=lambda: self.version,
                    on_blocked=self._count_blocked,
                )
            except _DivergedError:
                self.discard()
            else:
                return
        raise CorruptError(
            f"the mirror lost its bits {_ATTEMPTS} times while it advanced to version {goal.version}",
            version=goal.version,
            rule="mirror.digest",
            hint="the memory or the disk of this machine may be faulty",
        )

    def _apply(self, plan: Plan, *, require: Require) -> None:
        """Apply all edges of a plan, one after another."""
        if not plan.edges:
            return
        first, start = plan.edges[0], None
        if first.start is None:
            start = open_start(self.log, plan, base=self._base)
            require(start.layout)
            self._allocate(start.layout)
        applied = self.applied(first)
        manifests = (edge.manifest for edge in plan.edges)
        layout = None if self.weights is None else self.weights.layout
        fetched = fetch_payloads(
            self.log.store, manifests, have=applied, layout=layout, on_refetch=self._count_refetched
        )
        with closing(fetched):
            payloads = self._timed(fetched)
            for edge in plan.edges:
                waited_s, since = self._handoff.fetch_s, time.perf_counter()
                with blocking(edge):
                    nbytes = self._apply_edge(edge, payloads, start)
                self._handoff.edges.append(edge.manifest.kind)
                self._handoff.nbytes += nbytes
                self._handoff.decode_s += time.perf_counter() - since - (self._handoff.fetch_s - waited_s)

    def _apply_edge(self, edge: Edge, payloads: Iterator[Payload], start: Start | None) -> int:
        """The number of bytes that were fetched for the edge."""
        if self.weights is None:
            raise CorruptError(f"{edge.key} starts from a version that the mirror does not hold", key=edge.key)
        if edge.start is not None:
            self._apply_delta(edge, payloads, self.weights)
            return edge.nbytes
        applied = self.applied(edge)
        self._apply_anchor(edge, payloads, self.weights, applied, None if start is None else start.base)
        return sum(ref.nbytes for ref in edge.manifest.payloads if ref.sha256 not in applied)

    def _apply_delta(self, edge: Edge, payloads: Iterator[Payload], weights: Weights) -> None:
        """A delta or a skip is decoded completely before the first write."""
        manifest = edge.manifest
        if manifest.parent_digest != self.digest or manifest.layout_sha256 != weights.layout.sha256:
            raise CorruptError(
                f"{edge.key} starts from the digest {manifest.parent_digest}, but version {self.version} has "
                f"{self.digest}",
                rule="chain.link",
                key=edge.key,
                version=edge.end,
            )
        try:
            staged = staged_changes(edge, payloads, weights)
        except MismatchError as error:
            # Either the mirror has lost bits, or the change was made against others than those of its parent.
            if not self.is_sound():
                raise _DivergedError from error
            message = f"{edge.key} does not fit version {edge.start}, from which it starts: {error.message}"
            raise CorruptError(message, rule=error.rule, key=edge.key, version=edge.end) from error
        with self.writing(edge.end, manifest.digest):
            overwrite_all(weights, staged)
        self._collect(staged, weights)

    def _apply_anchor(
        self,
        edge: Edge,
        payloads: Iterator[Payload],
        weights: Weights,
        applied: frozenset[str],
        base: Weights | None,
    ) -> None:
        """An anchor or a base is written as it arrives: the mirror is of no version until its digest is checked."""
        with self.writing(edge.end, edge.manifest.digest, resume=bool(applied)):
            use, in_place = partial(self._overwrite, weights), self._handoff.changes is None
            for differing, ref in decode_edge(
                edge, payloads, weights, use, base=base, applied=applied, in_place=in_place
            ):
                for changes in differing:
                    self._collect(changes, weights)
                if ref is not None:
                    self._note(MirrorRecord(None, edge.end, self._record.applied | {ref.sha256}))
            try:
                require_digest(edge, weights)
            except CorruptError as error:
                # A payload that the record names may not have been written: the next attempt starts from nothing.
                self._note(MirrorRecord())
                if applied:
                    raise _DivergedError from error
                raise

    def _overwrite(self, weights: Weights, changes: Changes) -> list[Changes]:
        """Write all elements of a block; return those that differed if they are collected. Runs in worker threads."""
        if self._handoff.changes is None:
            overwrite(weights, changes)
            return []
        differing = list(detect(weights, _Given(weights, changes), changes.runs))
        for part in differing:
            overwrite(weights, part)
        return differing

    def _collect(self, changes: Iterable[Changes], weights: Weights) -> None:
        for part in changes:
            if self._handoff.changes is not None:
                self._handoff.changes.append(part)
                self._handoff.changed += len(part.values)
                if self._handoff.changed > weights.layout.elements // WHOLE_SHARE:
                    self._handoff.changes = None

    def _allocate(self, layout: Layout) -> None:
        if self.weights is None or self.weights.layout != layout:
            # The old weights go first: there may be no memory for both.
            self.weights = self.version = self.digest = None
            self._record = MirrorRecord()
            self._handoff.changes = None
            self.weights = zeros(layout) if self.path is None else mapped_weights(layout, self.path)

    def _timed(self, payloads: Iterator[Payload]) -> Iterator[Payload]:
        """Adds the time that decoding waits for payloads to that of fetching."""
        while True:
            since = time.perf_counter()
            payload = next(payloads, None)
            self._handoff.fetch_s += time.perf_counter() - since
            if payload is None:
                return
            yield payload

    def _count_blocked(self, blocked: BlockedError) -> None:
        self._counts.rerouted += 1

    def _count_refetched(self, key: str) -> None:
        self._counts.refetched += 1

    def _hold(self, version: int, digest: StateDigest) -> None:
        self.version, self.digest = version, digest
        # The file's record already names this version as the one being written, which is enough.
        self._record = MirrorRecord(version)

    def _note(self, record: MirrorRecord) -> None:
        self._record = record
        if self.path is not None:
            # The record appears whole or not at all, but is not synced: after a power cut the digest decides.
            with temporary_beside(_record_path(self.path)) as temporary:
                temporary.write_bytes(record.to_bytes())
                os.replace(temporary, _record_path(self.path))


def fill_mirror(
    feed: Feed,
    path: Path,
    *,
    base: Path | None = None,
    version: int | None = None,
    on_locked: Callable[[], None] = lambda: None,
) -> int:
    """Bring the mirror in a file to a version, before an engine loads its weights, and return the version.

    By default a version that the mirror holds is kept, and an empty mirror gets the newest one. What the mirror holds
    is proved by its digest. Several processes may fill one mirror: one does it, and the others wait. `on_locked` is
    called once it is this one.
    """
    with ExitStack() as held:
        try:
            held.enter_context(locked(path))
        except InvalidInputError:
            logger.info("waiting for the process that fills the mirror %s", path)
            held.enter_context(locked(path, wait_s=_WAIT_S))
        on_locked()
        store = held.enter_context(opened(feed))
        mirror = Mirror(Log(PatientStore(store, _PATIENCE_S, level=logging.INFO)), path=path, base=base)
        mirror.open()
        if mirror.version is None or version not in (None, mirror.version):
            goal = mirror.log.require_head() if version is None else mirror.log.read(version)
            mirror.advance(goal, lambda layout: None)
        assert mirror.version is not None
        return mirror.version


def _record_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _is_record(path: Path) -> bool:
    """Whether a file is a record, even if it is damaged: a power cut can leave it empty."""
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        data = file.read(limits.MANIFEST_BYTES_MAX + 1)
    return not data.strip(b"\0") or (data.startswith(b'{"applied":') and b'"format":"deltasync/' in data)


def _read_record(path: Path) -> MirrorRecord | None:
    """The record of the mirror at `path`; None if there is none that can be used."""
    try:
        return MirrorRecord.from_bytes(_record_path(path).read_bytes())
    except FileNotFoundError:
        return None
    except (CorruptError, FormatError) as error:
        logger.warning("cannot use the record %s: %s", _record_path(path), error)
        return None


def _candidates(log: Log, record: MirrorRecord) -> Iterable[tuple[int, StateDigest]]:
    """Versions that the file may hold, with the digests that the feed has for them."""
    for version in (record.version, record.writing):
        if version is not None:
            try:
                yield version, log.read(version).digest
            except (CorruptError, FormatError, NotFoundError) as error:
                logger.warning("cannot check the mirror against version %d: %s", version, error)


class _DivergedError(Exception):
    """The mirror has other bits than its version; the feed is not at fault."""


class _Given:
    """The elements of a block with the bits that were decoded for them."""

    def __init__(self, weights: Weights, changes: Changes) -> None:
        self.layout = weights.layout
        self._weights = weights
        self._changes = changes

    def region(self, runs: Runs) -> Region:
        return self._weights.region(runs).holding(self._changes.values)
