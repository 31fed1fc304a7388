"""The target's half of writing in place: what the workers of an SGLang server are asked, and what they answer."""

import base64
import json
import os
import pickle
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

from deltasync.engines.memory import Indices, Placement, is_covered, segments, write_stage
from deltasync.errors import EngineError, InvalidInputError, MismatchError
from deltasync.files import atomic_write
from deltasync.format.weights import Bits, tensor_parts
from deltasync.replica.target import Staged
from deltasync.sglang.target import SglangServer

LOADER = "deltasync.sglang.loader.load"
"""What a server is started with, as `--custom-weight-loader`."""

TENSOR_NAME = "deltasync.request"
"""The name of the tensor that carries a request."""

CHANGES_NAME = ".deltasync.changes"
"""In the folder of a version: the changes that lead to it. SGLang reads no file with such a name."""

Action = Literal["map", "compare", "write"]
"""Find out where the weights are, and compare them; compare them with the folder; write the changes of the folder."""


@dataclass(frozen=True, slots=True)
class Request:
    """What every worker shall do with the folder of a version.

    `folder`: its path, as the workers see it. `version`: the one that it has. `start`: the version that its changes
    begin with. `token`: a number of the request, which the names of the answers have.
    """

    action: Action
    folder: str
    version: int
    token: str
    start: int | None = None

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "Request":
        """InvalidInputError if these are not the bytes of a request."""
        found = _object(data, "a request")
        if found.keys() != {field.name for field in fields(cls)} or found["action"] not in get_args(Action):
            raise InvalidInputError(
                f"{sorted(found)!s:.200} is not a request of this release",
                hint="use the same release of deltasync in `follow` and in the environment of SGLang",
            )
        return cls(**found)

    def answer_path(self, rank: int, folder: str | os.PathLike[str] | None = None) -> Path:
        """Where the worker puts its answer. `folder`: the path of the folder here, if it is another one."""
        return Path(self.folder if folder is None else folder) / f".deltasync.answer.{self.token}.{rank}"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a worker did. `refused`: why it has written nothing. `damaged`: why its weights are no version any more.

    `placements`: with "map", the elements of each tensor that it holds, as `Placement.to_json` has them.
    """

    refused: str | None = None
    damaged: str | None = None
    placements: Mapping[str, list[list[Any]]] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        atomic_write(path, [json.dumps(asdict(self)).encode()])

    @classmethod
    def read(cls, path: Path) -> "Answer":
        """EngineError if the worker has not answered."""
        try:
            data = path.read_bytes()
        except FileNotFoundError as error:
            raise EngineError(
                f"a worker of SGLang did not answer: {path.name} is missing",
                hint="the server must be able to write to the folder; its own log may say more",
            ) from error
        return cls(**_object(data, str(path)))


def _object(data: bytes, what: str) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError as error:
        raise InvalidInputError(f"{what} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidInputError(f"{what} is {type(found).__name__}, not an object")
    return found


class InPlace:
    """Asks all workers of a server to map its weights, and to write changes over them.

    InvalidInputError if the server was started in a way that does not allow it.
    """

    def __init__(self, server: SglangServer, *, load_s: float) -> None:
        self._server = server
        self._load_s = load_s
        facts = server.ask("/server_info")
        loaders = facts.get("custom_weight_loader")
        if not isinstance(loaders, list) or LOADER not in loaders:
            raise InvalidInputError(
                f"{server.name} does not have our loader: its custom_weight_loader is {loaders!r:.80}",
                hint=f"start it with --custom-weight-loader {LOADER}",
            )
        for name, allowed, why in (
            ("dp_size", 1, "SGLang takes tensors for one data-parallel replica only"),
            ("speculative_algorithm", None, "a draft model would keep its old weights"),
        ):
            if facts.get(name) != allowed:
                raise InvalidInputError(
                    f"{server.name} has {name} {facts.get(name)!r:.40}: {why}", hint="leave --only-changes out"
                )
        sizes = [facts.get("tp_size"), facts.get("pp_size")]
        if not all(isinstance(size, int) and 0 < size <= 1 << 16 for size in sizes):
            raise InvalidInputError(f"{server.name} does not say how many workers it has", hint="SGLang 0.5.23 does")
        self._tp_size: int = facts["tp_size"]
        self._workers: int = self._tp_size * facts["pp_size"]

    def stage(self, folder: Path, staged: Staged) -> None:
        """Put the changes beside the folder's weights, for the workers."""
        writes: dict[int, list[tuple[Indices, Bits]]] = {}
        for changes in staged.changes or ():
            for ordinal, indices, values in tensor_parts(staged.weights.layout, changes):
                writes.setdefault(ordinal, []).append((indices.astype(np.int64), values))
        write_stage(
            folder / CHANGES_NAME,
            (segment for ordinal, parts in writes.items() for segment in segments(ordinal, parts)),
        )

    def map(self, folder: Path, there: str, staged: Staged) -> None:
        """Let the workers find out where the weights of the folder are, which they have just loaded.

        MismatchError if one of them cannot, or if no worker holds some part of a tensor.
        """
        with self._session():
            answers = self._ask("map", folder, there, staged)
        failed = _failures(answers)
        if not failed:
            # The end of a session lets SGLang process weights: they must be the same ones afterwards.
            with self._session():
                failed = _failures(self._ask("compare", folder, there, staged))
        for _, reason in failed:
            raise MismatchError(f"{self._server.name} cannot be written in place: {reason}", rule="sglang.map")
        ranks = [{name: [Placement.from_json(p) for p in held] for name, held in a.placements.items()} for a in answers]
        for spec in staged.weights.layout.tensors:
            if not is_covered(spec.elements, [rank.get(spec.name, []) for rank in ranks]):
                raise MismatchError(
                    f"{self._server.name} cannot be written in place: it does not take all of {spec.name!r:.200}",
                    rule="sglang.map",
                    hint="serve the model that is trained, or leave --only-changes out",
                )

    def write(self, folder: Path, there: str, staged: Staged, *, flushes: bool) -> None:
        """Let the workers write the changes and read them back, then name the version.

        EngineError, before the version is named, if one of them did not.
        """
        with self._session():
            answers = self._ask("write", folder, there, staged, flushes=flushes)
        for rank, reason in _failures(answers):
            raise EngineError(
                f"worker {rank} of {self._server.name} has not written version {staged.version}: {reason}",
                version=staged.version,
            )
        self._server.name_weights(str(staged.version))

    @contextmanager
    def _session(self) -> Iterator[None]:
        begin: Mapping[str, Any] = {"selector": "target"}
        try:
            self._server.ask("/begin_weight_update", begin, timeout_s=self._load_s)
        except EngineError:
            # A process that died may have left a session open.
            self._server.ask("/end_weight_update", {}, timeout_s=self._load_s)
            self._server.ask("/begin_weight_update", begin, timeout_s=self._load_s)
        try:
            yield
        finally:
            self._server.ask("/end_weight_update", {}, timeout_s=self._load_s)

    def _ask(self, action: Action, folder: Path, there: str, staged: Staged, *, flushes: bool = False) -> list[Answer]:
        """The answers of all workers, by rank."""
        request = Request(action, there, staged.version, secrets.token_hex(8), staged.start)
        named = [(TENSOR_NAME, torch.frombuffer(bytearray(request.to_json()), dtype=torch.uint8))]
        payload = base64.b64encode(pickle.dumps(named)).decode()
        body = {
            "serialized_named_tensors": [payload] * self._tp_size,
            "load_format": LOADER,
            "flush_cache": flushes,
            "selector": "target",
        }
        self._server.ask("/update_weights_from_tensor", body, timeout_s=self._load_s)
        paths = [request.answer_path(rank, folder) for rank in range(self._workers)]
        try:
            return [Answer.read(path) for path in paths]
        finally:
            for path in paths:
                path.unlink(missing_ok=True)


def _failures(answers: Sequence[Answer]) -> list[tuple[int, str]]:
    """The ranks that have not done what they were asked to, and why."""
    reasons = [(rank, answer.refused or answer.damaged) for rank, answer in enumerate(answers)]
    return [(rank, reason) for rank, reason in reasons if reason is not None]
