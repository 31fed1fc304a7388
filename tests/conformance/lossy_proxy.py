"""A proxy that loses, delays and damages answers, in front of a real server: what a client must live with."""

import http.client
import http.server
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from support.servers import Server

STALL_S = 5.0


class Proxy:
    """Stands in front of a server: counts requests, and spoils answers after the server has done what was asked."""

    def __init__(self, server: Server) -> None:
        self.seen: list[str] = []
        """Methods of the requests that were passed on."""
        self.lose: list[str] = []
        """How to treat the next answers: "503" replaces one, "cut" closes the connection without any."""
        self.spoil: Callable[[str, str], str] = lambda method, path: ""
        """How to treat any other answer, by method and path: as above, or "flip" a bit of it, or "stall" a while."""
        address = urllib.parse.urlsplit(server.endpoint)
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def forward(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                upstream = http.client.HTTPConnection(address.hostname or "", address.port, timeout=30)
                # The header Host is signed: it stays that of the proxy.
                upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():
                    upstream.putheader(name, value)
                upstream.endheaders(body)
                answer = upstream.getresponse()
                content = answer.read()
                upstream.close()
                proxy.seen.append(self.command)
                self.reply(answer, content)

            def reply(self, answer: http.client.HTTPResponse, content: bytes) -> None:
                how = proxy.lose.pop(0) if proxy.lose else proxy.spoil(self.command, self.path)
                if how == "stall":
                    time.sleep(STALL_S)
                if how == "flip" and content:
                    middle = len(content) // 2
                    content = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
                if how == "cut":
                    self.close_connection = True
                    return
                if how == "503":
                    self.send_response(503)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("date", "server", "connection", "transfer-encoding", "content-length"):
                        self.send_header(name, value)
                length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
                self.send_header("Content-Length", length or "0")
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward  # noqa: N815

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.http.server_address[1]}"


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
