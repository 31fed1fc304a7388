"""In the API server: the `vllm.endpoint_plugins` entry point, its control routes, and the engine behind them."""

import asyncio
import hmac
import logging
import os
import sys
import threading
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict
from typing import Any, Protocol, TypeVar

from fastapi import Body, FastAPI
from starlette.datastructures import State
from starlette.responses import JSONResponse

from deltasync.errors import DeltasyncError, EngineError
from deltasync.replica import metrics
from deltasync.replica.follower import Follower
from deltasync.replica.target import Target
from deltasync.vllm.labels import App, Labelling, Labels, Message, Receive, Send, note_versions, route_path
from deltasync.vllm.settings import PauseMode, Settings, memory_folder
from deltasync.vllm.target import VllmTarget

_T = TypeVar("_T")
_TIMEOUT_S = 600.0
"""An engine that does not answer for so long will not: loading a large model from host memory takes less."""


class ServerEngine:
    """An `Engine` over vLLM's engine client, whose coroutines run in the server's event loop."""

    def __init__(self, client: Any, loop: asyncio.AbstractEventLoop, *, pause: PauseMode, labels: Labels) -> None:
        self._client = client
        self._loop = loop
        self._pause: PauseMode = pause
        self._labels = labels

    @property
    def name(self) -> str:
        import vllm

        return f"vllm {vllm.__version__}"

    @property
    def checkpoint(self) -> str:
        return str(self._client.vllm_config.model_config.model)

    def call(self, method: str, *args: Any) -> list[Any]:
        found: list[Any] = self._wait(self._client.collective_rpc("deltasync", args=(method, *args)), method)
        return found

    def pause(self) -> None:
        self._wait(self._client.pause_generation(mode=self._pause, clear_cache=True), "pause")

    def resume(self) -> None:
        self._wait(self._client.resume_generation(), "resume")

    def label(self, version: int) -> None:
        self._wait(self._client.update_weight_version(str(version)), "label")
        self._labels.current = str(version)

    def _wait(self, work: Awaitable[_T], what: str) -> _T:
        async def done() -> _T:
            return await work

        future = asyncio.run_coroutine_threadsafe(done(), self._loop)
        try:
            return future.result(_TIMEOUT_S)
        # vLLM raises what its parts raise: whatever it is, the engine did not do what it was asked for.
        except Exception as error:
            future.cancel()
            raise EngineError(
                f"vLLM failed at {what!r}: {type(error).__name__}: {error!s:.500}",
                hint="look at the server's log; restart it if it does not recover",
            ) from error


PREFIX = "/deltasync"

_STATUS = {"not_found": 404, "invalid_input": 400, "mismatch": 409, "store": 502, "engine": 503}


class Controlled(Protocol):
    """What the routes control."""

    @property
    def follower(self) -> Follower: ...

    @property
    def target(self) -> Target: ...

    @property
    def way(self) -> str: ...


