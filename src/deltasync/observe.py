"""What others watch: observers, metrics for Prometheus (extra `metrics`), spans for OpenTelemetry, status over HTTP.

Events and status are dataclasses. The metadata of a field say how it is `shown`, and everything here is made from that.
"""

import hashlib
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from deltasync import listener
from deltasync.errors import DeltasyncError, InvalidInputError
from deltasync.listener import Request, Response

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shown:
    """How a field is shown.

    `metric` and `help`: the metric that has it. `is_total`: it only grows, or is added up. `label`: it has a value for
    each value of this label. `span`: the attribute of spans that has it. `is_phase`: it is a span of its own.
    `tracker`: its name in a tracker.
    """

    metric: str | None = None
    help: str = ""
    is_total: bool = False
    label: str | None = None
    span: str | None = None
    is_phase: bool = False
    tracker: str | None = None


def shown(metric: str | None = None, help: str = "", **options: Any) -> dict[str, Shown]:
    """The metadata of a field that is shown so."""
    return {"shown": Shown(metric, help, **options)}


def total(metric: str, help: str, **options: Any) -> dict[str, Shown]:
    """The metadata of a field that only grows, or that is added up."""
    return shown(metric, help, is_total=True, **options)


def phases_of(event: "DataclassInstance") -> dict[str, float]:
    """The seconds of the phases of an event, in their order."""
    return {name.removesuffix("_s"): value for how, name, value in _walk(event) if how.is_phase}


def tracked(event: "DataclassInstance") -> dict[str, float | None]:
    """The numbers of an event that a tracker shows."""
    return {how.tracker: value for how, _, value in _walk(event) if how.tracker is not None}


def _walk(event: "DataclassInstance") -> Iterator[tuple[Shown, str, Any]]:
    """What is shown of an event and of the dataclasses in it, with names and values."""
    for each in fields(event):
        value = getattr(event, each.name)
        if is_dataclass(value) and not isinstance(value, type):
            yield from _walk(value)
        elif (how := each.metadata.get("shown")) is not None:
            yield how, each.name, value


# Observers


def tell(observer: object, *args: object, method: str = "__call__") -> None:
    """Call an observer, or its `method` if it has that. What it raises is logged, and changes nothing."""
    called = getattr(observer, method, None)
    if callable(called):
        with _logging_errors():
            called(*args)


@contextmanager
def _logging_errors() -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit) as error:
        logger.error("an observer failed: %r", error, exc_info=error)


# Metrics

Value = float | None | Mapping[str, float]
"""Of a metric: a number, or one for each value of its label. None has no sample: the value is not known."""


@dataclass(frozen=True, slots=True)
class Family:
    """A metric `deltasync_{name}`, and how it is read from a record. A total has the suffix `_total`."""

    name: str
    help: str
    read: Callable[[Any], Value]
    is_total: bool = False
    label: str | None = None


def families(kind: "type[DataclassInstance]", prefix: str = "", *, within: str | None = None) -> Iterator[Family]:
    """The metrics of the fields of a dataclass: that of the record, or that of its field `within`, if it is there."""
    for each in fields(kind):
        how = each.metadata.get("shown")
        if how is not None and how.metric is not None:
            yield Family(prefix + how.metric, how.help, partial(_read, within, each.name), how.is_total, how.label)


def _read(within: str | None, name: str, record: object) -> Any:
    inner = record if within is None else getattr(record, within)
    return None if inner is None else getattr(inner, name)


class Collector:
    """Gives the metrics of records as they are at each scrape."""

    def __init__(
        self,
        families: Iterable[Family],
        read: Callable[[], Mapping[tuple[str, ...], object]],
        labels: tuple[str, ...] = (),
        *,
        beside: Iterable["Collector"] = (),
    ) -> None:
        """`read` returns the records, by the values of their `labels`. `beside`: metrics that belong to these."""
        self._families = tuple(families)
        self._read = read
        self._labels = labels
        self._beside = tuple(beside)

    def collect(self) -> "Iterator[Metric]":
        """The metrics now: called by the registry at each scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        records = self._read()
        for one in self._families:
            make = CounterMetricFamily if one.is_total else GaugeMetricFamily
            labels = self._labels if one.label is None else (*self._labels, one.label)
            family = make(f"deltasync_{one.name}", one.help, labels=labels)
            for values, record in records.items():
                for label, number in _samples(one.read(record)):
                    family.add_metric((*values, *label), number)
            yield family
        for other in self._beside:
            yield from other.collect()


def _samples(value: Any) -> Iterator[tuple[tuple[str, ...], float]]:
    if isinstance(value, Mapping):
        yield from (((label,), number) for label, number in value.items())
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _samples(asdict(value))
    elif value is not None:
        yield (), float(value)


def require_client() -> None:
    """InvalidInputError without prometheus-client."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError as error:
        raise InvalidInputError(
            "metrics need the package prometheus-client", hint="pip install 'deltasync[metrics]'"
        ) from error


def registered(collector: Any, registry: "CollectorRegistry | None" = None) -> Callable[[], None]:
    """Add a collector to a registry, by default that of the process; the result removes it again."""
    from prometheus_client import REGISTRY

    chosen = REGISTRY if registry is None else registry
    chosen.register(collector)
    return lambda: chosen.unregister(collector)


