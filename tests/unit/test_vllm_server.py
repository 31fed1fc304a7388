"""The engine behind an API server, called from another thread than that of its event loop, and the replica's thread."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from support import LONG_S, join
from support.feeds import Feed
from support.replicas import TorchTarget, follower, quick, wait_until

from deltasync import parallel
from deltasync.errors import DeltasyncError, EngineError, InvalidInputError, MismatchError
from deltasync.testing.faulty import Fault, FaultyStore
from deltasync.vllm import server
from deltasync.vllm.core import CacheSalts
from deltasync.vllm.labels import Labels
from deltasync.vllm.routes import Replica
from deltasync.vllm.server import ServerEngine
from deltasync.vllm.settings import PauseMode, SyncMode

__all__ = ["quick"]


class Client:
    """vLLM's engine client, as far as it is used. Notes every call, which must be made in the loop's thread."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.worker_error: str | None = None
        self.error: Exception | None = None
        self.is_stuck = False
        self.thread: int | None = None
        self.engine_core = SimpleNamespace(add_request_async=self._add, call_utility_async=self._call)

    async def _add(self, request: Any) -> None:
        await self._note("add", request.cache_salt)

    async def _call(self, method: str, *args: Any) -> None:
        await self._note(method, args)

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...]) -> list[Any]:
        await self._note(method, args)
        return [
            {"result": "first"},
            {"result": "second"} if self.worker_error is None else {"error": self.worker_error},
        ]

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
    join(thread)
    found.close()


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
def test_what_vllm_is_asked_for(loop: asyncio.AbstractEventLoop, mode: PauseMode) -> None:
    client, labels = Client(), Labels()
    engine = ServerEngine(client, loop, pause=mode, labels=labels)
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


def test_caches_that_are_kept_get_a_new_salt_before_generation_resumes(loop: asyncio.AbstractEventLoop) -> None:
    client, labels = Client(), Labels()
    engine = ServerEngine(client, loop, pause="keep", labels=labels, salts=CacheSalts(client))
    for version in (3, 4):
        engine.pause()
        engine.label(version)
        engine.resume()
    names = [name for name, _ in client.calls]
    assert names == ["pause", "version", "deltasync_renew_salt", "resume"] * 2
    assert client.calls[0] == ("pause", ("keep", False))
    assert client.calls[2] != client.calls[6]


def test_no_version_is_live_during_a_switch(loop: asyncio.AbstractEventLoop) -> None:
    client, labels = Client(), Labels()
    engine = ServerEngine(client, loop, pause="keep", labels=labels)
    engine.pause()
    engine.label(7)
    assert (labels.current, labels.version) == ("7", None)
    waiting = asyncio.run_coroutine_threadsafe(labels.wait_for(lambda: labels.version == 7, 60.0), loop)
    engine.resume()
    assert waiting.result(LONG_S)
    assert labels.version == 7
    engine.pause()
    client.error = RuntimeError("the worker died")
    with pytest.raises(EngineError):
        engine.resume()
    assert labels.version is None


@pytest.mark.parametrize(
    ("core", "message"),
    [
        ({"core_engines": [b"0", b"1"]}, r"2 engines \(--data-parallel-size\)"),
        ({"core_engines": [b"0"], "client_count": 3}, r"3 API servers \(--api-server-count\)"),
    ],
)
def test_a_server_with_several_engines_is_refused(
    monkeypatch: pytest.MonkeyPatch, core: dict[str, Any], message: str
) -> None:
    """vLLM asks all of them, and returns only what the first one answers."""
    monkeypatch.setenv("DELTASYNC_FEED", "memory:")
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0"))
    client = SimpleNamespace(engine_core=SimpleNamespace(**core))
    with pytest.raises(InvalidInputError, match=f"the server has {message}"):
        asyncio.run(server.Endpoint().init_state(client, SimpleNamespace(), SimpleNamespace()))  # type: ignore[arg-type]
    server.require_one_engine(SimpleNamespace(engine_core=SimpleNamespace(core_engines=[b"0"], client_count=1)))


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


def test_an_error_of_one_worker_is_an_error_of_the_engine(loop: asyncio.AbstractEventLoop) -> None:
    client = Client()
    client.worker_error = "ValueError: no such place"
    with pytest.raises(EngineError, match="a worker of vLLM failed at 'scatter': ValueError: no such place"):
        ServerEngine(client, loop, pause="keep", labels=Labels()).call("scatter")


