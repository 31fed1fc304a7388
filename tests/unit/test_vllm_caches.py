"""Salts of the prefix cache: which requests have which, before and after a switch."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from deltasync.vllm.core import RENEW, CacheSalts, renew_salt


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
