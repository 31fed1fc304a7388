"""The referee: knows the bits of every version, looks at every operation, and says which errors are allowed.

It is independent of the code under test as far as that is possible: it learns the bits of a version from the trainer,
by the step that the manifest names, and the order of events from the store.
"""

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from deltasync import blocks
from deltasync.errors import (
    ConflictError,
    CorruptError,
    DeltasyncError,
    FormatError,
    InvalidInputError,
    MismatchError,
    NotFoundError,
    RankError,
    StoreError,
)
from deltasync.feed.fetch import fetch_files, fetch_payloads
from deltasync.feed.log import LIVE_S, Log
from deltasync.feed.plan import Edge
from deltasync.feed.upload import LATE_S
from deltasync.format import keys
from deltasync.format.digest import StateDigest
from deltasync.format.manifest import Manifest, PayloadRef
from deltasync.format.sealed import FloorRecord, Heartbeat
from deltasync.format.weights import Weights, zeros
from deltasync.state import State as HeldState
from deltasync.state import load
from deltasync.upkeep.survey import is_given_up, reachable
from deltasync.upkeep.verify import verify

from .store import ERRORS, SimProcess

if TYPE_CHECKING:
    from .world import World

_CLOCK_ERROR_S = 310
"""How wrong the clock of a pruner may be."""


class TargetError(Exception):
    """A target fails by chance."""


@dataclass(frozen=True, slots=True)
class Truth:
    """The right bits of a version."""

    weights: Weights
    digest: StateDigest


