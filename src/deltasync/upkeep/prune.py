"""Delete old versions, but nothing that a kept version or a live replica needs. Nothing else deletes from a feed.

The manifests of versions are always kept. They are small, and they are the fence: a trainer that resumes after months
must find that its next version exists, however old it is.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from deltasync.arguments import instance, seconds, whole_number
from deltasync.errors import CorruptError, DeltasyncError, FormatError, NotFoundError
from deltasync.feed.log import READ_THREADS, Log, is_live, read_manifest
from deltasync.feed.plan import Edge, cheapest_paths
from deltasync.format import keys
from deltasync.format.manifest import Manifest
from deltasync.format.sealed import FloorRecord, Heartbeat, Pin
from deltasync.parallel import each
from deltasync.store import Feed, opened
from deltasync.store.fencing import PATIENCE_S, probe_clock
from deltasync.store.patient import PatientStore
from deltasync.store.protocol import Store
from deltasync.upkeep.stats import MaintenanceStats
from deltasync.upkeep.survey import ORPHAN_S, Known, Survey, is_given_up, manifest_items, reachable, survey

logger = logging.getLogger(__name__)

LOOK_S = 60
"""An orphan is deleted within this time after the listing that shows its age. Otherwise it is listed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What stays of a feed when it is pruned. What live replicas and pinned versions need stays in any case.

    `anchors`: at least this many of the newest anchors; a base counts as one.
    `versions`: at least this many of the newest versions can be restored.
    `age_s`: so can every version that was committed within this time, by the store's clock.
    `every_s`: how often a publisher, and `deltasync prune --follow`, delete what need not stay.
    """

    anchors: int = 2
    versions: int = 100
    age_s: float | None = None
    every_s: float = 60.0

    def __post_init__(self) -> None:
        whole_number("anchors", self.anchors, least=1)
        whole_number("versions", self.versions, least=1)
        if self.age_s is not None:
            seconds("age_s", self.age_s)
        seconds("every_s", self.every_s, is_zero_allowed=False)


@dataclass(frozen=True, slots=True)
class Pruning:
    """What is deleted, in the order of `keys`, orphans last. Versions before `floor` cannot be restored then."""

    floor: int
    keys: tuple[str, ...]
    payload_bytes: int
    orphans: int
    held_by: tuple[str, ...]
    """Live replicas that are behind `floor`: the deltas that they need are kept."""
    versions: tuple[int, ...] = ()
    """The versions that can be restored now, and no longer afterwards."""
    young_orphans: int = 0
    """Payloads that no manifest names, and that stay because they were put within a day."""
    young_orphan_bytes: int = 0
    pinned: tuple[str, ...] = ()
    """Pins of versions before `floor`: what these versions need is kept."""
    pins: frozenset[Pin] = field(default=frozenset(), compare=False, repr=False)
    """All pins that were read: a later one is taken into account when it is found."""
    manifests: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    """The keys of all manifests that were read: what a later one names is no orphan."""

    def to_json(self) -> dict[str, Any]:
        shown = ((each.name, getattr(self, each.name)) for each in fields(self) if each.compare)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in shown}


def plan_prune(feed: Feed, retention: Retention, *, clock: Callable[[], float] = time.time) -> Pruning:
    """What `prune` would delete of a feed. CorruptError if the feed is damaged: nothing is deleted then."""
    instance("retention", retention, Retention, hint="Retention(anchors=2, versions=100), from deltasync")
    with opened(feed) as store:
        return _plan(Log(store), retention, clock)[0]


def _plan(
    log: Log, retention: Retention, clock: Callable[[], float], known: Known | None = None
) -> tuple[Pruning, list[Edge], Survey]:
    """The plan, the edges that stay, and what it was made from."""
    # Read before everything else: a payload that is put and committed while this process sleeps is young.
    started_unix_s = clock()
    contents = survey(log, known, young_unix_s=started_unix_s - ORPHAN_S)
    for key, error in contents.damaged.items():
        raise _unreadable(key, error)
    for gap in contents.gaps():
        raise _unreadable(keys.version_key(gap[0]), NotFoundError(f"version {gap[0]} is missing"))
    floor = _floor(contents, retention, started_unix_s)
    live = [beat for beat in log.heartbeats() if is_live(beat, clock())]
    behind = [beat for beat in live if beat.version is not None and beat.version < floor]
    pruning, kept = _pruning(contents, floor, behind, orphans_before_unix_s=started_unix_s - ORPHAN_S)
    return pruning, kept, contents


class Pruner:
    """Prunes a feed again and again. Manifests that were read are remembered, so that a run reads only new ones."""

    def __init__(self, store: Store, retention: Retention, *, clock: Callable[[], float] = time.time) -> None:
        self.upkeep = MaintenanceStats()
        self._log = Log(store)
        self._retention = retention
        self._clock = clock
        self._known = Known()

    def run(self, *, is_stopping: Callable[[], bool] = lambda: False) -> tuple[Pruning, tuple[str, ...]]:
        """Delete what need not stay; returns the plan, and the keys of it that stay after all.

        After an error, or if `is_stopping` has ended it early, the next run deletes the rest.
        """
        upkeep = self.upkeep
        with upkeep.attempt():
            with upkeep.phase("plan"):
                pruning, kept, contents = _plan(self._log, self._retention, self._clock, self._known)
            self._known.forget(contents, kept)
            stored = {keys.payload_key(sha256): item.nbytes for sha256, item in contents.payloads.items()}
            upkeep.head, upkeep.version = contents.head, pruning.floor
            deleted: set[str] = set()
            with upkeep.phase("delete"):
                # Counted one by one: an error does not bring back what was deleted before it.
                for key in _deletions(self._log.store, pruning, clock=self._clock, is_stopping=is_stopping):
                    deleted.add(key)
                    upkeep.count("deleted_objects")
                    upkeep.count("deleted_bytes", stored.get(key, 0))
            upkeep.figures = {
                "stored_bytes": sum(nbytes for key, nbytes in stored.items() if key not in deleted),
                "held_replicas": len(pruning.held_by),
                "held_pins": len(pruning.pinned),
            }
            upkeep.count("runs")
            return pruning, _kept(pruning, deleted)


def prune(
    feed: Feed,
    pruning: Pruning,
    *,
    clock: Callable[[], float] = time.time,
    is_stopping: Callable[[], bool] = lambda: False,
) -> tuple[str, ...]:
    """Delete what `plan_prune` chose. A publisher may run at the same time; repeat it after an interruption.

    The floor is raised first, so that readers can explain what is missing. Manifests are deleted before their payloads,
    so that no manifest names a payload that was deleted. Returns the keys that stay after all: orphans that were put
    within a day by the store's own clock, or that a manifest names by now, and what a version needs that was pinned
    after the plan was made. `is_stopping` is called before each deletion: if it returns True, the rest stays, too.
    """
    with opened(feed) as store:
        return _kept(pruning, set(_deletions(store, pruning, clock=clock, is_stopping=is_stopping)))


def _kept(pruning: Pruning, deleted: Collection[str]) -> tuple[str, ...]:
    kept = tuple(key for key in pruning.keys if key not in deleted)
    for key in kept:
        logger.info("%s stays: it was put again, or a manifest or a pin needs it by now", key)
    return kept


def _deletions(
    store: Store, pruning: Pruning, *, clock: Callable[[], float], is_stopping: Callable[[], bool]
) -> Iterator[str]:
    """Raise the floor, and delete what `prune` deletes. Yields each key that was deleted."""
    log = Log(store)
    first_orphan = len(pruning.keys) - pruning.orphans
    orphans = pruning.keys[first_orphan:]
    before_unix_s = probe_clock(PatientStore(store, PATIENCE_S)) - ORPHAN_S if orphans else 0.0
    named = _named_since(log, pruning.manifests) if orphans else set()
    if pruning.floor > log.floor_of(keys.FLOOR):
        store.put(keys.FLOOR, FloorRecord(pruning.floor).to_bytes())
    # After the floor: `pin` writes first and reads the floor last, so that one of the two sees the other.
    needed = _pinned_since(log, pruning)
    wanted = named | needed
    for key in pruning.keys[:first_orphan]:
        if key not in needed and not is_stopping():
            store.delete(key)
            yield key
    for key in orphans:
        if key not in wanted and not is_stopping() and _is_older(store, key, before_unix_s, clock):
            store.delete(key)
            yield key


def _pinned_since(log: Log, pruning: Pruning) -> set[str]:
    """The keys of what versions need that were pinned after the plan was made."""
    added = [pin for pin in log.pins() if pin not in pruning.pins and pin.version < pruning.floor]
    if not added:
        return set()
    contents = survey(log)
    edges = _pinned_edges(contents, added)
    needed = {ref.sha256 for edge in edges for ref in edge.manifest.refs}
    needed |= _files(contents.versions[pin.version] for pin in added)
    return {*(edge.key for edge in edges), *map(keys.payload_key, needed)}


def _pinned_edges(contents: Survey, pins: Collection[Pin]) -> list[Edge]:
    """The edges that pinned versions are restored by. CorruptError if one of them cannot be restored."""
    for pin in pins:
        manifest = contents.versions.get(pin.version)
        if manifest is None or manifest.digest.hex != pin.digest:
            raise _broken_pin(pin, "the feed does not have this version with the digest that was pinned")

    def is_linked(edge: Edge) -> bool:
        """Whether an edge leads from and to the digests of its versions."""
        ends = ((edge.start, edge.manifest.parent_digest), (edge.end, edge.manifest.digest))
        known = contents.versions
        return all(at is None or (at in known and known[at].digest == digest) for at, digest in ends)

    usable = (edge for edge in contents.edges if contents.holds(edge) and is_linked(edge))
    paths = cheapest_paths(usable, ends={pin.version for pin in pins}) if pins else {}
    for pin in pins:
        if pin.version not in paths:
            raise _broken_pin(pin, "an object that this version is built on is missing")
    return [edge for path in paths.values() for edge in path]


def _broken_pin(pin: Pin, message: str) -> CorruptError:
    return CorruptError(
        f"the pin {pin.name} of version {pin.version} cannot be kept: {message}",
        version=pin.version,
        key=keys.pin_key(pin.name),
        rule="prune.pin",
        hint=f"nothing was deleted; put the objects back from a copy, or `deltasync unpin` {pin.name}",
    )


def _named_since(log: Log, known: Collection[str]) -> set[str]:
    """The keys of the payloads that manifests name which were committed after those in `known` were read."""

    def payload_keys(key: str) -> set[str]:
        try:
            manifest = read_manifest(log.store, key)
        except NotFoundError:
            return set()
        except (CorruptError, FormatError) as error:
            raise _unreadable(key, error) from error
        return {keys.payload_key(ref.sha256) for ref in manifest.refs}

    newest = max((v for key in known if (v := keys.parse_version_key(key)) is not None), default=None)
    added = [item.key for item in manifest_items(log, after=newest) if item.key not in known]
    return set().union(*each(payload_keys, added, waiting=READ_THREADS))


def _is_older(store: Store, key: str, before_unix_s: float, clock: Callable[[], float]) -> bool:
    """Whether an orphan was last put before that time, by a listing from a moment ago."""
    while True:
        looked_unix_s = clock()
        is_older = any(item.key == key and item.modified_unix_s < before_unix_s for item in store.list(key))
        # This process may have slept since: a publisher that was restarted may have put and committed it.
        if not is_older or abs(clock() - looked_unix_s) <= LOOK_S:
            return is_older


def _unreadable(key: str, error: DeltasyncError) -> CorruptError:
    return _damaged(f"{key} cannot be read, so it is not known which payloads it needs: {error.message}", key)


def _damaged(message: str, key: str) -> CorruptError:
    hint = "nothing was deleted; `deltasync verify` lists what is damaged"
    return CorruptError(message, key=key, rule="prune.damaged", hint=hint)


def _floor(contents: Survey, retention: Retention, now_unix_s: float) -> int:
    """The newest version from which enough anchors and versions remain.

    Only the objects in the store decide. The record of an earlier floor does not: it only explains what is missing.
    """
    head = contents.head
    if head is None:
        return 0
    newest = max(0, head - retention.versions + 1)
    if retention.age_s is not None:
        since_unix_s = now_unix_s - retention.age_s
        newest = min([newest, *(v for v, unix_s in contents.committed_unix_s.items() if unix_s >= since_unix_s)])
    starts = sorted({edge.end for edge in contents.edges if edge.start is None and contents.holds(edge)})
    fitting = [v for i, v in enumerate(starts) if len(starts) - i >= retention.anchors and v <= newest]
    return max(fitting, default=0)


def _pruning(
    contents: Survey, floor: int, behind: Collection[Heartbeat], *, orphans_before_unix_s: float
) -> tuple[Pruning, list[Edge]]:
    """The plan, and the edges that stay."""
    oldest = min((beat.version for beat in behind if beat.version is not None), default=floor)
    below = [pin for pin in contents.pins if pin.version < floor]
    pinned = {edge.key for edge in _pinned_edges(contents, below)}
    gone: list[Edge] = []
    kept: list[Edge] = []
    for edge in contents.edges:
        # A live replica needs what leads on from the oldest version that one of them has.
        is_unused = is_given_up(edge, floor) and (edge.start is None or edge.start < oldest)
        (gone if is_unused and edge.key not in pinned else kept).append(edge)
    reached = reachable(filter(contents.holds, contents.edges)) - reachable(filter(contents.holds, kept))
    # A skip may lead to a version that was committed after the versions were listed: its delta is not seen, and stays.
    lost = {version for version in reached if contents.head is not None and version <= contents.head}
    if lost and max(lost) >= floor:
        message = f"version {max(lost)} needs versions before {floor}: an object that it is built on is missing"
        raise _damaged(message, keys.version_key(max(lost)))
    needed = {ref.sha256 for edge in kept for ref in edge.manifest.refs}
    needed |= _files(contents.versions[pin.version] for pin in below)
    named = {ref.sha256 for edge in gone for ref in edge.manifest.refs}
    # A publisher may be about to name files beside the weights again: like orphans, they go once they are old.
    files = _files(edge.manifest for edge in gone) - needed
    known = (named | needed) - files
    unnamed = {sha256: item for sha256, item in contents.payloads.items() if sha256 not in known}
    orphans = {sha256 for sha256, item in unnamed.items() if item.modified_unix_s < orphans_before_unix_s}
    young = [item for sha256, item in unnamed.items() if sha256 not in orphans and sha256 not in files]
    deleted = [*sorted((named - needed - files) & contents.payloads.keys()), *sorted(orphans)]
    manifests = [edge.key for edge in gone if keys.parse_version_key(edge.key) is None]
    pruning = Pruning(
        floor=max(floor, contents.floor),
        keys=(*manifests, *(keys.payload_key(sha256) for sha256 in deleted)),
        payload_bytes=sum(contents.payloads[sha256].nbytes for sha256 in deleted),
        orphans=len(orphans),
        held_by=tuple(sorted(beat.replica for beat in behind)),
        versions=tuple(sorted(lost)),
        young_orphans=len(young),
        young_orphan_bytes=sum(item.nbytes for item in young),
        pinned=tuple(sorted(pin.name for pin in below)),
        pins=frozenset(contents.pins),
        manifests=frozenset(edge.key for edge in contents.edges),
    )
    return pruning, kept


def _files(manifests: Iterable[Manifest]) -> set[str]:
    return {manifest.files.sha256 for manifest in manifests if manifest.files is not None}
