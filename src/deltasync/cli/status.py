"""The `status` command: the replicas of a feed by their heartbeats."""

import argparse
import sys
from typing import Any

from deltasync.cli.feeds import feed_size_text, stored
from deltasync.cli.output import Column, Output
from deltasync.cli.units import count_text, duration_text
from deltasync.errors import MismatchError
from deltasync.feed.log import Log
from deltasync.replica.fleet import ReplicaState, replica_states
from deltasync.store import opened

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
        out.table(title, _COLUMNS, [_row(state) for state in states], alarming=alarming)
    sys.stdout.flush()
    wrong = [state.id for state in states if state.is_live and state.has_digest is False]
    if wrong:
        raise MismatchError(
            f"{args.url}: {count_text(len(wrong), 'replica')} with another digest than that of the version served, "
            f"or with a version that the feed does not have, such as {wrong[0]!r:.140}",
            hint="scrub or restart them; `deltasync verify` checks the feed itself",
        )


def _row(state: ReplicaState) -> tuple[Any, ...]:
    proved_s = state.proved_age_s
    return (
        state.id,
        state.version,
        state.lag,
        state.age_s,
        "live" if state.is_live else "silent",
        "unknown" if state.has_digest is None else "equal" if state.has_digest else "DIFFERENT",
        None if proved_s is None else f"{state.proved_version}, {duration_text(proved_s)} ago",
        state.engine,
        ", ".join(f"{phase} {duration_text(value)}" for phase, value in state.seconds.items()) or None,
    )
