"""Metrics of the processes that maintain a feed, for Prometheus (extra `metrics`): compactor, pruner, relay."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Literal

from deltasync.metrics import Samples, counter, gauge
from deltasync.upkeep.relay import Relay
from deltasync.upkeep.stats import Upkeep

if TYPE_CHECKING:
    from prometheus_client.core import Metric

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
_COUNTERS: Mapping[Role, Mapping[str, tuple[str, str]]] = {
    "compactor": {
        "skips": ("skips", "Skips that were committed."),
        "payload_bytes": ("payload_bytes", "Bytes of their payloads."),
    },
    "pruner": {
        "runs": ("runs", "Times that the feed was pruned."),
        "deleted_objects": ("deleted_objects", "Objects that were deleted."),
        "deleted_bytes": ("deleted_bytes", "Bytes of the payloads that were deleted."),
    },
    "relay": {
        "payload_bytes": ("payload_bytes", "Bytes of payloads that were sent."),
        "manifest_bytes": ("manifest_bytes", "Bytes of manifests that were sent."),
        "left_out": ("coalesced", "Versions that became part of an edge to a later one."),
        "heartbeat_failures": ("heartbeat_failures", "Looks at heartbeats that could not be copied to the source."),
    },
}
"""Name and description of the counter for each count of a role."""

_FIGURES: Mapping[Role, Mapping[str, str]] = {
    "compactor": {},
    "pruner": {
        "stored_bytes": "Bytes of all payloads of the feed after the last run.",
        "held_replicas": "Live replicas that are behind, so that the deltas that they need stay.",
        "held_pins": "Pins of older versions, so that what they need stays.",
    },
    "relay": {},
}


class UpkeepCollector:
    """Collects the metrics of one role at each scrape. A gauge without a value has no sample.

    Several relays of one process differ in the label `destination`. The other roles have no such label.
    """

    def __init__(self, role: Role, sources: Mapping[tuple[str, ...], Upkeep]) -> None:
        self._role = role
        self._sources = sources
        self._labels = ("destination",) if role == "relay" else ()

    @classmethod
    def of_relays(cls, *relays: Relay) -> "UpkeepCollector":
        """The collector of the relays of a process."""
        return cls("relay", {(each.destination,): each.upkeep for each in relays})

    def collect(self) -> "Iterator[Metric]":
        role = self._role

        def samples(read: Callable[[Upkeep], float | None]) -> Samples:
            return {labels: read(upkeep) for labels, upkeep in self._sources.items()}

        def by(names: tuple[str, ...], read: Callable[[Upkeep, str], float]) -> Samples:
            return {(*labels, name): read(upkeep, name) for labels, upkeep in self._sources.items() for name in names}

        yield gauge(f"{role}_version", _VERSIONS[role], samples(lambda u: u.version), self._labels)
        heads = samples(lambda u: u.head)
        yield gauge(f"{role}_head", "The newest version of the feed that was seen.", heads, self._labels)
        if role == "relay":
            yield gauge("relay_lag", "Versions that the copy does not have yet.", samples(_lag), self._labels)
        yield gauge(f"{role}_failing", "1 while it fails.", samples(lambda u: u.error is not None), self._labels)
        yield gauge(
            f"{role}_last_success_timestamp_seconds",
            "When it last did its work, or found that there was none.",
            samples(lambda u: u.worked_unix_s),
            self._labels,
        )
        for name, description in _FIGURES[role].items():
            yield gauge(f"{role}_{name}", description, samples(partial(_figure, name=name)), self._labels)
        yield counter(
            f"{role}_phase_seconds",
            "Time by phase.",
            by(PHASES[role], lambda u, phase: u.seconds.get(phase, 0.0)),
            (*self._labels, "phase"),
        )
        if role == "relay":
            yield counter(
                "relay_edges",
                "Edges that were sent, by kind.",
                by(EDGES, lambda u, kind: u.counts.get(f"{kind}_edges", 0)),
                (*self._labels, "kind"),
            )
        if role != "pruner":
            retried = samples(partial(_count, name="retries"))
            yield counter(f"{role}_retries", "Requests to a store that were made again.", retried, self._labels)
        failed = samples(partial(_count, name="failures"))
        yield counter(f"{role}_failures", "Attempts that failed; another follows.", failed, self._labels)
        for field, (name, description) in _COUNTERS[role].items():
            yield counter(f"{role}_{name}", description, samples(partial(_count, name=field)), self._labels)


def _lag(upkeep: Upkeep) -> int | None:
    head, version = upkeep.head, upkeep.version
    return None if head is None else head - (-1 if version is None else version)


def _count(upkeep: Upkeep, *, name: str) -> int:
    return upkeep.counts.get(name, 0)


def _figure(upkeep: Upkeep, *, name: str) -> int | None:
    return upkeep.figures.get(name)
