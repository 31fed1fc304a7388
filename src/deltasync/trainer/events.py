"""What a publisher reports: handles of publications, events with sizes and times, metrics (extra `metrics`)."""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from deltasync.errors import InvalidInputError, StoreError
from deltasync.format.manifest import Kind, Manifest, Timeline
from deltasync.observe import Collector, Family, Value, families, phases_of, registered, require_client, shown
from deltasync.parallel import Progress
from deltasync.upkeep.stats import MaintenanceStats, Role, upkeep_metrics

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

logger = logging.getLogger(__name__)

PROGRESS_S = 10.0
"""Seconds between two log lines about an anchor that takes long."""


@dataclass(frozen=True, slots=True)
class PublishEvent:
    """One committed version, or one anchor that was added to a version (`kind` is then "anchor").

    Seconds by phase: the trainer waited for `held_s`; the other phases ran in the background. Payloads are put while
    others are encoded: `encode_s` is the time in which putting waited for the encoder. `coalesced` counts the earlier
    publications that this one carries. `timeline` is that of the manifest, with the time of the capture.
    """

    kind: Kind = field(metadata=shown(span="kind"))
    version: int = field(metadata=shown("version", "The version that was committed last."))
    step: int | None = field(metadata=shown("step", "The trainer's step of that version.", span="step"))
    elements: int = field(metadata=shown("elements", "Elements of all weights."))
    changed: int | None = field(metadata=shown(span="changed"))
    payload_bytes: int = field(metadata=shown(span="payload_bytes", tracker="bytes"))
    held_s: float = field(metadata=shown(span="held_s", tracker="held_s"))
    encode_s: float = field(metadata=shown(is_phase=True))
    put_s: float = field(metadata=shown(is_phase=True))
    commit_s: float = field(metadata=shown(is_phase=True))
    coalesced: int = field(metadata=shown(span="coalesced"))
    retries: int = field(metadata=shown(span="retries", tracker="retries"))
    timeline: Timeline | None = None

    def __str__(self) -> str:
        changed = "all" if self.changed is None else f"{self.changed} changed ({self.density or 0:.3%})"
        background = f"encode {self.encode_s:.3f} s, put {self.put_s:.3f} s, commit {self.commit_s:.3f} s"
        return (
            f"version {self.version} ({self.kind}, step {self.step}): {changed}, {self.payload_bytes} bytes; "
            f"held {self.held_s:.3f} s, {background}, {self.retries} retries, {self.coalesced} coalesced"
        )

    @property
    def density(self) -> float | None:
        """The share of elements that changed."""
        return None if self.changed is None or not self.elements else self.changed / self.elements


Observer = Callable[[PublishEvent], None]
"""Called with each event. If it has a method `failed`, that is called with the error of each failed publication.

If it has a method `maintains`, that is called with the role (pruner, compactor) and the `MaintenanceStats` of each
process of the feed's maintenance that the publisher runs by itself.
"""


def logged_progress(version: int) -> Progress:
    """Logs the progress of an anchor every `PROGRESS_S`."""
    next_s = time.monotonic() + PROGRESS_S

    def report(phase: str, done: int, total: int) -> None:
        nonlocal next_s
        now_s = time.monotonic()
        if now_s >= next_s and done < total:
            logger.info("the anchor of version %d: %.0f %% of %d elements are put", version, 100 * done / total, total)
            next_s = now_s + PROGRESS_S

    return report


class Publication:
    """The handle of one `publish` call. What it captured is part of `version`, which may carry later captures too."""

    def __init__(self, step: int | None) -> None:
        self.step = step
        self._done = threading.Event()
        self._manifest: Manifest | None = None
        self._error: BaseException | None = None
        self._event: PublishEvent | None = None

    @property
    def version(self) -> int | None:
        """The version that carries these weights; None while it is not committed."""
        return None if self._manifest is None else self._manifest.version

    @property
    def stats(self) -> PublishEvent | None:
        """Sizes and times of the version; None while it is not committed."""
        return self._event

    @property
    def error(self) -> BaseException | None:
        """What it failed with for good; None while it is not committed, and after that."""
        return self._error

    def wait(self, timeout_s: float | None = None) -> Manifest:
        """Wait for the commit and return its manifest. Raises the error if it failed for good, StoreError on timeout.

        After an error no change is lost: the next publication carries it.
        """
        if not self._done.wait(timeout_s):
            raise StoreError(
                f"step {self.step} is not committed after {timeout_s} s",
                transient=True,
                hint="it continues in the background: wait again",
            )
        if self._manifest is None:
            raise self._error if self._error is not None else StoreError("the publisher was closed", transient=False)
        return self._manifest

    def succeed(self, manifest: Manifest, event: PublishEvent) -> None:
        """Called by the pipeline once the version is committed."""
        self._manifest, self._event = manifest, event
        self._done.set()

    def fail(self, error: BaseException) -> None:
        """Called by the pipeline when the version could not be committed."""
        self._error = error
        self._done.set()