def exposition(*collectors: Collector) -> Callable[[], bytes]:
    """A function that returns the metrics as text. InvalidInputError without prometheus-client."""
    require_client()
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    for collector in collectors:
        registered(collector, registry)
    return lambda: generate_latest(registry)


# Health and status


@contextmanager
def listening(
    status: "Callable[[], DataclassInstance]",
    host: str,
    port: int,
    *,
    token: str | None = None,
    metrics: Callable[[], bytes] | None = None,
    why_not_ready: Callable[[], str | None] = lambda: None,
    details: Callable[[], Mapping[str, Any]] = dict,
) -> Iterator[str]:
    """Serve `/healthz`, `/readyz`, `/status` and `/metrics` during the block; gives the URL. Port 0 takes a free one.

    The status has a `version`. `why_not_ready` is asked for each `GET /readyz`. `details` are added to the status. With
    a token, `/status` without it is 401; without one it is 403 for requests that do not name a loopback address. The
    others, which probes and scrapers read, need neither. InvalidInputError without a token if other hosts could reach
    the address.
    """

    def respond(request: Request) -> Response:
        asked = (request.method, request.path)
        if asked == ("GET", "/healthz"):
            return Response.json(200, {"healthy": True})
        if asked == ("GET", "/readyz"):
            # Without the reason, which may name the store: anyone may ask.
            is_ready = why_not_ready() is None
            return Response.json(200 if is_ready else 503, {"ready": is_ready, "version": asdict(status())["version"]})
        if asked == ("GET", "/metrics") and metrics is not None:
            from prometheus_client import CONTENT_TYPE_LATEST

            return Response(200, CONTENT_TYPE_LATEST, metrics())
        if not request.is_allowed(token):
            return Response.unauthorized()
        if asked == ("GET", "/status"):
            if token is None and not request.is_local:
                return Response.json(403, {"error": {"kind": "host", "hint": "ask 127.0.0.1 or localhost"}})
            return Response.json(200, {**asdict(status()), "not_ready": why_not_ready(), **details()})
        hint = "GET /healthz, /readyz, /status or /metrics"
        if asked == ("GET", "/metrics"):
            hint = "pip install 'deltasync[metrics]'"
        return Response.json(404, {"error": {"kind": "not_found", "hint": hint}})

    with listener.listening(respond, host, port, has_token=token is not None) as url:
        yield url


# Spans

FeedId = Callable[[], str | None]
"""Reads the id of the feed from its record."""


def trace_id(feed: str, version: int) -> int:
    """The id of the trace of a version: never 0."""
    return int.from_bytes(_hash(feed, version)[:16]) or 1


class VersionTracer:
    """Records spans for the versions of one feed. In a process without a provider of OpenTelemetry it does nothing.

    Spans of trainer and replicas have a common parent, which is never recorded itself.
    """

    def __init__(self, read_feed: FeedId) -> None:
        self._read_feed = read_feed
        self._feed: str | None = None

    def record(
        self, name: str, event: Any, *, end_unix_s: float, began_unix_s: float | None = None, **attributes: Any
    ) -> None:
        """Record a span of a version's event and one for each of its phases: one after another, up to the end.

        `began_unix_s` is earlier than the first phase if something waited before it. An error is logged.
        """
        api = sys.modules.get("opentelemetry.trace")
        if api is None:
            return
        with _logging_errors():
            provider = api.get_tracer_provider()
            if isinstance(provider, api.NoOpTracerProvider | api.ProxyTracerProvider):
                return
            if self._feed is None:
                # Where it cannot be read the next version tries again: nothing may depend on a trace.
                with suppress(DeltasyncError):
                    self._feed = self._read_feed()
            if (feed := self._feed) is None:
                return
            tracer = provider.get_tracer("deltasync")
            version, phases = event.version, phases_of(event)
            attributes |= {how.span: value for how, _, value in _walk(event) if how.span is not None}
            known = _hash(feed, version)
            parent = api.SpanContext(
                trace_id=trace_id(feed, version),
                span_id=int.from_bytes(known[16:24]) or 1,
                is_remote=True,
                trace_flags=api.TraceFlags(api.TraceFlags.SAMPLED),
            )
            end_ns, durations_ns = _ns(end_unix_s), [_ns(seconds) for seconds in phases.values()]
            start_ns = end_ns - sum(durations_ns)
            outer = tracer.start_span(
                f"deltasync.{name}",
                context=api.set_span_in_context(api.NonRecordingSpan(parent)),
                start_time=start_ns if began_unix_s is None else min(_ns(began_unix_s), start_ns),
                attributes={
                    "deltasync.feed": feed,
                    "deltasync.version": version,
                    **{f"deltasync.{key}": value for key, value in attributes.items() if value is not None},
                },
            )
            inside = api.set_span_in_context(outer)
            for phase, duration_ns in zip(phases, durations_ns, strict=True):
                span = tracer.start_span(f"deltasync.{name}.{phase}", context=inside, start_time=start_ns)
                start_ns += duration_ns
                span.end(end_time=start_ns)
            outer.end(end_time=end_ns)


def _hash(feed: str, version: int) -> bytes:
    return hashlib.sha256(f"deltasync {feed} {version}".encode()).digest()


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
