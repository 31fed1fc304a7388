"""What runs in the engine core: salts of the prefix cache, and calls that would make the label of a version wrong."""

import asyncio
import inspect
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from deltasync.errors import InvalidInputError
from deltasync.vllm.core import CALL, RENEW, CacheSalts, install, own_client, renew_salt
from deltasync.vllm.labels import Labels


@dataclass(eq=False)
class Request:
    """A request of vLLM's scheduler, as far as it is used."""

    request_id: str
    cache_salt: str | None = None
    num_output_tokens: int = 0
    num_computed_tokens: int = 0
    block_hashes: list[Any] = field(default_factory=lambda: ["old"])

    def update_block_hashes(self) -> None:
        if not self.block_hashes:
            self.block_hashes.append(("hash", self.cache_salt))


class Scheduler:
    """vLLM's scheduler, as far as it is used."""

    def __init__(self, running: list[Request], waiting: list[Request]) -> None:
        self.running = running
        self.waiting = waiting
        self.prev_step_scheduled_req_ids = {request.request_id for request in running}
        self.is_reset = False

    def _preempt_request(self, request: Request, timestamp: float, *, drop_stale_output: bool) -> None:
        assert request not in self.running
        assert drop_stale_output
        self.waiting.insert(0, request)

    def reset_encoder_cache(self) -> None:
        self.is_reset = True


class Core:
    """The engine core and its client in one. A call of the client's runs when the queue is emptied."""

    def __init__(self, scheduler: Scheduler | None = None) -> None:
        self.scheduler = Scheduler([], []) if scheduler is None else scheduler
        self.model_executor = self.scheduler
        self.engine_core = self

    async def add_request_async(self, request: Request) -> None:
        request.block_hashes.clear()
        request.update_block_hashes()
        self.scheduler.waiting.append(request)

    async def call_utility_async(self, method: str, *args: Any) -> None:
        getattr(self, method)(*args)


setattr(Core, RENEW, renew_salt)


def test_requests_have_our_salt_and_their_own() -> None:
    core = Core()
    salts = CacheSalts(core)
    asyncio.run(core.add_request_async(Request("a")))
    asyncio.run(core.add_request_async(Request("b", "tenant:1")))
    asyncio.run(salts.renew())
    asyncio.run(core.add_request_async(Request("c", "tenant:1")))
    found = [request.cache_salt or "" for request in core.scheduler.waiting]
    assert [salt.partition(":")[2] for salt in found] == ["", "tenant:1", "tenant:1"]
    assert len({salt.partition(":")[0] for salt in found}) == 1


def test_every_switch_draws_a_salt_that_was_never_used() -> None:
    """Also one that leads back to an older version: requests in flight left blocks of other versions there."""
    core, seen = Core(), set[str]()
    salts = CacheSalts(core)
    for i in range(20):
        request = Request(str(i))
        asyncio.run(core.add_request_async(request))
        seen.add(str(request.cache_salt))
        asyncio.run(salts.renew())
    assert len(seen) == 20


def test_only_requests_with_tokens_keep_their_salt() -> None:
    begun = Request("begun", "old:x", num_output_tokens=1)
    prefilled = Request("prefilled", "old:x")
    waiting = Request("waiting", "old:")
    preempted = Request("preempted", "old:y", num_output_tokens=5)
    unsalted = Request("unsalted")
    scheduler = Scheduler([prefilled, begun], [waiting, preempted, unsalted])
    renew_salt(Core(scheduler), "new")
    assert (begun.cache_salt, begun.block_hashes) == ("old:x", ["old"])
    assert scheduler.running == [begun]
    assert scheduler.waiting == [prefilled, waiting, preempted, unsalted]
    assert [request.cache_salt for request in scheduler.waiting] == ["new:x", "new:", "new:y", "new:"]
    assert all(request.block_hashes == [("hash", request.cache_salt)] for request in scheduler.waiting)
    assert scheduler.prev_step_scheduled_req_ids == {"begun"}
    assert scheduler.is_reset


def test_requests_in_the_second_queue_of_older_releases_are_salted() -> None:
    """In vLLM 0.30, requests that wait for a grammar are there."""
    scheduler = Scheduler([], [Request("waiting", "old:")])
    skipped = Request("skipped", "old:x")
    # A session that waits for its next input: its KV was computed with the old weights.
    session = Request("session", "old:y", num_output_tokens=5, num_computed_tokens=9)
    scheduler.skipped_waiting = [skipped, session]  # type: ignore[attr-defined]
    renew_salt(Core(scheduler), "new")
    assert [request.cache_salt for request in (*scheduler.waiting, skipped, session)] == ["new:", "new:x", "old:y"]
    assert session.block_hashes == ["old"]


def test_a_scheduler_of_another_release_is_refused_without_any_request() -> None:
    class Other(Scheduler):
        def _preempt_request(self, request: Request) -> None:  # type: ignore[override]
            """One that takes no time."""

    with pytest.raises(TypeError, match="too many positional arguments"):
        renew_salt(Core(Other([], [])), "new")


def test_requests_that_are_started_again_stay_in_their_order() -> None:
    running = [Request(name) for name in "abc"]
    scheduler = Scheduler(running, [Request("d")])
    renew_salt(Core(scheduler), "new")
    assert [request.request_id for request in scheduler.waiting] == ["a", "b", "c", "d"]


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
