"""Calls of vLLM that would make the label of a version wrong, on an engine core and an engine client of our own."""

import asyncio
import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from deltasync.errors import InvalidInputError
from deltasync.vllm.core import CALL, install, own_client
from deltasync.vllm.labels import Labels

WRITES = ("load_model", "reload_weights", "reset_weights", "sleep")
PROTOCOL = ("init_weight_transfer_engine", "start_weight_update", "update_weights")


def engine_core(backend: str = "deltasync") -> Any:
    """An engine core whose calls are checked, with those that got through in `calls`."""

    class Core:
        def __init__(self) -> None:
            self.calls: list[Any] = []
            self.vllm_config = SimpleNamespace(weight_transfer_config=SimpleNamespace(backend=backend))
            self.model_executor = SimpleNamespace(is_sleeping=False)

        def collective_rpc(self, method: Any, timeout: float | None = None, args: tuple[Any, ...] = ()) -> str:
            self.calls.append(method)
            return "called"

        def sleep(self, level: int = 1, mode: str = "abort") -> None:
            self.calls.append(("sleep", level, mode))

    install(Core)
    return Core()


@pytest.mark.parametrize("method", WRITES + PROTOCOL)
def test_a_server_that_follows_keeps_its_weights(method: str) -> None:
    core = engine_core()
    assert core.collective_rpc(CALL, None, ("describe",)) == "called"
    with pytest.raises(InvalidInputError, match=rf"'{method}' is refused.*/deltasync/advance"):
        core.collective_rpc(method)
    assert core.calls == [CALL]


@pytest.mark.parametrize("method", WRITES)
def test_a_program_that_updates_weights_cannot_replace_them_otherwise(method: str) -> None:
    core = engine_core()
    # Nothing is known of the weights before: the first update writes all of them.
    assert core.collective_rpc(method) == "called"
    for _ in range(2):
        for own in PROTOCOL:
            assert core.collective_rpc(own) == "called"
    with pytest.raises(InvalidInputError, match=rf"'{method}' is refused.*update_weights"):
        core.collective_rpc(method)


def test_only_a_sleep_that_discards_weights_is_refused() -> None:
    core = engine_core()
    core.sleep(2)
    core.collective_rpc(CALL)
    core.sleep()
    core.sleep(1, "wait")
    core.sleep(level=0)
    with pytest.raises(InvalidInputError, match="a sleep of level 2 is refused"):
        core.sleep(level=2)
    assert core.calls == [
        ("sleep", 2, "abort"),
        CALL,
        ("sleep", 1, "abort"),
        ("sleep", 1, "wait"),
        ("sleep", 0, "abort"),
    ]


def test_an_engine_that_sleeps_is_not_written() -> None:
    core = engine_core()
    core.model_executor.is_sleeping = True
    with pytest.raises(InvalidInputError, match="asleep"):
        core.collective_rpc(CALL, None, ("scatter",))
    core.model_executor.is_sleeping = False
    assert core.collective_rpc(CALL, None, ("scatter",)) == "called"


def test_other_calls_and_other_backends_are_let_through() -> None:
    core, other = engine_core(), engine_core(backend="nccl")
    core.collective_rpc(CALL)
    for method in ("check_health", print, b"pickled"):
        assert core.collective_rpc(method) == "called"
    for method in ("update_weights", *WRITES):
        assert other.collective_rpc(method) == "called"
    # vLLM converts arguments by the signature.
    assert list(inspect.signature(core.collective_rpc).parameters) == ["method", "timeout", "args"]


class Client:
    """An engine client that notes what reaches it."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.calls.append(("sleep", level))

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        self.calls.append(("wake_up", tags))
        return True

    async def resume_generation(self) -> None:
        self.calls.append("resume")

    async def update_weight_version(self, new_version: str) -> None:
        self.calls.append(("version", new_version))


def test_nobody_else_sets_the_label_or_resumes_during_a_switch() -> None:
    async def check() -> None:
        client, labels = Client(), Labels()
        own_client(client, labels)
        with pytest.raises(InvalidInputError, match="the version of the feed"):
            await client.update_weight_version("7")
        labels.is_switching = True
        for call in (client.resume_generation, client.wake_up, client.sleep):
            with pytest.raises(InvalidInputError, match="while a version is being written"):
                await call()
        assert client.calls == []
        await labels.end_switch()
        await client.resume_generation()
        await client.sleep(1)
        # The switch began after the engine fell asleep, and waits for it.
        labels.is_switching = True
        assert await client.wake_up(["weights"])
        assert client.calls == ["resume", ("sleep", 1), ("wake_up", ["weights"])]

    asyncio.run(check())
