"""Metrics of the processes that maintain a feed, for Prometheus (extra `metrics`): compactor, pruner, relay."""

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from deltasync.observe import Collector, Family
from deltasync.upkeep.stats import Upkeep

Role = Literal["compactor", "pruner", "relay"]

PHASES: Mapping[Role, tuple[str, ...]] = {
    "compactor": ("replay", "encode", "put", "commit"),
    "pruner": ("plan", "delete"),
    "relay": ("fetch", "put", "commit"),
}
"""The phases of each role, in their order."""

EDGES = ("anchor", "base", "delta", "skip")

_VERSIONS: Mapping[Role, str] = {
    "compactor": "The version whose weights the compactor holds.",
    "pruner": "The oldest version from which on everything stays.",
    "relay": "The newest version of the copy.",
}
_RETRIES = ("retries", "retries", "Requests to a store that were made again.")
_COUNTS: Mapping[Role, tuple[tuple[str, str, str], ...]] = {
    "compactor": (
        _RETRIES,
        ("skips", "skips", "Skips that were committed."),
        ("payload_bytes", "payload_bytes", "Bytes of their payloads."),
    ),
    "pruner": (
        ("runs", "runs", "Times that the feed was pruned."),
        ("deleted_objects", "deleted_objects", "Objects that were deleted."),
        ("deleted_bytes", "deleted_bytes", "Bytes of the payloads that were deleted."),
    ),
    "relay": (
        _RETRIES,
        ("payload_bytes", "payload_bytes", "Bytes of payloads that were sent."),
        ("manifest_bytes", "manifest_bytes", "Bytes of manifests that were sent."),
        ("left_out", "coalesced", "Versions that became part of an edge to a later one."),
        ("heartbeat_failures", "heartbeat_failures", "Looks at heartbeats that could not be copied to the source."),
    ),
}
"""Of each role: a count, the name of its metric, and what it says."""

_FIGURES = {
    "stored_bytes": "Bytes of all payloads of the feed after the last run.",
    "held_replicas": "Live replicas that are behind, so that the deltas that they need stay.",
    "held_pins": "Pins of older versions, so that what they need stays.",
}
"""What a pruner found."""


def upkeep_metrics(role: Role, sources: Mapping[tuple[str, ...], Upkeep]) -> Collector:
    """The metrics of one role. Relays of one process differ in the label `destination`; other roles have no label."""
    return Collector(_families(role), lambda: sources, ("destination",) if role == "relay" else ())


def _families(role: Role) -> Iterator[Family]:
    def family(name: str, help: str, read: Callable[[Upkeep], float | None]) -> Family:
        return Family(f"{role}_{name}", help, read)

    def total(name: str, help: str, count: str) -> Family:
        return Family(f"{role}_{name}", help, lambda upkeep: upkeep.counts.get(count, 0), is_total=True)

    yield family("version", _VERSIONS[role], lambda upkeep: upkeep.version)
    yield family("head", "The newest version of the feed that was seen.", lambda upkeep: upkeep.head)
    yield family("failing", "1 while it fails.", lambda upkeep: upkeep.error is not None)
    worked = "When it last did its work, or found that there was none."
    yield family("last_success_timestamp_seconds", worked, lambda upkeep: upkeep.worked_unix_s)
    yield total("failures", "Attempts that failed; another follows.", "failures")
    for count, name, help in _COUNTS[role]:
        yield total(name, help, count)
    seconds = lambda upkeep: {phase: upkeep.seconds.get(phase, 0.0) for phase in PHASES[role]}  # noqa: E731
    yield Family(f"{role}_phase_seconds", "Time by phase.", seconds, is_total=True, label="phase")
    if role == "pruner":
        for name, help in _FIGURES.items():
            yield family(name, help, lambda upkeep, name=name: upkeep.figures.get(name))  # type: ignore[misc]
    if role == "relay":
        yield family("lag", "Versions that the copy does not have yet.", _lag)
        edges = lambda upkeep: {kind: upkeep.counts.get(f"{kind}_edges", 0) for kind in EDGES}  # noqa: E731
        yield Family("relay_edges", "Edges that were sent, by kind.", edges, is_total=True, label="kind")


def _lag(upkeep: Upkeep) -> int | None:
    head, version = upkeep.head, upkeep.version
    return None if head is None else head - (-1 if version is None else version)
