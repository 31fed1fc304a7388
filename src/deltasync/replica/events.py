"""What replicas report: each advance, the status and metrics of a follower; and what others read in heartbeats."""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple, dataclass, field, fields
from operator import add
from typing import TYPE_CHECKING, Any

from deltasync.feed.log import LIVE_S, RELAY_ENGINE, Log, is_live
from deltasync.format.manifest import Kind, Manifest
from deltasync.format.sealed import Heartbeat, is_decimal
from deltasync.observe import Collector, Family, families, shown, total

if TYPE_CHECKING:
    from deltasync.replica.folder import HookStatus


@dataclass(frozen=True, slots=True)
class Seconds:
    """Time by phase. `fetch` is the time that decoding waited for; `pause` is how long `commit` held up serving."""

    plan: float = field(default=0.0, metadata=shown(is_phase=True))
    fetch: float = field(default=0.0, metadata=shown(is_phase=True))
    decode: float = field(default=0.0, metadata=shown(is_phase=True))
    stage: float = field(default=0.0, metadata=shown(is_phase=True))
    commit: float = field(default=0.0, metadata=shown(is_phase=True))
    pause: float = field(default=0.0, metadata=shown(span="pause_s", tracker="pause_s"))

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(*map(add, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class Advance:
    """A target advanced to another version. `changed` counts the overwritten elements; None means all weights.

    `edges` are the kinds of the manifests that were applied, `nbytes` the bytes that were fetched for them: none and 0
    if the mirror had the version already. `committed_unix_s` is when the version was committed, by the trainer's clock.
    """

    from_version: int | None = field(metadata=shown(span="from_version"))
    version: int
    edges: tuple[Kind, ...] = field(metadata=shown(span="edges"))
    nbytes: int = field(metadata=shown(span="fetched_bytes", tracker="bytes"))
    changed: int | None = field(metadata=shown(span="changed"))
    seconds: Seconds
    committed_unix_s: int | None = None

    def __str__(self) -> str:
        s = self.seconds
        origin = "from nothing" if self.from_version is None else f"from version {self.from_version}"
        edges = f"{len(self.edges)} edge{'' if len(self.edges) == 1 else 's'}"
        changed = "all weights" if self.changed is None else f"{self.changed} elements"
        return (
            f"version {self.version} is live, {origin}: {changed}, {edges}, {self.nbytes} bytes; "
            f"plan {s.plan:.3f} s, fetch {s.fetch:.3f} s, decode {s.decode:.3f} s, stage {s.stage:.3f} s, "
            f"commit {s.commit:.3f} s, pause {s.pause:.4f} s"
        )


Observer = Callable[[Advance], None]


@dataclass(slots=True)
class Counts:
    """Counters since the follower was created."""

    moves: int = field(default=0, metadata=total("moves", "Times that the target became another version."))
    nbytes: int = field(default=0, metadata=total("fetched_bytes", "Bytes of the payloads that were fetched."))
    refetched: int = field(
        default=0, metadata=total("refetched", "Payloads that arrived damaged and were fetched again.")
    )
    rerouted: int = field(default=0, metadata=total("rerouted", "Edges that could not be used."))
    rebuilt: int = field(default=0, metadata=total("rebuilt", "Mirrors that had other bits than their version."))
    scrubbed: int = field(
        default=0, metadata=total("scrubbed_elements", "Elements that were compared with the mirror.")
    )
    damaged: int = field(default=0, metadata=total("damaged_elements", "Elements that differed from the mirror."))
    repaired: int = field(
        default=0, metadata=total("repaired_elements", "Elements that differed and were overwritten.")
    )
    failures: int = field(default=0, metadata=total("failures", "Moves that failed."))
    heartbeat_failures: int = field(
        default=0, metadata=total("heartbeat_failures", "Heartbeats that could not be written.")
    )
    retries: int = field(default=0, metadata=total("retries", "Reads of the store that were made again."))


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a follower. `version` is live in the target; `lag` counts the versions after it.

    `proved_version` was the live version when all live weights were last read back and found equal, at
    `proved_unix_s`. `scrubbed_unix_s`: when the last round of the scrub over all weights was complete.
    `unseen_elements`: how many live elements that depend on the weights no scrub has compared; nothing is proved then.
    `error`: what the last advance failed with, or following ended with; None after a success. `stale_s`: seconds since
    a poll found `version` to be the one to serve, the newest or the pinned one; None if no poll has.
    `heartbeat_problem`: why heartbeats do not serve their purpose, if they do not: no right to write them, or another
    follower with the same name. `polled_s`: seconds since the store last answered a poll; None if it never has.
    `seconds`: the time of all advances so far, by phase.
    """

    replica: str
    version: int | None = field(metadata=shown("version", "The version that is live."))
    head: int | None = field(metadata=shown("head", "The newest version of the feed that was seen."))
    lag: int | None = field(metadata=shown("lag", "Versions between the two."))
    mirror: int | None
    pinned: int | None
    is_paused: bool
    is_following: bool = field(metadata=shown("following", "1 while the feed is followed."))
    last: Advance | None
    error: str | None
    counts: Counts = field(default_factory=Counts)
    proved_version: int | None = None
    proved_unix_s: int | None = None
    scrubbed_unix_s: int | None = None
    unseen_elements: int = 0
    stale_s: float | None = field(
        default=None,
        metadata=shown("stale_seconds", "Seconds since the live version was found to be the newest."),
    )
    heartbeat_problem: str | None = None
    polled_s: float | None = field(
        default=None, metadata=shown("poll_age_seconds", "Seconds since the store last answered a poll.")
    )
    seconds: Seconds = field(
        default_factory=Seconds, metadata=total("move_seconds", "Time of all moves, by phase.", label="phase")
    )


# Metrics, and whether a follower is ready


def follower_metrics(status: Callable[[], Status], hook: "Callable[[], HookStatus] | None" = None) -> Collector:
    """The metrics of one follower, and of its hook."""
    hooks = [] if hook is None else [Collector(_HOOK, lambda: {(): hook()})]
    return Collector(_STATUS, lambda: {(): status()}, beside=hooks)


def _age_s(status: Status) -> float | None:
    last = status.last
    if last is None or last.version != status.version or last.committed_unix_s is None:
        return None
    return max(0.0, time.time() - last.committed_unix_s)


_STATUS = (
    *families(Status),
    *families(Counts, within="counts"),
    Family("failing", "1 while following fails.", lambda status: status.error is not None),
    Family(
        "version_age_seconds",
        "Seconds since the live version was committed, by the clocks of trainer and replica.",
        _age_s,
    ),
    Family(
        "last_move_seconds",
        "Time of the last move, by phase.",
        lambda status: None if status.last is None else status.last.seconds,
        label="phase",
    ),
)
_HOOK = (
    Family("exec_version", "The version that the command last succeeded for.", lambda hook: hook.version),
    Family("exec_failing", "1 while the command fails.", lambda hook: hook.is_failing),
    Family("exec_failures", "Runs of the command that failed.", lambda hook: hook.failures, is_total=True),
)


def no_version(status: Callable[[], Status], *, ready_s: float | None = None) -> str | None:
    """Why a follower is not ready: it serves no version, or one that was the newest too long ago. None if it is."""
    now = status()
    if now.version is None:
        return "no version is live yet" if now.error is None else f"no version is live: {now.error}"
    if ready_s is not None and (now.stale_s is None or now.stale_s > ready_s):
        since = "" if now.stale_s is None else f" for {now.stale_s:.0f} s"
        return f"version {now.version} was not known to be the newest{since}" + (f": {now.error}" if now.error else "")
    return None


# The replicas of a feed by their heartbeats


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """The last heartbeat of a replica, compared with the feed."""

    id: str
    version: int | None
    lag: int | None
    age_s: int
    is_live: bool
    engine: str | None
    has_digest: bool | None
    """Whether it has the digest of its version; False if the feed has no such version, None if it reports none."""
    seconds: dict[str, float]
    proved_version: int | None = None
    """The version that it served when all of its live weights were last read back and found equal."""
    proved_age_s: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "version": self.version,
            "lag": self.lag,
            "age_s": self.age_s,
            "live": self.is_live,
            "engine": self.engine,
            "digest_equal": self.has_digest,
            "proved_version": self.proved_version,
            "proved_age_s": self.proved_age_s,
            "seconds": self.seconds,
        }


def replica_states(log: Log, head: Manifest, *, clock: Callable[[], float] = time.time) -> list[ReplicaState]:
    """Every replica with a heartbeat: the live ones first, those on the oldest version first."""
    now_unix_s, beats = clock(), log.heartbeats()
    compared = zip(beats, log.compare(beats), strict=True)
    states = [replica_state(beat, head, has_digest, now_unix_s) for beat, has_digest in compared]
    return sorted(states, key=worst_first)


def worst_first(state: ReplicaState) -> tuple[bool, int, str]:
    """The order of replicas: the live ones first, those on the oldest version first."""
    return not state.is_live, -1 if state.version is None else state.version, state.id


def replica_state(beat: Heartbeat, head: Manifest, has_digest: bool | None, now_unix_s: float) -> ReplicaState:
    """One replica; `has_digest` as `Log.compare` returns it."""
    proved = [beat.facts.get(name) for name in ("proved_version", "proved_unix_s")]
    version, unix_s = (int(str(text)) if all(map(is_decimal, proved)) else None for text in proved)
    return ReplicaState(
        id=beat.replica,
        version=beat.version,
        lag=None if beat.version is None else max(0, head.version - beat.version),
        age_s=max(0, int(now_unix_s) - beat.unix_s),
        is_live=is_live(beat, now_unix_s),
        engine=beat.facts.get("engine"),
        has_digest=has_digest,
        seconds=phase_seconds(beat),
        proved_version=version,
        proved_age_s=None if unix_s is None else max(0, int(now_unix_s) - unix_s),
    )


def serving(log: Log, *, live_s: float = LIVE_S, clock: Callable[[], float] = time.time) -> dict[str, int]:
    """The versions that live replicas serve, by replica, the slowest first.

    Live: the heartbeat is younger than `live_s`. A replica without a version makes no rollouts and is left out, and so
    is a relay, and a replica with a version that this feed does not have, or has with another digest.
    """
    now_unix_s = clock()
    beats = [beat for beat in log.heartbeats() if beat.facts.get("engine") != RELAY_ENGINE]
    live = [beat for beat in beats if is_live(beat, now_unix_s, live_s=live_s)]
    compared = zip(live, log.compare(live), strict=True)
    found = [(b.version, b.replica) for b, has_digest in compared if b.version is not None and has_digest is not False]
    return {replica: version for version, replica in sorted(found)}


def phase_seconds(beat: Heartbeat) -> dict[str, float]:
    """The seconds of each phase of a replica's last move, as far as its heartbeat has them."""
    seconds = {}
    for phase in fields(Seconds):
        # Anyone who may write to the feed may have written it.
        with suppress(ValueError):
            value = float(beat.facts.get(f"{phase.name}_s", ""))
            if 0.0 <= value < math.inf:
                seconds[phase.name] = value
    return seconds
