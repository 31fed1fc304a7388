"""The `status` command: the replicas of a feed by their heartbeats."""

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from deltasync.cli.feeds import feed_size_text, stored
from deltasync.cli.output import Column, Output
from deltasync.cli.units import count_text, duration_text
from deltasync.errors import MismatchError
from deltasync.feed.log import Log, is_live
from deltasync.format.manifest import Manifest
from deltasync.format.sealed import Heartbeat, is_decimal
from deltasync.replica.events import Seconds
from deltasync.store import opened

_PHASES = tuple(field.name for field in fields(Seconds))
_COLUMNS = (
    Column("replica", is_name=True),
    Column("version"),
    Column("lag"),
    Column("age", duration_text),
    Column("state", is_name=True),
    Column("digest", is_name=True),
    Column("proved", rank=2),
    Column("engine", is_name=True, rank=1),
    Column("last move", is_name=True, rank=3),
)


def status(args: argparse.Namespace, out: Output) -> None:
    """List the replicas; an error if a live one has other bits than its version."""
    with opened(args.url) as store:
        log = Log(store)
        head = log.require_head()
        floor = log.floor()
        states = replica_states(log, head)
        payloads, stored_bytes = stored(store)
    if out.is_json:
        sizes = {"stored_bytes": stored_bytes, "stored_payloads": payloads}
        replicas = [state.to_json() for state in states]
        out.json({"head": head.version, "floor": floor, **sizes, "replicas": replicas})
    else:
        live = sum(state.is_live for state in states)
        title = f"version {head.version} is the newest" + (f", pruned before version {floor}" if floor else "")
        title += f"; {count_text(live, 'live replica')}, {len(states) - live} silent"
        title += f"; {feed_size_text(payloads, stored_bytes)}"
        alarming = [i for i, state in enumerate(states) if state.has_digest is False]
        out.table(title, _COLUMNS, [state.row() for state in states], alarming=alarming)
    sys.stdout.flush()
    wrong = [state.id for state in states if state.is_live and state.has_digest is False]
    if wrong:
        raise MismatchError(
            f"{args.url}: {count_text(len(wrong), 'replica')} with another digest than that of the version served, "
            f"or with a version that the feed does not have, such as {wrong[0]!r:.140}",
            hint="scrub or restart them; `deltasync verify` checks the feed itself",
        )


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

    def row(self) -> tuple[Any, ...]:
        return (
            self.id,
            self.version,
            self.lag,
            self.age_s,
            "live" if self.is_live else "silent",
            "unknown" if self.has_digest is None else "equal" if self.has_digest else "DIFFERENT",
            None if self.proved_age_s is None else f"{self.proved_version}, {duration_text(self.proved_age_s)} ago",
            self.engine,
            ", ".join(f"{phase} {duration_text(value)}" for phase, value in self.seconds.items()) or None,
        )


def replica_states(log: Log, head: Manifest, *, clock: Callable[[], float] = time.time) -> list[ReplicaState]:
    """Every replica with a heartbeat: the live ones first, those on the oldest version first."""
    now_unix_s, beats = clock(), log.heartbeats()
    compared = zip(beats, log.compare(beats), strict=True)
    states = [_state(beat, head, has_digest, now_unix_s) for beat, has_digest in compared]
    return sorted(states, key=lambda s: (not s.is_live, -1 if s.version is None else s.version, s.id))


def _state(beat: Heartbeat, head: Manifest, has_digest: bool | None, now_unix_s: float) -> ReplicaState:
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
        seconds={phase: value for phase in _PHASES if (value := _seconds(beat.facts.get(f"{phase}_s"))) is not None},
        proved_version=version,
        proved_age_s=None if unix_s is None else max(0, int(now_unix_s) - unix_s),
    )


def _seconds(text: str | None) -> float | None:
    """A number of seconds from a heartbeat; None if it is missing or not valid."""
    try:
        value = float("" if text is None else text)
    except ValueError:
        return None
    return value if 0.0 <= value < math.inf else None
