"""The replicas of a feed by their heartbeats."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from deltasync.feed.log import LIVE_S, RELAY_ENGINE, Log, is_live
from deltasync.format.manifest import Manifest
from deltasync.format.sealed import Heartbeat, is_decimal
from deltasync.replica.events import Seconds

_PHASES = tuple(field.name for field in fields(Seconds))


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
    return {phase: value for phase in _PHASES if (value := _seconds(beat.facts.get(f"{phase}_s"))) is not None}


def _seconds(text: str | None) -> float | None:
    """A number of seconds from a heartbeat; None if it is missing or not valid."""
    try:
        value = float("" if text is None else text)
    except ValueError:
        return None
    return value if 0.0 <= value < math.inf else None
