"""`deltasync status URL`."""

import argparse
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from deltasync.cli.feed import add_url, feed
from deltasync.cli.options import Commands, add_json
from deltasync.cli.output import print_json, print_table
from deltasync.errors import MismatchError, NotFoundError
from deltasync.following.events import Seconds
from deltasync.format.manifest import Manifest
from deltasync.format.records import Heartbeat
from deltasync.log.log import Log
from deltasync.prune import LIVE_S

_PHASES = tuple(field.name for field in fields(Seconds))


@dataclass(frozen=True, slots=True)
class Replica:
    """What the last heartbeat of a replica says, held against the feed."""

    id: str
    version: int | None
    lag: int | None
    age_s: int
    is_live: bool
    engine: str | None
    is_equal: bool | None
    """Whether its digest is that of the version; None if it tells none, or the feed does not have the version."""
    seconds: dict[str, float]

    @property
    def is_wrong(self) -> bool:
        return self.is_equal is False

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "version": self.version,
            "lag": self.lag,
            "age_s": self.age_s,
            "live": self.is_live,
            "engine": self.engine,
            "digest_equal": self.is_equal,
            "seconds": self.seconds,
        }


def register(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("status", help="say what the replicas of a feed serve", description=__doc__)
    add_url(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print every replica; exit with 3 if a live one does not have the bits of its version."""
    with feed(args.url) as store:
        log = Log(store)
        head = log.require_head()
        floor = log.floor()
        found = replicas(log, head)
    if args.json:
        print_json({"head": head.version, "floor": floor, "replicas": [replica.to_json() for replica in found]})
    else:
        _print(head.version, floor, found)
    sys.stdout.flush()
    wrong = [replica for replica in found if replica.is_live and replica.is_wrong]
    if wrong:
        raise MismatchError(
            f"{args.url}: {len(wrong)} replicas do not have the digest of their version, such as {wrong[0].id!r:.140}",
            hint="scrub or restart them; `deltasync verify` checks the feed itself",
        )


def replicas(log: Log, head: Manifest, *, clock: Callable[[], float] = time.time) -> list[Replica]:
    """Every replica with a heartbeat: live ones first, the slowest of them first."""
    now_unix_s, beats = clock(), log.heartbeats()
    claimed = {beat.version for beat in beats if beat.version is not None and "digest" in beat.facts}
    digests = {version: _digest(log, version) for version in claimed}
    found = [_replica(beat, head, digests, now_unix_s) for beat in beats]
    return sorted(found, key=lambda r: (not r.is_live, -1 if r.version is None else r.version, r.id))


def _digest(log: Log, version: int) -> str | None:
    try:
        return log.read(version).digest.hex
    except NotFoundError:
        return None


def _replica(beat: Heartbeat, head: Manifest, digests: Mapping[int, str | None], now_unix_s: float) -> Replica:
    told, wanted = beat.facts.get("digest"), None if beat.version is None else digests.get(beat.version)
    age_s = max(0, int(now_unix_s) - beat.unix_s)
    return Replica(
        id=beat.replica,
        version=beat.version,
        lag=None if beat.version is None else max(0, head.version - beat.version),
        age_s=age_s,
        is_live=age_s < LIVE_S,
        engine=beat.facts.get("engine"),
        is_equal=None if told is None or wanted is None else told == wanted,
        seconds={phase: value for phase in _PHASES if (value := _seconds(beat.facts.get(f"{phase}_s"))) is not None},
    )


def _seconds(text: str | None) -> float | None:
    """A number from a heartbeat; None if it is missing, or anything else."""
    try:
        value = float("" if text is None else text)
    except ValueError:
        return None
    return value if 0.0 <= value < math.inf else None


def _print(head: int, floor: int, found: Sequence[Replica]) -> None:
    live = sum(replica.is_live for replica in found)
    title = f"version {head} is the newest" + (f", pruned before {floor}" if floor else "")
    title += f"; {live} live replicas, {len(found) - live} silent"
    columns = ("replica", "version", "lag", "age", "state", "digest", "engine", "seconds of the last move")
    alarming = [i for i, replica in enumerate(found) if replica.is_wrong]
    print_table(title, columns, [_row(replica) for replica in found], alarming=alarming)


def _row(r: Replica) -> tuple[str, ...]:
    return (
        r.id,
        _text(r.version),
        _text(r.lag),
        f"{r.age_s} s",
        "live" if r.is_live else "silent",
        "unknown" if r.is_equal is None else "equal" if r.is_equal else "DIFFERENT",
        _text(r.engine),
        ", ".join(f"{phase} {value:.3g}" for phase, value in r.seconds.items()) if r.seconds else "-",
    )


def _text(value: int | str | None) -> str:
    return "-" if value is None else str(value)