@dataclass(frozen=True, slots=True)
class CaptureTime:
    """When a capture began, by the publisher's clock; how long it held the trainer; and `perf_counter` at its end."""

    unix_s: float
    held_s: float
    end_s: float

    def timeline(self, *, started_s: float, encode_s: float) -> Timeline:
        """The steps until now, of a version that has been in progress since `started_s`, by `perf_counter`."""
        put_s = time.perf_counter() - started_s - encode_s
        seconds = (self.unix_s, self.held_s, started_s - self.end_s, encode_s, put_s)
        # A clock can be set to before 1970.
        return Timeline(*(max(0, round(1000 * value)) for value in seconds))


@dataclass(frozen=True, slots=True)
class CommittedVersion:
    """A committed version or a late anchor, and the time that it took. `is_anchor_due`: it should get an anchor."""

    manifest: Manifest
    put_s: float = 0.0
    commit_s: float = 0.0
    retries: int = 0
    is_anchor_due: bool = False
    encode_s: float = 0.0

    def event(self, *, held_s: float = 0.0, coalesced: int = 0) -> PublishEvent:
        """The event that reports it."""
        m = self.manifest
        return PublishEvent(
            kind=m.kind,
            version=m.version,
            step=m.step,
            elements=m.elements,
            changed=m.changed,
            payload_bytes=m.nbytes,
            held_s=held_s,
            encode_s=self.encode_s,
            put_s=self.put_s,
            commit_s=self.commit_s,
            coalesced=coalesced,
            retries=self.retries,
            timeline=m.timeline,
        )


_TOTALS: dict[str, tuple[str, str | None]] = {
    "versions": ("Versions and anchors that were committed, by kind.", "kind"),
    "payload_bytes": ("Bytes of their payloads, by kind.", "kind"),
    "phase_seconds": ("Time of all versions; training waits for the phase held.", "phase"),
    "changed_elements": ("Elements that changed, in all versions.", None),
    "coalesced": ("Publications that became part of a later version.", None),
    "retries": ("Requests to the store that were made again.", None),
    "failures": ("Publications that failed; the next one carries their changes.", None),
}
"""What all events of a publisher add up to: help and label."""


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
        self._totals: dict[str, dict[str, float]] = {name: defaultdict(float) for name in _TOTALS}
        """By name, then by the value of the label, which is empty for what has none."""
        self._totals["phase_seconds"].update(held=0.0, encode=0.0, put=0.0, commit=0.0)
        self._upkeeps: dict[Role, MaintenanceStats] = {}
        try:
            self._unregister = registered(self, registry)
        except ValueError as error:
            raise InvalidInputError(
                "the registry has the metrics of another publisher", hint="give each publisher a registry of its own"
            ) from error

    def __call__(self, event: PublishEvent) -> None:
        """Count a committed version or anchor."""
        with self._lock:
            self._totals["versions"][event.kind] += 1
            self._totals["payload_bytes"][event.kind] += event.payload_bytes
            self._totals["changed_elements"][""] += event.changed or 0
            self._totals["coalesced"][""] += event.coalesced
            self._totals["retries"][""] += event.retries
            for phase, value_s in _seconds_of(event).items():
                self._totals["phase_seconds"][phase] += value_s
            # An anchor may be added to a version that is no longer the newest.
            if self._newest is None or event.version >= self._newest.version:
                self._newest, self._committed_unix_s = event, time.time()
        if self._then is not None:
            self._then(event)

    def failed(self, error: BaseException) -> None:
        """Count a publication that failed."""
        with self._lock:
            self._totals["failures"][""] += 1

    def maintains(self, role: Role, upkeep: MaintenanceStats) -> None:
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


def _total(name: str, metrics: PublisherMetrics) -> Value:
    found = metrics._totals[name]
    return found[""] if _TOTALS[name][1] is None else found


_FAMILIES = (
    *families(PublishEvent, "publisher_", within="_newest"),
    *(
        Family(f"publisher_{name}", help, partial(_total, name), is_total=True, label=label)
        for name, (help, label) in _TOTALS.items()
    ),
    Family(
        "publisher_last_commit_timestamp_seconds",
        "When the last version was committed.",
        lambda metrics: metrics._committed_unix_s,
    ),
    Family(
        "publisher_last_version_seconds",
        "Time of the last version, by phase.",
        lambda metrics: {} if metrics._newest is None else _seconds_of(metrics._newest),
        label="phase",
    ),
)