class Guard:
    """ASGI middleware: nothing under the prefix is answered without the token, not even whether it exists."""

    def __init__(self, app: App, token: str | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        path = route_path(scope)
        is_ours = path == PREFIX or path.startswith(f"{PREFIX}/")
        if scope["type"] in ("http", "websocket") and is_ours and not self._is_allowed(scope):
            answer = JSONResponse(
                {"error": {"kind": "unauthorized"}}, status_code=401, headers={"www-authenticate": "Bearer"}
            )
            await answer(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_allowed(self, scope: Message) -> bool:
        given = b"".join(value for key, value in scope["headers"] if key == b"authorization")
        return self._token is not None and hmac.compare_digest(given, b"Bearer " + self._token.encode())


def add_routes(app: FastAPI, controlled: Callable[[], Controlled | None]) -> None:
    """Add the routes. `controlled` gives None until the server is up."""

    async def run(work: Callable[[Controlled], Any]) -> JSONResponse:
        found = controlled()
        try:
            if found is None:
                raise EngineError("the server is not up yet", hint="try again")
            return JSONResponse(await asyncio.to_thread(work, found))
        except DeltasyncError as error:
            return JSONResponse({"error": _told(error)}, status_code=_STATUS.get(error.kind, 500))

    @app.get(f"{PREFIX}/status")
    async def status() -> JSONResponse:
        return await run(_status)

    @app.post(f"{PREFIX}/advance")
    async def advance(to: int | None = Body(None, embed=True)) -> JSONResponse:
        return await run(lambda c: _advance(c, to))

    @app.post(f"{PREFIX}/pin")
    async def pin(version: int | None = Body(None, embed=True)) -> JSONResponse:
        return await run(_then_status(lambda c: c.follower.pin(version)))

    @app.post(f"{PREFIX}/pause")
    async def pause() -> JSONResponse:
        return await run(_then_status(lambda c: c.follower.pause()))

    @app.post(f"{PREFIX}/resume")
    async def resume() -> JSONResponse:
        return await run(_then_status(lambda c: c.follower.resume()))

    @app.post(f"{PREFIX}/nudge")
    async def nudge() -> JSONResponse:
        return await run(_then_status(lambda c: c.follower.nudge()))

    @app.post(f"{PREFIX}/scrub")
    async def scrub(repair: bool = Body(True, embed=True)) -> JSONResponse:
        return await run(lambda c: _scrub(c, repair=repair))


def _status(found: Controlled) -> dict[str, Any]:
    return {**asdict(found.follower.status()), "engine": found.target.engine, "way": found.way}


def _then_status(act: Callable[[Controlled], None]) -> Callable[[Controlled], dict[str, Any]]:
    def work(found: Controlled) -> dict[str, Any]:
        act(found)
        return _status(found)

    return work


def _advance(found: Controlled, to: int | None) -> dict[str, Any]:
    moved = found.follower.advance(to=to)
    return {"version": found.target.version, "moved": None if moved is None else asdict(moved)}


def _scrub(found: Controlled, *, repair: bool) -> dict[str, Any]:
    damages = found.follower.scrub(repair=repair)
    return {"version": found.target.version, "damaged": [asdict(damage) for damage in damages]}


def _told(error: DeltasyncError) -> Mapping[str, Any]:
    return {"kind": error.kind, "message": error.message, "hint": error.hint, "rule": error.rule}


logger = logging.getLogger(__name__)
_NICE = 10


class Endpoint:
    """One for each API server.

    InvalidInputError if the environment is wrong or names no feed: vLLM logs it, and serves without following anything.
    """

    name = "deltasync"
    required_tasks = None

    def __init__(self) -> None:
        self.labels = Labels()
        self._settings = Settings.from_environment()
        self._following: Following | None = None

    def attach_router(self, app: FastAPI) -> None:
        """Add routes and headers."""
        add_routes(app, lambda: self._following)
        app.add_middleware(Labelling, labels=self.labels)
        app.add_middleware(Guard, token=self._settings.token)
        serve = app.router.lifespan_context

        @asynccontextmanager
        async def until_shutdown(app: FastAPI) -> AsyncIterator[Any]:
            async with serve(app) as state:
                try:
                    yield state
                finally:
                    if self._following is not None:
                        # Moves need the event loop, which would not run while it waits here.
                        await asyncio.to_thread(self._following.close)

        app.router.lifespan_context = until_shutdown

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        """Begin to follow. Answers are labelled `none` until the first version is live."""
        if engine_client is None:
            return
        _log_beside_vllm()
        if self._settings.token is None:
            logger.warning("DELTASYNC_TOKEN is not set: the control routes answer nobody")
        note_versions(engine_client, self.labels)
        engine = ServerEngine(engine_client, asyncio.get_running_loop(), pause=self._settings.pause, labels=self.labels)
        self._following = Following(self._settings, engine)
        self._following.start()


def _log_beside_vllm() -> None:
    """vLLM sets up its own logger only: what this package tells goes the same way, unless somebody said where to."""
    ours, theirs = logging.getLogger("deltasync"), logging.getLogger("vllm")
    if not ours.hasHandlers():
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)


class Following:
    """A follower, its target, and the thread that keeps them going."""

    def __init__(self, settings: Settings, engine: ServerEngine) -> None:
        self._settings = settings
        self._memory = ExitStack()
        folder = self._memory.enter_context(memory_folder())
        self.target = VllmTarget(engine, folder=folder)
        self.follower = Follower(
            settings.feed,
            self.target,
            mirror=folder / "mirror.safetensors" if settings.mirror is None else settings.mirror,
            base=settings.base,
            replica=settings.replica,
            scrub_s=settings.scrub_s,
        )
        self._thread = threading.Thread(target=self._run, name="deltasync-follow", daemon=True)
        self._forget: Callable[[], None] = lambda: None

    @property
    def way(self) -> str:
        return self._settings.way

    def start(self) -> None:
        """Follow in the background, unless a controller does."""
        try:
            self._forget = metrics.register(self.follower.status)
        except ImportError:
            logger.info("prometheus-client is not installed: there are no metrics of deltasync")
        if self._settings.way == "pull":
            self._thread.start()

    def close(self) -> None:
        """Stop, and leave nothing in memory."""
        self._forget()
        self.follower.close()
        if self._thread.is_alive():
            self._thread.join()
        self._memory.close()

    def _run(self) -> None:
        if sys.platform == "linux":
            # Of this thread and those that it starts: where cores are few, generation goes before decoding.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            self.follower.follow()
        except DeltasyncError as error:
            logger.error("no longer following %s: %s", self._settings.feed, error)
