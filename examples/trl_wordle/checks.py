"""What has to be there before anything starts: each check fails with a message that says what is missing where."""

import json
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from deltasync.errors import EngineError, InvalidInputError

_ANSWER_S = 5.0
_POLL_S = 0.5


def require_model(folder: str) -> None:
    """A checkpoint of transformers with a tokenizer."""
    for name in ("config.json", "tokenizer.json"):
        if not (Path(folder) / name).is_file():
            raise InvalidInputError(
                f"there is no model in {folder}: it has no {name}", hint=f"make one: python make_model.py {folder}"
            )


def require_free(host: str, port: int) -> None:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise InvalidInputError(
                f"the server cannot listen on {host}:{port}: {error.strerror}", hint="give another --port"
            ) from error


def environment_at(url: str) -> dict[str, Any]:
    """What the environment tells about itself."""
    try:
        found = _get(url)
    except (OSError, ValueError) as error:
        raise EngineError(
            f"there is no environment at {url}: {error}", hint="start environment.py, or give another --environment"
        ) from error
    if not isinstance(found, dict) or found.get("environment") != "wordle":
        raise InvalidInputError(f"{url} is not the environment of this example", hint="give another --environment")
    return found


def wait_for_server(url: str, model: str, *, wait_s: float) -> None:
    """Until a vLLM server that has this model answers."""
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            found = _get(f"{url}/v1/models")
            break
        except (OSError, ValueError) as error:
            if time.monotonic() >= deadline_s:
                raise EngineError(
                    f"no vLLM server answered at {url} within {wait_s:g} s: {error}",
                    hint="start server.py with the same --feed and look at what it says, or give another --server",
                ) from error
        time.sleep(_POLL_S)
    names = [each["id"] for each in found["data"]] if isinstance(found, dict) and "data" in found else []
    if model not in names:
        raise InvalidInputError(
            f"the server at {url} has the model {', '.join(names) or 'of nobody knows what'}, not {model}",
            hint="give server.py and trainer.py the same --model",
        )


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=_ANSWER_S) as response:
        return json.loads(response.read())
