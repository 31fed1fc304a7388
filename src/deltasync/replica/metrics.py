"""A follower's state over HTTP: status, and metrics for Prometheus (extra `metrics`)."""

import hmac
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from deltasync.errors import InvalidInputError
from deltasync.replica.events import Status

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_TOTALS = {
    "moves": "How often the target became a version.",
    "nbytes": "Bytes of the payloads that were fetched for that.",
    "refetched": "Payloads that came damaged and were fetched again.",
    "rerouted": "Edges that turned out to be of no use.",
    "rebuilt": "Mirrors that had other bits than their version.",
    "scrubbed": "Elements that were compared with the mirror.",
    "damaged": "Elements that differed from the mirror.",
    "repaired": "Elements that differed and were overwritten.",
}
_NAMES = {"nbytes": "fetched_bytes", "scrubbed": "scrubbed_elements"}
_NAMES |= {"damaged": "damaged_elements", "repaired": "repaired_elements"}


class FollowerCollector:
    """What a registry asks at each scrape. A number that nobody knows yet is left out."""

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
        for name, about, value in gauges:
            gauge = GaugeMetricFamily(f"deltasync_{name}", about)
            if value is not None:
                gauge.add_metric([], value)
            yield gauge
        seconds = GaugeMetricFamily("deltasync_last_move_seconds", "Time of the last move, by phase.", labels=["phase"])
        for phase, value_s in {} if status.last is None else asdict(status.last.seconds).items():
            seconds.add_metric([phase], value_s)
        yield seconds
        for name, total in asdict(status.counts).items():
            yield CounterMetricFamily(f"deltasync_{_NAMES.get(name, name)}", _TOTALS[name], value=total)


def register(status: Callable[[], Status]) -> Callable[[], None]:
    """Add a follower to the registry of this process, which vLLM serves; call the result to take it out again."""
    from prometheus_client import REGISTRY

    collector = FollowerCollector(status)
    REGISTRY.register(collector)
    return lambda: REGISTRY.unregister(collector)


class Exposition:
    """The metrics of one follower as text, for a server of our own."""

    def __init__(self, status: Callable[[], Status]) -> None:
        try:
            from prometheus_client import CollectorRegistry
        except ImportError as error:
            raise InvalidInputError(
                "metrics need the package prometheus-client", hint="pip install 'deltasync[metrics]'"
            ) from error
        self._registry = CollectorRegistry()
        self._registry.register(FollowerCollector(status))

    @property
    def content_type(self) -> str:
        from prometheus_client import CONTENT_TYPE_LATEST

        return CONTENT_TYPE_LATEST

    def text(self) -> bytes:
        """All metrics, now."""
        from prometheus_client import generate_latest

        return generate_latest(self._registry)


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Listener:
    """The routes `GET /status` and `GET /metrics`.

    With a token, a request without it gets 401 and nothing else; metrics need no token.
    """

    status: Callable[[], Mapping[str, Any]]
    metrics: Exposition | None = None
    token: str | None = None

    def answer(self, method: str, path: str, authorization: str) -> tuple[int, str, bytes]:
        """Status, type and content of the answer to a request."""
        if (method, path) == ("GET", "/metrics") and self.metrics is not None:
            return 200, self.metrics.content_type, self.metrics.text()
        if not self._is_allowed(authorization):
            return _json(401, {"error": {"kind": "unauthorized"}})
        if (method, path) == ("GET", "/status"):
            return _json(200, self.status())
        return _json(404, {"error": {"kind": "not_found", "hint": "GET /status, GET /metrics"}})

    def _is_allowed(self, authorization: str) -> bool:
        wanted = f"Bearer {self.token}"
        return self.token is None or hmac.compare_digest(authorization.encode(), wanted.encode())


@contextmanager
def listening(listener: Listener, host: str, port: int) -> Iterator[str]:
    """Answers in threads during the block; gives the URL. Port 0 takes a free one."""

    class Bound(_Handler):
        pass

    Bound.listener = listener
    server_class = _ServerV6 if ":" in host else _Server
    try:
        server = server_class((host, port), Bound)
    except OSError as error:
        raise InvalidInputError(
            f"cannot listen on {host} port {port}: {error.strerror}", hint="choose another address"
        ) from error
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="deltasync-listen")
    thread.daemon = True
    thread.start()
    try:
        yield f"http://{f'[{host}]' if ':' in host else host}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def parse_address(text: str) -> tuple[str, int]:
    """HOST:PORT, with an IPv6 address in brackets. ValueError for anything else."""
    found = urlsplit(f"//{text}")
    host, port = found.hostname, found.port
    if host is None or port is None or found.netloc != text or found.username is not None:
        raise ValueError(f"{text!r} is not HOST:PORT")
    return host, port


class _Server(ThreadingHTTPServer):
    daemon_threads = True


class _ServerV6(_Server):
    address_family = socket.AF_INET6


class _Handler(BaseHTTPRequestHandler):
    listener: Listener
    timeout = 10.0
    """Seconds; who has not sent a request by then is gone."""

    def _answer(self) -> None:
        authorization = self.headers.get("Authorization", "")
        status, kind, content = self.listener.answer(self.command, urlsplit(self.path).path, authorization)
        self.send_response(status)
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = _answer  # noqa: N815

    def version_string(self) -> str:
        return "deltasync"

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)


def _json(status: int, value: Mapping[str, Any]) -> tuple[int, str, bytes]:
    return status, "application/json", json.dumps(value).encode()
