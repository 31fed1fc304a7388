"""A link of a given rate to a server on loopback: what is sent waits for its turn, on all connections together."""

import socket
import threading
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_CHUNK_BYTES = 2048


class SlowLink:
    """Passes connections on to an endpoint. Bytes to the server pass at `bytes_per_s`, those back at once.

    `sent_bytes` counts what has passed to the server, headers of requests included.
    """

    def __init__(self, endpoint: str, bytes_per_s: float | None = None) -> None:
        address = urllib.parse.urlsplit(endpoint)
        self._server = (address.hostname or "", address.port or 80)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.bytes_per_s = bytes_per_s
        self.sent_bytes = 0
        self._lock = threading.Lock()
        self._free_s = 0.0
        """When the link has passed on everything that was given to it so far."""
        self._stopped = threading.Event()

    def run(self) -> None:
        """Accept connections until `stop`."""
        while not self._stopped.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._server)
            except OSError:
                client.close()
                continue
            for source, sink, is_slow in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._pass, args=(source, sink, is_slow), daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _pass(self, source: socket.socket, sink: socket.socket, is_slow: bool) -> None:
        with suppress(OSError):
            while data := source.recv(_CHUNK_BYTES if is_slow else 1 << 16):
                if is_slow:
                    self._wait(len(data))
                sink.sendall(data)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        source.close()

    def _wait(self, nbytes: int) -> None:
        with self._lock:
            self.sent_bytes += nbytes
            now_s = time.monotonic()
            rate = self.bytes_per_s
            self._free_s = max(self._free_s, now_s) + (0.0 if rate is None else nbytes / rate)
            wait_s = self._free_s - now_s
        self._stopped.wait(wait_s)


@contextmanager
def slow_link(endpoint: str, bytes_per_s: float | None = None) -> Iterator[SlowLink]:
    """A link to an endpoint for as long as the block runs."""
    link = SlowLink(endpoint, bytes_per_s)
    thread = threading.Thread(target=link.run, daemon=True)
    thread.start()
    try:
        yield link
    finally:
        link.stop()
        thread.join()
