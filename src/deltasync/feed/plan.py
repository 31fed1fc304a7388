"""The cheapest way to a version: anchors, bases, deltas and skips are edges whose cost is what has to be fetched."""

import heapq
import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from deltasync.errors import CorruptError, FormatError, NotFoundError
from deltasync.feed.log import READ_THREADS, Log, manifest_key, require_follows
from deltasync.format import keys
from deltasync.format.manifest import Manifest
from deltasync.parallel import each

logger = logging.getLogger(__name__)

_HOLE_MAX = 64
"""How many unreadable manifests in a row a walk passes over."""

_FURTHER = 16
"""How far to look past a way that was found: skips can make deltas this many times cheaper, hardly more."""


@dataclass(frozen=True, slots=True)
class Edge:
    """One manifest as a way from version `start` (None: from nothing) to version `end`."""

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
    """Edges to take one after another; `edges` is empty if there is nothing to do."""

    edges: tuple[Edge, ...]

    @property
    def nbytes(self) -> int:
        return sum(edge.nbytes for edge in self.edges)


def plan(log: Log, target: Manifest, *, start: int | None = None, avoid: Collection[str] = ()) -> Plan:
    """The cheapest way to `target`, from nothing or from version `start` where the caller holds that.

    `avoid` names the keys of manifests that turned out to be of no use (damaged, pruned, a base that is not at hand).
    NotFoundError if no way is left.
    """
    for thorough in (False, True):
        edges = collect(log, target, start=start, avoid=avoid, thorough=thorough)
        found = cheapest(edges, start=start, end=target.version)
        if found is not None:
            return Plan(found)
    raise NotFoundError(
        f"there is no way to version {target.version} in {log.store.url}",
        version=target.version,
        hint="its chain was pruned or is damaged: `deltasync verify` tells; choose a later version",
    )


def cheapest(edges: Iterable[Edge], *, start: int | None, end: int) -> tuple[Edge, ...] | None:
    """The way of least bytes, then of fewest edges; None if there is none."""
    by_start: dict[int | None, list[Edge]] = {}
    for edge in edges:
        by_start.setdefault(edge.start, []).append(edge)
    # Nothing is None, and a version that the caller holds costs nothing. The count breaks ties: edges do not compare.
    queue: list[tuple[int, int, int, int | None, tuple[Edge, ...]]] = [(0, 0, 0, None, ())]
    if start is not None:
        queue.append((0, 0, 1, start, ()))
    done: set[int | None] = set()
    pushed = len(queue)
    while queue:
        nbytes, hops, _, at, way = heapq.heappop(queue)
        if at == end:
            return way
        if at in done:
            continue
        done.add(at)
        for edge in by_start.get(at, ()):
            pushed += 1
            heapq.heappush(queue, (nbytes + edge.nbytes, hops + 1, pushed, edge.end, (*way, edge)))
    return None


def collect(
    log: Log, target: Manifest, *, start: int | None, avoid: Collection[str], thorough: bool = False
) -> list[Edge]:
    """The edges that can lie on a cheap way to `target`, read backwards until nothing cheaper can come.

    `thorough` reads on to the first version: what looked like a cheap way may be closed further on.
    """
    late = set(log.anchors())
    edges: list[Edge] = []
    walked_bytes = 0
    best_bytes: int | None = None
    for manifest in _backwards(log, target, down_to=start):
        anchor = _readable(log.anchor, manifest.version) if manifest.version in late else None
        for edge in _usable(manifest, anchor, avoid):
            edges.append(edge)
            if edge.start is None and edge.manifest.kind == "anchor":
                cost = walked_bytes + edge.nbytes
                best_bytes = cost if best_bytes is None else min(best_bytes, cost)
        walked_bytes += manifest.nbytes if manifest.kind == "delta" else 0
        if not thorough and best_bytes is not None and walked_bytes > _FURTHER * best_bytes:
            break
    digests = {edge.end: edge.manifest.digest for edge in edges}
    oldest = min((edge.end for edge in edges), default=0)
    lowest = oldest - 1 if start is None else min(start, oldest - 1)
    wanted = [(a, b) for a, b in log.skips() if lowest <= a and b <= target.version]
    for skip in each(lambda pair: _readable(log.skip, *pair), wanted, waiting=READ_THREADS):
        if skip is not None and (edge := Edge(manifest_key(skip), skip)).key not in avoid:
            if digests.get(skip.version, skip.digest) == skip.digest:
                edges.append(edge)
            else:
                logger.warning("%s leads to another digest than version %d has: passed over", edge.key, skip.version)
    return edges


def _usable(manifest: Manifest, anchor: Manifest | None, avoid: Collection[str]) -> Iterator[Edge]:
    for key, found in ((manifest_key(manifest), manifest), (keys.anchor_key(manifest.version), anchor)):
        if found is None or key in avoid:
            continue
        if found.digest == manifest.digest:
            yield Edge(key, found)
        else:
            logger.warning("%s has another digest than version %d: passed over", key, manifest.version)


def _backwards(log: Log, target: Manifest, *, down_to: int | None) -> Iterator[Manifest]:
    """`target`, then the versions before it, each checked to lead to the next.

    What is missing, damaged or leads elsewhere is passed over, as a skip may do; a long hole ends the walk.
    """
    last = -1 if down_to is None or down_to >= target.version else down_to
    after: Manifest | None = target
    hole = 0
    yield target
    older = range(target.version - 1, last, -1)
    for manifest in each(lambda version: _readable(log.read, version), older, waiting=READ_THREADS):
        if manifest is not None and _leads(manifest, after):
            yield manifest
            after, hole = manifest, 0
            continue
        after, hole = None, hole + 1
        if hole == _HOLE_MAX:
            return


def _leads(before: Manifest, after: Manifest | None) -> bool:
    if after is None:
        return True
    try:
        require_follows(before, after)
    except CorruptError as error:
        logger.warning("passed over version %d: %s", before.version, error)
        return False
    return True


def _readable(read: Callable[..., Manifest | None], *at: int) -> Manifest | None:
    """None for a manifest that is of no use to anybody."""
    try:
        return read(*at)
    except (CorruptError, FormatError, NotFoundError) as error:
        logger.warning("passed over: %s", error)
        return None
