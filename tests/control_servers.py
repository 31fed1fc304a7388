"""The control routes of vLLM's plugin without vLLM: the real routes and guard, over a follower of the test's own."""

import asyncio
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI

from deltasync.following.follower import Follower
from deltasync.following.target import Target
from deltasync.serve.vllm.routes import Guard, add_routes

TOKEN = "a token for tests"


@dataclass
class Controlled:
    """What the routes control."""

    follower: Follower
    target: Target
    way: str = "push"


@dataclass
class ControlServer:
    """A server on loopback. `faults` are the next answers, each a status and a content, in place of the real ones."""

    url: str
    controlled: Controlled | None
    faults: list[tuple[int, bytes]] = field(default_factory=list)
    requests: list[tuple[str, Any]] = field(default_factory=list)
    """Paths, and what was sent there."""


@contextmanager
def control_server(controlled: Controlled | None) -> Iterator[ControlServer]:
    """Each request is run through the ASGI app in a loop of its own."""
    app = FastAPI()
    found = ControlServer("", controlled)
    add_routes(app, lambda: found.controlled)
    app.add_middleware(Guard, token=TOKEN)

    class Handler(http.server.BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            found.requests.append((self.path, json.loads(body) if body else None))
            if found.faults:
                status, content = found.faults.pop(0)
            else:
                status, content = asyncio.run(_call(app, self.command, self.path, self.headers.items(), body))
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Location", "http://127.0.0.1:9/elsewhere")
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = _answer  # noqa: N815

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


async def _call(app: Any, method: str, path: str, headers: Any, body: bytes) -> tuple[int, bytes]:
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers],
    }
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)
