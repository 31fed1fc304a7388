"""Weights at a version of a feed, and the one way in which they get to another version.

The trainer's shadow, the replica's mirror and the weights that a tool holds are states. `State.advance` plans, fetches,
decodes, verifies and writes; its cost is that of the change.
"""

import logging
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal

from deltasync import blocks
from deltasync.errors import CorruptError, FormatError, InvalidInputError, MismatchError, NotFoundError
from deltasync.feed.fetch import fetch_payloads
from deltasync.feed.log import Log
from deltasync.feed.plan import Edge, Plan
from deltasync.feed.route import Blocked, Route, require_digest
from deltasync.format import limits
from deltasync.format.digest import StateDigest
from deltasync.format.layout import Layout
from deltasync.format.manifest import Kind, Manifest, PayloadRef
from deltasync.format.payload import Payload
from deltasync.format.weights import Changes, Region, Runs, Weights, zeros
from deltasync.parallel import Progress, counting, each
from deltasync.past import Past, bits_before

logger = logging.getLogger(__name__)

ATTEMPTS = 2
"""How often one advance may find that the weights lost their bits."""

_Use = Literal["keep", "drop", "write", "compare"]
"""What becomes of decoded changes: keep them, drop them, write them, or write and keep those that differ."""


class LostBits(Exception):  # noqa: N818 - what `State.advance` answers by starting anew
    """The weights have other bits than their version; the feed is not at fault."""


@dataclass(slots=True)
class Applied:
    """What advances have done to a state since this record began. Its owner reads it, also after an error.

    `changes` lead from version `start` to that of the state, in order, as long as they are at most `limit` elements;
    None means that only all weights will do.
    """

    limit: int = 0
    start: int | None = None
    changes: list[Changes] | None = None
    changed: int = 0
    edges: list[Kind] = field(default_factory=list)
    nbytes: int = 0
    rerouted: int = 0
    refetched: int = 0
    rebuilt: int = 0
    plan_s: float = 0.0
    fetch_s: float = 0.0
    decode_s: float = 0.0

    def collect(self, changes: Iterable[Changes]) -> None:
        """Keep changes, or give them up if they become too many."""
        for part in changes:
            if self.changes is not None:
                self.changes.append(part)
                self.changed += len(part.values)
                if self.changed > self.limit:
                    self.changes = None

    def count_refetched(self, key: str) -> None:
        self.refetched += 1


