"""A follower over HTTP: its health, whether it is ready, its status, and metrics for Prometheus (extra `metrics`)."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from deltasync import listener
from deltasync.errors import InvalidInputError
from deltasync.listener import Request, Response
from deltasync.replica.events import Status
from deltasync.replica.hook import HookStatus

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_COUNTERS = {
    "moves": ("moves", "Times that the target became another version."),
    "nbytes": ("fetched_bytes", "Bytes of the payloads that were fetched."),
    "refetched": ("refetched", "Payloads that arrived damaged and were fetched again."),
    "rerouted": ("rerouted", "Edges that could not be used."),
    "rebuilt": ("rebuilt", "Mirrors that had other bits than their version."),
    "scrubbed": ("scrubbed_elements", "Elements that were compared with the mirror."),
    "damaged": ("damaged_elements", "Elements that differed from the mirror."),
    "repaired": ("repaired_elements", "Elements that differed and were overwritten."),
    "failures": ("failures", "Moves that failed."),
    "heartbeat_failures": ("heartbeat_failures", "Heartbeats that could not be written."),
}
"""Name and description of the counter for each field of `Counts`."""


class FollowerCollector:
    """Collects the metrics of one follower, and of its hook, at each scrape. A gauge without a value has no sample."""

    def __init__(self, status: Callable[[], Status], hook: Callable[[], HookStatus] | None = None) -> None:
        self._status = status
        self._hook = hook

    def collect(self) -> "Iterator[Metric]":
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        status = self._status()
        live = status.last if status.last is not None and status.last.version == status.version else None
        committed_unix_s = None if live is None else live.committed_unix_s
        gauges = (
            ("version", "The version that is live.", status.version),
            ("head", "The newest version of the feed that was seen.", status.head),
            ("lag", "Versions between the two.", status.lag),
            ("following", "1 while the feed is followed.", int(status.is_following)),
            ("failing", "1 while following fails.", int(status.error is not None)),
            ("stale_seconds", "Seconds since the live version was found to be the newest.", status.stale_s),
            ("poll_age_seconds", "Seconds since the store last answered a poll.", status.polled_s),
            (
                "version_age_seconds",
                "Seconds since the live version was committed, by the clocks of trainer and replica.",
                None if committed_unix_s is None else max(0.0, time.time() - committed_unix_s),
            ),
        )
        for name, description, value in gauges:
            gauge = GaugeMetricFamily(f"deltasync_{name}", description)
            if value is not None:
                gauge.add_metric([], value)
            yield gauge
        seconds = GaugeMetricFamily("deltasync_last_move_seconds", "Time of the last move, by phase.", labels=["phase"])
        for phase, value_s in {} if status.last is None else asdict(status.last.seconds).items():
            seconds.add_metric([phase], value_s)
        yield seconds
        phases = CounterMetricFamily("deltasync_move_seconds", "Time of all moves, by phase.", labels=["phase"])
        for phase, value_s in asdict(status.seconds).items():
            phases.add_metric([phase], value_s)
        yield phases
        for field, total in asdict(status.counts).items():
            name, description = _COUNTERS[field]
            yield CounterMetricFamily(f"deltasync_{name}", description, value=total)
        if self._hook is not None:
            hook = self._hook()
            gauge = GaugeMetricFamily("deltasync_exec_version", "The version that the command last succeeded for.")
            if hook.version is not None:
                gauge.add_metric([], hook.version)
            yield gauge
            yield GaugeMetricFamily("deltasync_exec_failing", "1 while the command fails.", value=int(hook.is_failing))
            yield CounterMetricFamily("deltasync_exec_failures", "Runs of the command that failed.", hook.failures)


def register(status: Callable[[], Status]) -> Callable[[], None]:
    """Add a follower to the registry of this process, which vLLM serves; the result removes it again."""
    from prometheus_client import REGISTRY

    collector = FollowerCollector(status)
    REGISTRY.register(collector)
    return lambda: REGISTRY.unregister(collector)


def exposition(status: Callable[[], Status], hook: Callable[[], HookStatus] | None = None) -> Callable[[], bytes]:
    """A function that returns the metrics of one follower as text. InvalidInputError without prometheus-client."""
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ImportError as error:
        raise InvalidInputError(
            "metrics need the package prometheus-client", hint="pip install 'deltasync[metrics]'"
        ) from error
    registry = CollectorRegistry()
    registry.register(FollowerCollector(status, hook))
    return lambda: generate_latest(registry)


@contextmanager
def listening(
    status: Callable[[], Status],
    host: str,
    port: int,
    *,
    token: str | None = None,
    metrics: Callable[[], bytes] | None = None,
    why_not_ready: Callable[[], str | None] | None = None,
    details: Callable[[], Mapping[str, Any]] = dict,
) -> Iterator[str]:
    """Serve `/healthz`, `/readyz`, `/status` and `/metrics` during the block; gives the URL. Port 0 takes a free one.

    `why_not_ready` is asked for each `GET /readyz`; by default it is ready while a version is live. `details` are added
    to the status. With a token, `/status` without it is 401; the others, which probes and scrapers read, need none.
    InvalidInputError without a token if other hosts could reach the address.
    """
    not_ready = partial(no_version, status) if why_not_ready is None else why_not_ready

    def respond(request: Request) -> Response:
        asked = (request.method, request.path)
        if asked == ("GET", "/healthz"):
            return Response.json(200, {"healthy": True})
        if asked == ("GET", "/readyz"):
            # Without the reason, which may name the store: anyone may ask.
            is_ready = not_ready() is None
            return Response.json(200 if is_ready else 503, {"ready": is_ready, "version": status().version})
        if asked == ("GET", "/metrics") and metrics is not None:
            from prometheus_client import CONTENT_TYPE_LATEST

            return Response(200, CONTENT_TYPE_LATEST, metrics())
        if not request.is_allowed(token):
            return Response.unauthorized()
        if asked == ("GET", "/status"):
            return Response.json(200, {**asdict(status()), "not_ready": not_ready(), **details()})
        hint = "GET /healthz, /readyz, /status or /metrics"
        if asked == ("GET", "/metrics"):
            hint = "pip install 'deltasync[metrics]'"
        return Response.json(404, {"error": {"kind": "not_found", "hint": hint}})

    with listener.listening(respond, host, port, has_token=token is not None) as url:
        yield url


def no_version(status: Callable[[], Status], *, ready_s: float | None = None) -> str | None:
    """Why a follower is not ready: it serves no version, or one that was the newest too long ago. None if it is."""
    now = status()
    if now.version is None:
        return "no version is live yet" if now.error is None else f"no version is live: {now.error}"
    if ready_s is not None and (now.stale_s is None or now.stale_s > ready_s):
        since = "" if now.stale_s is None else f" for {now.stale_s:.0f} s"
        return f"version {now.version} was not known to be the newest{since}" + (f": {now.error}" if now.error else "")
    return None
