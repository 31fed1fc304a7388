"""In the API server: the `vllm.endpoint_plugins` entry point, its control routes, and the engine behind them."""

import asyncio
import hmac
import logging
import threading
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict
from typing import Any, TypeVar

from fastapi import Body, FastAPI
from starlette.datastructures import State
from starlette.responses import JSONResponse

from deltasync.errors import DeltasyncError, EngineError
from deltasync.parallel import lower_priority
from deltasync.replica import metrics
from deltasync.replica.follower import Follower
from deltasync.replica.target import Target
from deltasync.vllm.labels import App, LabelMiddleware, Labels, Message, Receive, Send, note_versions, route_path
from deltasync.vllm.settings import PauseMode, Settings, Way, memory_folder
from deltasync.vllm.target import VllmTarget

logger = logging.getLogger(__name__)

PREFIX = "/deltasync"
_STATUS_CODES = {"not_found": 404, "invalid_input": 400, "mismatch": 409, "store": 502, "engine": 503}
_TIMEOUT_S = 600.0
"""An engine that takes longer to answer has failed: loading a large model from host memory takes less."""
_NICENESS = 10

_T = TypeVar("_T")


class Endpoint:
    """The plugin of one API server.

    InvalidInputError if the environment is wrong or names no feed: vLLM logs it, and serves without following a feed.
    """

    name = "deltasync"
    required_tasks = None

    def __init__(self) -> None:
        self.labels = Labels()
        self._settings = Settings.from_environment()
        self._replica: Replica | None = None
        self._held = ExitStack()

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes and the middleware, and close the replica when the server shuts down."""
        add_routes(app, lambda: self._replica)
        app.add_middleware(LabelMiddleware, labels=self.labels)
        app.add_middleware(TokenMiddleware, token=self._settings.token)
        serve = app.router.lifespan_context

        @asynccontextmanager
        async def serve_then_close(app: FastAPI) -> AsyncIterator[Any]:
            async with serve(app) as state:
                try:
                    yield state
                finally:
                    # In another thread: the move in progress needs the event loop to finish.
                    await asyncio.to_thread(self._held.close)

        app.router.lifespan_context = serve_then_close

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        """Start to follow the feed. Answers are labelled `none` until the first version is live."""
        if engine_client is None:
            return
        _log_where_vllm_does()
        settings = self._settings
        if settings.token is None:
            logger.warning("DELTASYNC_TOKEN is not set: every request to the control routes is refused")
        note_versions(engine_client, self.labels)
        engine = ServerEngine(engine_client, asyncio.get_running_loop(), pause=settings.pause, labels=self.labels)
        folder = self._held.enter_context(memory_folder())
        target = VllmTarget(engine, folder=folder)
        follower = Follower(
            settings.feed,
            target,
            mirror=folder / "mirror.safetensors" if settings.mirror is None else settings.mirror,
            base=settings.base,
            replica=settings.replica,
            scrub_s=settings.scrub_s,
        )
        self._replica = Replica(follower, target, way=settings.way)
        self._held.callback(self._replica.close)
        self._replica.start()


class Replica:
    """The follower of one server with its target. The methods that return a dictionary answer a route."""

    def __init__(self, follower: Follower, target: Target, *, way: Way) -> None:
        self.follower = follower
        self._target = target
        self._way: Way = way
        self._unregister_metrics: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Add the metrics to those of the server and, in `pull` mode, follow the feed in the background."""
        try:
            self._unregister_metrics = metrics.register(self.follower.status)
        except ImportError:
            logger.info("prometheus-client is not installed: the server has no metrics of deltasync")
        if self._way == "pull":
            # A thread inherits the priority of the thread that starts it, and that of the server must stay as it is.
            starter = threading.Thread(target=self._start_with_low_priority)
            starter.start()
            starter.join()

    def _start_with_low_priority(self) -> None:
        # Where cores are few, generation goes before decoding.
        lower_priority(_NICENESS)
        self.follower.start()

    def close(self) -> None:
        """Finish the move in progress, stop, and release the feed and the mirror."""
        self._unregister_metrics()
        self.follower.close()

    def status(self) -> dict[str, Any]:
        return {**asdict(self.follower.status()), "engine": self._target.engine, "way": self._way}

    def advance(self, to: int | None) -> dict[str, Any]:
        moved = self.follower.advance(to=to)
        return {"version": self._target.version, "moved": None if moved is None else asdict(moved)}

    def scrub(self, *, repair: bool) -> dict[str, Any]:
        damages = self.follower.scrub(repair=repair)
        return {"version": self._target.version, "damaged": [asdict(damage) for damage in damages]}


def add_routes(app: FastAPI, get_replica: Callable[[], Replica | None]) -> None:
    """Add the control routes. `get_replica` returns None until the engine is up."""

    async def answer(work: Callable[[Replica], dict[str, Any]]) -> JSONResponse:
        try:
            replica = get_replica()
            if replica is None:
                raise EngineError("the server is not up yet", hint="try again")
            return JSONResponse(await asyncio.to_thread(work, replica))
        except DeltasyncError as error:
            fields = {"kind": error.kind, "message": error.message, "hint": error.hint, "rule": error.rule}
            return JSONResponse({"error": fields}, status_code=_STATUS_CODES.get(error.kind, 500))

    async def act(work: Callable[[Follower], None]) -> JSONResponse:
        def act_and_report(replica: Replica) -> dict[str, Any]:
            work(replica.follower)
            return replica.status()

        return await answer(act_and_report)

    @app.get(f"{PREFIX}/status")
    async def status() -> JSONResponse:
        return await answer(Replica.status)

    @app.post(f"{PREFIX}/advance")
    async def advance(to: int | None = Body(None, embed=True)) -> JSONResponse:
        return await answer(lambda replica: replica.advance(to))

    @app.post(f"{PREFIX}/scrub")
    async def scrub(repair: bool = Body(True, embed=True)) -> JSONResponse:
        return await answer(lambda replica: replica.scrub(repair=repair))

    @app.post(f"{PREFIX}/pin")
    async def pin(version: int | None = Body(None, embed=True)) -> JSONResponse:
        return await act(lambda follower: follower.pin(version))

    @app.post(f"{PREFIX}/pause")
    async def pause() -> JSONResponse:
        return await act(Follower.pause)

    @app.post(f"{PREFIX}/resume")
    async def resume() -> JSONResponse:
        return await act(Follower.resume)

    @app.post(f"{PREFIX}/nudge")
    async def nudge() -> JSONResponse:
        return await act(Follower.nudge)


class TokenMiddleware:
    """ASGI middleware: without the token, every path under the prefix is 401, whether it exists or not."""

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
        results: list[Any] = self._wait(self._client.collective_rpc("deltasync", args=(method, *args)), method)
        return results

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
        # vLLM passes on whatever its parts raise. In each case the engine did not do what it was asked to do.
        except Exception as error:
            future.cancel()
            raise EngineError(
                f"vLLM failed at {what!r}: {type(error).__name__}: {error!s:.500}",
                hint="look at the server's log; restart it if it does not recover",
            ) from error


def _log_where_vllm_does() -> None:
    """Give our logger the handlers of vLLM's, which sets up no other one, unless the user has configured ours."""
    ours, theirs = logging.getLogger("deltasync"), logging.getLogger("vllm")
    if not ours.hasHandlers():
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
