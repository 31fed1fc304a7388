"""Read all manifests of a feed at once, for `verify` and `prune`."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TypeVar

from deltasync.errors import DeltasyncError, NotFoundError
from deltasync.feed.log import READ_THREADS, Log, outcome, read_manifest
from deltasync.feed.plan import Edge
from deltasync.format import keys
from deltasync.format.manifest import Manifest
from deltasync.format.sealed import Pin
from deltasync.parallel import each
from deltasync.store.protocol import ObjectInfo

_T = TypeVar("_T")

ORPHAN_S = 86_400
"""A payload that no manifest names may belong to a commit in progress; an older one is left from a dead writer."""

_FIRST_READ = 1000
"""Versions that a survey for `prune` reads in any case, the newest ones; then twice as many, and so on."""

_MISSING_MAX = 1000
"""How many missing versions are counted: one stray key can make a gap of any length."""


@dataclass(frozen=True, slots=True)
class Survey:
    """The manifests that could be read, as edges; `damaged` has the errors of the others, by key."""

    edges: tuple[Edge, ...]
    versions: dict[int, Manifest]
    damaged: dict[str, DeltasyncError]
    payloads: dict[str, ObjectInfo]
    floor: int
    pins: tuple[Pin, ...] = ()
    committed_unix_s: dict[int, float] = field(default_factory=dict)
    """When the manifests of versions were created, by the store's clock."""
    first: int = 0
    """Versions before this one that are not in `versions` were pruned: nothing of them is left (`Known.forget`)."""

    @property
    def head(self) -> int | None:
        """The newest version, readable or not."""
        return max(self._listed, default=None)

    def all_versions(self) -> set[int]:
        """The versions up to the head, with or without a manifest; of those without, the first thousand."""
        missing = (version for gap in self.gaps() for version in gap)
        return {*self._listed, *islice(missing, _MISSING_MAX)}

    def gaps(self) -> Iterator[range]:
        """Versions below the head without a manifest, as ranges."""
        expected = self.first
        for version in sorted(self._listed):
            if version > expected:
                yield range(expected, version)
            expected = max(expected, version + 1)

    @property
    def _listed(self) -> set[int]:
        unreadable = (keys.parse_version_key(key) for key in self.damaged)
        return {*self.versions, *(version for version in unreadable if version is not None)}

    def holds(self, edge: Edge) -> bool:
        """Whether all objects that an edge needs are in the store, in their full size."""
        objects = ((self.payloads.get(ref.sha256), ref) for ref in edge.manifest.refs)
        return all(item is not None and item.nbytes == ref.nbytes for item, ref in objects)


class Known:
    """The manifests that an earlier survey has read. Manifests never change, so that they need not be read again.

    A feed can be rolled back or replaced, though. Then the time or the size of one that is known differs, or it is
    gone, and everything is forgotten.
    """

    def __init__(self) -> None:
        self.first = 0
        self._manifests: dict[str, tuple[ObjectInfo, Manifest]] = {}

    def get(self, item: ObjectInfo) -> Manifest | None:
        """The manifest of an object in a listing, if it is known."""
        found = self._manifests.get(item.key)
        return None if found is None or found[0] != item else found[1]

    def listed(self, log: Log) -> list[ObjectInfo]:
        """The manifests in the listing: those of all versions from `first` on, and all anchors and skips."""
        items = manifest_items(log, after=self.first - 1 if self.first else None)
        by_key = {item.key: item for item in items}
        for key, (item, _) in self._manifests.items():
            version = keys.parse_version_key(key)
            if version is not None and version >= self.first and by_key.get(key) != item:
                self.first, self._manifests = 0, {}
                return manifest_items(log)
        return items

    def add(self, item: ObjectInfo, manifest: Manifest) -> None:
        self._manifests[item.key] = item, manifest

    def older(self) -> dict[str, Manifest]:
        """The manifests of versions before `first` that are still needed."""
        versions = ((keys.parse_version_key(key), key, found[1]) for key, found in self._manifests.items())
        return {key: manifest for version, key, manifest in versions if version is not None and version < self.first}

    def forget(self, contents: Survey, kept: Iterable[Edge]) -> None:
        """Forget versions below the floor of which nothing is in the store and that no edge of `kept` touches."""
        needed = {at for edge in kept for at in (edge.start, edge.end)}
        read = {edge.key for edge in contents.edges}
        while self.first < contents.floor:
            manifest = contents.versions.get(self.first)
            is_gone = manifest is not None and all(ref.sha256 not in contents.payloads for ref in manifest.refs)
            if not is_gone and self.first not in needed:
                break
            self.first += 1
        for key in list(self._manifests):
            version = keys.parse_version_key(key)
            is_settled = version is not None and version < self.first and version not in needed
            if is_settled or key not in read:
                del self._manifests[key]


def manifest_items(log: Log, *, after: int | None = None) -> list[ObjectInfo]:
    """The manifests in the listing: those of all versions, or of those after one, and all anchors and skips."""
    listed = [*log.store.list(keys.VERSIONS, after=None if after is None else keys.version_key(after))]
    listed += [item for prefix in (keys.ANCHORS, keys.SKIPS) for item in log.store.list(prefix)]
    return [item for item in listed if keys.is_manifest_key(item.key)]


