"""The timeline of a version: its steps on the trainer, by the manifest, and on replicas, by their heartbeats."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deltasync.cli.output import Column, Output
from deltasync.cli.units import duration_text
from deltasync.format.manifest import Manifest
from deltasync.format.sealed import Heartbeat, is_decimal
from deltasync.replica.fleet import phase_seconds

_COLUMNS = (
    Column("where", is_name=True),
    Column("step", is_name=True),
    Column("began", "{:+.3f} s".format),
    Column("took", duration_text),
)
_INSIDE = ("pause",)
"""Phases that are part of another one."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step on the way of a version. `began_s` counts from the beginning of the timeline."""

    where: str
    step: str
    began_s: float
    took_s: float | None = None


@dataclass(frozen=True, slots=True)
class VersionTimeline:
    """The steps of one version. It begins with the capture, or with the commit if no capture was recorded."""

    version: int
    has_capture: bool
    began_unix_ms: int
    steps: tuple[Step, ...]

    @classmethod
    def of(cls, manifest: Manifest, heartbeats: Sequence[Heartbeat]) -> "VersionTimeline":
        """From a manifest, and from the heartbeats of replicas whose last move led to its version."""
        recorded = manifest.timeline
        began_unix_ms = 1000 * manifest.created_unix_s if recorded is None else recorded.captured_unix_ms
        steps = list(_trainer_steps(manifest))
        for beat in heartbeats:
            moved, at = beat.facts.get("moved_version"), beat.facts.get("moved_unix_ms")
            if moved == str(manifest.version) and at is not None and is_decimal(at):
                steps += _replica_steps(beat, (int(at) - began_unix_ms) / 1000)
        return cls(manifest.version, recorded is not None, began_unix_ms, tuple(steps))

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "steps": [asdict(step) for step in self.steps]}

    def print(self, out: Output) -> None:
        """As a table."""
        since = "capture" if self.has_capture else "commit (no capture was recorded: a command, or an earlier release)"
        title = f"version {self.version} since its {since}; replicas by their own clocks"
        out.table(title, _COLUMNS, [(s.where, s.step, s.began_s, s.took_s) for s in self.steps])


def _trainer_steps(manifest: Manifest) -> Iterator[Step]:
    at_s = 0.0
    if manifest.timeline is not None:
        t = manifest.timeline
        phases = (("capture", t.held_ms), ("queue", t.queued_ms), ("encode", t.encode_ms), ("put", t.put_ms))
        for name, milliseconds in phases:
            yield Step("trainer", name, at_s, milliseconds / 1000)
            at_s += milliseconds / 1000
    yield Step("trainer", "committed", at_s)


def _replica_steps(beat: Heartbeat, live_s: float) -> Iterator[Step]:
    """The phases of a move, one after the other, which ended when the version was live."""
    seconds = phase_seconds(beat)
    at_s = live_s - sum(value for phase, value in seconds.items() if phase not in _INSIDE)
    for phase, value in seconds.items():
        if phase in _INSIDE:
            yield Step(beat.replica, phase, live_s - value, value)
        else:
            yield Step(beat.replica, phase, at_s, value)
            at_s += value
    yield Step(beat.replica, "live", live_s)
