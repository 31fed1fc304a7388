"""A proxy that loses, delays and damages answers, in front of a real server: what a client must live with."""

import http.client
import http.server
import sys
import threading
import time
import urllib.parse
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .servers import Server

STALL_S = 5.0
SLOW_BYTES_PER_S = 200_000
_CHUNK_BYTES = 16_384
_UPSTREAM_S = 60.0


class Proxy:
    """Stands in front of a server, and treats requests and answers as it is asked to:

    - `503` replaces the answer, `cut` closes the connection without any, both after the server has done its work;
    - `refuse` is a 503, and `drop` closes the connection, before the server sees the request;
    - `half` closes the connection in the middle of the answer;
    - `flip` changes one bit of its body, at a place that the path determines;
    - `stall` keeps it back for `stall_s` seconds, or until `release`; `slow` sends it at `SLOW_BYTES_PER_S`.
    """

    def __init__(self, server: Server) -> None:
        self.seen: list[str] = []
        """Methods of the requests that were passed on."""
        self.lose: list[str] = []
        """How to treat the next answers."""
        self.spoil: Callable[[str, str], str] = lambda method, path: ""
        """How to treat any other request or answer, by method and path; empty for not at all."""
        self.spoiled: Counter[str] = Counter()
        """How often each treatment was given."""
        self.stall_s = STALL_S
        self._released = threading.Event()
        self._counting = threading.Lock()
        address = urllib.parse.urlsplit(server.endpoint)
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def forward(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                how = proxy.lose.pop(0) if proxy.lose else proxy.spoil(self.command, self.path)
                if how in ("refuse", "drop"):
                    proxy.count(how)
                    self.refuse(with_answer=how == "refuse")
                    return
                upstream = http.client.HTTPConnection(address.hostname or "", address.port, timeout=_UPSTREAM_S)
                try:
                    # The header Host is signed: it stays that of the proxy.
                    upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                    for name, value in self.headers.items():
                        upstream.putheader(name, value)
                    upstream.endheaders(body)
                    answer = upstream.getresponse()
                    content = answer.read()
                except (OSError, http.client.HTTPException):
                    self.close_connection = True
                    return
                finally:
                    upstream.close()
                proxy.seen.append(self.command)
                self.reply(answer, content, how)

            def refuse(self, *, with_answer: bool) -> None:
                if with_answer:
                    self.send_response(503)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                else:
                    self.close_connection = True

            def reply(self, answer: http.client.HTTPResponse, content: bytes, how: str) -> None:
                if how and not (how == "flip" and not content):
                    proxy.count(how)
                if how == "stall":
                    proxy._released.wait(proxy.stall_s)
                if how == "flip" and content:
                    # Any place, but the same one for the same object.
                    chosen = zlib.crc32(self.path.encode())
                    place, bit = chosen % len(content), 1 << chosen % 8
                    content = content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :]
                if how in ("503", "cut"):
                    self.refuse(with_answer=how == "503")
                    return
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("date", "server", "connection", "transfer-encoding", "content-length"):
                        self.send_header(name, value)
                length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
                self.send_header("Content-Length", length or "0")
                self.end_headers()
                if how == "half":
                    self.close_connection = True
                    content = content[: len(content) // 2]
                if how == "slow":
                    for start in range(0, len(content), _CHUNK_BYTES):
                        self.wfile.write(content[start : start + _CHUNK_BYTES])
                        time.sleep(_CHUNK_BYTES / SLOW_BYTES_PER_S)
                else:
                    self.wfile.write(content)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward  # noqa: N815

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.http = _QuietServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.http.server_address[1]}"

    def count(self, how: str) -> None:
        with self._counting:
            self.spoiled[how] += 1

    def release(self) -> None:
        """Spoil nothing from now on, and send the answers that are kept back."""
        self.spoil = lambda method, path: ""
        self._released.set()
        self._released = threading.Event()


class _QuietServer(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed, or that gave up, has closed its connection, which is no error here."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


@contextmanager
def proxied(server: Server) -> Iterator[Proxy]:
    """A proxy in front of a server, for as long as the block runs."""
    proxy = Proxy(server)
    thread = threading.Thread(target=proxy.http.serve_forever, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.http.shutdown()
        proxy.http.server_close()
        thread.join()
