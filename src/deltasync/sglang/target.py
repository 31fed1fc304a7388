"""`SglangTarget`: an SGLang server that is kept at the newest version of a feed, through its own HTTP routes.

    deltasync follow s3://bucket/run-42 --target /models/live --sglang http://127.0.0.1:30000

Each version is written as a checkpoint folder that the server can read, too. Then the server pauses, loads the folder,
and goes on. With `--only-changes` it loads the first version so; of later ones, what changed is written over its live
weights. Needs no package of SGLang.
"""

import http.client
import json
import logging
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from deltasync import arguments, blocks
from deltasync.checkpoint import open_checkpoint
from deltasync.errors import DeltasyncError, EngineError, InvalidInputError
from deltasync.format.weights import Weights
from deltasync.replica.folder import FolderTarget, recorded_version
from deltasync.replica.target import Damage, Staged

if TYPE_CHECKING:
    from deltasync.sglang.in_place import InPlace


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


Pause = Literal["retract", "in_place", "abort"]
"""What happens to running requests: they are computed again, go on with the old cache, or end."""

PAUSES: tuple[Pause, ...] = get_args(Pause)

_LOOK_S = 5.0
"""How often the server is asked which weights it has."""

UNKNOWN = "unknown"
"""What a server calls its weights after it failed to load a version: they may be the old ones or the new ones."""

_Held = Literal["version", "unknown", "torn"]
"""What the memory of the server holds: the version that it names; one version or the other; none."""


