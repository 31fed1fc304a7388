"""Metrics of a publisher for Prometheus (extra `metrics`)."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deltasync.errors import InvalidInputError
from deltasync.observe import Collector, Family, families, phases_of, registered, require_client, total
from deltasync.trainer.events import PublishEvent
from deltasync.upkeep.stats import Role, Upkeep, upkeep_metrics

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric


def _no_seconds() -> dict[str, float]:
    return dict.fromkeys(("held", "encode", "put", "commit"), 0.0)


@dataclass(slots=True)
class _Totals:
    """What all events of a publisher add up to."""

    versions: Counter[str] = field(
        default_factory=Counter,
        metadata=total("versions", "Versions and anchors that were committed, by kind.", label="kind"),
    )
    payload_bytes: Counter[str] = field(
        default_factory=Counter, metadata=total("payload_bytes", "Bytes of their payloads, by kind.", label="kind")
    )
    seconds: dict[str, float] = field(
        default_factory=_no_seconds,
        metadata=total("phase_seconds", "Time of all versions; training waits for the phase held.", label="phase"),
    )
    changed: int = field(default=0, metadata=total("changed_elements", "Elements that changed, in all versions."))
    coalesced: int = field(default=0, metadata=total("coalesced", "Publications that became part of a later version."))
    retries: int = field(default=0, metadata=total("retries", "Requests to the store that were made again."))
    failures: int = field(
        default=0, metadata=total("failures", "Publications that failed; the next one carries their changes.")
    )


class PublisherMetrics:
    """An observer of one publisher that counts for Prometheus: versions, bytes, seconds by phase, retries, failures.

    `PublisherOptions(observer=PublisherMetrics())` adds them to the registry of the process, or to `registry`; serve it
    with `prometheus_client.start_http_server(9464)`. With `then`, that observer is called with each event, too.
    A publisher that prunes or writes skips by itself has the metrics of a pruner and a compactor as well.
    InvalidInputError without prometheus-client, or if the registry has another publisher.
    """

    def __init__(
        self,
        *,
        registry: "CollectorRegistry | None" = None,
        then: Callable[[PublishEvent], None] | None = None,
    ) -> None:
        require_client()
        self._then = then
        self._lock = threading.Lock()
        self._newest: PublishEvent | None = None
        self._committed_unix_s: float | None = None
        self._totals = _Totals()
        self._upkeeps: dict[Role, Upkeep] = {}
        try:
            self._unregister = registered(self, registry)
        except ValueError as error:
            raise InvalidInputError(
                "the registry has the metrics of another publisher", hint="give each publisher a registry of its own"
            ) from error

    def __call__(self, event: PublishEvent) -> None:
        """Count a committed version or anchor."""
        with self._lock:
            totals = self._totals
            totals.versions[event.kind] += 1
            totals.payload_bytes[event.kind] += event.payload_bytes
            totals.changed += event.changed or 0
            totals.coalesced += event.coalesced
            totals.retries += event.retries
            for phase, value_s in _seconds_of(event).items():
                totals.seconds[phase] += value_s
            # An anchor may be added to a version that is no longer the newest.
            if self._newest is None or event.version >= self._newest.version:
                self._newest, self._committed_unix_s = event, time.time()
        if self._then is not None:
            self._then(event)

    def failed(self, error: BaseException) -> None:
        """Count a publication that failed."""
        with self._lock:
            self._totals.failures += 1

    def maintains(self, role: Role, upkeep: Upkeep) -> None:
        """Add the metrics of the publisher's retention, or of the skips that it writes."""
        self._upkeeps[role] = upkeep

    def close(self) -> None:
        """Remove the metrics from the registry."""
        self._unregister()

    def describe(self) -> "Iterator[Metric]":
        """The names, which the registry compares with those that it has."""
        return self.collect()

    def collect(self) -> "Iterator[Metric]":
        """The metrics now: called by the registry at each scrape."""
        with self._lock:
            own = list(Collector(_FAMILIES, lambda: {(): self}).collect())
        yield from own
        for role, upkeep in list(self._upkeeps.items()):
            yield from upkeep_metrics(role, {(): upkeep}).collect()


def _seconds_of(event: PublishEvent) -> dict[str, float]:
    return {"held": event.held_s, **phases_of(event)}


def _last_seconds(metrics: PublisherMetrics) -> dict[str, float]:
    return {} if metrics._newest is None else _seconds_of(metrics._newest)


_FAMILIES = (
    *families(PublishEvent, "publisher_", within="_newest"),
    *families(_Totals, "publisher_", within="_totals"),
    Family(
        "publisher_last_commit_timestamp_seconds",
        "When the last version was committed.",
        lambda metrics: metrics._committed_unix_s,
    ),
    Family("publisher_last_version_seconds", "Time of the last version, by phase.", _last_seconds, label="phase"),
)