def survey(log: Log, known: Known | None = None, *, young_unix_s: float | None = None) -> Survey:
    """Read a feed. Manifests that are `known` are not read again.

    `young_unix_s`: leave out the oldest versions if nothing of them is in the store and no pin is among them. A feed
    keeps the manifests of all versions, and most of them were pruned long ago. Every payload that was put before that
    time is then named by a manifest that was read, or by none at all.

    Payloads are listed after the manifests: a manifest is committed after its payloads, so a commit at the same time
    does not look like a missing payload. The floor is read last: `prune` raises it before it deletes, so what is
    missing then is known to be pruned.
    """
    known = Known() if known is None else known
    damaged: dict[str, DeltasyncError] = {}

    items = known.listed(log)
    manifests = known.older()
    manifests |= {item.key: manifest for item in items if (manifest := known.get(item)) is not None}

    def read_all(some: Iterable[ObjectInfo]) -> None:
        wanted = [item for item in some if item.key not in manifests]
        found = each(lambda item: outcome(read_manifest, log.store, item.key), wanted, waiting=READ_THREADS)
        for item, manifest in zip(wanted, found, strict=True):
            if isinstance(manifest, Manifest):
                manifests[item.key] = manifest
                known.add(item, manifest)
            elif not isinstance(manifest, NotFoundError):
                # One that is missing was deleted by `prune` since the listing.
                damaged[item.key] = manifest

    def noted(read: Callable[[], _T], key: str) -> _T | None:
        found = outcome(read)
        if isinstance(found, DeltasyncError):
            damaged[found.key or key] = found
            return None
        return found

    older: list[ObjectInfo] = []
    if young_unix_s is not None:
        older = [item for item in items if keys.parse_version_key(item.key) is not None][:-_FIRST_READ]
    left_out = {item.key for item in older}
    read_all(item for item in items if item.key not in left_out)
    noted(log.feed, keys.FEED)
    pins = tuple(noted(log.pins, keys.PINS) or ())
    payloads = dict(log.payloads())
    while older and young_unix_s is not None and _may_be_stored(older[-1], manifests, payloads, pins, young_unix_s):
        count = len(manifests)
        read_all(older[-count:])
        del older[-count:]
    if older:
        known.first = (keys.parse_version_key(older[-1].key) or 0) + 1
    floor = noted(log.floor, keys.FLOOR) or 0
    edges = [Edge(key, manifest) for key, manifest in sorted(manifests.items())]
    own = [edge for edge in edges if edge.key.startswith(keys.VERSIONS)]
    return Survey(
        edges=(*own, *(edge for edge in edges if not edge.key.startswith(keys.VERSIONS))),
        versions={edge.end: edge.manifest for edge in own},
        damaged=damaged,
        payloads=payloads,
        floor=floor,
        pins=pins,
        committed_unix_s={
            version: item.modified_unix_s for item in items if (version := keys.parse_version_key(item.key)) is not None
        },
        first=known.first,
    )


def _may_be_stored(
    newest: ObjectInfo,
    manifests: dict[str, Manifest],
    payloads: dict[str, ObjectInfo],
    pins: Iterable[Pin],
    young_unix_s: float,
) -> bool:
    """Whether something in the store may belong to `newest`, the manifest of a version, or to an older version.

    A stored change to a later version counts if it leads from one of these, which may be a base: a base stores nothing.
    The payloads of a version are put before its manifest: a later one that no manifest names is one of a publication in
    progress. In a copy of a feed the times may be others, so that only young payloads are taken for that: they stay.
    """
    version = keys.parse_version_key(newest.key) or 0
    if any(pin.version <= version for pin in pins):
        return True
    named: set[str] = set()
    for manifest in manifests.values():
        refs = [ref.sha256 for ref in manifest.refs]
        if manifest.version <= version and any(sha256 in payloads for sha256 in refs):
            return True
        if manifest.parent is not None and manifest.parent <= version and all(sha256 in payloads for sha256 in refs):
            return True
        named.update(refs)
    settled_unix_s = max(newest.modified_unix_s, young_unix_s)
    return any(sha256 not in named and item.modified_unix_s <= settled_unix_s for sha256, item in payloads.items())


def without_pruned(log: Log, before: Survey) -> Survey:
    """The same survey without the payloads that `prune` has deleted since."""
    left = dict(log.payloads())
    return replace(
        before,
        payloads={sha256: item for sha256, item in before.payloads.items() if sha256 in left},
        floor=before.floor if {keys.FLOOR, keys.COPY} & before.damaged.keys() else log.floor(),
    )


def reachable(edges: Iterable[Edge]) -> set[int]:
    """The versions that these edges lead to from nothing."""
    by_start: dict[int | None, list[int]] = {}
    for edge in edges:
        by_start.setdefault(edge.start, []).append(edge.end)
    seen: set[int] = set()
    waiting = list(by_start.get(None, ()))
    while waiting:
        version = waiting.pop()
        if version not in seen:
            seen.add(version)
            waiting.extend(by_start.get(version, ()))
    return seen


def is_given_up(edge: Edge, floor: int) -> bool:
    """Whether `prune` no longer promises the payloads of an edge."""
    return edge.end < floor if edge.start is None else edge.start < floor
