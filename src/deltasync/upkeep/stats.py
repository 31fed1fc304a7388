"""What the processes that maintain a feed have done: a compactor, a pruner, a relay. Their status and their metrics."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from deltasync.observe import Collector, Family
from deltasync.store.patient import PatientStore

Role = Literal["compactor", "pruner", "relay"]

PHASES: Mapping[Role, tuple[str, ...]] = {
    "compactor": ("replay", "encode", "put", "commit"),
    "pruner": ("plan", "delete"),
    "relay": ("fetch", "put", "commit"),
}
"""The phases of each role, in their order."""


@dataclass(slots=True)
class MaintenanceStats:
    """Counts and times of one such process since it was created. One thread writes them, others may read them.

    No dictionary is ever changed: it is replaced by another one, so that others may read it in the meantime.

    `version`: where it is. A compactor holds the weights of this version, a copy has it as its newest one, and a
    pruner keeps everything from it on. `head`: the newest version of the feed that it has seen. `error`: what the last
    attempt failed with; None after a success. `worked_unix_s`: when the last attempt succeeded.
    """

    version: int | None = None
    head: int | None = None
    counts: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    """Time by phase."""
    figures: dict[str, int] = field(default_factory=dict)
    """What the last attempt found, which may become less."""
    error: str | None = None
    worked_unix_s: float | None = None

    @contextmanager
    def attempt(self, *stores: PatientStore) -> Iterator[None]:
        """Count what happens in the block as one attempt, which fails with an error, and the retries of `stores`."""
        retries = sum(store.retries for store in stores)
        try:
            yield
        except GeneratorExit:
            # The caller has had enough, which is no failure.
            raise
        except BaseException as error:
            self.count("failures")
            self.error = f"{type(error).__name__}: {error}"
            raise
        else:
            self.error, self.worked_unix_s = None, time.time()
        finally:
            self.count("retries", sum(store.retries for store in stores) - retries)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time that the block takes."""
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self.seconds = {**self.seconds, name: self.seconds.get(name, 0.0) + time.perf_counter() - began_s}

    def count(self, name: str, number: int = 1) -> None:
        """Add to a count."""
        self.counts = {**self.counts, name: self.counts.get(name, 0) + number}

    def why_not_ready(self) -> str | None:
        """Why this process does not do its work: it fails, or has not succeeded yet. None if it does."""
        if self.error is not None:
            return self.error
        return "it has not succeeded yet" if self.worked_unix_s is None else None


_VERSIONS: Mapping[Role, str] = {
    "compactor": "The version whose weights the compactor holds.",
    "pruner": "The oldest version from which on everything stays.",
    "relay": "The newest version of the copy.",
}
_FAILURES = {"failures": "Attempts that failed; another follows."}
_RETRIES = {"retries": "Requests to a store that were made again."}
_COUNTS: Mapping[Role, Mapping[str, str]] = {
    "compactor": {
        **_FAILURES,
        **_RETRIES,
        "skips": "Skips that were committed.",
        "payload_bytes": "Bytes of their payloads.",
    },
    "pruner": {
        **_FAILURES,
        "runs": "Times that the feed was pruned.",
        "deleted_objects": "Objects that were deleted.",
        "deleted_bytes": "Bytes of the payloads that were deleted.",
    },
    "relay": {
        **_FAILURES,
        **_RETRIES,
        "payload_bytes": "Bytes of payloads that were sent.",
        "manifest_bytes": "Bytes of manifests that were sent.",
        "left_out": "Versions that became part of an edge to a later one.",
        "heartbeat_failures": "Looks at heartbeats that could not be copied to the source.",
    },
}
_FIGURES: Mapping[str, str] = {
    "stored_bytes": "Bytes of all payloads of the feed after the last run.",
    "held_replicas": "Live replicas that are behind, so that the deltas that they need stay.",
    "held_pins": "Pins of older versions, so that what they need stays.",
}
"""What a pruner found."""

_EDGES = ("anchor", "base", "delta", "skip")


def upkeep_metrics(role: Role, sources: Mapping[tuple[str, ...], MaintenanceStats]) -> Collector:
    """The metrics of one role. Relays of one process differ in the label `destination`; other roles have no label."""

    def gauge(name: str, help: str, read: Callable[[MaintenanceStats], float | None]) -> Family:
        return Family(f"{role}_{name}", help, read)

    def lag(upkeep: MaintenanceStats) -> int | None:
        return None if upkeep.head is None else upkeep.head - (-1 if upkeep.version is None else upkeep.version)

    worked = "When it last did its work, or found that there was none."
    families = [
        gauge("version", _VERSIONS[role], lambda upkeep: upkeep.version),
        gauge("head", "The newest version of the feed that was seen.", lambda upkeep: upkeep.head),
        gauge("failing", "1 while it fails.", lambda upkeep: upkeep.error is not None),
        gauge("last_success_timestamp_seconds", worked, lambda upkeep: upkeep.worked_unix_s),
    ]
    for count, help in _COUNTS[role].items():
        name = "coalesced" if count == "left_out" else count
        families.append(Family(f"{role}_{name}", help, partial(_counted, count), is_total=True))
    seconds = lambda upkeep: {phase: upkeep.seconds.get(phase, 0.0) for phase in PHASES[role]}  # noqa: E731
    families.append(Family(f"{role}_phase_seconds", "Time by phase.", seconds, is_total=True, label="phase"))
    if role == "pruner":
        families += [gauge(name, help, partial(_found, name)) for name, help in _FIGURES.items()]
    if role == "relay":
        families.append(gauge("lag", "Versions that the copy does not have yet.", lag))
        edges = lambda upkeep: {kind: _counted(f"{kind}_edges", upkeep) for kind in _EDGES}  # noqa: E731
        families.append(Family("relay_edges", "Edges that were sent, by kind.", edges, is_total=True, label="kind"))
    return Collector(families, lambda: sources, ("destination",) if role == "relay" else ())


def _counted(name: str, upkeep: MaintenanceStats) -> int:
    return upkeep.counts.get(name, 0)


def _found(name: str, upkeep: MaintenanceStats) -> int | None:
    return upkeep.figures.get(name)
