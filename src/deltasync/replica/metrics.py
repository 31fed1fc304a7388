"""Metrics of a follower for Prometheus (extra `metrics`), and whether it is ready."""

import time
from collections.abc import Callable

from deltasync.observe import Collector, Family, families
from deltasync.replica.events import Counts, Status
from deltasync.replica.hook import HookStatus


def follower_metrics(status: Callable[[], Status], hook: Callable[[], HookStatus] | None = None) -> Collector:
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
