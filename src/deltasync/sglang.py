"""`SglangTarget`: an SGLang server that is kept at the newest version of a feed, through its own HTTP routes.

    deltasync follow s3://bucket/run-42 --target /models/live --sglang http://127.0.0.1:30000

Each version is written as a checkpoint folder that the server can read, too. Then the server pauses, loads the folder,
and goes on. Needs no package of SGLang.
"""

import json
import logging
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

from deltasync import arguments, blocks
from deltasync.checkpoint import open_checkpoint
from deltasync.errors import DeltasyncError, EngineError, InvalidInputError
from deltasync.format.weights import Weights
from deltasync.replica.folder import FolderTarget
from deltasync.replica.target import Damage, Staged

__all__ = ["SglangTarget"]

logger = logging.getLogger(__name__)

TOKEN = "DELTASYNC_ENGINE_TOKEN"
"""Environment variable with the server's API key, or its key for administrators, if it has one."""

Pause = Literal["retract", "in_place", "abort"]
"""What happens to running requests: they are computed again, go on with the old cache, or end."""

PAUSES: tuple[Pause, ...] = get_args(Pause)

ROUTES: Mapping[str, Mapping[str, object]] = {
    "/pause_generation": {"mode": "retract"},
    "/update_weights_from_disk": {"model_path": "", "weight_version": "", "flush_cache": True},
    "/continue_generation": {},
}
"""The routes that are called, with the fields of their bodies, as SGLang 0.5.23 has them. `/model_info` is read."""

_LOOK_S = 5.0
"""How often the server is asked which weights it has."""

_ASK_S = 10.0
_ANSWER_BYTES_MAX = 1 << 24


