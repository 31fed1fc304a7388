"""The engine behind an API server, called from another thread than that of its event loop, and the replica's thread."""

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.feeds import Feed
from support.replicas import TorchTarget, follower

from deltasync import parallel
from deltasync.errors import EngineError
from deltasync.vllm import server
from deltasync.vllm.labels import Labels
from deltasync.vllm.server import Replica, ServerEngine
from deltasync.vllm.settings import PauseMode, Way


class Client:
    """vLLM's engine client, as far as it is used. Notes every call, which must be made in the loop's thread."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(model="some/model"))
        self.error: Exception | None = None
        self.is_stuck = False
        self.thread: int | None = None

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...]) -> list[Any]:
        await self._note(method, args)
        return ["first", "second"]

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        await self._note("pause", (mode, clear_cache))

    async def resume_generation(self) -> None:
        await self._note("resume", ())

    async def update_weight_version(self, version: str) -> None:
        await self._note("version", (version,))

    async def _note(self, name: str, args: tuple[Any, ...]) -> None:
        self.thread = threading.get_ident()
        self.calls.append((name, args))
        await asyncio.sleep(0)
        if self.is_stuck:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    found = asyncio.new_event_loop()
    thread = threading.Thread(target=found.run_forever)
    thread.start()
    yield found
    found.call_soon_threadsafe(found.stop)
    thread.join()
    found.close()


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
def test_what_vllm_is_asked_for(loop: asyncio.AbstractEventLoop, mode: PauseMode) -> None:
    client, labels = Client(), Labels()
    engine = ServerEngine(client, loop, pause=mode, labels=labels)
    assert engine.checkpoint == "some/model"
    assert engine.call("copy", "mirror", [1, 2]) == ["first", "second"]
    engine.pause()
    assert labels.current == "none"
    engine.label(7)
    assert labels.current == "7"
    engine.resume()
    # What was computed with the weights before must be forgotten, whatever becomes of the requests.
    wanted = [("deltasync", ("copy", "mirror", [1, 2])), ("pause", (mode, True)), ("version", ("7",)), ("resume", ())]
    assert client.calls == wanted
    assert client.thread != threading.get_ident()


OPERATIONS: dict[str, Callable[[ServerEngine], object]] = {
    "scatter": lambda engine: engine.call("scatter"),
    "pause": lambda engine: engine.pause(),
    "resume": lambda engine: engine.resume(),
    "label": lambda engine: engine.label(7),
}


@pytest.mark.parametrize(("name", "operation"), OPERATIONS.items())
@pytest.mark.parametrize("error", [RuntimeError("the worker died"), ValueError("the worker died")])
def test_whatever_it_raises_is_an_error_of_the_engine(
    loop: asyncio.AbstractEventLoop, name: str, operation: Callable[[ServerEngine], object], error: Exception
) -> None:
    client, labels = Client(), Labels()
    client.error = error
    with pytest.raises(EngineError, match=f"failed at '{name}': {type(error).__name__}: the worker died") as raised:
        operation(ServerEngine(client, loop, pause="keep", labels=labels))
    assert raised.value.__cause__ is error
    assert labels.current == "none"


def test_an_engine_that_does_not_answer(loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_TIMEOUT_S", 0.05)
    client = Client()
    client.is_stuck = True
    with pytest.raises(EngineError, match="failed at 'pause': TimeoutError"):
        ServerEngine(client, loop, pause="keep", labels=Labels()).pause()
    # Nothing is left that would go on later.
    waiting = asyncio.run_coroutine_threadsafe(_others(), loop).result()
    assert waiting == 0


@pytest.mark.parametrize("way", ["pull", "push"])
def test_a_server_follows_only_if_it_pulls(way: Way) -> None:
    feed = Feed.of(2)
    target = TorchTarget(feed.states[0].layout)
    replica = Replica(follower(feed.store, target), target, way=way)
    before = threading.active_count()
    replica.start()
    try:
        if way == "pull":
            assert replica.follower.wait_live(timeout_s=60) == 1
        else:
            assert threading.active_count() == before
            assert replica.advance(None)["version"] == 1
        assert replica.status()["is_following"] is (way == "pull")
    finally:
        replica.close()
    assert not replica.status()["is_following"]
    assert replica.follower.error is None


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has a priority of its own on Linux only")
def test_the_follower_yields_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every thread that following starts has a lower priority; that of the server stays as it is."""
    monkeypatch.setattr(parallel, "_pools", parallel._Pools())
    ours, others = niceness(threading.main_thread()), set(threading.enumerate())
    feed = Feed.of(3)
    target = TorchTarget(feed.states[0].layout)
    replica = Replica(follower(feed.store, target), target, way="pull")
    replica.start()
    try:
        replica.follower.wait_live(timeout_s=60)
        started = [niceness(thread) for thread in set(threading.enumerate()) - others]
    finally:
        replica.close()
    assert started
    assert all(found == max(ours, 10) for found in started)
    assert niceness(threading.main_thread()) == ours


def niceness(thread: threading.Thread) -> int:
    assert thread.native_id is not None
    return os.getpriority(os.PRIO_PROCESS, thread.native_id)


async def _others() -> int:
    """Tasks of this loop beside this one, after those that are being ended have ended."""
    for _ in range(5):
        await asyncio.sleep(0)
    return len(asyncio.all_tasks()) - 1
