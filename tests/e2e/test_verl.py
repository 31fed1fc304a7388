"""The checkpoint engine with verl's own registry and base classes, called in the order of verl's manager."""

import asyncio
import importlib.util
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import LONG_S

from deltasync.errors import InvalidInputError, NotFoundError
from deltasync.feed.log import Log
from deltasync.store import open_store

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        importlib.util.find_spec("verl") is None and "CI" not in os.environ,
        reason="verl is not installed: make .venv/e2e.stamp",
    ),
]

State = dict[str, torch.Tensor]


def weights(seed: int) -> State:
    torch.manual_seed(seed)
    return {
        "embed": torch.randn(64, 16).bfloat16(),
        "norm": torch.randn(16),
        "steps": torch.tensor(seed),
        "empty": torch.empty(0, 4).bfloat16(),
    }


def trained(state: State, seed: int) -> State:
    torch.manual_seed(seed)
    return {
        name: torch.where(torch.rand(tensor.shape) < 0.1, tensor + 1, tensor).to(tensor.dtype)
        for name, tensor in state.items()
    }


class Gathered:
    """A generator of an actor, which counts what it gave."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.count = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for pair in self.state.items():
            self.count += 1
            yield pair

    async def asynchronously(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        for pair in self:
            await asyncio.sleep(0)
            yield pair


def engines(feed: Path, actors: int, rollouts: int, **options: Any) -> tuple[list[Any], list[Any]]:
    """As verl creates them: its registry, its arguments."""
    from verl.checkpoint_engine.base import CheckpointEngineRegistry
    from verl.utils.import_utils import import_external_libs

    import_external_libs("deltasync.verl")
    options = {"feed": str(feed), "wait_s": LONG_S, **options}
    made = [
        CheckpointEngineRegistry.new("deltasync", is_master=rank == 0, bucket_size=1 << 20, **options)
        for rank in range(actors)
    ]
    return made, [CheckpointEngineRegistry.new("deltasync", bucket_size=1 << 20, **options) for _ in range(rollouts)]


async def update(
    actors: list[Any], rollouts: list[Any], sent: list[Any], step: int | None
) -> tuple[list[Any], list[State]]:
    """One round of `CheckpointEngineManager.update_weights`, without Ray."""
    everyone = [*actors, *rollouts]
    metadata = [engine.prepare() for engine in everyone]
    topology = type(actors[0]).build_topology(len(actors), len(rollouts), metadata)
    for group, kwargs in zip((actors, rollouts), topology, strict=True):
        assert all(len(values) == len(group) for values in kwargs.values())
        for i, engine in enumerate(group):
            engine.init_process_group(**{name: values[i] for name, values in kwargs.items()})

    async def receive(engine: Any) -> State:
        return {name: tensor async for name, tensor in engine.receive_weights(global_steps=step)}

    received = asyncio.gather(*(receive(engine) for engine in rollouts))
    metrics = [
        await engine.send_weights(generator, global_steps=step) for engine, generator in zip(actors, sent, strict=True)
    ]
    states = await received
    for engine in everyone:
        engine.finalize()
    return metrics, states


def same(a: State, b: State) -> bool:
    def bits(tensor: torch.Tensor) -> bytes:
        return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())

    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and a[n].shape == b[n].shape and bits(a[n]) == bits(b[n]) for n in a
    )


@pytest.mark.parametrize("is_async", [False, True])
def test_each_round_brings_the_actors_bits_to_every_rollout_worker(tmp_path: Path, is_async: bool) -> None:
    actors, rollouts = engines(tmp_path / "feed", 2, 2)
    state = weights(0)
    for step in range(3):
        sent = [Gathered(state), Gathered(state)]
        given = [s.asynchronously() if is_async else iter(s) for s in sent]
        metrics, received = asyncio.run(update(actors, rollouts, given, 10 * step))
        assert all(same(found, state) for found in received)
        assert [s.count for s in sent] == [len(state)] * 2, "all ranks gather"
        assert metrics[0]["deltasync/version"] == step
        assert metrics[1] == {}
        state = trained(state, step)
        if step == 0:
            # Later rounds need no more than what changed.
            (tmp_path / "feed" / "payloads").rename(tmp_path / "payloads")
            (tmp_path / "feed" / "payloads").mkdir()
    for payload in (tmp_path / "payloads").iterdir():
        payload.rename(tmp_path / "feed" / "payloads" / payload.name)
    log = Log(open_store(tmp_path / "feed"))
    assert [log.read(i).kind for i in range(3)] == ["anchor", "delta", "delta"]
    assert [log.read(i).step for i in range(3)] == [0, 10, 20]
    # A worker that joins late, and one that fetches when it is free.
    _, (late,) = engines(tmp_path / "feed", 0, 1)

    async def pulled() -> State:
        return {name: tensor async for name, tensor in late.get_weights()}

    assert same(asyncio.run(pulled()), received[0])
    for engine in (*actors, *rollouts, late):
        engine.close()


def test_a_version_that_does_not_come_is_reported(tmp_path: Path) -> None:
    _, (rollout,) = engines(tmp_path / "feed", 0, 1, wait_s=0.2)
    rollout.init_process_group(version=0)

    async def receive() -> None:
        async for _ in rollout.receive_weights():
            pass

    with pytest.raises(NotFoundError, match="was not committed within"):
        asyncio.run(receive())
    rollout.finalize()
    with pytest.raises(InvalidInputError, match="needs a round"):
        asyncio.run(receive())


def test_weights_of_another_step_are_not_taken(tmp_path: Path) -> None:
    (actor,), (rollout,) = engines(tmp_path / "feed", 1, 1)
    asyncio.run(actor.send_weights(weights(0).items(), global_steps=7))
    rollout.init_process_group(version=0)

    async def receive() -> None:
        async for _ in rollout.receive_weights(global_steps=8):
            pass

    with pytest.raises(InvalidInputError, match="of step 7, not of 8"):
        asyncio.run(receive())
    actor.close()


@pytest.mark.parametrize("is_async", [False, True])
def test_a_round_that_fails_is_gathered_to_its_end(tmp_path: Path, is_async: bool) -> None:
    (actor,), _ = engines(tmp_path / "feed", 1, 0)
    asyncio.run(actor.send_weights(weights(0).items()))
    sent = Gathered({"unknown": torch.zeros(3), **weights(0)})
    with pytest.raises(InvalidInputError, match="unknown"):
        asyncio.run(send(actor, sent, is_async))
    assert sent.count == 5
    actor.close()


async def send(actor: Any, sent: Gathered, is_async: bool) -> None:
    await actor.send_weights(sent.asynchronously() if is_async else iter(sent))


def test_another_seam_is_refused_at_import() -> None:
    from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineWithCache

    from deltasync.verl import require_seam

    require_seam(CheckpointEngineWithCache)
    with pytest.raises(InvalidInputError, match="get_weights differ"):
        require_seam(CheckpointEngine)
    assert "vllm" not in sys.modules
