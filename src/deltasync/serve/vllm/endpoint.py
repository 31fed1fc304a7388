"""What vLLM's API server loads: the `vllm.endpoint_plugins` entry point. It follows the feed, and answers for it."""

import asyncio
import logging
import os
import sys
import threading
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import State

from deltasync.errors import DeltasyncError
from deltasync.following.follower import Follower
from deltasync.serve import metrics
from deltasync.serve.vllm.labels import Labelling, Labels, note_versions
from deltasync.serve.vllm.memory import memory_folder
from deltasync.serve.vllm.routes import Guard, add_routes
from deltasync.serve.vllm.server import ServerEngine
from deltasync.serve.vllm.settings import Settings
from deltasync.serve.vllm.target import VllmTarget

_log = logging.getLogger(__name__)
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
            _log.warning("DELTASYNC_TOKEN is not set: the control routes answer nobody")
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
            _log.info("prometheus-client is not installed: there are no metrics of deltasync")
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
            self.follower.follow(self.target)
        except DeltasyncError as error:
            _log.error("no longer following %s: %s", self._settings.feed, error)
