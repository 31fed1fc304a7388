"""Checks before anything starts. Each fails with a message that says what is missing, and where."""

import json
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from deltasync import EngineError, InvalidInputError

_ANSWER_S = 5.0
_POLL_S = 0.5


def require_model(folder: str) -> None:
    """Require a checkpoint of transformers with a tokenizer."""
    for name in ("config.json", "tokenizer.json"):
        if not (Path(folder) / name).is_file():
            raise InvalidInputError(
                f"there is no model in {folder}: it has no {name}", hint=f"make one: python make_model.py {folder}"
            )


def require_free(host: str, port: int) -> None:
    """Require a port that is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise InvalidInputError(
                f"the server cannot listen on {host}:{port}: {error.strerror}", hint="give another --port"
            ) from error


def environment_at(url: str) -> dict[str, Any]:
    """The description that the environment at this URL gives of itself."""
    try:
        description = _get(url)
    except (OSError, ValueError) as error:
        raise EngineError(
            f"there is no environment at {url}: {error}", hint="start environment.py, or give another --environment"
        ) from error
    if not isinstance(description, dict) or description.get("environment") != "wordle":
        raise InvalidInputError(f"{url} is not the environment of this example", hint="give another --environment")
    return description


def wait_for_server(url: str, model: str, *, wait_s: float) -> None:
    """Wait for a vLLM server, which must have this model."""
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            answer = _get(f"{url}/v1/models")
            break
        except (OSError, ValueError) as error:
            if time.monotonic() >= deadline_s:
                raise EngineError(
                    f"no vLLM server answered at {url} within {wait_s:g} s: {error}",
                    hint="start server.py with the same --feed and look at its log, or give another --server",
                ) from error
        time.sleep(_POLL_S)
    names = [each["id"] for each in answer["data"]] if isinstance(answer, dict) and "data" in answer else []
    if model not in names:
        raise InvalidInputError(
            f"the server at {url} has the model {', '.join(names) or 'with no name'}, not {model}",
            hint="give server.py and trainer.py the same --model",
        )


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=_ANSWER_S) as response:
        return json.loads(response.read())
