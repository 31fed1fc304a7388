"""What a target and the workers of a server exchange: a request to all of them, and an answer of each.

The request goes through the server as the bytes of one tensor. Answers are files in the folder of the version, because
the server itself answers a request of this kind with success, or ends.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from deltasync.errors import EngineError, InvalidInputError
from deltasync.files import atomic_write

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
