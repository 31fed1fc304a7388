"""The engine behind vLLM's API server, called from the thread that follows a feed."""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from deltasync.errors import EngineError
from deltasync.serve.vllm.labels import Labels
from deltasync.serve.vllm.settings import PauseMode

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
