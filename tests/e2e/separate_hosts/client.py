"""What anyone who can reach the replica's port sees of it."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from wordle.game import LETTERS, Array
from wordle.training import FIRST_LETTER, FIRST_MARKED

from deltasync.errors import EngineError

MODEL = "policy"

_UP_WITHIN_S = 600.0
_LOOK_S = 0.2
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, eq=False)
class Letters:
    """The next letters of several games, and the oldest and the newest version that made some of them."""

    tokens: Array
    log_probs: NDArray[np.float32]
    versions: tuple[int, int]


class Client:
    """The HTTP routes of a vLLM server. `token`: for those that ask for one."""

    def __init__(self, url: str, *, token: str | None = None) -> None:
        self._url = url
        self._token = token

    def wait_up(self) -> None:
        """Until answers carry a version. EngineError if that takes too long."""
        deadline = time.monotonic() + _UP_WITHIN_S
        while time.monotonic() < deadline:
            try:
                _, headers = self._complete([[0]], max_tokens=1)
            except OSError:
                headers = {}
            if headers.get("x-deltasync-version", "none") != "none":
                return
            time.sleep(_LOOK_S)
        raise EngineError(f"no version is served at {self._url}", hint="look at the log of the replica")

    def letters(self, texts: Array) -> Letters:
        """A guess for each text, drawn as the policy likes letters, at temperature 1."""
        allowed = list(range(FIRST_LETTER, FIRST_MARKED))
        choices, headers = self._complete(
            texts.tolist(), max_tokens=LETTERS, temperature=1.0, logprobs=0, allowed_token_ids=allowed
        )
        only = headers["x-deltasync-version"]
        first, last = (headers.get(f"x-deltasync-{which}-version", only) for which in ("first", "last"))
        return Letters(
            tokens=np.array([choice["token_ids"] for choice in choices]),
            log_probs=np.array([choice["logprobs"]["token_logprobs"] for choice in choices], np.float32),
            versions=(int(first), int(last)),
        )

    def text_log_probs(self, texts: Array) -> NDArray[np.float64]:
        """The log-probability of each token of whole texts but the first, among all tokens."""
        choices, _ = self._complete(texts.tolist(), max_tokens=1, prompt_logprobs=0)
        log_probs = [
            [given[str(token)]["logprob"] for given, token in zip(choice["prompt_logprobs"][1:], text[1:], strict=True)]
            for choice, text in zip(choices, texts.tolist(), strict=True)
        ]
        return np.array(log_probs)

    def control(self, verb: str, body: Mapping[str, Any] | None = None) -> Any:
        """A control route of the plugin; a POST where there is a body."""
        return self._ask(f"/deltasync/{verb}", body)[0]

    def _complete(self, prompts: list[list[int]], **options: Any) -> tuple[list[Any], Mapping[str, str]]:
        plain = {"ignore_eos": True, "return_token_ids": True, "return_tokens_as_token_ids": True, "detokenize": False}
        answer, headers = self._ask("/v1/completions", {"model": MODEL, "prompt": prompts, **plain, **options})
        return sorted(answer["choices"], key=lambda choice: int(choice["index"])), headers

    def _ask(self, path: str, body: Mapping[str, Any] | None) -> tuple[Any, Mapping[str, str]]:
        headers = {"content-type": "application/json"}
        if self._token is not None:
            headers["authorization"] = f"Bearer {self._token}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
                return json.load(response), {name.lower(): value for name, value in response.headers.items()}
        except urllib.error.HTTPError as error:
            text = error.read()[:500].decode(errors="replace")
            raise EngineError(f"{path} answered {error.code}: {text}", hint="look at the log of the replica") from error
