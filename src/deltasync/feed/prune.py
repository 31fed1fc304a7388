"""The one deleter: gives up old versions, and never what a kept version or a live replica needs.

The manifests of versions stay for ever. They are small, and they are the fence: a trainer that wakes up after months
must find its version taken, however old it is.
"""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from deltasync.errors import CorruptError, InvalidInputError, NotFoundError
from deltasync.feed.log import Log
from deltasync.feed.plan import Edge
from deltasync.feed.survey import Survey, is_given_up, reachable, survey
from deltasync.format import keys
from deltasync.format.sealed import FloorRecord, Heartbeat
from deltasync.store import Feed, opened
from deltasync.store.protocol import Store

LIVE_S = 900
"""A replica whose heartbeat is older counts as gone."""

ORPHAN_S = 86_400
"""Payloads that no manifest names may belong to a commit under way; older ones were left by a writer that died."""


@dataclass(frozen=True, slots=True)
class Pruning:
    """What goes: versions before `floor` can no longer be restored. `keys` in the order of deletion, orphans last."""

    floor: int
    keys: tuple[str, ...]
    payload_bytes: int
    orphans: int
    held_by: tuple[str, ...]
    """Live replicas that are behind `floor`: the deltas that lead them on are kept."""
    orphans_before_unix_s: float = field(default=0.0, compare=False)
    """Orphans that were put since then are spared: a publisher came back for them."""

    def to_json(self) -> dict[str, Any]:
        return {
            "floor": self.floor,
            "keys": list(self.keys),
            "payload_bytes": self.payload_bytes,
            "orphans": self.orphans,
            "held_by": list(self.held_by),
        }


def plan_prune(feed: Feed, *, keep_anchors: int, keep_versions: int, clock: Callable[[], float] = time.time) -> Pruning:
    """What a prune would delete so that the newest `keep_versions` versions can be restored, each from one of at least
    `keep_anchors` anchors (bases count). CorruptError if the feed is damaged: repair or accept that first.
    """
    if keep_anchors < 1 or keep_versions < 1:
        raise InvalidInputError(f"keep at least one anchor and one version, not {keep_anchors} and {keep_versions}")
    with opened(feed) as store:
        log = Log(store)
        found = survey(log)
        _require_readable(found)
        floor = _floor(found, keep_anchors=keep_anchors, keep_versions=keep_versions)
        live = [beat for beat in log.heartbeats() if beat.unix_s > clock() - LIVE_S]
    behind = [beat for beat in live if beat.version is not None and beat.version < floor]
    return _pruning(found, floor, behind, orphans_before_unix_s=clock() - ORPHAN_S)


def prune(feed: Feed, pruning: Pruning) -> None:
    """Do it. Safe beside a publisher, and to be repeated after an interruption.

    The floor is told first, so that a reader that misses something learns why; manifests go before their payloads, so
    that nothing names what is gone.
    """
    with opened(feed) as store:
        if pruning.floor > Log(store).floor():
            store.put(keys.FLOOR, FloorRecord(pruning.floor).to_bytes())
        first_orphan = len(pruning.keys) - pruning.orphans
        for i, key in enumerate(pruning.keys):
            if i < first_orphan or not _is_put_again(store, key, pruning.orphans_before_unix_s):
                store.delete(key)


def _is_put_again(store: Store, key: str, since_unix_s: float) -> bool:
    """Whether an orphan is younger than it was: the next commit may name it."""
    return any(item.key == key and item.modified_unix_s >= since_unix_s for item in store.list(key))


def _require_readable(found: Survey) -> None:
    missing = {keys.version_key(v): NotFoundError(f"version {v} is missing") for v in found.missing()}
    for key, error in {**found.damaged, **missing}.items():
        raise _damaged(f"{key} cannot be read, so what it needs is not known: {error.message}", key)


def _damaged(message: str, key: str) -> CorruptError:
    hint = "`deltasync verify` tells what is damaged; nothing was deleted"
    return CorruptError(message, key=key, rule="prune.damaged", hint=hint)


def _floor(found: Survey, *, keep_anchors: int, keep_versions: int) -> int:
    """The newest version from which enough anchors and versions remain.

    By what is in the store alone: the record of an earlier floor explains, and must not decide what is deleted.
    """
    if found.head is None:
        return 0
    starts = sorted({edge.end for edge in found.edges() if edge.start is None and found.holds(edge)})
    fitting = [
        version
        for i, version in enumerate(starts)
        if len(starts) - i >= keep_anchors and version <= max(0, found.head - keep_versions + 1)
    ]
    return max(fitting, default=0)


def _pruning(found: Survey, floor: int, behind: Collection[Heartbeat], *, orphans_before_unix_s: float) -> Pruning:
    oldest = min((beat.version for beat in behind if beat.version is not None), default=floor)
    gone = [edge for edge in found.edges() if _goes(edge, floor, oldest)]
    kept = [edge for edge in found.edges() if not _goes(edge, floor, oldest)]
    lost = reachable(filter(found.holds, found.edges())) - reachable(filter(found.holds, kept))
    if lost and max(lost) >= floor:
        message = f"version {max(lost)} needs what lies before version {floor}: something on its way is missing"
        raise _damaged(message, keys.version_key(max(lost)))
    # Files beside the weights are few and shared by all versions: they stay.
    needed = {ref.sha256 for edge in kept for ref in edge.manifest.refs} | _files(gone)
    named = {ref.sha256 for edge in gone for ref in edge.manifest.refs}
    orphans = {
        sha256
        for sha256, item in found.payloads.items()
        if sha256 not in named | needed and item.modified_unix_s < orphans_before_unix_s
    }
    doomed = [*sorted((named - needed) & found.payloads.keys()), *sorted(orphans)]
    manifests = [edge.key for edge in gone if keys.parse_version_key(edge.key) is None]
    return Pruning(
        floor=max(floor, found.floor),
        keys=(*manifests, *(keys.payload_key(sha256) for sha256 in doomed)),
        payload_bytes=sum(found.payloads[sha256].nbytes for sha256 in doomed),
        orphans=len(orphans),
        held_by=tuple(sorted(beat.replica for beat in behind)),
        orphans_before_unix_s=orphans_before_unix_s,
    )


def _goes(edge: Edge, floor: int, oldest: int) -> bool:
    """Given up, and not on the way of a live replica from version `oldest` on."""
    return is_given_up(edge, floor) and (edge.start is None or edge.start < oldest)


def _files(edges: Collection[Edge]) -> set[str]:
    return {edge.manifest.files.sha256 for edge in edges if edge.manifest.files is not None}
