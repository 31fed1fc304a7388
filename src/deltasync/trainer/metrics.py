"""Metrics of a publisher for Prometheus (extra `metrics`)."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from deltasync.errors import InvalidInputError
from deltasync.metrics import Samples, counter, gauge, registered, require_client
from deltasync.trainer.events import PublishEvent
from deltasync.upkeep.metrics import Role, UpkeepCollector
from deltasync.upkeep.stats import Upkeep

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

_PHASES = ("held", "encode", "put", "commit")


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
        self._head: PublishEvent | None = None
        self._committed_unix_s: float | None = None
        self._counts: Counter[str] = Counter()
        self._versions: Counter[str] = Counter()
        self._payload_bytes: Counter[str] = Counter()
        self._seconds: dict[str, float] = dict.fromkeys(_PHASES, 0.0)
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
            self._versions[event.kind] += 1
            self._payload_bytes[event.kind] += event.payload_bytes
            self._counts["coalesced"] += event.coalesced
            self._counts["retries"] += event.retries
            self._counts["changed_elements"] += event.changed or 0
            for phase in _PHASES:
                self._seconds[phase] += getattr(event, f"{phase}_s")
            # An anchor may be added to a version that is no longer the newest.
            if self._head is None or event.version >= self._head.version:
                self._head, self._committed_unix_s = event, time.time()
        if self._then is not None:
            self._then(event)

    def failed(self, error: BaseException) -> None:
        """Count a publication that failed."""
        with self._lock:
            self._counts["failures"] += 1

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
            head, committed_unix_s, counts = self._head, self._committed_unix_s, self._counts.copy()
            versions, payload_bytes, seconds = self._versions.copy(), self._payload_bytes.copy(), dict(self._seconds)
        for name, description, value in (
            ("version", "The version that was committed last.", None if head is None else head.version),
            ("step", "The trainer's step of that version.", None if head is None else head.step),
            ("elements", "Elements of all weights.", None if head is None else head.elements),
            ("last_commit_timestamp_seconds", "When the last version was committed.", committed_unix_s),
        ):
            yield gauge(f"publisher_{name}", description, value)
        last: Samples = {(phase,): getattr(head, f"{phase}_s") for phase in (() if head is None else _PHASES)}
        yield gauge("publisher_last_version_seconds", "Time of the last version, by phase.", last, ("phase",))
        labelled: tuple[tuple[str, str, str, dict[str, float]], ...] = (
            ("versions", "Versions and anchors that were committed, by kind.", "kind", dict(versions)),
            ("payload_bytes", "Bytes of their payloads, by kind.", "kind", dict(payload_bytes)),
            ("phase_seconds", "Time of all versions; training waits for the phase held.", "phase", seconds),
        )
        for name, description, label, values in labelled:
            samples: Samples = {(key,): total for key, total in values.items()}
            yield counter(f"publisher_{name}", description, samples, (label,))
        for name, description in (
            ("changed_elements", "Elements that changed, in all versions."),
            ("coalesced", "Publications that became part of a later version."),
            ("retries", "Requests to the store that were made again."),
            ("failures", "Publications that failed; the next one carries their changes."),
        ):
            yield counter(f"publisher_{name}", description, counts[name])
        for role, upkeep in list(self._upkeeps.items()):
            yield from UpkeepCollector(role, {(): upkeep}).collect()
