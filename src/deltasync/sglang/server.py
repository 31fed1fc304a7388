"""The HTTP routes of an SGLang server that concern weights."""

import http.client
import json
import logging
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from deltasync.errors import EngineError, InvalidInputError

logger = logging.getLogger(__name__)

TOKEN = "DELTASYNC_ENGINE_TOKEN"
"""Environment variable with the server's API key, or its key for administrators, if it has one."""

Routes = Mapping[str, Mapping[str, object]]

ROUTES: Routes = {
    "/pause_generation": {"mode": "retract"},
    "/update_weights_from_disk": {"model_path": "", "weight_version": "", "flush_cache": True},
    "/update_weight_version": {"new_version": "", "abort_all_requests": False},
    "/continue_generation": {},
}
"""The routes that are called, with the fields of their bodies, as SGLang 0.5.23 has them. `/model_info` is read."""

IN_PLACE_ROUTES: Routes = {
    "/begin_weight_update": {"selector": "target"},
    "/update_weights_from_tensor": {
        "serialized_named_tensors": [],
        "load_format": "",
        "flush_cache": True,
        "selector": "target",
    },
    "/end_weight_update": {},
}
"""The routes that are called in addition to write in place. `/server_info` is read."""

_ASK_S = 10.0
_ANSWER_BYTES_MAX = 1 << 24


class SglangServer:
    """Calls the routes of the server at a URL."""

    def __init__(self, url: str) -> None:
        if not url.startswith(("http://", "https://")):
            raise InvalidInputError(f"{url!r:.80} is not the URL of a server", hint="http://127.0.0.1:30000")
        parts = urllib.parse.urlsplit(url)
        if "@" in parts.netloc or parts.query or parts.fragment:
            # The URL is in logs and heartbeats, and may contain a secret: the message does not repeat it.
            raise InvalidInputError(
                "the URL of a server must not have a password, a query or a fragment",
                hint=f"set {TOKEN} to its API key",
            )
        self.url = url.rstrip("/")

    @property
    def name(self) -> str:
        return f"sglang at {self.url}"

    def label(self) -> str:
        """What the server says of its weights."""
        label = self.ask("/model_info").get("weight_version")
        if not isinstance(label, str):
            raise EngineError(
                f"{self.name} does not say which weights it has: /model_info has no weight_version",
                hint="SGLang 0.5.23 does; is this its server?",
            )
        return label

    def name_weights(self, label: str) -> None:
        """Let the server call the weights that it has by another name."""
        self.ask("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    def require(self, routes: Routes) -> None:
        """InvalidInputError if the server's own description lacks one of these routes, or a field of its body."""
        code, described = self._request("/openapi.json", None, _ASK_S)
        if code == 404:
            logger.info("%s does not describe its routes: they are not checked before they are used", self.name)
            return
        if code >= 400:
            raise self._refused("/openapi.json", described, code)
        paths = described.get("paths")
        for route, fields in routes.items():
            post = paths.get(route, {}).get("post") if isinstance(paths, dict) else None
            if post is None:
                raise InvalidInputError(
                    f"{self.name} has no route POST {route}", hint="the routes of SGLang 0.5.23 are expected"
                )
            known = _body_fields(described, post)
            missing = [] if known is None else sorted(set(fields) - known)
            if missing:
                raise InvalidInputError(
                    f"POST {route} of {self.name} takes no {', '.join(missing)}",
                    hint="the routes of SGLang 0.5.23 are expected",
                )

    def ask(self, route: str, body: Mapping[str, object] | None = None, *, timeout_s: float = _ASK_S) -> dict[str, Any]:
        """The answer to a GET, or to a POST where there is a body. EngineError if the server refuses."""
        code, answer = self._request(route, body, timeout_s)
        if code >= 400:
            raise self._refused(route, answer, code)
        return answer

    def _request(self, route: str, body: Mapping[str, object] | None, timeout_s: float) -> tuple[int, dict[str, Any]]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + route, data, {"content-type": "application/json"})
        if token := os.environ.get(TOKEN):
            # Not for the server that an answer may redirect to.
            request.add_unredirected_header("authorization", f"Bearer {token}")
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                return response.status, _parsed(response.read(_ANSWER_BYTES_MAX))
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _parsed(error.read(_ANSWER_BYTES_MAX))
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"{self.name} cannot be reached: {error}", hint="is the server up?") from error

    def _refused(self, route: str, answer: Mapping[str, Any], code: int) -> EngineError:
        message = answer.get("message") or answer.get("detail") or answer or "no reason was given"
        hint = f"set {TOKEN} to its API key" if code in (401, 403) else "its own log may say more"
        return EngineError(f"{self.name} refused {route} ({code}): {message!s:.500}", hint=hint)


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(data)
    except ValueError:
        return {"message": data[:500].decode(errors="replace")}
    return answer if isinstance(answer, dict) else {"message": f"{answer!r:.500}"}


def _body_fields(described: Mapping[str, Any], post: Mapping[str, Any]) -> set[str] | None:
    """The fields of the body of a route; None if the description does not say."""
    try:
        schema = post["requestBody"]["content"]["application/json"]["schema"]
        if "$ref" in schema:
            schema = described["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return set(schema["properties"])
    except (KeyError, TypeError, AttributeError):
        return None
