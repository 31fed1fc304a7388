"""What needs attention in a feed: rules over an overview."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from deltasync.ui.overview import Overview

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

_LISTED = 3
"""Alerts of one kind, beside one that counts the others."""


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


def _some(found: Sequence[Alert], more: str) -> Iterator[Alert]:
    """The first of several alerts of one kind, and how many more there are: a fleet must not bury everything else."""
    yield from found[:_LISTED]
    if len(found) > _LISTED:
        yield replace(found[0], message=f"{len(found) - _LISTED:,} more {more}")


def _damage(overview: Overview) -> Iterator[Alert]:
    hint = "`deltasync verify` shows what it costs; publish an anchor to go on, or put the object back from a copy"
    found = []
    for damage in overview.damages:
        where = damage.key if damage.version is None else f"version {damage.version}, {damage.key}"
        found.append(Alert("critical", "damage", f"Damage in {where}: {damage.message}", hint))
    yield from _some(found, "objects are damaged")


def _replicas(overview: Overview) -> Iterator[Alert]:
    diverged, behind, silent = [], [], []
    for r in overview.replicas:
        state = r.state
        if state.is_live and state.has_digest is False:
            message = f"Replica {state.id} has other bits than version {state.version} of this feed"
            hint = "scrub or restart it; if it follows another feed, give it another prefix"
            diverged.append(Alert("critical", "diverged", message, hint))
        if state.is_live and state.lag is not None and state.lag > BEHIND_VERSIONS:
            seconds = "" if r.lag_s is None else f" and {r.lag_s:,} s"
            message = f"Replica {state.id} is {state.lag:,} versions{seconds} behind"
            hint = "look at its phase times and its log; `deltasync compact` makes catching up cheaper"
            behind.append(Alert("warning", "behind", message, hint))
        # One that stopped long ago was probably ended on purpose.
        if not state.is_live and state.age_s < ENDED_S:
            message = f"Replica {state.id} has not written a heartbeat for {state.age_s // 60:,} min"
            hint = "check whether it runs, and whether it may write to replicas/"
            silent.append(Alert("warning", "silent", message, hint))
    yield from _some(diverged, "replicas have other bits than their version")
    yield from _some(behind, "replicas are behind")
    if not has_ended(overview):
        yield from _some(silent, "replicas are silent")


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