class State:
    """The weights of one version. One thread at a time may use it.

    `weights` is None until a layout is known; `at`, the manifest of the version, is None while the weights are of no
    version. `scratch`: nothing else uses the weights before they are at the goal. Deltas are then written as they are
    decoded, so that memory does not grow with them, and the digest of all weights is checked at the end.
    """

    def __init__(self, weights: Weights | None = None, at: Manifest | None = None, *, scratch: bool = False) -> None:
        self.weights = weights
        self.at = at
        self._is_scratch = scratch
        self._writing: int | None = None
        """The version that an interrupted attempt was writing."""
        self._written: frozenset[str] = frozenset()
        """The payloads of it that were written from nothing."""
        self.lock = threading.RLock()
        """Held by `apply` while it overwrites the weights. Other threads hold it to read them."""
        self.pasts: list[Past] = []
        """What keeps the bits that are replaced. The owner of a past adds it here, and removes it."""
        self._missed: list[list[list[Changes]]] = []
        self._replaced: list[Changes] = []
        """The bits that an anchor has replaced so far, for `pasts`."""

    @property
    def version(self) -> int | None:
        return None if self.at is None else self.at.version

    @property
    def digest(self) -> StateDigest | None:
        return None if self.at is None else self.at.digest

    def past(self, *, over_anchors: bool = False) -> Past:
        """The weights of the present version, while the state goes on."""
        if self.at is None:
            raise InvalidInputError("the weights are of no version")
        return Past(self.require_weights(), self.at, self.lock, over_anchors=over_anchors)

    def missed(self) -> list[list[Changes]]:
        """A list to which every `apply` adds its changes, for a copy of the weights elsewhere; its owner empties it."""
        self._missed.append([])
        return self._missed[-1]

    def advance(self, route: Route, applied: Applied | None = None, progress: Progress | None = None) -> None:
        """Go to the goal of a route by the cheapest plan, and by others where an edge cannot be used.

        An error leaves the state at a version of the plan, or at none.
        """
        applied = Applied() if applied is None else applied
        since, busy_s = time.perf_counter(), applied.fetch_s + applied.decode_s
        goal, lost = route.goal, 0
        try:
            while self.at is None or (self.at.version, self.at.digest) != (goal.version, goal.digest):
                plan = None if self.version == goal.version else route.plan(self.version)
                if plan is None or self._has_diverged(route, plan.edges[0]):
                    logger.warning("the weights of version %s are not those of the feed: rebuilding them", self.version)
                    self.discard(applied)
                    continue
                try:
                    self.follow(route, plan, applied, progress)
                except Blocked:
                    # The next plan goes around it.
                    continue
                except LostBits as error:
                    self._lose_pasts()
                    self.discard(applied)
                    lost += 1
                    if lost == ATTEMPTS:
                        raise CorruptError(
                            f"the weights lost their bits {ATTEMPTS} times on the way to version {goal.version}",
                            version=goal.version,
                            rule="state.digest",
                            hint="the memory or the disk of this machine may be faulty",
                        ) from error
        finally:
            applied.rerouted += route.rerouted
            route.rerouted = 0
            applied.plan_s += time.perf_counter() - since - (applied.fetch_s + applied.decode_s - busy_s)

    def follow(
        self, route: Route, plan: Plan, applied: Applied | None = None, progress: Progress | None = None
    ) -> None:
        """Take all edges of a plan of the route, one after another. Blocked if one cannot be used."""
        applied = Applied() if applied is None else applied
        first = plan.edges[0]
        base = None
        if first.start is None and not self._has_room(first):
            start = route.open(first)
            base = start.base
            self._allocate(start.layout, applied)
        count = counting(progress, "restore", plan.nbytes)
        manifests = [edge.manifest for edge in plan.edges]
        layout = None if self.weights is None else self.weights.layout
        have = self.written(first)
        fetched = fetch_payloads(
            route.log.store, manifests, have=have, layout=layout, on_refetch=applied.count_refetched
        )
        with closing(fetched):
            for edge in plan.edges:
                with route.using(edge):
                    for nbytes in self.take(edge, fetched, applied, base if edge is first else None):
                        if count is not None:
                            count(nbytes)
        last = plan.edges[-1]
        if self._is_scratch:
            elements = 0 if self.weights is None else self.weights.layout.elements
            with route.using(first):
                self.prove(last, progress=counting(progress, "digest", elements))
        if last.end == route.goal.version:
            self.at = route.goal

    def take(
        self,
        edge: Edge,
        payloads: Iterator[Payload],
        applied: Applied | None = None,
        base: Weights | None = None,
    ) -> Iterator[int]:
        """Write the version that an edge leads to. Yields the size of each payload that was decoded meanwhile.

        A scratch state is of no version then: `prove` it.
        """
        applied = Applied() if applied is None else applied
        waited_s, since = applied.fetch_s, time.perf_counter()
        have = self.written(edge)
        if edge.start is None:
            yield from self._take_whole(edge, payloads, applied, base, have)
        elif self._is_scratch:
            self._begin(edge.manifest)
            for _, ref in self._decoded(edge, payloads, "write", applied):
                if ref is not None:
                    yield ref.nbytes
        else:
            # A delta or a skip is decoded and verified completely before the first write.
            manifest = edge.manifest
            if manifest.parent_digest != self.digest or manifest.layout_sha256 != self.require_weights().layout.sha256:
                raise CorruptError(
                    f"{edge.key} starts from the digest {manifest.parent_digest}, but version {self.version} has "
                    f"{self.digest}",
                    rule="chain.link",
                    key=edge.key,
                    version=edge.end,
                )
            staged: list[Changes] = []
            try:
                for part, _ in self._decoded(edge, payloads, "keep", applied):
                    staged += part
            except MismatchError as error:
                # Either these weights have lost bits, or the change was made against others than those of its parent.
                if not self.is_sound():
                    raise LostBits from error
                message = f"{edge.key} does not fit version {edge.start}, from which it starts: {error.message}"
                raise CorruptError(message, rule=error.rule, key=edge.key, version=edge.end) from error
            try:
                self.apply(staged, manifest)
            except BaseException:
                applied.changes = None
                raise
            applied.collect(staged)
        applied.edges.append(edge.manifest.kind)
        applied.nbytes += sum(ref.nbytes for ref in edge.manifest.payloads if ref.sha256 not in have)
        applied.decode_s += time.perf_counter() - since - (applied.fetch_s - waited_s)

    def _take_whole(
        self,
        edge: Edge,
        payloads: Iterator[Payload],
        applied: Applied,
        base: Weights | None,
        have: frozenset[str],
    ) -> Iterator[int]:
        """An anchor or a base is written as it arrives: the weights are of no version until their digest is checked."""
        for past in self.pasts:
            if not past.over_anchors:
                past.lose()
        self._begin(edge.manifest, keep=have)
        try:
            for changes, ref in self._decoded(edge, payloads, "compare", applied, base=base, have=have):
                applied.collect(changes)
                if ref is not None:
                    self._written |= {ref.sha256}
                    self._note(None, self._writing, self._written)
                    yield ref.nbytes
            if not self._is_scratch:
                self.prove(edge, was_resumed=bool(have))
        except BaseException:
            applied.changes = None
            raise
        finally:
            for past in self.pasts:
                past.keep(self._replaced)
            self._replaced = []

    def check(self, edge: Edge, payloads: Iterator[Payload]) -> Iterator[int]:
        """Decode and verify an edge that starts from the present version, or leads to it from nothing.

        Yields the size of each payload that is good. Nothing is written or kept.
        """
        for _, ref in self._decoded(edge, payloads, "drop", Applied()):
            if ref is not None:
                yield ref.nbytes

    def apply(self, changes: Sequence[Changes], at: Manifest, *, before: Sequence[Changes] | None = None) -> None:
        """Overwrite the weights with the verified changes that lead to a version. After an error they are of none.

        `before`: what `bits_before` gives for the changes, where the caller has it already.
        """
        weights = self.require_weights()
        if self.pasts and before is None:
            before = self.bits_before(changes)
        with self.lock:
            for past in self.pasts:
                past.keep(before or ())
            self._begin(at)
            blocks.overwrite_all(weights, changes)
            for missed in self._missed:
                missed.append(list(changes))
            self._hold(at)

    def bits_before(self, changes: Iterable[Changes]) -> list[Changes]:
        """The bits that changes to the present version will replace."""
        return list(each(partial(bits_before, self.require_weights()), changes))

    def require_weights(self) -> Weights:
        """The weights; CorruptError if there are none yet."""
        if self.weights is None:
            raise CorruptError("the change starts from a version that is not held")
        return self.weights

    def is_sound(self) -> bool:
        """Whether the weights have the digest of their version, if they are of one; reads all of them."""
        if self.weights is None or self.at is None or blocks.digest(self.weights) == self.at.digest:
            return True
        logger.warning("the weights no longer have the digest of version %s: rebuilding them", self.version)
        return False

    def discard(self, applied: Applied) -> None:
        """Give up weights that turned out to be of no version. The next advance starts from nothing."""
        applied.rebuilt += 1
        applied.changes = None
        self.at = None
        self._forget()
        if self.weights is not None:
            self._note()

    def written(self, edge: Edge) -> frozenset[str]:
        """The payloads of an edge from nothing that an interrupted attempt has written already."""
        if self.at is not None or self._writing != edge.end:
            return frozenset()
        return self._written & {ref.sha256 for ref in edge.manifest.payloads}

    def _begin(self, to: Manifest, *, keep: frozenset[str] = frozenset()) -> None:
        """The weights are about to be overwritten with a version; `keep`: payloads of it that are there already."""
        self._note(self.version, to.version, keep)
        self.at = None
        self._writing, self._written = to.version, keep

    def _note(
        self, version: int | None = None, writing: int | None = None, written: frozenset[str] = frozenset()
    ) -> None:
        """Called before the weights are overwritten, and with what was written: a state in a file records it there."""

    def _hold(self, at: Manifest) -> None:
        """The weights are those of a version."""
        self.at = at
        self._forget()

    def _forget(self) -> None:
        self._writing, self._written = None, frozenset()

    def _has_room(self, edge: Edge) -> bool:
        """Whether these weights were made for the version, so that nothing has to be read to know its layout."""
        is_fitting = self.weights is not None and self.weights.layout.sha256 == edge.manifest.layout_sha256
        return self._is_scratch and is_fitting and edge.manifest.kind != "base"

    def _allocate(self, layout: Layout, applied: Applied) -> None:
        if self.weights is None or self.weights.layout != layout:
            # The old weights go first: there may be no memory for both.
            self.weights = self.at = None
            self._forget()
            self._lose_pasts()
            applied.changes = None
            self.weights = self._new_weights(layout)

    def _lose_pasts(self) -> None:
        for past in self.pasts:
            past.lose()

    def _new_weights(self, layout: Layout) -> Weights:
        return zeros(layout)

    def prove(self, edge: Edge, *, was_resumed: bool = False, progress: blocks.OnProgress | None = None) -> None:
        """CorruptError unless the weights have the digest of the version that the edge leads to."""
        try:
            require_digest(edge, self.require_weights(), on_progress=progress)
        except CorruptError as error:
            self._forget()
            self._note()
            if was_resumed:
                # A payload that was left out may not have been written after all.
                raise LostBits from error
            raise
        self._hold(edge.manifest)

    def _has_diverged(self, route: Route, first: Edge) -> bool:
        """Whether the feed has this version with another digest: it was rolled back and went on differently.

        A plan from nothing need not know. The edge may also be damaged: then the manifest of this version is right.
        """
        if self.version is None or first.start is None or first.manifest.parent_digest == self.digest:
            return False
        try:
            return route.log.read(self.version).digest != self.digest
        except (CorruptError, FormatError, NotFoundError):
            return False

    def _decoded(
        self,
        edge: Edge,
        payloads: Iterator[Payload],
        use: _Use,
        applied: Applied,
        *,
        base: Weights | None = None,
        have: Collection[str] = (),
    ) -> Iterator[tuple[list[Changes], PayloadRef | None]]:
        """Decode and verify the blocks of an edge on all cores, while later payloads are fetched.

        Gives what is kept of each block, in the order of the blocks, with a payload after the last block of it. Each
        payload is taken from `payloads` when its turn comes; those in `have` are left out. An edge that names a base
        gives all weights of `base` first. Blocks do not overlap, so that threads can write them.
        """
        layout = self.require_weights().layout
        items = _block_numbers(edge, payloads, layout, have, applied)
        decoded = each(partial(self._decode, edge, use, applied), items)
        if base is None:
            return decoded
        base.layout.require_equal(layout, ours="the base", theirs="the weights")

        def used(runs: Runs) -> tuple[list[Changes], PayloadRef | None]:
            return self._used(Changes(runs, None, base.region(runs).gather()), use, applied), None

        return chain(each(used, blocks.layout_runs(base.layout, elements=limits.PLANES_ELEMENTS)), decoded)

    def _decode(
        self, edge: Edge, use: _Use, applied: Applied, item: tuple[Payload, int | None, PayloadRef | None]
    ) -> tuple[list[Changes], PayloadRef | None]:
        payload, i, ref = item
        weights = self.require_weights()
        if i is None:
            return [], ref
        if use == "compare" and not self._compares(applied):
            # Straight into the weights: what differed is not wanted.
            blocks.restore_block(weights, payload.block(i))
            return [], ref
        kept: list[Changes] = []
        for changes in blocks.decode_block(weights, payload.block(i), relative=edge.start is not None):
            kept += self._used(changes, use, applied)
        return kept, ref

    def _used(self, changes: Changes, use: _Use, applied: Applied) -> list[Changes]:
        """What is kept of decoded changes. Runs in worker threads."""
        weights = self.require_weights()
        if use == "keep":
            return [changes]
        if use == "drop":
            return []
        if use == "write" or not self._compares(applied):
            blocks.overwrite(weights, changes)
            return []
        differing = list(blocks.detect(weights, _Given(weights, changes), changes.runs))
        for part in differing:
            if self.pasts:
                self._replaced.append(bits_before(weights, part).packed())
            blocks.overwrite(weights, part)
        return differing

    def _compares(self, applied: Applied) -> bool:
        """Whether the changes of an anchor are wanted."""
        return applied.changes is not None or any(not past.is_lost for past in self.pasts)


