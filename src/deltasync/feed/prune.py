"""Delete old versions, but nothing that a kept version or a live replica needs. Nothing else deletes from a feed.

The manifests of versions are always kept. They are small, and they are the fence: a trainer that resumes after months
must find that its next version exists, however old it is.
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
"""A payload that no manifest names may belong to a commit in progress; an older one is left from a dead writer."""


@dataclass(frozen=True, slots=True)
class Pruning:
    """What is deleted, in the order of `keys`, orphans last. Versions before `floor` cannot be restored then."""

    floor: int
    keys: tuple[str, ...]
    payload_bytes: int
    orphans: int
    held_by: tuple[str, ...]
    """Live replicas that are behind `floor`: the deltas that they need are kept."""
    orphans_before_unix_s: float = field(default=0.0, compare=False)
    """Orphans that were put since then are kept: a publisher has resumed and may commit them."""

    def to_json(self) -> dict[str, Any]:
        return {
            "floor": self.floor,
            "keys": list(self.keys),
            "payload_bytes": self.payload_bytes,
            "orphans": self.orphans,
            "held_by": list(self.held_by),
        }


def plan_prune(feed: Feed, *, keep_anchors: int, keep_versions: int, clock: Callable[[], float] = time.time) -> Pruning:
    """What `prune` would delete so that `keep_versions` versions and at least `keep_anchors` anchors remain.

    Bases count as anchors. CorruptError if the feed is damaged: nothing is deleted then.
    """
    if keep_anchors < 1 or keep_versions < 1:
        raise InvalidInputError(
            f"keep_anchors and keep_versions must be at least 1, not {keep_anchors} and {keep_versions}"
        )
    with opened(feed) as store:
        log = Log(store)
        contents = survey(log)
        _require_readable(contents)
        floor = _floor(contents, keep_anchors=keep_anchors, keep_versions=keep_versions)
        live = [beat for beat in log.heartbeats() if beat.unix_s > clock() - LIVE_S]
    behind = [beat for beat in live if beat.version is not None and beat.version < floor]
    return _pruning(contents, floor, behind, orphans_before_unix_s=clock() - ORPHAN_S)


def prune(feed: Feed, pruning: Pruning) -> None:
    """Delete what `plan_prune` chose. A publisher may run at the same time; repeat it after an interruption.

    The floor is raised first, so that readers can explain what is missing. Manifests are deleted before their payloads,
    so that no manifest names a payload that was deleted.
    """
    with opened(feed) as store:
        if pruning.floor > Log(store).floor():
            store.put(keys.FLOOR, FloorRecord(pruning.floor).to_bytes())
        first_orphan = len(pruning.keys) - pruning.orphans
        for i, key in enumerate(pruning.keys):
            if i < first_orphan or not _is_put_again(store, key, pruning.orphans_before_unix_s):
                store.delete(key)


def _is_put_again(store: Store, key: str, since_unix_s: float) -> bool:
    """Whether an orphan was put again since it was listed: the next commit may name it."""
    return any(item.key == key and item.modified_unix_s >= since_unix_s for item in store.list(key))


def _require_readable(contents: Survey) -> None:
    missing = {keys.version_key(v): NotFoundError(f"version {v} is missing") for v in contents.missing()}
    for key, error in {**contents.damaged, **missing}.items():
        raise _damaged(f"{key} cannot be read, so it is not known which payloads it needs: {error.message}", key)


def _damaged(message: str, key: str) -> CorruptError:
    hint = "nothing was deleted; `deltasync verify` lists what is damaged"
    return CorruptError(message, key=key, rule="prune.damaged", hint=hint)


def _floor(contents: Survey, *, keep_anchors: int, keep_versions: int) -> int:
    """The newest version from which enough anchors and versions remain.

    Only the objects in the store decide. The record of an earlier floor does not: it only explains what is missing.
    """
    if contents.head is None:
        return 0
    starts = sorted({edge.end for edge in contents.edges() if edge.start is None and contents.holds(edge)})
    fitting = [
        version
        for i, version in enumerate(starts)
        if len(starts) - i >= keep_anchors and version <= max(0, contents.head - keep_versions + 1)
    ]
    return max(fitting, default=0)


def _pruning(contents: Survey, floor: int, behind: Collection[Heartbeat], *, orphans_before_unix_s: float) -> Pruning:
    oldest = min((beat.version for beat in behind if beat.version is not None), default=floor)
    gone = [edge for edge in contents.edges() if _goes(edge, floor, oldest)]
    kept = [edge for edge in contents.edges() if not _goes(edge, floor, oldest)]
    lost = reachable(filter(contents.holds, contents.edges())) - reachable(filter(contents.holds, kept))
    if lost and max(lost) >= floor:
        message = f"version {max(lost)} needs versions before {floor}: an object that it is built on is missing"
        raise _damaged(message, keys.version_key(max(lost)))
    # Files beside the weights are few and shared by all versions: they are kept.
    needed = {ref.sha256 for edge in kept for ref in edge.manifest.refs} | _files(gone)
    named = {ref.sha256 for edge in gone for ref in edge.manifest.refs}
    orphans = {
        sha256
        for sha256, item in contents.payloads.items()
        if sha256 not in named | needed and item.modified_unix_s < orphans_before_unix_s
    }
    deleted = [*sorted((named - needed) & contents.payloads.keys()), *sorted(orphans)]
    manifests = [edge.key for edge in gone if keys.parse_version_key(edge.key) is None]
    return Pruning(
        floor=max(floor, contents.floor),
        keys=(*manifests, *(keys.payload_key(sha256) for sha256 in deleted)),
        payload_bytes=sum(contents.payloads[sha256].nbytes for sha256 in deleted),
        orphans=len(orphans),
        held_by=tuple(sorted(beat.replica for beat in behind)),
        orphans_before_unix_s=orphans_before_unix_s,
    )


def _goes(edge: Edge, floor: int, oldest: int) -> bool:
    """Whether an edge is given up and no live replica, the oldest of which is at `oldest`, needs it."""
    return is_given_up(edge, floor) and (edge.start is None or edge.start < oldest)


def _files(edges: Collection[Edge]) -> set[str]:
    return {edge.manifest.files.sha256 for edge in edges if edge.manifest.files is not None}
