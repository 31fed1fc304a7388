"""Metrics of a process for Prometheus (extra `metrics`), and its health and status over HTTP."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from deltasync import listener
from deltasync.errors import InvalidInputError
from deltasync.listener import Request, Response

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

Samples = Mapping[tuple[str, ...], float | None]
"""Values by the values of their labels. None has no sample: the value is not known."""


class Collector(Protocol):
    """Gives the metrics as they are now, at each scrape."""

    def collect(self) -> "Iterator[Metric]": ...


def gauge(name: str, description: str, samples: Samples | float | None, labels: tuple[str, ...] = ()) -> "Metric":
    """A gauge `deltasync_{name}`."""
    from prometheus_client.core import GaugeMetricFamily

    return _filled(GaugeMetricFamily(f"deltasync_{name}", description, labels=labels), samples)


def counter(name: str, description: str, samples: Samples | float | None, labels: tuple[str, ...] = ()) -> "Metric":
    """A counter `deltasync_{name}_total`."""
    from prometheus_client.core import CounterMetricFamily

    return _filled(CounterMetricFamily(f"deltasync_{name}", description, labels=labels), samples)


def _filled(family: Any, samples: Samples | float | None) -> "Metric":
    for labels, value in (samples if isinstance(samples, Mapping) else {(): samples}).items():
        if value is not None:
            family.add_metric(labels, value)
    filled: Metric = family
    return filled


def require_client() -> None:
    """InvalidInputError without prometheus-client."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError as error:
        raise InvalidInputError(
            "metrics need the package prometheus-client", hint="pip install 'deltasync[metrics]'"
        ) from error


def registered(collector: Collector, registry: "CollectorRegistry | None" = None) -> Callable[[], None]:
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
