"""Read all manifests of a feed at once, for `verify` and `prune`."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from deltasync.errors import CorruptError, DeltasyncError, FormatError, NotFoundError
from deltasync.feed.log import READ_THREADS, Log, read_manifest
from deltasync.feed.plan import Edge
from deltasync.format import keys
from deltasync.format.manifest import Manifest
from deltasync.format.sealed import Pin
from deltasync.parallel import each
from deltasync.store.protocol import ObjectInfo

ORPHAN_S = 86_400
"""A payload that no manifest names may belong to a commit in progress; an older one is left from a dead writer."""

_MISSING_MAX = 1000
"""How many missing versions are counted: one stray key can make a gap of any length."""


@dataclass(frozen=True, slots=True)
class Survey:
    """The manifests that could be read, by version; `damaged` has the errors of the others, by key."""

    versions: dict[int, Manifest]
    anchors: dict[int, Manifest]
    skips: dict[tuple[int, int], Manifest]
    damaged: dict[str, DeltasyncError]
    payloads: dict[str, ObjectInfo]
    floor: int
    pins: tuple[Pin, ...] = ()

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
        expected = 0
        for version in sorted(self._listed):
            if version > expected:
                yield range(expected, version)
            expected = version + 1

    @property
    def _listed(self) -> set[int]:
        unreadable = (keys.parse_version_key(key) for key in self.damaged)
        return {*self.versions, *(version for version in unreadable if version is not None)}

    def holds(self, edge: Edge) -> bool:
        """Whether all objects that an edge needs are in the store, in their full size."""
        objects = ((self.payloads.get(ref.sha256), ref) for ref in edge.manifest.refs)
        return all(item is not None and item.nbytes == ref.nbytes for item, ref in objects)

    def edges(self) -> Iterator[Edge]:
        """Every readable manifest as an edge."""
        for version, manifest in self.versions.items():
            yield Edge(keys.version_key(version), manifest)
        for version, manifest in self.anchors.items():
            yield Edge(keys.anchor_key(version), manifest)
        for (start, end), manifest in self.skips.items():
            yield Edge(keys.skip_key(start, end), manifest)


def manifest_keys(log: Log) -> list[str]:
    """The keys of all manifests in the listing."""
    prefixes = (keys.VERSIONS, keys.ANCHORS, keys.SKIPS)
    return [item.key for prefix in prefixes for item in log.store.list(prefix) if _is_manifest(item.key)]


def survey(log: Log) -> Survey:
    """Read a feed.

    Payloads are listed after the manifests: a manifest is committed after its payloads, so a commit at the same time
    does not look like a missing payload. The floor is read last: `prune` raises it before it deletes, so what is
    missing then is known to be pruned.
    """
    damaged: dict[str, DeltasyncError] = {}
    manifests: dict[str, Manifest] = {}

    def read(key: str) -> tuple[str, Manifest | DeltasyncError | None]:
        try:
            return key, read_manifest(log.store, key)
        except NotFoundError:
            # `prune` has deleted it since the listing.
            return key, None
        except (CorruptError, FormatError) as error:
            return key, error

    for key, outcome in each(read, manifest_keys(log), waiting=READ_THREADS):
        if isinstance(outcome, DeltasyncError):
            damaged[key] = outcome
        elif outcome is not None:
            manifests[key] = outcome
    try:
        log.feed()
    except (CorruptError, FormatError) as error:
        damaged[keys.FEED] = error
    pins: tuple[Pin, ...] = ()
    try:
        pins = tuple(log.pins())
    except (CorruptError, FormatError) as error:
        damaged[error.key or keys.PINS] = error
    payloads = _payloads(log)
    floor = 0
    try:
        floor = log.floor()
    except (CorruptError, FormatError) as error:
        damaged[keys.FLOOR] = error
    return Survey(
        versions=dict(_picked(manifests, keys.parse_version_key)),
        anchors=dict(_picked(manifests, keys.parse_anchor_key)),
        skips={pair: m for key, m in manifests.items() if (pair := keys.parse_skip_key(key)) is not None},
        damaged=damaged,
        payloads=payloads,
        floor=floor,
        pins=pins,
    )


def without_pruned(log: Log, before: Survey) -> Survey:
    """The same survey without the payloads that `prune` has deleted since."""
    left = _payloads(log)
    return replace(
        before,
        payloads={sha256: item for sha256, item in before.payloads.items() if sha256 in left},
        floor=before.floor if keys.FLOOR in before.damaged else log.floor(),
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


def _payloads(log: Log) -> dict[str, ObjectInfo]:
    listed = ((keys.parse_payload_key(item.key), item) for item in log.store.list(keys.PAYLOADS))
    return {sha256: item for sha256, item in listed if sha256 is not None}


def _is_manifest(key: str) -> bool:
    parsers: tuple[Callable[[str], object], ...] = (keys.parse_version_key, keys.parse_anchor_key, keys.parse_skip_key)
    return any(parse(key) is not None for parse in parsers)


def _picked(manifests: dict[str, Manifest], parse: Callable[[str], int | None]) -> Iterator[tuple[int, Manifest]]:
    for key, manifest in manifests.items():
        version = parse(key)
        if version is not None:
            yield version, manifest
