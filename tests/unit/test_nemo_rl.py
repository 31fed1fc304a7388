"""The checkpoint engine for NeMo RL, with a double of its base class: the package is in no registry."""

import asyncio
import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from deltasync.errors import InvalidInputError, NotFoundError
from deltasync.feed.log import Log
from deltasync.store import open_store

State = dict[str, torch.Tensor]


class Double(ABC):
    """The methods of NeMo RL's base class, as of August 2026: names and parameters."""

    shard_expert_weights = False

    def get_target_weight_layout(self) -> None:
        return None

    @abstractmethod
    def prepare(self) -> Any: ...

    @abstractmethod
    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None: ...

    @abstractmethod
    def init_rollout_process_group(
        self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None: ...

    def finalize(self) -> None:
        return None

    @abstractmethod
    async def send_weights(self, weights: Any) -> None: ...

    @abstractmethod
    def receive_weight_batches(self) -> Any: ...


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, imported with the double in place of NeMo RL."""
    for name in (
        "nemo_rl",
        "nemo_rl.utils",
        "nemo_rl.utils.checkpoint_engines",
        "nemo_rl.utils.checkpoint_engines.base",
    ):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["nemo_rl.utils.checkpoint_engines.base"], "CheckpointEngine", Double, raising=False)
    yield importlib.import_module("deltasync.nemo_rl")
    sys.modules.pop("deltasync.nemo_rl")


def weights(seed: int) -> State:
    torch.manual_seed(seed)
    return {"embed": torch.randn(64, 16).bfloat16(), "norm": torch.randn(16), "steps": torch.tensor(seed)}


class Counted:
    def __init__(self, state: State) -> None:
        self.state = state
        self.count = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for pair in self.state.items():
            self.count += 1
            yield pair


async def refit(
    policy: list[Any], rollout: list[Any], sent: list[Counted]
) -> list[list[list[tuple[str, torch.Tensor]]]]:
    """One refit, in the order of NeMo RL's synchronizer."""
    metadata = [engine.prepare() for engine in (*policy, *rollout)]
    sizes = {"train_world_size": len(policy), "rollout_world_size": len(rollout), "metadata": metadata}
    for rank, engine in enumerate(policy):
        engine.init_policy_process_group(worker_rank=rank, **sizes)
    for rank, engine in enumerate(rollout):
        engine.init_rollout_process_group(rollout_rank=rank, **sizes)

    async def receive(engine: Any) -> list[list[tuple[str, torch.Tensor]]]:
        return [batch async for batch in engine.receive_weight_batches()]

    received = asyncio.gather(*(receive(engine) for engine in rollout))
    for engine, generator in zip(policy, sent, strict=True):
        await engine.send_weights(iter(generator))
    found = await received
    for engine in (*policy, *rollout):
        engine.finalize()
    return found


def test_each_refit_brings_the_bits_to_every_rollout_worker(tmp_path: Path, module: Any) -> None:
    feed = str(tmp_path / "feed")
    make = module.DeltasyncCheckpointEngine
    policy = [make(bucket_size=1 << 20, feed=feed) for _ in range(2)]
    rollout = [make(bucket_size=size, feed=feed) for size in (1 << 20, 100)]
    for version in range(3):
        state = weights(version)
        sent = [Counted(state), Counted(state)]
        whole, small = asyncio.run(refit(policy, rollout, sent))
        assert [generator.count for generator in sent] == [3, 3], "all ranks gather"
        assert (len(whole), len(small)) == (1, 2)
        for batches in (whole, small):
            found = dict(pair for batch in batches for pair in batch)
            assert found.keys() == state.keys()
            assert all(
                torch.equal(found[n].view(-1).view(torch.uint8), t.view(-1).view(torch.uint8)) for n, t in state.items()
            )
    assert Log(open_store(feed)).require_head().version == 2
    for engine in (*policy, *rollout):
        engine.close()


def test_a_refit_that_fails_is_gathered_to_its_end(tmp_path: Path, module: Any) -> None:
    engine = module.DeltasyncCheckpointEngine(bucket_size=1, feed=str(tmp_path / "feed"))
    asyncio.run(refit([engine], [], [Counted(weights(0))]))
    sent = Counted({"unknown": torch.zeros(2), **weights(0)})
    with pytest.raises(InvalidInputError, match="unknown"):
        asyncio.run(refit([engine], [], [sent]))
    assert sent.count == 4
    engine.close()


def test_what_does_not_fit_is_refused(tmp_path: Path, module: Any) -> None:
    make, feed = module.DeltasyncCheckpointEngine, str(tmp_path / "feed")
    for options, message in (
        ({"bucket_size": 0}, "bucket_size"),
        ({"dtype": "int8"}, "floating-point"),
        ({"wait_s": 0}, "wait_s"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            make(**{"bucket_size": 1, "feed": feed, **options})
    engine = make(bucket_size=1, feed=feed, wait_s=0.1)
    sizes = {"rollout_rank": 0, "train_world_size": 1, "rollout_world_size": 1}
    for metadata in ([{"version": 1}, {"version": 2}], [{}], [None], []):
        with pytest.raises(InvalidInputError, match="do not see the same version"):
            engine.init_rollout_process_group(metadata=metadata, **sizes)

    async def receive() -> None:
        async for _ in engine.receive_weight_batches():
            pass

    with pytest.raises(InvalidInputError, match="there is no refit"):
        asyncio.run(receive())
    engine.init_rollout_process_group(metadata=[{"version": -1}], **sizes)
    with pytest.raises(NotFoundError, match="was not committed"):
        asyncio.run(receive())


def test_another_seam_is_refused(module: Any) -> None:
    class Other(Double):
        @abstractmethod
        async def send_weights(self, weights: Any, step: int) -> None: ...

    module.require_seam(Double)
    with pytest.raises(InvalidInputError, match="send_weights differ"):
        module.require_seam(Other)