class SglangTarget(FolderTarget):
    """A checkpoint folder, and an SGLang server that loads it.

    `server`: its URL. `path_there`: the path under which the server finds the folder, if it is another one there.
    `pause`: what happens to running requests while the weights are loaded. `in_place` needs `keeps_cache`.
    `keeps_cache`: leave the KV cache as it is, computed with the weights of earlier versions. By default it is flushed.
    `only_changes`: let the workers of the server write only what changed. The server must have been started with
    `--custom-weight-loader deltasync.sglang.loader.load`, and be able to write to the folder. Needs torch.
    `load_s`: how long the server may take to load a version.

    `version` is what the server said, when it was last asked, that it has. After a restart of the server it is None
    until the version is loaded.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        server: str,
        *,
        path_there: str | None = None,
        pause: Pause = "retract",
        keeps_cache: bool = False,
        only_changes: bool = False,
        load_s: float = 1800.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(path)
        self._server = SglangServer(server)
        self.engine = self._server.name
        arguments.one_of("pause", pause, PAUSES)
        if pause == "in_place" and not keeps_cache:
            raise InvalidInputError(
                "SGLang cannot flush its cache with requests that are paused in place",
                hint='use pause="retract", or keep the cache',
            )
        self._path_there = os.path.abspath(path) if path_there is None else path_there
        self._pause = pause
        self._keeps_cache = keeps_cache
        self._load_s = arguments.seconds("load_s", load_s, is_zero_allowed=False)
        self._only_changes = only_changes
        self._in_place: InPlace | None = None
        self._clock = clock
        self._held: _Held = "version"
        self._live: int | None = None
        self._looked_s: float | None = None
        self._is_checked = False

    def open(self) -> None:
        """Lock the path. What the server has is not known before it was asked to load a version."""
        super().open()
        if self.version != self._live:
            # Another process may have written the folder since.
            self._live = None
        self.version = self._live

    def look(self) -> None:
        """Now and then, ask the server which weights it has. None if they are others, or if it cannot be reached."""
        now_s = self._clock()
        if self._live is None or (self._looked_s is not None and now_s - self._looked_s < _LOOK_S):
            return
        self._looked_s = now_s
        try:
            label = self._label()
        except EngineError as error:
            logger.warning("%s", error)
            return
        if label != str(self._live):
            logger.warning("%s has the weights %r, not version %d: it is loaded again", self.engine, label, self._live)
            self._live = None
        self.version = self._live

    def stage(self, staged: Staged) -> bool:
        """Write and prove the folder. EngineError, before anything is written, if the server cannot be reached.

        InvalidInputError, once, if it lacks a route, a field or a setting that is needed.
        """
        # A server that was started again may have been started in another way.
        self._is_checked &= self._label() == str(self._live)
        if not self._is_checked:
            self._server.require({**ROUTES, **IN_PLACE_ROUTES} if self._only_changes else ROUTES)
            if self._only_changes:
                # Only here is torch needed.
                from deltasync.sglang.in_place import InPlace

                self._in_place = InPlace(self._server, load_s=self._load_s)
            self._is_checked = True
        current = self._current()
        if staged.changes is None and current is not None and recorded_version(current) == staged.version:
            # The server was restarted, or failed: the folder may be right already.
            try:
                is_right = blocks.digest(open_checkpoint(current).weights) == staged.manifest.digest
            except DeltasyncError:
                is_right = False
            if is_right:
                self._staged = current
                return True
        is_proved = super().stage(staged)
        if self._in_place is not None and staged.changes is not None and self._staged is not None:
            self._in_place.stage(self._staged, staged)
        return is_proved

    def commit(self, staged: Staged) -> float:
        """Pause the server, let it load the folder or what changed, and let it go on.

        EngineError with the server's own message if it refuses. It goes on then, with weights that it calls `UNKNOWN`.
        Only if what changed may be written in part, it stays paused until it has loaded a version.
        MismatchError, with what cannot be mapped, if the model is none that can be written in place; the server has the
        version then.
        """
        self.version = self._live = None
        # No route gives the bits of the server's memory.
        self.unseen_elements = staged.manifest.elements
        since = self._clock()
        self._server.ask("/pause_generation", {"mode": self._pause}, timeout_s=self._load_s)
        try:
            self._switch(staged)
            if not self._is_written(staged):
                self._load(staged)
            label = self._label()
            if label != str(staged.version):
                self._held = "unknown"
                raise EngineError(
                    f"{self.engine} has the weights {label!r:.80} after it loaded version {staged.version}",
                    version=staged.version,
                    hint="does something else update its weights?",
                )
        finally:
            if self._held == "torn":
                logger.error("%s stays paused: its weights are of no version until it has loaded one", self.engine)
            else:
                if self._held == "unknown":
                    self._server.name_weights(UNKNOWN)
                    self._held = "version"
                self._server.ask("/continue_generation", {})
        self.version = self._live = staged.version
        self._looked_s = self._clock()
        return self._clock() - since

    def _is_written(self, staged: Staged) -> bool:
        """Write what changed, if that is possible. Whatever fails there, loading the whole folder puts right."""
        if self._in_place is None or staged.changes is None or self._held == "torn":
            return False
        label = self._label()
        if label != str(staged.start):
            logger.warning("%s has the weights %r, not version %s: it loads all", self.engine, label, staged.start)
            return False
        self._held = "torn"
        try:
            self._in_place.write(self._path, self._path_there, staged, flushes=not self._keeps_cache)
        except DeltasyncError as error:
            logger.warning("%s: it loads the whole folder now", error)
            return False
        self._held = "version"
        return True

    def _load(self, staged: Staged) -> None:
        """Load the whole folder, and let the workers map it if later versions are to be written in place."""
        self._load_folder(staged)
        if self._in_place is None:
            return
        # A loader that does more than to load may change live weights while it is traced.
        self._held = "torn"
        try:
            self._in_place.map(self._path, self._path_there, staged)
        except DeltasyncError:
            self._load_folder(staged)
            raise
        self._held = "version"

    def _load_folder(self, staged: Staged) -> None:
        body = {
            "model_path": self._path_there,
            "weight_version": str(staged.version),
            "flush_cache": not self._keeps_cache,
        }
        if self._held == "version":
            # SGLang may fail after it has loaded all, and its roll-back reads the new folder.
            self._held = "unknown"
        self._server.ask("/update_weights_from_disk", body, timeout_s=self._load_s)
        self._held = "version"

    def scrub(self, weights: Weights, tensors: Sequence[int], *, repair: bool) -> list[Damage]:
        """Compare the folder. A folder that was damaged is loaded again; the server's memory cannot be compared."""
        damages = super().scrub(weights, tensors, repair=repair)
        if damages:
            self.version = self._live = None
        return damages

    def _label(self) -> str:
        try:
            return self._server.label()
        except EngineError:
            # What the server has is not known: ask it at the next step.
            self.version = self._looked_s = None
            raise