class SglangTarget(FolderTarget):
    """A checkpoint folder, and an SGLang server that loads it.

    `server`: its URL. `path_there`: the path under which the server finds the folder, if it is another one there.
    `pause`: what happens to running requests while the weights are loaded. `in_place` needs `keeps_cache`.
    `keeps_cache`: leave the KV cache as it is, computed with the weights of earlier versions. By default it is flushed.
    `load_s`: how long the server may take to load a version.

    `version` is what the server says that it has. After a restart of the server it is None until the version is loaded.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        server: str,
        *,
        path_there: str | None = None,
        pause: Pause = "retract",
        keeps_cache: bool = False,
        load_s: float = 1800.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(path)
        if not server.startswith(("http://", "https://")):
            raise InvalidInputError(f"{server!r:.80} is not the URL of a server", hint="http://127.0.0.1:30000")
        arguments.one_of("pause", pause, PAUSES)
        if pause == "in_place" and not keeps_cache:
            raise InvalidInputError(
                "SGLang cannot flush its cache with requests that are paused in place",
                hint='use pause="retract", or keep the cache',
            )
        self._server = server.rstrip("/")
        self._path_there = os.path.abspath(path) if path_there is None else path_there
        self._pause = pause
        self._keeps_cache = keeps_cache
        self._load_s = arguments.seconds("load_s", load_s, is_zero_allowed=False)
        self._clock = clock
        self._live: int | None = None
        self._looked_s: float | None = None
        self._is_checked = False
        self._elements = 0

    @property
    def engine(self) -> str:
        return f"sglang at {self._server}"

    @property
    def version(self) -> int | None:
        """The version that the server has; None if it has another one, cannot be reached, or was not asked to load."""
        folder = super().version
        if self._live is None or folder != self._live:
            return None
        now_s = self._clock()
        if self._looked_s is None or now_s - self._looked_s >= _LOOK_S:
            self._looked_s = now_s
            try:
                label = self._label()
            except EngineError as error:
                logger.warning("%s", error)
                return None
            if label != str(self._live):
                logger.warning(
                    "%s has the weights %r, not version %d: it is loaded again", self.engine, label, self._live
                )
                self._live = None
        return self._live

    def stage(self, staged: Staged) -> bool:
        """Write and prove the folder. EngineError, before anything is written, if the server cannot be reached."""
        self._require_routes()
        self._label()
        current = self._current()
        if staged.changes is None and current is not None and super().version == staged.version:
            # The server was restarted, or failed: the folder may be right already.
            try:
                is_right = blocks.digest(open_checkpoint(current).weights) == staged.manifest.digest
            except DeltasyncError:
                is_right = False
            if is_right:
                self._staged = current
                return True
        return super().stage(staged)

    def commit(self, staged: Staged) -> float:
        """Pause the server, let it load the folder, and let it go on, whether that succeeded or not.

        EngineError with the server's own message if it refuses.
        """
        self._live, self._elements = None, staged.manifest.elements
        since = self._clock()
        self._ask("/pause_generation", {"mode": self._pause}, timeout_s=self._load_s)
        try:
            super().commit(staged)
            body = {
                "model_path": self._path_there,
                "weight_version": str(staged.version),
                "flush_cache": not self._keeps_cache,
            }
            self._ask("/update_weights_from_disk", body, timeout_s=self._load_s)
            label = self._label()
            if label != str(staged.version):
                raise EngineError(
                    f"{self.engine} has the weights {label!r:.80} after it loaded version {staged.version}",
                    version=staged.version,
                    hint="does something else update its weights?",
                )
        finally:
            self._ask("/continue_generation", {})
        self._live, self._looked_s = staged.version, self._clock()
        return self._clock() - since

    def scrub(self, weights: Weights, tensors: Sequence[int], *, repair: bool) -> list[Damage]:
        """Compare the folder. A folder that was damaged is loaded again; the server's memory cannot be compared."""
        damages = super().scrub(weights, tensors, repair=repair)
        if damages:
            self._live = None
        return damages

    @property
    def unseen_elements(self) -> int:
        """All of them: no route gives the bits of the server's memory."""
        return self._elements

    def _label(self) -> str:
        label = self._ask("/model_info").get("weight_version")
        if not isinstance(label, str):
            raise EngineError(
                f"{self.engine} does not say which weights it has: /model_info has no weight_version",
                hint="SGLang 0.5.23 does; is this its server?",
            )
        return label

    def _require_routes(self) -> None:
        """InvalidInputError, once, if the server's own description lacks a route or a field that is needed."""
        if self._is_checked:
            return
        code, described = self._request("/openapi.json", None, _ASK_S)
        if code == 404:
            logger.info("%s does not describe its routes: they are not checked before they are used", self.engine)
            self._is_checked = True
            return
        if code >= 400:
            raise self._refused("/openapi.json", described, code)
        paths = described.get("paths")
        for route, fields in ROUTES.items():
            post = paths.get(route, {}).get("post") if isinstance(paths, dict) else None
            if post is None:
                raise InvalidInputError(
                    f"{self.engine} has no route POST {route}", hint="the routes of SGLang 0.5.23 are expected"
                )
            known = _body_fields(described, post)
            missing = [] if known is None else sorted(set(fields) - known)
            if missing:
                raise InvalidInputError(
                    f"POST {route} of {self.engine} takes no {', '.join(missing)}",
                    hint="the routes of SGLang 0.5.23 are expected",
                )
        self._is_checked = True

    def _ask(
        self, route: str, body: Mapping[str, object] | None = None, *, timeout_s: float = _ASK_S
    ) -> dict[str, Any]:
        """The answer to a GET, or to a POST where there is a body. EngineError if the server refuses."""
        code, answer = self._request(route, body, timeout_s)
        if code >= 400:
            raise self._refused(route, answer, code)
        return answer

    def _request(self, route: str, body: Mapping[str, object] | None, timeout_s: float) -> tuple[int, dict[str, Any]]:
        headers = {"content-type": "application/json"}
        if token := os.environ.get(TOKEN):
            headers["authorization"] = f"Bearer {token}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._server + route, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                return response.status, _parsed(response.read(_ANSWER_BYTES_MAX))
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _parsed(error.read(_ANSWER_BYTES_MAX))
        except OSError as error:
            self._looked_s = None
            raise EngineError(f"{self.engine} cannot be reached: {error}", hint="is the server up?") from error

    def _refused(self, route: str, answer: Mapping[str, Any], code: int) -> EngineError:
        message = answer.get("message") or answer.get("detail") or answer or "no reason was given"
        hint = f"set {TOKEN} to its API key" if code in (401, 403) else "its own log may say more"
        return EngineError(f"{self.engine} refused {route} ({code}): {message!s:.500}", hint=hint)


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