def test_an_engine_that_does_not_answer(loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_TIMEOUT_S", 0.05)
    client = Client()
    client.is_stuck = True
    with pytest.raises(EngineError, match="failed at 'pause': TimeoutError"):
        ServerEngine(client, loop, pause="keep", labels=Labels()).pause()
    # Nothing is left that would go on later.
    waiting = asyncio.run_coroutine_threadsafe(_others(), loop).result(LONG_S)
    assert waiting == 0


@pytest.mark.parametrize("way", ["pull", "push"])
def test_a_server_follows_only_if_it_pulls(way: SyncMode) -> None:
    feed = Feed.of(2)
    target = TorchTarget(feed.states[0].layout)
    replica = Replica(follower(feed.store, target), target, way=way)
    before = set(threading.enumerate())
    replica.start()
    try:
        if way == "pull":
            assert replica.follower.wait_live(timeout_s=LONG_S) == 1
        else:
            assert set(threading.enumerate()) <= before
            assert replica.advance(None)["version"] == 1
        assert replica.status()["is_following"] is (way == "pull")
    finally:
        replica.close()
    assert not replica.status()["is_following"]
    assert replica.follower.error is None


def test_a_server_that_follows_is_ready_while_its_version_is_recent() -> None:
    feed = Feed.of(2)
    is_away = threading.Event()
    store = FaultyStore(feed.store, lambda operation: Fault("refuse") if is_away.is_set() else None)
    target = TorchTarget(feed.states[0].layout)
    replica = Replica(follower(store, target), target, way="pull", ready_s=0.5)
    is_away.set()
    replica.start()
    try:
        wait_until(lambda: replica.follower.error is not None)
        assert not replica.is_ready
        is_away.clear()
        wait_until(lambda: replica.is_ready)
        assert replica.follower.status().version == 1
        is_away.set()
        wait_until(lambda: not replica.is_ready)
        assert replica.follower.status().version == 1
        is_away.clear()
        wait_until(lambda: replica.is_ready)
        # What stands still is not followed.
        replica.follower.pause()
        wait_until(lambda: not replica.is_ready)
    finally:
        replica.close()
    assert not replica.is_ready


def test_without_a_bound_a_server_is_ready_while_it_follows() -> None:
    feed = Feed.of(1)
    target = TorchTarget(feed.states[0].layout)
    replica = Replica(follower(feed.store, target), target, way="pull", ready_s=None)
    replica.start()
    try:
        replica.follower.wait_live(timeout_s=LONG_S)
        assert replica.is_ready
    finally:
        replica.close()
    assert replica.follower.status().version == 0
    assert not replica.is_ready


def test_a_refused_feed_is_reported_once_and_ends_readiness() -> None:
    feed = Feed.of(2)
    target = TorchTarget(feed.states[0].layout)
    refused: list[DeltasyncError] = []
    replica = Replica(follower(feed.store, target), target, way="pull", on_refused=refused.append)
    replica.start()
    try:
        replica.follower.wait_live(timeout_s=LONG_S)
        assert replica.is_ready
        target.fails = other_model
        feed.delta()
        wait_until(lambda: bool(refused))
        wait_until(lambda: not replica.is_ready)
        assert replica.status()["error"] == "MismatchError: another model"
        assert replica.status()["version"] == 1
    finally:
        replica.close()
    assert [type(error) for error in refused] == [MismatchError]


def other_model(staged: object) -> None:
    raise MismatchError("another model")


@pytest.mark.parametrize("action", ["exit", "serve"])
def test_a_server_ends_only_if_it_is_to_and_once_it_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, action: str
) -> None:
    """The signal comes after vLLM has installed its handler; the exit code comes after all is closed."""
    monkeypatch.setenv("DELTASYNC_FEED", "memory:")
    monkeypatch.setenv("DELTASYNC_ON_REFUSED", action)
    events: list[Any] = []
    monkeypatch.setattr(server.os, "kill", lambda *args: events.append(args))
    endpoint, app = server.Endpoint(), FastAPI()
    endpoint.attach_router(app)
    endpoint._held.callback(events.append, "closed")
    refusal = threading.Thread(target=endpoint._end_if_refused, args=(MismatchError("another model"),))
    refusal.start()

    async def serve() -> None:
        lifespan = app.router.lifespan_context(app)

        async def shutdown() -> None:
            await lifespan.__aexit__(None, None, None)

        app.state.server = SimpleNamespace(shutdown=shutdown)
        assert not events
        await lifespan.__aenter__()
        await asyncio.to_thread(refusal.join)
        await app.state.server.shutdown()

    if action == "exit":
        with pytest.raises(SystemExit) as raised:
            asyncio.run(serve())
        assert raised.value.code == 3
        assert events == [(os.getpid(), signal.SIGTERM), "closed"]
        assert "the server ends with exit code 3" in caplog.text
    else:
        asyncio.run(serve())
        assert events == ["closed"]
        assert "is not ready" in caplog.text


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
        replica.follower.wait_live(timeout_s=LONG_S)
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