class Referee:
    """Checks the rules of the protocol. A broken one ends the run with `World.fail`."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._steps: list[Weights] = []
        self.versions: list[Truth] = []
        self.edges: dict[str, Edge] = {}
        self.restores = 0
        self.anchors = 0
        self.deletions = 0
        """How many objects the pruner has deleted."""
        self._first_put_s: dict[str, float] = {}
        self._owed: dict[str, SimProcess] = {}
        """Payloads of a committed version that its writer has to put again, as it slept in the commit."""
        self._beats: dict[str, dict[str, int]] = {}
        """For each pruner, the versions of the live replicas that it has read."""
        self._arrived_late: set[str] = set()
        self._writers: dict[str, set[SimProcess]] = {}
        """The processes that have written a manifest or a lease, by its key."""

    # --- what the trainer says ----------------------------------------------------------------------------------------

    def note_step(self, weights: Weights) -> int:
        """Keep the bits that a trainer is about to publish; returns the number of the step."""
        self._steps.append(Weights(weights.layout, tuple(array.copy() for array in weights.arrays)))
        return len(self._steps) - 1

    @property
    def head(self) -> int | None:
        return len(self.versions) - 1 if self.versions else None

    @property
    def floor(self) -> int:
        data = self._world.objects.find(keys.FLOOR)
        return 0 if data is None else FloorRecord.from_bytes(data).version

    # --- what happens to objects --------------------------------------------------------------------------------------

    def wrote(self, process: SimProcess, key: str, data: bytes, before: bytes | None) -> None:
        """An object was put or created. `before` is what it replaced."""
        if key == keys.LEASE or key.startswith((keys.VERSIONS, keys.ANCHORS)):
            self._writers.setdefault(key, set()).add(process)
        if key.startswith(keys.PAYLOADS):
            self._require(key == keys.payload_key(hashlib.sha256(data).hexdigest()), "payload.key", f"{key} has others")
            self._first_put_s[key] = self._world.scheduler.now_s
            self._owed.pop(key, None)
        elif key.startswith((keys.VERSIONS, keys.ANCHORS, keys.SKIPS)):
            self._require(before in (None, data), "manifest.changed", f"{process.name} has changed {key}")
            if before is None:
                self._commit(process, key, Manifest.from_bytes(data))
        elif key == keys.FEED:
            self._require(before in (None, data), "feed.changed", f"{process.name} has changed {key}")
        elif key == keys.FLOOR:
            self._raise_floor(FloorRecord.from_bytes(data).version, before)
        elif key.startswith(keys.REPLICAS):
            beat = Heartbeat.from_bytes(data)
            claimed = beat.facts.get("digest")
            if beat.version is not None and claimed is not None:
                self._require(
                    claimed == self.versions[beat.version].digest.hex,
                    "heartbeat.digest",
                    f"{beat.replica} claims another digest for version {beat.version}",
                )

    def deleted(self, process: SimProcess, key: str, before: bytes | None) -> None:
        """An object was deleted."""
        if before is None or key.startswith((keys.PROBES, keys.REPLICAS)) or key == keys.LEASE:
            return
        is_prunable = key.startswith((keys.PAYLOADS, keys.ANCHORS, keys.SKIPS))
        self._require(process.role == "pruner" and is_prunable, "deleted", f"{process.name} has deleted {key}")
        self.deletions += 1
        world = self._world
        gone = [edge for edge in self.edges.values() if key in (edge.key, *map(_ref_key, edge.manifest.refs))]
        whole = [edge for edge in self.edges.values() if self._is_whole(edge)]
        lost = reachable([*whole, *(edge for edge in gone if self._is_whole(edge, but=key))]) - reachable(
            edge for edge in whole if edge.key != key
        )
        if key.startswith((keys.ANCHORS, keys.SKIPS)):
            del self.edges[key]
        self._require(
            all(version < self.floor for version in lost),
            "prune.kept",
            f"without {key} the versions {sorted(lost)} are lost, and the floor is {self.floor}",
        )
        for replica, version in self._beats.get(process.name, {}).items():
            for edge in gone:
                self._require(
                    edge.start is None or edge.start < version or not world.objects.has(keys.replica_key(replica)),
                    "prune.path",
                    f"{key} is on the path of {replica}, which is at version {version}",
                )

    def read(self, process: SimProcess, key: str, *, is_flipped: bool) -> None:
        """An object was read. The pruner must respect the heartbeats that it reads and that arrive undamaged."""
        replica = keys.parse_replica_key(key)
        if process.role != "pruner" or replica is None:
            return
        beats = self._beats.setdefault(process.name, {})
        beats.pop(replica, None)
        data = self._world.objects.find(key)
        if data is None or is_flipped:
            return
        age_s = self._world.scheduler.now_s - self._world.objects.modified_unix_s(key)
        version = Heartbeat.from_bytes(data).version
        if version is not None and age_s < LIVE_S - _CLOCK_ERROR_S and abs(process.clock_offset_s) < _CLOCK_ERROR_S:
            beats[replica] = version

    def begin_pruning(self, process: SimProcess) -> None:
        """The pruner makes a new plan: heartbeats that it read for an earlier one no longer count."""
        self._beats.pop(process.name, None)

    def _commit(self, process: SimProcess, key: str, manifest: Manifest) -> None:
        """A manifest appeared."""
        version, is_added = manifest.version, key.startswith((keys.ANCHORS, keys.SKIPS))
        if is_added:
            self._require(version < len(self.versions), "added.version", f"{key} is of a version that does not exist")
            truth = self.versions[version]
            if manifest.parent is None:
                self.anchors += 1
            else:
                parent = self.versions[manifest.parent].digest
                self._require(manifest.parent_digest == parent, "skip.parent", f"{key} has another parent digest")
        else:
            self._require(version == len(self.versions), "version.dense", f"{key} follows version {self.head}")
            assert manifest.step is not None
            weights = self._steps[manifest.step]
            truth = Truth(weights, blocks.digest(weights))
            parent = self.versions[-1].digest if self.versions else None
            self._require(manifest.parent_digest == parent, "version.parent", f"{key} has another parent digest")
            self.versions.append(truth)
        self._require(manifest.digest == truth.digest, "commit.digest", f"{key} has not the digest of its weights")
        edge = self.edges[key] = Edge(key, manifest)
        missing = [ref_key for ref_key in map(_ref_key, manifest.refs) if not self._world.objects.has(ref_key)]
        if missing and is_added and is_given_up(edge, self.floor):
            return
        if missing:
            # Only a writer that slept while it committed may find its payloads gone. It has to put them again.
            for ref_key in missing:
                put_s = self._first_put_s.get(ref_key)
                is_late = put_s is not None and self._world.scheduler.now_s - put_s > LATE_S
                self._require(is_late, "commit.payload", f"{key} is committed by {process.name} without {ref_key}")
                self._owed[ref_key] = process
            return
        self._require_bits(edge, truth)

    def _require_bits(self, edge: Edge, truth: Truth) -> None:
        """The payloads of an edge lead from the right bits to the right bits."""
        start = edge.start
        weights = zeros(truth.weights.layout)
        if start is not None:
            weights = copied(self.versions[start].weights)
        try:
            for _ in HeldState(weights, scratch=True).take(edge, fetch_payloads(self._world.objects, [edge.manifest])):
                pass
            fetch_files(self._world.objects, edge.manifest)
        except DeltasyncError as error:
            self._world.fail("commit.bits", f"{edge.key} cannot be applied: {error}")
        self._require(same_bits(weights, truth.weights), "commit.bits", f"{edge.key} leads to other bits")

    def _raise_floor(self, floor: int, before: bytes | None) -> None:
        if before is not None:
            old = FloorRecord.from_bytes(before).version
            self._require(floor >= old, "floor.lowered", f"the floor went from {old} to {floor}")
        config = self._world.config
        head = 0 if self.head is None else self.head
        self._require(floor <= max(0, head - config.keep_versions + 1), "prune.versions", f"floor {floor}, head {head}")
        starts = {edge.end for edge in self.edges.values() if edge.start is None and self._is_whole(edge)}
        kept = sum(start >= floor for start in starts)
        self._require(kept >= config.keep_anchors, "prune.anchors", f"the floor {floor} keeps {kept} anchors")

    def _is_whole(self, edge: Edge, *, but: str | None = None) -> bool:
        """Whether all payloads of an edge are in the store; `but` was there a moment ago."""
        return all(self._world.objects.has(key) or key == but for key in map(_ref_key, edge.manifest.refs))

    def is_new_shard(self, key: str, data: bytes) -> bool:
        """Whether a `put` of this payload is a shard of an anchor that is not committed yet."""
        if not key.startswith(keys.PAYLOADS) or b'"kind":"shard"' not in data[:4096]:
            return False
        return not any(key in map(_ref_key, edge.manifest.refs) for edge in self.edges.values())

    # --- what processes have ------------------------------------------------------------------------------------------

    def require_version(self, who: str, version: int, weights: Weights, digest: StateDigest | None = None) -> None:
        """Weights that are of a version have its bits."""
        self._require(version < len(self.versions), "bits", f"{who} has version {version}, which does not exist")
        truth = self.versions[version]
        self._require(same_bits(weights, truth.weights), "bits", f"{who} has other bits than version {version}")
        self._require(digest in (None, truth.digest), "digest", f"{who} has another digest for version {version}")

    def arrived_late(self, key: str) -> None:
        """A request arrived after its sender had given it up."""
        self._arrived_late.add(key)

    # --- which errors are allowed -------------------------------------------------------------------------------------

    def judge(self, process: SimProcess, error: BaseException) -> None:
        """An error was raised. `World.fail` unless something that happened explains it."""
        if not self._is_allowed(process, error):
            message = f"{process.name}: {error!r}, after {sorted(_met(process))}"
            self._world.fail(f"error.{type(error).__name__}", message, error)

    def judge_damage(self, process: SimProcess, damages: object) -> None:
        """`verify` found damage. Only a version whose payloads are still to be put again is damaged."""
        self._require(self._owed != {}, "verify", f"{process.name} found {damages}")

    def _is_allowed(self, process: SimProcess, error: BaseException) -> bool:
        met = _met(process)
        was_damaged = bool(met & {"flip", "torn", "rot"})
        if isinstance(error, StoreError):
            # A probe whose bytes were damaged on the way looks like one of a store that keeps nothing.
            return bool(met & ERRORS) or (was_damaged and not error.transient)
        if isinstance(error, CorruptError | FormatError | MismatchError):
            return was_damaged or (isinstance(error, CorruptError) and self._owed != {})
        if isinstance(error, ConflictError):
            return was_damaged or self._is_conflict(process, error)
        if isinstance(error, NotFoundError):
            # A reader may come too early, or the pruner was faster.
            is_pruned = error.version is not None and error.version < self.floor
            is_racing = "empty" in met or self.deletions > process.deletions_seen
            return is_pruned or is_racing or was_damaged or self._owed != {}
        if isinstance(error, TargetError):
            return "target" in met
        if isinstance(error, RankError):
            # A rank was lost, or stopped for longer than the others wait.
            return bool(met & {"lost", "nap", "nap after", "sleep", "sleep after", "delay"} | met & ERRORS)
        if isinstance(error, InvalidInputError) and error.__cause__ is not None:
            # A publisher that has stopped repeats why.
            return self._is_allowed(process, error.__cause__)
        return False

    def _is_conflict(self, process: SimProcess, error: ConflictError) -> bool:
        """A conflict needs another writer, or an own request that arrived late."""
        others = self._writers.get(error.key or "", set()).difference(process.peers)
        if error.key == keys.LEASE and _met(process) & ERRORS:
            # A publisher of the same process could not release it.
            return True
        return bool(others) or error.key in self._arrived_late

    # --- at the end ---------------------------------------------------------------------------------------------------

    def require_whole_feed(self) -> None:
        """`verify`, which decodes every payload, finds no damage, and the head is restored to the right bits."""
        objects, log = self._world.objects, Log(self._world.objects)
        self._require(not self._owed, "commit.owed", f"{sorted(self._owed)} were not put again")
        found = verify(objects, deep=True)
        self._require(found.damages == (), "verify", f"{found.damages}")
        head = log.require_head()
        try:
            weights = load(log, head)
        except DeltasyncError as error:
            self._world.fail("restore", f"the head cannot be restored: {error}", error)
        self.restores += 1
        self.require_version("a new reader", head.version, weights)

    def _require(self, is_so: bool, rule: str, message: str) -> None:
        if not is_so:
            self._world.fail(rule, message)


def _met(process: SimProcess) -> set[str]:
    return {fault for peer in process.peers for fault in peer.met}


def _ref_key(ref: PayloadRef) -> str:
    return keys.payload_key(ref.sha256)


def same_bits(a: Weights, b: Weights) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a.arrays, b.arrays, strict=True))


def copied(weights: Weights) -> Weights:
    return Weights(weights.layout, tuple(array.copy() for array in weights.arrays))
