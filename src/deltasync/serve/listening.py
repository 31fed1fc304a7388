"""A little HTTP server beside a follower: a nudge for it, its status, its metrics."""

import hmac
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from deltasync.errors import InvalidInputError
from deltasync.serve.metrics import Exposition

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Listener:
    """What the routes do: `POST /nudge`, `GET /status`, `GET /metrics`.

    With a token, whoever does not bring it gets 401 and learns nothing else; only metrics are for everybody.
    """

    nudge: Callable[[], None]
    status: Callable[[], Mapping[str, Any]]
    metrics: Exposition | None = None
    token: str | None = None

    def answer(self, method: str, path: str, authorization: str) -> tuple[int, str, bytes]:
        """Status, type and content of the answer to a request."""
        if (method, path) == ("GET", "/metrics") and self.metrics is not None:
            return 200, self.metrics.content_type, self.metrics.text()
        if not self._is_allowed(authorization):
            return _json(401, {"error": {"kind": "unauthorized"}})
        if (method, path) == ("POST", "/nudge"):
            self.nudge()
            return _json(202, {})
        if (method, path) == ("GET", "/status"):
            return _json(200, self.status())
        return _json(404, {"error": {"kind": "not_found", "hint": "POST /nudge, GET /status, GET /metrics"}})

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
        _log.debug(format, *args)


def _json(status: int, value: Mapping[str, Any]) -> tuple[int, str, bytes]:
    return status, "application/json", json.dumps(value).encode()
