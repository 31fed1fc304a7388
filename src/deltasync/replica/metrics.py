"""The status of a follower over HTTP, and its metrics for Prometheus (extra `metrics`)."""

import hmac
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from deltasync.errors import InvalidInputError
from deltasync.replica.events import Status

if TYPE_CHECKING:
    from prometheus_client.core import Metric

logger = logging.getLogger(__name__)

_COUNTERS = {
    "moves": ("moves", "Times that the target became another version."),
    "nbytes": ("fetched_bytes", "Bytes of the payloads that were fetched."),
    "refetched": ("refetched", "Payloads that arrived damaged and were fetched again."),
    "rerouted": ("rerouted", "Edges that could not be used."),
    "rebuilt": ("rebuilt", "Mirrors that had other bits than their version."),
    "scrubbed": ("scrubbed_elements", "Elements that were compared with the mirror."),
    "damaged": ("damaged_elements", "Elements that differed from the mirror."),
    "repaired": ("repaired_elements", "Elements that differed and were overwritten."),
}
"""Name and description of the counter for each field of `Counts`."""


class FollowerCollector:
    """Collects the metrics of one follower at each scrape. A gauge without a value yet has no sample."""

    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status

    def collect(self) -> "Iterator[Metric]":
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        status = self._status()
        gauges = (
            ("version", "The version that is live.", status.version),
            ("head", "The newest version of the feed that was seen.", status.head),
            ("lag", "Versions between the two.", status.lag),
            ("following", "1 while the feed is followed.", int(status.is_following)),
            ("failing", "1 while following fails.", int(status.error is not None)),
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
        for field, total in asdict(status.counts).items():
            name, description = _COUNTERS[field]
            yield CounterMetricFamily(f"deltasync_{name}", description, value=total)


def register(status: Callable[[], Status]) -> Callable[[], None]:
    """Add a follower to the registry of this process, which vLLM serves; the result removes it again."""
    from prometheus_client import REGISTRY

    collector = FollowerCollector(status)
    REGISTRY.register(collector)
    return lambda: REGISTRY.unregister(collector)


def exposition(status: Callable[[], Status]) -> Callable[[], bytes]:
    """A function that returns the metrics of one follower as text. InvalidInputError without prometheus-client."""
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ImportError as error:
        raise InvalidInputError(
            "metrics need the package prometheus-client", hint="pip install 'deltasync[metrics]'"
        ) from error
    registry = CollectorRegistry()
    registry.register(FollowerCollector(status))
    return lambda: generate_latest(registry)


@contextmanager
def listening(
    status: Callable[[], Status],
    host: str,
    port: int,
    *,
    token: str | None = None,
    metrics: Callable[[], bytes] | None = None,
) -> Iterator[str]:
    """Serve `GET /status` and `GET /metrics` during the block; gives the URL. Port 0 takes a free one.

    With a token, every request without it is 401, except for the metrics.
    """
    try:
        server = _Server((host, port), status, token, metrics)
    except OSError as error:
        raise InvalidInputError(
            f"cannot listen on {host} port {port}: {error.strerror}", hint="choose another address"
        ) from error
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="deltasync-listen", daemon=True)
    thread.start()
    try:
        yield f"http://{f'[{host}]' if ':' in host else host}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def parse_address(text: str) -> tuple[str, int]:
    """HOST:PORT, with an IPv6 address in brackets. ValueError for anything else."""
    parts = urlsplit(f"//{text}")
    if parts.hostname is None or parts.port is None or parts.netloc != text or parts.username is not None:
        raise ValueError(f"{text!r} is not HOST:PORT")
    return parts.hostname, parts.port


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(
        self,
        address: tuple[str, int],
        status: Callable[[], Status],
        token: str | None,
        metrics: Callable[[], bytes] | None,
    ) -> None:
        self.status = status
        self.token = token
        self.metrics = metrics
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    timeout = 10.0
    """Seconds after which a connection that has not sent a request is closed."""

    def do_GET(self) -> None:
        server, path = cast(_Server, self.server), urlsplit(self.path).path
        if (self.command, path) == ("GET", "/metrics") and server.metrics is not None:
            from prometheus_client import CONTENT_TYPE_LATEST

            self._send(200, CONTENT_TYPE_LATEST, server.metrics())
        elif not self._is_allowed(server.token):
            self._send_json(401, {"error": {"kind": "unauthorized"}})
        elif (self.command, path) == ("GET", "/status"):
            self._send_json(200, asdict(server.status()))
        else:
            self._send_json(404, {"error": {"kind": "not_found", "hint": "GET /status, GET /metrics"}})

    do_POST = do_GET  # noqa: N815 - answered with 401 or 404

    def _is_allowed(self, token: str | None) -> bool:
        given = self.headers.get("Authorization", "")
        return token is None or hmac.compare_digest(given.encode(), f"Bearer {token}".encode())

    def _send_json(self, code: int, value: dict[str, Any]) -> None:
        self._send(code, "application/json", json.dumps(value).encode())

    def _send(self, code: int, content_type: str, content: bytes) -> None:
        self.send_response(code)
        if code == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def version_string(self) -> str:
        return "deltasync"

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)