def _block_numbers(
    edge: Edge, payloads: Iterator[Payload], layout: Layout, have: Collection[str], applied: Applied
) -> Iterator[tuple[Payload, int | None, PayloadRef | None]]:
    """The number of each block in its payload, and the payload with the last of them.

    The time that decoding waits for a payload counts as fetching.
    """
    for ref in edge.manifest.payloads:
        if ref.sha256 not in have:
            since = time.perf_counter()
            payload = next(payloads)
            applied.fetch_s += time.perf_counter() - since
            payload.header.layout.require_equal(layout, ours=edge.key, theirs="the version before it")
            last = len(payload.block_infos) - 1
            if last < 0:
                yield payload, None, ref
            for i in range(last + 1):
                yield payload, i, ref if i == last else None


class _Given:
    """The elements of a block with the bits that were decoded for them."""

    def __init__(self, weights: Weights, changes: Changes) -> None:
        self.layout = weights.layout
        self._weights = weights
        self._changes = changes

    def region(self, runs: Runs) -> Region:
        return self._weights.region(runs).holding(self._changes.values)


def load(log: Log, goal: Manifest, *, base: Path | None = None, progress: Progress | None = None) -> Weights:
    """The weights of a version, in memory."""
    state = State(scratch=True)
    state.advance(Route(log, goal, base=base), progress=progress)
    return state.require_weights()
