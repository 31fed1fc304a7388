"""Find the cheapest plan for a version: anchors, bases, deltas and skips are edges that cost the bytes to fetch."""

import heapq
import logging
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from deltasync.errors import CorruptError, DeltasyncError, NotFoundError
from deltasync.feed.log import READ_THREADS, Log, manifest_key, outcome, require_follows
from deltasync.format import keys
from deltasync.format.manifest import Manifest
from deltasync.parallel import each

logger = logging.getLogger(__name__)

_GAP_MAX = 64
"""How many unreadable manifests in a row are skipped before the walk ends."""

_FURTHER = 16
"""How far to read past a plan that was found: skips can make deltas this many times cheaper, hardly more."""


@dataclass(frozen=True, slots=True)
class Edge:
    """One manifest as a step from version `start` (None: from nothing) to version `end`."""

    key: str
    manifest: Manifest

    @property
    def start(self) -> int | None:
        return self.manifest.parent if self.manifest.kind in ("delta", "skip") else None

    @property
    def end(self) -> int:
        return self.manifest.version

    @property
    def nbytes(self) -> int:
        return self.manifest.nbytes


@dataclass(frozen=True, slots=True)
class Plan:
    """Edges to apply one after another; `edges` is empty if there is nothing to do."""

    edges: tuple[Edge, ...]

    @property
    def nbytes(self) -> int:
        return sum(edge.nbytes for edge in self.edges)


def plan(log: Log, target: Manifest, *, start: int | None = None, avoid: Collection[str] = ()) -> Plan:
    """The cheapest plan for `target`, from nothing or from version `start` if the caller holds that.

    `avoid` has the keys of manifests that cannot be used: damaged, pruned, or a base that is not available.
    NotFoundError if there is no plan.
    """
    for thorough in (False, True):
        unusable: list[str] = []
        edges = collect(log, target, unusable, start=start, avoid=avoid, thorough=thorough)
        path = cheapest(edges, start=start, end=target.version)
        if path is not None:
            # One warning, however many there are.
            if len(unusable) == 1:
                logger.warning("passing over a manifest: %s", unusable[0])
            elif unusable:
                message = "passing over %d manifests, which `deltasync verify` lists. The first: %s"
                logger.warning(message, len(unusable), unusable[0])
            return Plan(path)
    raise NotFoundError(
        f"version {target.version} cannot be rebuilt from {log.store.url}: the versions that it is built on were "
        "pruned or are damaged",
        version=target.version,
        hint="run `deltasync verify` to see which, and choose a later version",
    )


def cheapest(edges: Iterable[Edge], *, start: int | None, end: int) -> tuple[Edge, ...] | None:
    """The path with the fewest bytes, then with the fewest edges; None if there is none."""
    return cheapest_paths(edges, start=start, ends=(end,)).get(end)


def cheapest_paths(
    edges: Iterable[Edge], *, start: int | None = None, ends: Collection[int]
) -> dict[int, tuple[Edge, ...]]:
    """The cheapest path to each version of `ends` that can be reached."""
    by_start: dict[int | None, list[Edge]] = {}
    for edge in edges:
        by_start.setdefault(edge.start, []).append(edge)
    # Nothing is None, and a version that the caller holds costs nothing. The count breaks ties: edges do not compare.
    queue: list[tuple[int, int, int, int | None, Edge | None]] = [(0, 0, 0, None, None)]
    if start is not None:
        queue.append((0, 0, 1, start, None))
    pushed, missing = len(queue), set(ends)
    # Not whole paths: those to all versions of a long feed would take time and memory by the square of its length.
    last: dict[int | None, Edge | None] = {}
    while queue and missing:
        nbytes, hops, _, at, by = heapq.heappop(queue)
        if at in last:
            continue
        last[at] = by
        if at is not None:
            missing.discard(at)
        for after in by_start.get(at, ()):
            pushed += 1
            heapq.heappush(queue, (nbytes + after.nbytes, hops + 1, pushed, after.end, after))
    paths: dict[int, tuple[Edge, ...]] = {}
    for end in ends:
        path: list[Edge] = []
        step = last.get(end)
        while step is not None:
            path.append(step)
            step = last[step.start]
        if end in last:
            paths[end] = tuple(reversed(path))
    return paths


