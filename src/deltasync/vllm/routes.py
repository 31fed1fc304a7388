"""In the API server: what it follows, the control routes with their token, and requests that ask for a version."""

import asyncio
import hmac
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fastapi import Body, FastAPI
from starlette.responses import JSONResponse

from deltasync.errors import DeltasyncError, EngineError, InvalidInputError, NotFoundError
from deltasync.observe import registered
from deltasync.parallel import lower_priority
from deltasync.replica.events import follower_metrics
from deltasync.replica.follower import Follower
from deltasync.replica.target import Target
from deltasync.vllm.labels import VERSION, App, Labels, Message, Receive, Send, route_path
from deltasync.vllm.settings import SyncMode

logger = logging.getLogger(__name__)

_NICENESS = 10


class Replica:
    """The follower of one server with its target. The methods that return a dictionary answer a route.

    `ready_s`: in `pull` mode, how long ago the live version may have been the newest one; None sets no bound.
    `has_metrics`: add the metrics of the follower to those of the server, which has room for one.
    `on_refused`: called in the thread that follows if it ends with an error, which no retry can fix.
    """

    def __init__(
        self,
        follower: Follower,
        target: Target,
        *,
        way: SyncMode,
        ready_s: float | None = None,
        has_metrics: bool = True,
        on_refused: Callable[[DeltasyncError], None] = lambda error: None,
    ) -> None:
        self.follower = follower
        self._target = target
        self._way: SyncMode = way
        self._ready_s = ready_s
        self._has_metrics = has_metrics
        self._on_refused = on_refused
        self._thread: threading.Thread | None = None
        self._unregister_metrics: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Add the metrics to those of the server, and begin what runs in the background.

        In `pull` mode it follows the feed; in `push` mode it proves the version that the target started with.
        """
        if self._has_metrics:
            try:
                self._unregister_metrics = registered(follower_metrics(self.follower.status))
            except ImportError:
                logger.info("prometheus-client is not installed: the server has no metrics of deltasync")
        if self._way == "pull" or self._target.version is not None:
            work = self._follow if self._way == "pull" else self._prove
            self._thread = threading.Thread(target=work, name="deltasync-follow", daemon=True)
            self._thread.start()

    def _follow(self) -> None:
        # Where cores are few, generation goes before decoding. A thread inherits the priority of its parent.
        lower_priority(_NICENESS)
        try:
            self.follower.follow()
        except DeltasyncError as error:
            logger.error("the feed is refused, and no longer followed: %s", error)
            self._on_refused(error)

    def _prove(self) -> None:
        """Prove the version that the target started with. Without that, it is live but not known to be."""
        try:
            self.follower.advance(to=self._target.version)
        except DeltasyncError as error:
            logger.error("the version that the server started with is not proved: %s", error)

    def close(self) -> None:
        """Finish the move in progress, stop, and release the feed and the mirror."""
        self._unregister_metrics()
        self.follower.stop()
        if self._thread is not None:
            self._thread.join()
        self.follower.close()

    @property
    def is_ready(self) -> bool:
        """Whether a version is live and, in `pull` mode, followed within the bound. Never blocks."""
        status = self.follower.status()
        if status.version is None or self._way == "push":
            return status.version is not None
        is_recent = self._ready_s is None or (status.stale_s is not None and status.stale_s < self._ready_s)
        return status.is_following and is_recent

    def status(self) -> dict[str, Any]:
        status = asdict(self.follower.status())
        return {**status, "engine": self._target.engine, "way": self._way, "is_ready": self.is_ready}

    def advance(self, to: int | None) -> dict[str, Any]:
        moved = self.follower.advance(to=to)
        return {"version": self._target.version, "moved": None if moved is None else asdict(moved)}

    def scrub(self, *, repair: bool) -> dict[str, Any]:
        damages = self.follower.scrub(repair=repair)
        return {
            "version": self._target.version,
            "damaged": [asdict(damage) for damage in damages],
            "unseen_elements": self._target.unseen_elements,
        }


PREFIX = "/deltasync"
READY = f"{PREFIX}/ready"
_STATUS_CODES = {"not_found": 404, "invalid_input": 400, "mismatch": 409, "store": 502, "engine": 503}
MIN_VERSION = b"x-deltasync-min-version"
WAIT_S = b"x-deltasync-wait-s"
_HEADERS = (VERSION, MIN_VERSION, WAIT_S)

WAIT_MOST_S = 60.0
"""Longer waits are cut to this: proxies give up on a silent connection after about a minute."""
_SWITCH_S = 5.0
"""How long every such request waits for the end of a switch. The engine would hold it, too."""
_CLOSING_S = 1.0
"""How often a waiting request looks whether the server shuts down, which waits for all requests."""
_RETRY_AFTER_S = 1
_VERSION_DIGITS = 18


def is_control(scope: Message) -> bool:
    """Whether a request is for a path under the prefix."""
    path = route_path(scope)
    return path == PREFIX or path.startswith(f"{PREFIX}/")


def error_response(error: DeltasyncError) -> JSONResponse:
    """The answer to a request that fails with this error."""
    fields = {"kind": error.kind, "message": error.message, "hint": error.hint, "rule": error.rule}
    return JSONResponse({"error": fields}, status_code=_STATUS_CODES.get(error.kind, 500))


Replicas = Mapping[str | None, Replica]
"""What a server follows: feeds of adapters by the name of the adapter, and a feed of weights under None."""


def named(replicas: Replicas, adapter: str | None) -> Replica:
    """The replica of an adapter, or of the weights for None."""
    found = replicas.get(adapter)
    if found is not None:
        return found
    adapters = [name for name in replicas if name is not None]
    if adapter is None:
        raise InvalidInputError(
            "the server follows no feed of weights", hint=f"name one of its adapters, as in ?adapter={adapters[0]}"
        )
    raise NotFoundError(
        f"the server follows no adapter {adapter!r:.80}", hint=f"it follows {', '.join(adapters) or 'none'}"
    )


def add_routes(app: FastAPI, get_replicas: Callable[[], Replicas | None]) -> None:
    """Add the control routes. `get_replicas` returns None until the engine is up.

    The query parameter `adapter` of a route names an adapter; without it, the route is about the weights.
    """

    async def answer(work: Callable[[Replicas], dict[str, Any]]) -> JSONResponse:
        try:
            replicas = get_replicas()
            if replicas is None:
                raise EngineError("the server is not up yet", hint="try again")
            return JSONResponse(await asyncio.to_thread(work, replicas))
        except DeltasyncError as error:
            return error_response(error)

    async def act(adapter: str | None, work: Callable[[Follower], None]) -> JSONResponse:
        def act_and_report(replicas: Replicas) -> dict[str, Any]:
            replica = named(replicas, adapter)
            work(replica.follower)
            return replica.status()

        return await answer(act_and_report)

    @app.get(READY)
    async def ready() -> JSONResponse:
        replicas = get_replicas()
        is_ready = replicas is not None and all(replica.is_ready for replica in replicas.values())
        return JSONResponse({"ready": is_ready}, status_code=200 if is_ready else 503)

    @app.get(f"{PREFIX}/status")
    async def status() -> JSONResponse:
        def report(replicas: Replicas) -> dict[str, Any]:
            """The status of the weights, with those of the adapters by name."""
            adapters = {name: replica.status() for name, replica in replicas.items() if name is not None}
            return {**(replicas[None].status() if None in replicas else {}), "adapters": adapters}

        return await answer(report)

    @app.post(f"{PREFIX}/advance")
    async def advance(to: int | None = Body(None, embed=True), adapter: str | None = None) -> JSONResponse:
        return await answer(lambda replicas: named(replicas, adapter).advance(to))

    @app.post(f"{PREFIX}/scrub")
    async def scrub(repair: bool = Body(True, embed=True), adapter: str | None = None) -> JSONResponse:
        return await answer(lambda replicas: named(replicas, adapter).scrub(repair=repair))

    @app.post(f"{PREFIX}/pin")
    async def pin(version: int | None = Body(None, embed=True), adapter: str | None = None) -> JSONResponse:
        return await act(adapter, lambda follower: follower.pin(version))

    @app.post(f"{PREFIX}/pause")
    async def pause(adapter: str | None = None) -> JSONResponse:
        return await act(adapter, Follower.pause)

    @app.post(f"{PREFIX}/resume")
    async def resume(adapter: str | None = None) -> JSONResponse:
        return await act(adapter, Follower.resume)

    @app.post(f"{PREFIX}/nudge")
    async def nudge(adapter: str | None = None) -> JSONResponse:
        return await act(adapter, Follower.nudge)


def token_middleware(app: App, token: str | None) -> App:
    """ASGI middleware: without the token, every path under the prefix is 401, whether it exists or not.

    Only readiness needs none: load balancers have no token.
    """

    async def guarded(scope: Message, receive: Receive, send: Send) -> None:
        answer = app
        if scope["type"] in ("http", "websocket") and is_control(scope):
            is_open = route_path(scope) == READY and scope.get("method") == "GET"
            given = b"".join(value for key, value in scope["headers"] if key == b"authorization")
            is_allowed = token is not None and hmac.compare_digest(given, b"Bearer " + token.encode())
            if not (is_open or is_allowed):
                answer = JSONResponse(
                    {"error": {"kind": "unauthorized"}}, status_code=401, headers={"www-authenticate": "Bearer"}
                )
        await answer(scope, receive, send)

    return guarded


@dataclass(frozen=True, slots=True)
class Wanted:
    """The version that a request asks for, or the oldest one that it takes, and how long it waits for it."""

    version: int | None = None
    min_version: int | None = None
    wait_s: float = 0.0

    @classmethod
    def from_headers(cls, headers: Iterable[tuple[bytes, bytes]]) -> "Wanted":
        """Parse the headers of a request. InvalidInputError names the header that is wrong."""
        values: dict[bytes, str] = {}
        for key, value in headers:
            if key in _HEADERS:
                if key in values:
                    raise _wrong(key, "is given twice", "send it once")
                values[key] = value.decode("latin-1").strip()
        text = values.get(WAIT_S, "0")
        try:
            wait_s = float(text)
        except ValueError:
            wait_s = math.nan
        if not 0.0 <= wait_s < math.inf:
            raise _wrong(WAIT_S, f"is {text!r:.80}", "send a number of seconds, at least 0")
        return cls(_version(values, VERSION), _version(values, MIN_VERSION), min(wait_s, WAIT_MOST_S))

    def is_met_by(self, live: int | None) -> bool:
        """Whether the request can start under this version."""
        if self.version is None and self.min_version is None:
            return True
        return live is not None and self.version in (None, live) and (self.min_version or 0) <= live

    def __str__(self) -> str:
        exact = [] if self.version is None else [f"version {self.version}"]
        least = [] if self.min_version is None else [f"at least version {self.min_version}"]
        return " and ".join(exact + least)


def _version(values: dict[bytes, str], key: bytes) -> int | None:
    text = values.get(key)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= _VERSION_DIGITS):
        raise _wrong(key, f"is {text!r:.80}", f"send a version, a decimal number of at most {_VERSION_DIGITS} digits")
    return int(text)


def _wrong(key: bytes, what: str, hint: str) -> InvalidInputError:
    return InvalidInputError(f"the header {key.decode()} {what}", hint=hint)


def version_middleware(app: App, labels: Labels, is_closing: Callable[[], bool]) -> App:
    """ASGI middleware: a request that asks for a version which is not live is 409, after the time that it waits.

    `is_closing` returns whether the server shuts down.
    """

    async def admitted(scope: Message, receive: Receive, send: Send) -> None:
        answer = None
        if scope["type"] == "http" and not is_control(scope):
            try:
                answer = await refusal(Wanted.from_headers(scope["headers"]))
            except InvalidInputError as error:
                answer = error_response(error)
        await (app if answer is None else answer)(scope, receive, send)

    async def refusal(wanted: Wanted) -> JSONResponse | None:
        """The answer to a request that cannot start; None if it can."""
        if not wanted.is_met_by(labels.version):
            await labels.wait_for(lambda: not labels.is_switching, _SWITCH_S)
            deadline_s = time.monotonic() + wanted.wait_s
            while (left_s := deadline_s - time.monotonic()) > 0 and not is_closing():
                if await labels.wait_for(lambda: wanted.is_met_by(labels.version), min(left_s, _CLOSING_S)):
                    return None
        live = labels.version
        if wanted.is_met_by(live):
            return None
        fields = {
            "kind": "version",
            "message": f"the request asks for {wanted}, but {'none' if live is None else f'version {live}'} is live",
            "hint": f"try again, or let the request wait with the header {WAIT_S.decode()}",
            "rule": None,
        }
        return JSONResponse(
            {"error": fields, "version": live}, status_code=409, headers={"retry-after": str(_RETRY_AFTER_S)}
        )

    return admitted
