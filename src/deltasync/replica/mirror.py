"""The mirror: the replica host's copy of the weights of a version, in memory or in a mapped file.

The mirror follows a feed: plan, fetch, prove, decode. Nothing is written to it before it is proved. A small record lies
beside a mapped file and says what the file should hold. The record is only a hint: when the file is opened again, the
digest of all weights decides.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from deltasync import blocks
from deltasync.blocks import detect, overwrite
from deltasync.checkpoint import mapped_layout, mapped_weights
from deltasync.errors import CorruptError, FormatError, MismatchError, NotFoundError
from deltasync.feed.fetch import fetch_payloads
from deltasync.feed.log import Log
from deltasync.feed.plan import Edge, Plan
from deltasync.feed.replay import (
    BlockedError,
    blocking,
    decode_edge,
    open_start,
    require_digest,
    with_fallback,
    zeros,
)
from deltasync.format.digest import StateDigest
from deltasync.format.layout import Layout
from deltasync.format.manifest import Kind, Manifest
from deltasync.format.payload import Payload
from deltasync.format.sealed import (
    FORMAT,
    SEAL,
    is_count,
    is_sha256,
    parse_object,
    require_sealed,
    require_understood,
    sealed,
)
from deltasync.format.weights import Changes, Region, Runs, Weights
from deltasync.parallel import each
from deltasync.replica.events import Counts, Seconds

logger = logging.getLogger(__name__)
_COUNT_MAX = (1 << 63) - 1


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
        fields = parse_object(data, what="the mirror's record", scope="mirror")
        if fields.get("format") != FORMAT:
            raise FormatError(f"a mirror of format {fields.get('format')!r:.80}", rule="mirror.format")
        require_understood(
            fields, ("format", "version", "writing", "applied", SEAL), what="the mirror's record", scope="mirror"
        )
        require_sealed(data, fields, what="the mirror's record", scope="mirror")
        version, writing, applied = fields.get("version"), fields.get("writing"), fields.get("applied")
        counts = all(number is None or is_count(number, most=_COUNT_MAX) for number in (version, writing))
        if not counts or not isinstance(applied, list) or not all(is_sha256(text) for text in applied):
            raise CorruptError("the mirror's record has fields of other types", rule="mirror.field")
        return cls(version, writing, frozenset(applied))


class Mirror:
    """`weights` are those of `version`, whose state digest is `digest`; both None while they are of none.

    Not safe for threads: whoever moves or compares it holds the follower's lock.
    """

    def __init__(self, weights: Weights, path: Path | None) -> None:
        self.weights = weights
        self.path = path
        self.version: int | None = None
        self.digest: StateDigest | None = None
        self._record = MirrorRecord()

    @classmethod
    def new(cls, layout: Layout, path: Path | None) -> "Mirror":
        """Room for weights of this layout; a file of another layout is replaced."""
        return cls(zeros(layout) if path is None else mapped_weights(layout, path), path)

    @classmethod
    def reopened(cls, path: Path, log: Log) -> "Mirror | None":
        """What an earlier process left in a file, proved against the manifests of the feed; None if there is no file.

        One that holds no version of the feed is loudly given up: it is of no version then.
        """
        layout = mapped_layout(path)
        if layout is None:
            return None
        mirror = cls(mapped_weights(layout, path), path)
        mirror._record = _read_record(path)
        # The manifests first: a store that fails must not cost a digest at every attempt.
        candidates = dict(_candidates(log, mirror._record))
        found = blocks.digest(mirror.weights)
        for version, digest in candidates.items():
            if digest == found:
                mirror._hold(version, digest)
                logger.info("the mirror %s holds version %d", path, version)
                return mirror
        logger.warning(
            "the mirror %s has the digest %s, of no version that it should hold (%s): it is built anew",
            path,
            found,
            ", ".join(map(str, candidates)) if candidates else "none is known",
        )
        return mirror

    @property
    def applied(self) -> frozenset[str]:
        """Payloads of the anchor to `torn_for` that were written before an interruption."""
        return self._record.applied

    @property
    def torn_for(self) -> int | None:
        """The version that was being written when the weights got torn."""
        return self._record.writing if self.version is None else None

    @contextmanager
    def becoming(self, version: int, digest: StateDigest, *, resume: bool = False) -> Iterator[None]:
        """The block overwrites the weights with another version. If it fails, they are of none.

        `resume`: what was applied before an interruption stays noted.
        """
        applied = self._record.applied if resume else frozenset()
        self._note(MirrorRecord(self.version, version, applied))
        self.version = self.digest = None
        yield
        self._hold(version, digest)

    def note_applied(self, sha256: str) -> None:
        """A payload of an anchor is written: it need not be fetched again after an interruption."""
        self._note(MirrorRecord(None, self._record.writing, self._record.applied | {sha256}))

    def give_up(self) -> None:
        """The weights turned out to be of no version, and nothing of them is of use."""
        self.version = self.digest = None
        self._note(MirrorRecord())

    def is_sound(self) -> bool:
        """Whether the weights have the digest of their version; reads all of them."""
        return self.digest is not None and blocks.digest(self.weights) == self.digest

    def _hold(self, version: int, digest: StateDigest) -> None:
        self.version, self.digest = version, digest
        # The file's record already names this version as the one being written, which is as good.
        self._record = MirrorRecord(version)

    def _note(self, record: MirrorRecord) -> None:
        self._record = record
        if self.path is not None:
            # Whole or not at all, but not synced: after a power cut the digest decides, whatever is found here.
            temporary = _record_path(self.path).with_suffix(".tmp")
            temporary.write_bytes(record.to_bytes())
            os.replace(temporary, _record_path(self.path))


def _record_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _read_record(path: Path) -> MirrorRecord:
    try:
        return MirrorRecord.from_bytes(_record_path(path).read_bytes())
    except FileNotFoundError:
        return MirrorRecord()
    except (CorruptError, FormatError) as error:
        logger.warning("%s is of no use: %s", _record_path(path), error)
        return MirrorRecord()


def _candidates(log: Log, record: MirrorRecord) -> Iterable[tuple[int, StateDigest]]:
    """Versions that the file may hold, with the digests that the feed has for them."""
    for version in (record.version, record.writing):
        if version is not None:
            try:
                yield version, log.read(version).digest
            except (CorruptError, FormatError, NotFoundError) as error:
                logger.warning("cannot prove the mirror by version %d: %s", version, error)


WHOLE_SHARE = 4
"""From one in so many elements on, a target takes all weights: changes would need more memory than they save."""


class Gathered:
    """Changes since the mirror was at version `start`, in order, and what they took."""

    def __init__(self, start: int | None, *, elements: int) -> None:
        self.start = start
        self.changed = 0
        self.edges: list[Kind] = []
        self.nbytes = 0
        self.plan_s = 0.0
        self.fetch_s = 0.0
        self.decode_s = 0.0
        self._changes: list[Changes] | None = None if start is None else []
        self._most = elements // WHOLE_SHARE
        self._is_torn = False

    @property
    def changes(self) -> tuple[Changes, ...] | None:
        """None where only all weights will do."""
        return None if self._changes is None or self._is_torn else tuple(self._changes)

    @property
    def is_lost(self) -> bool:
        """Whether changes need not be added any more."""
        return self._changes is None

    def add(self, changes: Iterable[Changes]) -> None:
        """Bits that the mirror is overwritten with."""
        for part in changes:
            if self._changes is not None:
                self.changed += len(part.values)
                self._changes.append(part)
                if self.changed > self._most:
                    self.lose()

    def lose(self) -> None:
        """The changes are not known any more, or too many."""
        self._changes = None

    @contextmanager
    def tearing(self) -> Iterator[None]:
        """The block overwrites the mirror. If it fails, only all weights of a later version will do."""
        if self._is_torn:
            self.lose()
        self._is_torn = True
        yield
        self._is_torn = False

    def count(self, edge: Edge, *, nbytes: int) -> None:
        """The mirror has taken an edge, for which so much was fetched."""
        self.edges.append(edge.manifest.kind)
        self.nbytes += nbytes

    def seconds(self, *, stage_s: float, commit_s: float, pause_s: float) -> Seconds:
        """All phases of a move."""
        return Seconds(self.plan_s, self.fetch_s, self.decode_s, stage_s, commit_s, pause_s)


_DIVERGED_MOST = 2
"""How often in one move a mirror may turn out to be of no use."""

Require = Callable[[Layout], None]
"""Raises MismatchError for a layout that the target cannot take."""


class Reader:
    """Keeps a mirror and what it got since somebody took it. Not safe for threads."""

    def __init__(self, log: Log, *, path: Path | None, base: Path | None, counts: Counts) -> None:
        self.mirror: Mirror | None = None
        self.gathered = Gathered(None, elements=0)
        self._log = log
        self._path = path
        self._base = base
        self._counts = counts
        self._is_open = path is None

    @property
    def version(self) -> int | None:
        """What the mirror holds."""
        return None if self.mirror is None else self.mirror.version

    def open(self) -> None:
        """Look once for the mirror that an earlier process left in the file."""
        if self._is_open or self._path is None:
            return
        self.mirror = Mirror.reopened(self._path, self._log)
        self._is_open = True
        if self.mirror is not None and self.mirror.version is None and not self.mirror.applied:
            self._counts.rebuilt += 1
        self.renew()

    def renew(self) -> None:
        """From now on, gather what comes after the version that the mirror holds."""
        elements = 0 if self.mirror is None else self.mirror.weights.layout.elements
        self.gathered = Gathered(self.version, elements=elements)

    def move(self, goal: Manifest, require: Require) -> Mirror:
        """Bring the mirror to a version by the cheapest way, and by others where that one is closed.

        An error leaves it at a version on the way, or at none. `require` sees every layout before it is used.
        """
        self.open()
        if self.mirror is not None and self.version == goal.version and self.mirror.digest != goal.digest:
            logger.warning("the mirror has another version %d than the feed: it is built anew", goal.version)
            self.diverged()
        if self.mirror is not None and self.version == goal.version:
            return self.mirror
        for _ in range(_DIVERGED_MOST):
            try:
                with_fallback(
                    self._log,
                    goal,
                    self._timed(partial(self._take, require=require)),
                    start=lambda: self.version,
                    on_blocked=self._rerouted,
                )
            except _DivergedError:
                self.diverged()
                continue
            if self.mirror is not None:
                return self.mirror
        raise CorruptError(
            f"the mirror lost its bits {_DIVERGED_MOST} times on the way to version {goal.version}",
            version=goal.version,
            rule="mirror.digest",
            hint="the memory or the disk of this machine may be faulty",
        )

    def diverged(self) -> None:
        """The mirror has other bits than its version: begin from nothing."""
        self._counts.rebuilt += 1
        self.gathered.lose()
        if self.mirror is not None:
            self.mirror.give_up()

    def is_sound(self) -> bool:
        """Whether the mirror has the bits of its version, if it holds one; reads all of it."""
        if self.mirror is None or self.mirror.version is None or self.mirror.is_sound():
            return True
        logger.warning("the mirror does not have the digest of version %s any more: it is built anew", self.version)
        return False

    def _timed(self, attempt: Callable[[Plan], None]) -> Callable[[Plan], None]:
        """Counts the time between attempts as planning."""
        since = time.perf_counter()

        def timed(way: Plan) -> None:
            nonlocal since
            self.gathered.plan_s += time.perf_counter() - since
            try:
                attempt(way)
            finally:
                since = time.perf_counter()

        return timed

    def _rerouted(self, blocked: BlockedError) -> None:
        self._counts.rerouted += 1

    def _refetched(self, key: str) -> None:
        self._counts.refetched += 1

    def _take(self, way: Plan, *, require: Require) -> None:
        """All edges of a plan, one after another."""
        if not way.edges:
            return
        first = way.edges[0]
        have: frozenset[str] = frozenset()
        base: Weights | None = None
        if first.start is None:
            start = open_start(self._log, way, base=self._base)
            require(start.layout)
            have, base = self._make_room(start.layout, first), start.base
        manifests = (edge.manifest for edge in way.edges)
        with closing(fetch_payloads(self._log.store, manifests, have=have, on_refetch=self._refetched)) as arriving:
            for edge in way.edges:
                try:
                    with blocking(edge):
                        self._take_edge(edge, self._timed_payloads(arriving), have, base)
                except BlockedError as blocked:
                    if edge.start is None or not isinstance(blocked.cause, MismatchError):
                        raise
                    if not self.is_sound():
                        raise _DivergedError from blocked
                    raise BlockedError(edge, _misfit(edge, blocked.cause)) from blocked

    def _timed_payloads(self, payloads: Iterator[Payload]) -> Iterator[Payload]:
        """The payloads; the time that decoding waits for them is counted."""
        while True:
            since = time.perf_counter()
            payload = next(payloads, None)
            self.gathered.fetch_s += time.perf_counter() - since
            if payload is None:
                return
            yield payload

    def _make_room(self, layout: Layout, first: Edge) -> frozenset[str]:
        """A mirror of that layout; the payloads of its anchor that it has from an interrupted attempt."""
        if self.mirror is None or self.mirror.weights.layout != layout:
            # The old one goes first: there may be no room for two.
            self.mirror = None
            self.mirror = Mirror.new(layout, self._path)
            self.gathered.lose()
        if self.mirror.torn_for != first.end:
            return frozenset()
        return self.mirror.applied & {ref.sha256 for ref in first.manifest.payloads}

    def _take_edge(self, edge: Edge, payloads: Iterator[Payload], have: frozenset[str], base: Weights | None) -> None:
        mirror, gathered = self.mirror, self.gathered
        if mirror is None:
            raise CorruptError(f"{edge.key} leads on from nothing", key=edge.key)
        waited_s, since = gathered.fetch_s, time.perf_counter()
        if edge.start is not None:
            self._take_change(mirror, edge, payloads)
        else:
            self._take_all(mirror, edge, payloads, have, base)
        gathered.count(edge, nbytes=sum(ref.nbytes for ref in edge.manifest.payloads if ref.sha256 not in have))
        gathered.decode_s += time.perf_counter() - since - (gathered.fetch_s - waited_s)

    def _take_change(self, mirror: Mirror, edge: Edge, payloads: Iterator[Payload]) -> None:
        """A delta or skip: decoded whole, and only then written."""
        manifest = edge.manifest
        if manifest.parent_digest != mirror.digest or manifest.layout_sha256 != mirror.weights.layout.sha256:
            message = f"{edge.key} starts from {manifest.parent_digest}, version {mirror.version} has {mirror.digest}"
            raise CorruptError(message, rule="chain.link", key=edge.key, version=edge.end)
        staged = [part for _, changes in decode_edge(edge, payloads, mirror.weights) for part in changes]
        with self.gathered.tearing(), mirror.becoming(edge.end, manifest.digest):
            for _done in each(partial(overwrite, mirror.weights), staged):
                pass
        self.gathered.add(staged)

    def _take_all(
        self, mirror: Mirror, edge: Edge, payloads: Iterator[Payload], have: frozenset[str], base: Weights | None
    ) -> None:
        """An anchor or base: written as it comes, so that the mirror is torn until its digest is proved."""
        gathered = self.gathered
        with gathered.tearing(), mirror.becoming(edge.end, edge.manifest.digest, resume=bool(have)):
            for ref, changes in decode_edge(edge, payloads, mirror.weights, base=base, applied=have):
                for differing in each(partial(self._overwrite, mirror.weights), changes):
                    gathered.add(differing)
                if ref is not None:
                    mirror.note_applied(ref.sha256)
            try:
                require_digest(edge, mirror.weights)
            except CorruptError:
                # What was noted as applied may not have been: the next attempt begins from nothing.
                mirror.give_up()
                if have:
                    raise _DivergedError from None
                raise

    def _overwrite(self, weights: Weights, changes: Changes) -> list[Changes]:
        """Write, and return what differed before, if that is still collected. Called in worker threads."""
        if self.gathered.is_lost:
            overwrite(weights, changes)
            return []
        differing = list(detect(weights, _Given(weights, changes), changes.runs))
        for part in differing:
            overwrite(weights, part)
        return differing


class _DivergedError(Exception):
    """The mirror, and not the feed, is to blame."""


def _misfit(edge: Edge, cause: MismatchError) -> CorruptError:
    """The mirror is as it should be: then it is the change that is wrong."""
    message = f"{edge.key} does not fit version {edge.start}, from which it leads: {cause.message}"
    return CorruptError(message, rule=cause.rule, key=edge.key, version=edge.end)


class _Given:
    """The elements of a block with the bits that were decoded for them."""

    def __init__(self, weights: Weights, changes: Changes) -> None:
        self.layout = weights.layout
        self._weights = weights
        self._changes = changes

    def region(self, runs: Runs) -> Region:
        return self._weights.region(runs).holding(self._changes.values)
