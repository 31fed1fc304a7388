"""A stand-in for an SGLang server: the routes of release 0.5.23 that concern weights, and what they do to its state.

`TABLE` has every field of the bodies as that release declares them. A call that does not fit is answered with 422, as
its own server does; in addition, fields that it does not know are refused here.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from deltasync import digest
from deltasync.checkpoint import open_checkpoint

RELEASE = "0.5.23"

TABLE: dict[str, dict[str, tuple[tuple[type, ...], bool]]] = {
    "/pause_generation": {"mode": ((str,), False)},
    "/continue_generation": {"torch_empty_cache": ((bool,), False)},
    "/update_weights_from_disk": {
        "model_path": ((str,), True),
        "load_format": ((str, type(None)), False),
        "abort_all_requests": ((bool,), False),
        "weight_version": ((str, type(None)), False),
        "is_async": ((bool,), False),
        "torch_empty_cache": ((bool,), False),
        "keep_pause": ((bool,), False),
        "recapture_cuda_graph": ((bool,), False),
        "token_step": ((int,), False),
        "flush_cache": ((bool,), False),
        "manifest": ((dict, type(None)), False),
    },
}
"""The fields of each body: their types, and whether they are required."""

MODES = ("abort", "retract", "in_place")


class SglangStandIn:
    """The state of the server. Tests read and change it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.weight_version = "default"
        self.digest: str | None = None
        self.paused: str | None = None
        self.is_cache_flushed = False
        self.refusal: str | None = None
        self.forgets_label = False
        self.token: str | None = None
        self.table = dict(TABLE)
        self.has_openapi = True
        self.url = ""

    def restart(self) -> None:
        """As a server that was started again."""
        self.weight_version, self.digest, self.paused = "default", None, None

    def get(self, route: str) -> tuple[int, Any]:
        if route == "/model_info":
            return 200, {"model_path": "x", "weight_version": self.weight_version, "is_generation": True}
        if route == "/openapi.json" and self.has_openapi:
            schemas = {
                name.strip("/"): {"properties": {field: {} for field in fields}} for name, fields in self.table.items()
            }
            paths = {name: {"post": {"requestBody": _body(name)}} for name in self.table}
            return 200, {"paths": paths, "components": {"schemas": schemas}}
        return 404, {"detail": "Not Found"}

    def post(self, route: str, body: dict[str, Any]) -> tuple[int, Any]:
        fields = self.table.get(route)
        if fields is None:
            return 404, {"detail": "Not Found"}
        wrong = [n for n, v in body.items() if n not in fields or type(v) not in fields[n][0]]
        wrong += [n for n, (_, is_required) in fields.items() if is_required and n not in body]
        if wrong or (route == "/pause_generation" and body.get("mode", "abort") not in MODES):
            return 422, {"detail": f"these fields do not fit: {wrong}"}
        self.calls.append((route, body))
        if route == "/pause_generation":
            self.paused = body.get("mode", "abort")
            return 200, {"message": "Generation paused successfully.", "status": "ok"}
        if route == "/continue_generation":
            self.paused = None
            return 200, {"message": "Generation continued successfully.", "status": "ok"}
        return self._load(body)

    def _load(self, body: dict[str, Any]) -> tuple[int, Any]:
        assert self.paused is not None, "weights were loaded while requests run"
        if self.refusal is not None:
            return 400, {"success": False, "message": self.refusal, "num_paused_requests": 0}
        flushes = body.get("flush_cache", True)
        if flushes and self.paused == "in_place":
            return 400, {"success": False, "message": "Flush cache failed.", "num_paused_requests": 1}
        path = Path(body["model_path"])
        assert (path / "config.json").exists()
        open_checkpoint(path)
        self.digest, self.is_cache_flushed = digest(path).hex, flushes
        if body.get("weight_version") is not None and not self.forgets_label:
            self.weight_version = body["weight_version"]
        return 200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}


def _body(name: str) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{name.strip('/')}"}}}}


@contextmanager
def sglang_server() -> Iterator[SglangStandIn]:
    """A stand-in that answers on a port of this host."""
    state = SglangStandIn()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(*self._allowed(lambda: state.get(self.path)))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self._answer(*self._allowed(lambda: state.post(self.path, body)))

        def _allowed(self, answer: Any) -> tuple[int, Any]:
            if state.token is not None and self.headers.get("authorization") != f"Bearer {state.token}":
                return 401, {"error": "Unauthorized"}
            found: tuple[int, Any] = answer()
            return found

        def _answer(self, code: int, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(code)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
