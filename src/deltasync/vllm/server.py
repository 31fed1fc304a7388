"""In the API server: the `vllm.endpoint_plugins` entry point, and the engine behind it."""

import asyncio
import logging
import os
import signal
import threading
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI
from starlette.datastructures import State

from deltasync.errors import DeltasyncError, EngineError, InvalidInputError
from deltasync.replica.follower import Follower
from deltasync.replica.mirror import memory_folder
from deltasync.replica.target import Target
from deltasync.vllm.core import CALL, CacheSalts, own_client
from deltasync.vllm.labels import Labels, label_middleware, note_versions
from deltasync.vllm.plugin import log_where_vllm_does
from deltasync.vllm.releases import check_pauses, warn_if_not_in_zoo, warn_if_untested
from deltasync.vllm.routes import Replica, add_routes, token_middleware, version_middleware
from deltasync.vllm.settings import PauseMode, Settings
from deltasync.vllm.target import AdapterTarget, Load, VllmTarget

logger = logging.getLogger(__name__)

EXIT_REFUSED = 3
"""The exit code of a server that has refused its feed; the same as for mismatched data on the command line."""
_TIMEOUT_S = 600.0
"""An engine that takes longer to answer has failed: loading a large model from host memory takes less."""

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
        self._replicas: dict[str | None, Replica] | None = None
        self._held = ExitStack()
        self._app: FastAPI | None = None
        self._is_serving = threading.Event()

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes and the middleware, and close the replica when the server shuts down."""
        self._app = app
        add_routes(app, lambda: self._replicas)
        app.add_middleware(version_middleware, labels=self.labels, is_closing=lambda: self._server.should_exit)
        app.add_middleware(label_middleware, labels=self.labels)
        app.add_middleware(token_middleware, token=self._settings.token)
        serve = app.router.lifespan_context

        @asynccontextmanager
        async def serve_then_close(app: FastAPI) -> AsyncIterator[Any]:
            async with serve(app) as state:
                self._is_serving.set()
                try:
                    yield state
                finally:
                    # In another thread: the move in progress needs the event loop to finish.
                    await asyncio.to_thread(self._held.close)

        app.router.lifespan_context = serve_then_close

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        """Start to follow the feeds.

        Answers are labelled `none` until a version is live. With the load format `deltasync` one is live already.
        """
        if engine_client is None:
            return
        import vllm

        log_where_vllm_does()
        require_one_engine(engine_client)
        settings = self._settings
        if settings.token is None:
            logger.warning("DELTASYNC_TOKEN is not set: every request to the control routes is refused")
        warn_if_untested(vllm.__version__)
        warn_if_not_in_zoo(engine_client.vllm_config.model_config.architectures)
        check_pauses(engine_client, vllm.__version__)
        note_versions(engine_client, self.labels)
        folder = self._held.enter_context(memory_folder())
        loop = asyncio.get_running_loop()
        replicas: dict[str | None, Replica] = {}
        if settings.feed is not None:
            salts = await _salts(engine_client) if settings.cache == "keep" else None
            engine = ServerEngine(engine_client, loop, pause=settings.pause, labels=self.labels, salts=salts)
            own_client(engine_client, self.labels)
            mirror = folder / "mirror.safetensors" if settings.mirror is None else settings.mirror
            target = VllmTarget(engine, folder=folder, mirror=mirror)
            # In another thread: it waits for coroutines of this event loop.
            await asyncio.to_thread(target.claim)
            replicas[None] = self._following(
                settings.feed, target, mirror, base=settings.base, scrub_s=settings.scrub_s, has_metrics=True
            )
        for name, feed in settings.adapters.items():
            load = adapter_loader(engine_client, state.openai_serving_models, loop, name)
            own = folder / f"adapter-{name}"
            own.mkdir()
            adapter = AdapterTarget(name, load, folder=own)
            replicas[name] = self._following(feed, adapter, own / "mirror.safetensors", has_metrics=False)
        self._replicas = replicas
        for replica in replicas.values():
            replica.start()

    def _following(
        self,
        feed: str,
        target: Target,
        mirror: Path,
        *,
        base: Path | None = None,
        scrub_s: float | None = None,
        has_metrics: bool,
    ) -> Replica:
        """A replica that is closed when the server shuts down."""
        settings = self._settings
        follower = Follower(feed, target, mirror=mirror, base=base, replica=settings.replica, scrub_s=scrub_s)
        replica = Replica(
            follower,
            target,
            way=settings.way,
            ready_s=settings.ready_s,
            has_metrics=has_metrics,
            on_refused=self._end_if_refused,
        )
        self._held.callback(replica.close)
        return replica

    def _end_if_refused(self, error: DeltasyncError) -> None:
        """Shut the server down as a signal does, with an exit code of its own. Called in the thread that follows."""
        if self._settings.on_refused == "serve":
            logger.error("the server stays at its version, and is not ready")
            return
        logger.error("the server ends with exit code %d; DELTASYNC_ON_REFUSED=serve keeps it", EXIT_REFUSED)
        # Before that, vLLM takes the signal for an interrupt, and this replica would not be closed.
        self._is_serving.wait()
        server = self._server
        shutdown = server.shutdown

        async def shutdown_and_exit(*args: Any) -> None:
            # This is the last that vLLM's main coroutine waits for; it would return and exit with 0.
            await shutdown(*args)
            raise SystemExit(EXIT_REFUSED)

        server.shutdown = shutdown_and_exit
        os.kill(os.getpid(), signal.SIGTERM)

    @property
    def _server(self) -> Any:
        """Uvicorn's server, once there are requests."""
        assert self._app is not None
        return self._app.state.server


