"""A small HTTP server for this process, on loopback or behind a token: metrics, status, and the page of a feed."""

import hmac
import ipaddress
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast
from urllib.parse import urlsplit

from deltasync.errors import InvalidInputError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Request:
    """A request without its body, which is never read. `path` has no query."""

    method: str
    path: str
    headers: Mapping[str, str]
    """Names are found in any case."""

    def is_allowed(self, token: str | None) -> bool:
        """Whether it carries the token; always, if there is none."""
        given = self.headers.get("Authorization", "")
        return token is None or hmac.compare_digest(given.encode(), f"Bearer {token}".encode())

    @property
    def is_local(self) -> bool:
        """Whether it names this machine by a loopback name: a page whose host's name leads here gives its own name."""
        try:
            name = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
            return name == "localhost" or ipaddress.ip_address(name).is_loopback
        except ValueError:
            return False


@dataclass(frozen=True, slots=True)
class Response:
    """The response to a request."""

    code: int
    content_type: str
    content: bytes
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def json(cls, code: int, value: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> "Response":
        return cls(code, "application/json", json.dumps(value).encode(), {} if headers is None else headers)

    @classmethod
    def unauthorized(cls) -> "Response":
        """For a request without the token."""
        return cls.json(401, {"error": {"kind": "unauthorized"}}, {"WWW-Authenticate": "Bearer"})


Respond = Callable[[Request], Response]
"""Called in a thread of its own for each request; GET and POST only."""


@contextmanager
def listening(respond: Respond, host: str, port: int, *, has_token: bool) -> Iterator[str]:
    """Serve during the block; gives the URL. Port 0 takes a free one.

    InvalidInputError if other hosts could reach the address and there is no token to keep them out.
    """
    try:
        # Resolved once, so that the address that is checked is the one that is bound.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        address = str(socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)[0][4][0])
        if not has_token and not ipaddress.ip_address(address).is_loopback:
            raise InvalidInputError(
                f"other hosts can reach {host}, and there is no token to keep them out",
                hint="set DELTASYNC_TOKEN, or listen on 127.0.0.1",
            )
        server = _Server((address, port), respond)
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


_CONNECTIONS_MAX = 32
_CONNECTION_S = 10.0
"""Seconds after which a connection is closed, whether its request was answered or not."""


class _Server(ThreadingHTTPServer):
    """Answers each connection in a thread of its own. Of too many connections, the oldest one is closed.

    A slow or idle client, which needs no token to connect, thus keeps no other one from an answer for long.
    """

    daemon_threads = True
    request_queue_size = _CONNECTIONS_MAX

    def __init__(self, address: tuple[str, int], respond: Respond) -> None:
        self.respond = respond
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
        response = cast(_Server, self.server).respond(
            Request(self.command, urlsplit(self.path).path, cast(Mapping[str, str], self.headers))
        )
        self.send_response(response.code)
        for name, value in response.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", response.content_type)
        self.send_header("Content-Length", str(len(response.content)))
        self.end_headers()
        self.wfile.write(response.content)

    do_POST = do_GET  # noqa: N815 - answered with 401 or 404

    def version_string(self) -> str:
        return "deltasync"

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)