def collect(
    log: Log,
    target: Manifest,
    unusable: list[str],
    *,
    start: int | None,
    avoid: Collection[str],
    thorough: bool = False,
) -> list[Edge]:
    """The edges that can be part of a cheap plan, read backwards from `target` until nothing cheaper can follow.

    `thorough` reads on to the first version, for when no plan was found among the others. `unusable` gets the reasons
    why manifests were left out.
    """
    # A version that the caller holds is as good as any anchor of an older one.
    late = set(log.anchors(start=0 if thorough or start is None or start > target.version else start))
    edges: list[Edge] = []
    walked_bytes = 0
    best_bytes: int | None = None
    has_skips: bool | None = None
    for manifest in _backwards(log, target, unusable, down_to=None if thorough else start):
        anchor = None
        if manifest.version in late:
            anchor = _readable(outcome(log.anchor, manifest.version), unusable)
        for key, found in ((manifest_key(manifest), manifest), (keys.anchor_key(manifest.version), anchor)):
            if found is None or key in avoid:
                continue
            if found.digest != manifest.digest:
                unusable.append(f"{key} has another digest than version {manifest.version}")
                continue
            edges.append(Edge(key, found))
            if found.kind == "anchor":
                cost = walked_bytes + found.nbytes
                best_bytes = cost if best_bytes is None else min(best_bytes, cost)
        walked_bytes += manifest.nbytes if manifest.kind == "delta" else 0
        if thorough or best_bytes is None or walked_bytes <= best_bytes:
            continue
        # Deltas alone cannot make an older version the cheaper start. Most feeds have no skips.
        if has_skips is None:
            further = _FURTHER * (target.version - manifest.version + 1)
            has_skips = bool(log.skips(start=max(0, manifest.version - further)))
        if not has_skips or walked_bytes > _FURTHER * best_bytes:
            break
    digests = {edge.end: edge.manifest.digest for edge in edges}
    oldest = min((edge.end for edge in edges), default=0)
    lowest = oldest - 1 if start is None else min(start, oldest - 1)
    wanted = [(a, b) for a, b in log.skips(start=max(0, lowest)) if b <= target.version]
    for read in each(lambda pair: outcome(log.skip, *pair), wanted, waiting=READ_THREADS):
        skip = _readable(read, unusable)
        if skip is not None and (edge := Edge(manifest_key(skip), skip)).key not in avoid:
            if digests.get(skip.version, skip.digest) == skip.digest:
                edges.append(edge)
            else:
                unusable.append(f"{edge.key} leads to another digest than version {skip.version} has")
    return edges


def _backwards(log: Log, target: Manifest, unusable: list[str], *, down_to: int | None) -> Iterator[Manifest]:
    """`target`, then the versions before it, each checked to lead to the next.

    Manifests that are missing, damaged or lead elsewhere are left out, as a skip may bridge them; a long gap ends the
    walk.
    """
    last = -1 if down_to is None or down_to >= target.version else down_to
    after: Manifest | None = target
    gap = 0
    yield target
    older = range(target.version - 1, last, -1)
    for read in each(lambda version: outcome(log.read, version), older, waiting=READ_THREADS):
        manifest = _readable(read, unusable)
        if manifest is not None and after is not None:
            try:
                require_follows(manifest, after)
            except CorruptError as error:
                unusable.append(str(error))
                manifest = None
        if manifest is not None:
            yield manifest
            after, gap = manifest, 0
            continue
        after, gap = None, gap + 1
        if gap == _GAP_MAX:
            return


def _readable(read: Manifest | DeltasyncError | None, unusable: list[str]) -> Manifest | None:
    if isinstance(read, DeltasyncError):
        unusable.append(str(read))
        return None
    return read
