"""A follower over HTTP: its health, whether it is ready, its status, and metrics for Prometheus (extra `metrics`)."""

import hmac
import ipaddress
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from deltasync.errors import InvalidInputError
from deltasync.replica.events import Status
from deltasync.replica.hook import HookStatus

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
    """Collects the metrics of one follower, and of its hook, at each scrape. A gauge without a value has no sample."""

    def __init__(self, status: Callable[[], Status], hook: Callable[[], HookStatus] | None = None) -> None:
        self._status = status
        self._hook = hook

    def collect(self) -> "Iterator[Metric]":
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        status = self._status()
        gauges = (
            ("version", "The version that is live.", status.version),
            ("head", "The newest version of the feed that was seen.", status.head),
            ("lag", "Versions between the two.", status.lag),
            ("following", "1 while the feed is followed.", int(status.is_following)),
            ("failing", "1 while following fails.", int(status.error is not None)),
            ("stale_seconds", "Seconds since the live version was found to be the newest.", status.stale_s),
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
    try:
        # Resolved once, so that the address that is checked is the one that is bound.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        address = str(socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)[0][4][0])
        if token is None and not ipaddress.ip_address(address).is_loopback:
            raise InvalidInputError(
                f"other hosts can reach {host}, and there is no token to keep them out",
                hint="set DELTASYNC_TOKEN, or listen on 127.0.0.1",
            )
        if why_not_ready is None:
            why_not_ready = partial(no_version, status)
        server = _Server((address, port), status, token, metrics, why_not_ready, details)
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


def no_version(status: Callable[[], Status], *, ready_s: float | None = None) -> str | None:
    """Why a follower is not ready: it serves no version, or one that was the newest too long ago. None if it is."""
    now = status()
    if now.version is None:
        return "no version is live yet" if now.error is None else f"no version is live: {now.error}"
    if ready_s is not None and (now.stale_s is None or now.stale_s > ready_s):
        since = "" if now.stale_s is None else f" for {now.stale_s:.0f} s"
        return f"version {now.version} was not known to be the newest{since}" + (f": {now.error}" if now.error else "")
    return None


def parse_address(text: str) -> tuple[str, int]:
    """HOST:PORT, with an IPv6 address in brackets. ValueError for anything else."""
    parts = urlsplit(f"//{text}")
    if parts.hostname is None or parts.port is None or parts.netloc != text or parts.username is not None:
        raise ValueError(f"{text!r} is not HOST:PORT")
    return parts.hostname, parts.port


_CONNECTIONS_MAX = 32
_CONNECTION_S = 10.0
"""Seconds after which a connection is closed, whether its request was answered or not."""


class _Server(ThreadingHTTPServer):
    """Answers each connection in a thread of its own. Of too many connections, the oldest one is closed.

    A slow or idle client, which needs no token to connect, thus keeps no other one from an answer for long.
    """

    daemon_threads = True
    request_queue_size = _CONNECTIONS_MAX

    def __init__(
        self,
        address: tuple[str, int],
        status: Callable[[], Status],
        token: str | None,
        metrics: Callable[[], bytes] | None,
        why_not_ready: Callable[[], str | None],
        details: Callable[[], Mapping[str, Any]],
    ) -> None:
        self.status = status
        self.token = token
        self.metrics = metrics
        self.why_not_ready = why_not_ready
        self.details = details
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._connections: dict[socket.socket, float] = {}
        """When each connection was accepted, oldest first."""
        self._lock = threading.Lock()
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._connections[request] = time.monotonic()
            while len(self._connections) > _CONNECTIONS_MAX:
                self._drop_oldest()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called between two polls for new connections."""
        with self._lock:
            while self._connections and time.monotonic() - next(iter(self._connections.values())) > _CONNECTION_S:
                self._drop_oldest()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a connection from %s failed", client_address, exc_info=True)

    def _drop_oldest(self) -> None:
        request = next(iter(self._connections))
        del self._connections[request]
        # Its thread reads the end of the stream, and closes it.
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    timeout = _CONNECTION_S

    def do_GET(self) -> None:
        server, request = cast(_Server, self.server), (self.command, urlsplit(self.path).path)
        if request == ("GET", "/healthz"):
            self._send_json(200, {"healthy": True})
        elif request == ("GET", "/readyz"):
            # Without the reason, which may name the store: anyone may ask.
            is_ready = server.why_not_ready() is None
            self._send_json(200 if is_ready else 503, {"ready": is_ready, "version": server.status().version})
        elif request == ("GET", "/metrics") and server.metrics is not None:
            from prometheus_client import CONTENT_TYPE_LATEST

            self._send(200, CONTENT_TYPE_LATEST, server.metrics())
        elif not self._is_allowed(server.token):
            self._send_json(401, {"error": {"kind": "unauthorized"}})
        elif request == ("GET", "/status"):
            not_ready = {"not_ready": server.why_not_ready()}
            self._send_json(200, {**asdict(server.status()), **not_ready, **server.details()})
        elif request == ("GET", "/metrics"):
            self._send_json(404, {"error": {"kind": "not_found", "hint": "pip install 'deltasync[metrics]'"}})
        else:
            hint = "GET /healthz, /readyz, /status or /metrics"
            self._send_json(404, {"error": {"kind": "not_found", "hint": hint}})

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