def require_one_engine(client: Any) -> None:
    """InvalidInputError unless there are one engine and one API server.

    Of several engines vLLM returns only the answers of the first one. What failed in another one would not be seen,
    and it would answer with other weights than its label says. Several API servers would each write their own version.
    """
    core = client.engine_core
    for count, what in (
        (len(getattr(core, "core_engines", ())), "engines (--data-parallel-size)"),
        (getattr(core, "client_count", 1), "API servers (--api-server-count)"),
    ):
        if count > 1:
            raise InvalidInputError(
                f"the server has {count} {what}, which cannot be kept at one version",
                hint="start several servers with one of each: every server follows the feed",
            )


async def _salts(client: Any) -> CacheSalts:
    """Salts for the requests of a server. InvalidInputError if its KV comes from elsewhere, too."""
    if client.vllm_config.kv_transfer_config is not None:
        raise InvalidInputError(
            "DELTASYNC_CACHE=keep does not work with a KV connector, which brings KV of other versions",
            hint="use DELTASYNC_CACHE=clear, or leave --kv-transfer-config out",
        )
    salts = CacheSalts(client)
    # A core that lacks the method fails here, and not at the first switch.
    await salts.renew()
    return salts


class ServerEngine:
    """An `Engine` over vLLM's engine client, whose coroutines run in the server's event loop.

    `salts`: keep the caches over a switch, with a new salt; None clears them.
    """

    def __init__(
        self,
        client: Any,
        loop: asyncio.AbstractEventLoop,
        *,
        pause: PauseMode,
        labels: Labels,
        salts: CacheSalts | None = None,
    ) -> None:
        self._client = client
        # Kept here, because `own_client` replaces them for all others.
        self._resume_generation, self._set_version = client.resume_generation, client.update_weight_version
        self._loop = loop
        self._pause: PauseMode = pause
        self._labels = labels
        self._salts = salts

    @property
    def name(self) -> str:
        import vllm

        return f"vllm {vllm.__version__}"

    def call(self, method: str, *args: Any) -> list[Any]:
        work = self._client.collective_rpc(CALL, args=(method, *args))
        answers: list[dict[str, Any]] = _wait(self._loop, work, method)
        for answer in answers:
            if "error" in answer:
                raise EngineError(
                    f"a worker of vLLM failed at {method!r}: {answer['error']}",
                    hint="look at the server's log; restart it if it does not recover",
                )
        return [answer["result"] for answer in answers]

    def pause(self) -> None:
        self._labels.is_switching = True
        work = self._client.pause_generation(mode=self._pause, clear_cache=self._salts is None)
        _wait(self._loop, work, "pause")

    def resume(self) -> None:
        async def resume() -> None:
            if self._salts is not None:
                await self._salts.renew()
            await self._resume_generation()
            await self._labels.end_switch()

        _wait(self._loop, resume(), "resume")

    def label(self, version: int) -> None:
        _wait(self._loop, self._set_version(str(version)), "label")
        self._labels.current = str(version)


def adapter_loader(client: Any, models: Any, loop: asyncio.AbstractEventLoop, name: str) -> Load:
    """A function that loads folders into vLLM under the name of an adapter. `models` are those of the API server."""
    from vllm.lora.request import LoRARequest

    def load(folder: Path) -> None:
        # An id of its own for each version: vLLM then loads it beside the one that requests in flight use.
        request = LoRARequest(name, models.lora_id_counter.inc(1), str(folder))
        hint = "start the server with --enable-lora, and with --max-lora-rank of at least the adapter's rank"
        if not _wait(loop, client.add_lora(request), f"load the adapter {name}", hint=hint):
            raise EngineError(f"vLLM did not load the adapter {name!r:.80}", hint="look at the server's log")
        loop.call_soon_threadsafe(models.lora_requests.__setitem__, name, request)

    return load


def _wait(
    loop: asyncio.AbstractEventLoop,
    work: Awaitable[_T],
    what: str,
    *,
    hint: str = "look at the server's log; restart it if it does not recover",
) -> _T:
    """The result of a coroutine of vLLM's client, from another thread than that of the event loop."""

    async def done() -> _T:
        return await work

    future = asyncio.run_coroutine_threadsafe(done(), loop)
    try:
        return future.result(_TIMEOUT_S)
    # vLLM passes on whatever its parts raise. In each case the engine did not do what it was asked to do.
    except Exception as error:
        future.cancel()
        raise EngineError(f"vLLM failed at {what!r}: {type(error).__name__}: {error!s:.500}", hint=hint) from error
