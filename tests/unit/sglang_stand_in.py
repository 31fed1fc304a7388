"""A stand-in for an SGLang server: the routes of release 0.5.23 that concern weights, and what they do to its state.

`TABLE` has every field of the bodies as that release declares them. A call that does not fit is answered with 422, as
its own server does; in addition, fields that it does not know are refused here. `workers` are torch models, which load
what they are given as its workers do.
"""

import base64
import importlib
import io
import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import torch
from support.servers import json_server

from deltasync import digest
from deltasync.checkpoint import open_checkpoint
from deltasync.engines.memory import as_tensor

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
    "/begin_weight_update": {"selector": ((str,), False)},
    "/end_weight_update": {},
    "/update_weights_from_tensor": {
        "serialized_named_tensors": ((list,), True),
        "load_format": ((str, type(None)), False),
        "flush_cache": ((bool,), False),
        "abort_all_requests": ((bool,), False),
        "weight_version": ((str, type(None)), False),
        "selector": ((str,), False),
        "torch_empty_cache": ((bool,), False),
    },
    "/update_weight_version": {"new_version": ((str,), True), "abort_all_requests": ((bool,), False)},
}
"""The fields of each body: their types, and whether they are required."""

MODES = ("abort", "retract", "in_place")

GLOBALS = {
    ("collections", "OrderedDict"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch.storage", "_load_from_bytes"),
}
"""Of the globals that the release allows in pickled tensors: those that tensors on the host need."""


class Worker(Protocol):
    """The model of one worker, with what the release does around loading."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object: ...

    def pack(self) -> None:
        """Process the weights after loading, and undo that."""
        ...


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        assert (module, name) in GLOBALS, f"the release blocks {module}.{name}"
        return super().find_class(module, name)


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
        self.workers: list[Worker] = []
        """By rank of a tensor-parallel group."""
        self.facts: dict[str, Any] = {
            "custom_weight_loader": [],
            "dp_size": 1,
            "pp_size": 1,
            "speculative_algorithm": None,
        }
        self.is_session_open = False
        self.has_ended = False
        """Whether the loader raised, which ends the server."""
        self.refuses_flush = False
        """Whether the cache cannot be flushed once the weights are loaded."""
        self.restores = True
        """Whether a session undoes what follows loading, as the release does for those weights that it packs."""

    def restart(self) -> None:
        """As a server that was started again."""
        self.weight_version, self.digest, self.paused = "default", None, None

    def get(self, route: str) -> tuple[int, Any]:
        if route == "/model_info":
            return 200, {"model_path": "x", "weight_version": self.weight_version, "is_generation": True}
        if route == "/server_info":
            return 200, {"tp_size": len(self.workers), **self.facts}
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
        if route == "/update_weight_version":
            self.weight_version = body["new_version"]
            return 200, {"success": True, "message": "", "new_version": self.weight_version}
        if route in ("/begin_weight_update", "/end_weight_update"):
            return self._session(is_open=route == "/begin_weight_update")
        if route == "/update_weights_from_tensor":
            return self._call_loader(body)
        return self._load(body)

    def _session(self, *, is_open: bool) -> tuple[int, Any]:
        if self.is_session_open == is_open:
            return 400, {
                "success": False,
                "message": f"a weight-update session is {'already' if is_open else 'not'} open",
            }
        for worker in self.workers if self.restores else ():
            worker.pack()
        self.is_session_open = is_open
        return 200, {"success": True, "message": "Success"}

    def _call_loader(self, body: dict[str, Any]) -> tuple[int, Any]:
        """As the scheduler of each rank does. An exception of the loader ends the server."""
        assert self.paused is not None, "weights were loaded while requests run"
        assert self.is_session_open
        assert body["load_format"] in self.facts["custom_weight_loader"]
        assert len(body["serialized_named_tensors"]) == len(self.workers)
        module, _, name = body["load_format"].rpartition(".")
        loader = getattr(importlib.import_module(module), name)
        for rank, (worker, data) in enumerate(zip(self.workers, body["serialized_named_tensors"], strict=True)):
            named = _Unpickler(io.BytesIO(base64.b64decode(data, validate=True))).load()
            with (
                mock.patch("torch.distributed.is_initialized", return_value=True),
                mock.patch("torch.distributed.get_rank", return_value=rank),
            ):
                try:
                    loader(worker, named)
                except Exception:
                    self.has_ended = True
                    raise
        self.is_cache_flushed = body.get("flush_cache", True)
        return 200, {"success": True, "message": "Success"}

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
        weights = open_checkpoint(path).weights
        for worker in self.workers:
            worker.load_weights(
                (spec.name, as_tensor(spec, bits).clone())
                for spec, bits in zip(weights.layout.tensors, weights.arrays, strict=True)
            )
            worker.pack()
        if self.refuses_flush:
            return 400, {"success": False, "message": "Weights were updated, but the cache was not flushed."}
        if body.get("weight_version") is not None and not self.forgets_label:
            self.weight_version = body["weight_version"]
        return 200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}


def _body(name: str) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{name.strip('/')}"}}}}


@contextmanager
def sglang_server() -> Iterator[SglangStandIn]:
    """A stand-in that answers on a port of this host."""
    state = SglangStandIn()

    def answer(path: str, body: Any, headers: Mapping[str, str]) -> tuple[int, Any]:
        if state.token is not None and headers.get("authorization") != f"Bearer {state.token}":
            return 401, {"error": "Unauthorized"}
        return state.get(path) if body is None else state.post(path, body)

    with json_server(answer) as state.url:
        yield state
