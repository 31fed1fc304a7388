"""What needs attention in a feed: rules over an overview."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from deltasync.ui.overview import Overview, Replica

Level = Literal["critical", "warning", "notice"]
_LEVELS: tuple[Level, ...] = ("critical", "warning", "notice")

BEHIND_VERSIONS = 8
"""A replica that is more versions behind is one to look at."""

SILENT_S = 600.0
SILENT_INTERVALS = 10
"""A publisher is silent after this time and so many times its usual interval."""

ENDED_S = 86_400.0
"""A run without a version for this long has probably ended."""

COPIES_MAX = 20
"""A feed that was never pruned may hold so many full copies of the weights before its size is mentioned."""

_LISTED = 20
"""Alerts of one kind."""


@dataclass(frozen=True, slots=True)
class Alert:
    """Something to look at, and what to do about it."""

    level: Level
    kind: str
    message: str
    hint: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def alerts(overview: Overview) -> list[Alert]:
    """What needs attention, the worst first."""
    rules: tuple[Callable[[Overview], Iterator[Alert]], ...] = (_damage, _replicas, _publisher, _size)
    found = [alert for rule in rules for alert in rule(overview)]
    return sorted(found, key=lambda alert: _LEVELS.index(alert.level))


def has_ended(overview: Overview) -> bool:
    """Whether the run has probably ended: no version for a day and for many times its usual interval."""
    return (overview.age_s or 0.0) > max(ENDED_S, SILENT_INTERVALS * (overview.interval_s or 0.0))


def _damage(overview: Overview) -> Iterator[Alert]:
    hint = "`deltasync verify` shows what it costs; publish an anchor to go on, or put the object back from a copy"
    for damage in overview.damages[:_LISTED]:
        where = damage.key if damage.version is None else f"version {damage.version}, {damage.key}"
        yield Alert("critical", "damage", f"Damage in {where}: {damage.message}", hint)
    if len(overview.damages) > _LISTED:
        yield Alert("critical", "damage", f"{len(overview.damages) - _LISTED} more damaged objects", hint)


def _replicas(overview: Overview) -> Iterator[Alert]:
    live = [r for r in overview.replicas if r.state.is_live]
    for r in (r for r in live if r.state.has_digest is False):
        yield Alert(
            "critical",
            "diverged",
            f"Replica {r.state.id} has other bits than version {r.state.version} of this feed",
            "scrub or restart it; if it follows another feed, give it another prefix",
        )
    behind = [r for r in live if (r.state.lag or 0) > BEHIND_VERSIONS]
    for r in behind[:_LISTED]:
        seconds = "" if r.lag_s is None else f" and {r.lag_s:,} s"
        yield Alert(
            "warning",
            "behind",
            f"Replica {r.state.id} is {r.state.lag:,} versions{seconds} behind",
            "look at its phase times and its log; `deltasync compact` makes catching up cheaper",
        )
    if len(behind) > _LISTED:
        yield Alert("warning", "behind", f"{len(behind) - _LISTED} more replicas are behind", "see the table")
    if has_ended(overview):
        return
    silent = [r for r in overview.replicas if not r.state.is_live and _was_just_here(overview, r)]
    for r in silent[:_LISTED]:
        minutes = r.state.age_s // 60
        yield Alert(
            "warning",
            "silent",
            f"Replica {r.state.id} has not written a heartbeat for {minutes:,} min",
            "check whether it runs, and whether it may write to replicas/",
        )
    if len(silent) > _LISTED:
        yield Alert("warning", "silent", f"{len(silent) - _LISTED} more replicas are silent", "see the table")


def _was_just_here(overview: Overview, replica: Replica) -> bool:
    """A replica that stopped a day ago was probably ended; one that stopped since is missed."""
    return replica.state.age_s < ENDED_S


def _publisher(overview: Overview) -> Iterator[Alert]:
    head, age_s = overview.head, overview.age_s
    if head is None or age_s is None:
        return
    if has_ended(overview):
        when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(head.created_unix_s))
        yield Alert(
            "notice",
            "ended",
            f"No version since {when} UTC: the run has probably ended",
            "nothing, if that was planned",
        )
    elif age_s > max(SILENT_S, SILENT_INTERVALS * (overview.interval_s or 0.0)):
        usual = "" if overview.interval_s is None else f"; usually there is one every {overview.interval_s:,.0f} s"
        yield Alert(
            "warning",
            "publisher",
            f"The publisher is silent: no version for {age_s / 60:,.0f} min{usual}",
            "look at the trainer's log for failed publications",
        )


def _size(overview: Overview) -> Iterator[Alert]:
    if overview.floor == 0 and overview.full_bytes and overview.stored_bytes > COPIES_MAX * overview.full_bytes:
        copies = overview.stored_bytes / overview.full_bytes
        yield Alert(
            "notice",
            "grows",
            f"The feed grows: it holds as much as {copies:,.0f} full copies, and was never pruned",
            "`deltasync prune` deletes what no replica needs",
        )
