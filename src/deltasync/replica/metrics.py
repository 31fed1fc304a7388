"""Metrics of a follower for Prometheus (extra `metrics`), and whether it is ready."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from deltasync.metrics import counter, gauge
from deltasync.replica.events import Status
from deltasync.replica.hook import HookStatus

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_COUNTERS = {
    "moves": ("moves", "Times that the target became another version."),
    "nbytes": ("fetched_bytes", "Bytes of the payloads that were fetched."),
    "refetched": ("refetched", "Payloads that arrived damaged and were fetched again."),
    "rerouted": ("rerouted", "Edges that could not be used."),
    "rebuilt": ("rebuilt", "Mirrors that had other bits than their version."),
    "scrubbed": ("scrubbed_elements", "Elements that were compared with the mirror."),
    "damaged": ("damaged_elements", "Elements that differed from the mirror."),
    "repaired": ("repaired_elements", "Elements that differed and were overwritten."),
    "failures": ("failures", "Moves that failed."),
    "retries": ("retries", "Reads of the store that were made again."),
    "heartbeat_failures": ("heartbeat_failures", "Heartbeats that could not be written."),
}
"""Name and description of the counter for each field of `Counts`."""


class FollowerCollector:
    """Collects the metrics of one follower, and of its hook, at each scrape. A gauge without a value has no sample."""

    def __init__(self, status: Callable[[], Status], hook: Callable[[], HookStatus] | None = None) -> None:
        self._status = status
        self._hook = hook

    def collect(self) -> "Iterator[Metric]":
        status = self._status()
        live = status.last if status.last is not None and status.last.version == status.version else None
        committed_unix_s = None if live is None else live.committed_unix_s
        gauges = (
            ("version", "The version that is live.", status.version),
            ("head", "The newest version of the feed that was seen.", status.head),
            ("lag", "Versions between the two.", status.lag),
            ("following", "1 while the feed is followed.", int(status.is_following)),
            ("failing", "1 while following fails.", int(status.error is not None)),
            ("stale_seconds", "Seconds since the live version was found to be the newest.", status.stale_s),
            ("poll_age_seconds", "Seconds since the store last answered a poll.", status.polled_s),
            (
                "version_age_seconds",
                "Seconds since the live version was committed, by the clocks of trainer and replica.",
                None if committed_unix_s is None else max(0.0, time.time() - committed_unix_s),
            ),
        )
        for name, description, value in gauges:
            yield gauge(name, description, value)
        last = {} if status.last is None else asdict(status.last.seconds)
        for make, name, description, seconds in (
            (gauge, "last_move_seconds", "Time of the last move, by phase.", last),
            (counter, "move_seconds", "Time of all moves, by phase.", asdict(status.seconds)),
        ):
            yield make(name, description, {(phase,): value_s for phase, value_s in seconds.items()}, ("phase",))
        for field, total in asdict(status.counts).items():
            name, description = _COUNTERS[field]
            yield counter(name, description, total)
        if self._hook is not None:
            hook = self._hook()
            yield gauge("exec_version", "The version that the command last succeeded for.", hook.version)
            yield gauge("exec_failing", "1 while the command fails.", int(hook.is_failing))
            yield counter("exec_failures", "Runs of the command that failed.", hook.failures)


def no_version(status: Callable[[], Status], *, ready_s: float | None = None) -> str | None:
    """Why a follower is not ready: it serves no version, or one that was the newest too long ago. None if it is."""
    now = status()
    if now.version is None:
        return "no version is live yet" if now.error is None else f"no version is live: {now.error}"
    if ready_s is not None and (now.stale_s is None or now.stale_s > ready_s):
        since = "" if now.stale_s is None else f" for {now.stale_s:.0f} s"
        return f"version {now.version} was not known to be the newest{since}" + (f": {now.error}" if now.error else "")
    return None
