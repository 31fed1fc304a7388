"""The mirror moves along a feed: plan, fetch, prove, decode. Nothing is written to it before it is proved."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

from deltasync import blocks
from deltasync.apply import overwrite
from deltasync.bases import open_base
from deltasync.detect import detect, stretches
from deltasync.errors import CorruptError, MismatchError
from deltasync.following.events import Counts
from deltasync.following.gathering import Gathered
from deltasync.following.mirror import Mirror
from deltasync.format import limits
from deltasync.format.changes import Changes
from deltasync.format.layout import Layout
from deltasync.format.manifest import Manifest
from deltasync.format.payload import Payload
from deltasync.format.weights import Region, Runs, Weights
from deltasync.log.log import Log
from deltasync.log.payloads import fetch_payloads
from deltasync.log.planning import Edge, Plan
from deltasync.parallel import each
from deltasync.replay import BlockedError, blocking, by_any_way, plan_layout

_log = logging.getLogger(__name__)

_DIVERGED_MOST = 2
"""How often in one move a mirror may turn out to be of no use."""

Require = Callable[[Layout], None]
"""Raises MismatchError for a layout that the target cannot take."""


class Reader:
    """Keeps a mirror and what it got since somebody took it. Not safe for threads."""

    def __init__(self, log: Log, *, path: Path | None, base: Path | None, threads: int | None, counts: Counts) -> None:
        self.mirror: Mirror | None = None
        self.gathered = Gathered(None, elements=0)
        self._log = log
        self._path = path
        self._base = base
        self._threads = threads
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
        self.mirror = Mirror.reopened(self._path, self._log, threads=self._threads)
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
            _log.warning("the mirror has another version %d than the feed: it is built anew", goal.version)
            self.diverged()
        if self.mirror is not None and self.version == goal.version:
            return self.mirror
        for _ in range(_DIVERGED_MOST):
            try:
                by_any_way(
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
        if self.mirror is None or self.mirror.version is None or self.mirror.is_sound(threads=self._threads):
            return True
        _log.warning("the mirror does not have the digest of version %s any more: it is built anew", self.version)
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
        if first.start is None:
            layout = plan_layout(self._log, way, base=self._base)
            require(layout)
            have = self._make_room(layout, first)
        manifests = (edge.manifest for edge in way.edges)
        with closing(fetch_payloads(self._log.store, manifests, have=have, on_refetch=self._refetched)) as arriving:
            for edge in way.edges:
                try:
                    with blocking(edge):
                        self._take_edge(edge, arriving, have)
                except BlockedError as blocked:
                    if edge.start is None or not isinstance(blocked.cause, MismatchError):
                        raise
                    if not self.is_sound():
                        raise _DivergedError from blocked
                    raise BlockedError(edge, _misfit(edge, blocked.cause)) from blocked

    def _next(self, arriving: Iterator[Payload]) -> Payload:
        """The next payload; the time that it is waited for is counted."""
        since = time.perf_counter()
        try:
            return next(arriving)
        finally:
            self.gathered.fetch_s += time.perf_counter() - since

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

    def _take_edge(self, edge: Edge, arriving: Iterator[Payload], have: frozenset[str]) -> None:
        mirror, gathered = self.mirror, self.gathered
        if mirror is None:
            raise CorruptError(f"{edge.key} leads on from nothing", key=edge.key)
        waited_s, since = gathered.fetch_s, time.perf_counter()
        if edge.start is not None:
            self._take_change(mirror, edge, arriving)
        else:
            self._take_all(mirror, edge, arriving, have)
        gathered.count(edge, nbytes=sum(ref.nbytes for ref in edge.manifest.payloads if ref.sha256 not in have))
        gathered.decode_s += time.perf_counter() - since - (gathered.fetch_s - waited_s)

    def _take_change(self, mirror: Mirror, edge: Edge, arriving: Iterator[Payload]) -> None:
        """A delta or skip: decoded whole, and only then written."""
        manifest = edge.manifest
        if manifest.parent_digest != mirror.digest or manifest.layout_sha256 != mirror.weights.layout.sha256:
            told = f"{edge.key} starts from {manifest.parent_digest}, version {mirror.version} has {mirror.digest}"
            raise CorruptError(told, rule="chain.link", key=edge.key, version=edge.end)
        found: list[Changes] = []
        for _ in manifest.payloads:
            found.extend(blocks.decode(mirror.weights, self._next(arriving).blocks(), threads=self._threads))
        with self.gathered.tearing(), mirror.becoming(edge.end, manifest.digest):
            for _done in each(partial(overwrite, mirror.weights), found, threads=self._threads):
                pass
        self.gathered.add(found)

    def _take_all(self, mirror: Mirror, edge: Edge, arriving: Iterator[Payload], have: frozenset[str]) -> None:
        """An anchor or base: written as it comes, so that the mirror is torn until its digest is proved."""
        manifest, gathered = edge.manifest, self.gathered
        with gathered.tearing(), mirror.becoming(edge.end, manifest.digest, resume=bool(have)):
            if manifest.kind == "base":
                self._write_all(mirror.weights, open_base(manifest, at=self._base, threads=self._threads).weights)
            for ref in manifest.payloads:
                if ref.sha256 not in have:
                    self._write_payload(mirror.weights, self._next(arriving))
                    mirror.note_applied(ref.sha256)
            found = blocks.digest(mirror.weights, threads=self._threads)
            if found != manifest.digest:
                # What was noted as applied may not have been: the next attempt begins from nothing.
                mirror.give_up()
                if have:
                    raise _DivergedError
                told = f"{edge.key} came out with the digest {found}, it promises {manifest.digest}"
                raise CorruptError(told, rule="restore.digest", key=edge.key, version=edge.end)

    def _write_payload(self, weights: Weights, payload: Payload) -> None:
        for changes in blocks.decode(weights, payload.blocks(), relative=False, threads=self._threads):
            if not self.gathered.is_lost:
                self.gathered.add(detect(weights, _Given(weights, changes), changes.runs))
            overwrite(weights, changes)

    def _write_all(self, weights: Weights, new: Weights) -> None:
        def one(stretch: Runs) -> list[Changes]:
            found = list(detect(weights, new, stretch))
            for changes in found:
                overwrite(weights, changes)
            return found

        pieces = stretches(weights.layout, elements=limits.PLANES_ELEMENTS)
        for found in each(one, pieces, threads=self._threads):
            self.gathered.add(found)


class _DivergedError(Exception):
    """The mirror, and not the feed, is to blame."""


def _misfit(edge: Edge, cause: MismatchError) -> CorruptError:
    """The mirror is as it should be: then it is the change that is wrong."""
    told = f"{edge.key} does not fit version {edge.start}, from which it leads: {cause.message}"
    return CorruptError(told, rule=cause.rule, key=edge.key, version=edge.end)


class _Given:
    """The elements of a block with the bits that were decoded for them."""

    def __init__(self, weights: Weights, changes: Changes) -> None:
        self.layout = weights.layout
        self._weights = weights
        self._changes = changes

    def region(self, runs: Runs) -> Region:
        return self._weights.region(runs).holding(self._changes.values)
