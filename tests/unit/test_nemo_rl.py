"""What NeMo RL is given, with doubles of its base classes and of its policy workers: the package is in no registry."""

import asyncio
import importlib
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from deltasync import Follower
from deltasync.errors import EngineError, InvalidInputError, NotFoundError
from deltasync.feed.log import RELAY_ENGINE, Log
from deltasync.format.sealed import Heartbeat
from deltasync.kernels import kernels
from deltasync.store import open_store
from deltasync.torch import ModuleTarget

State = dict[str, torch.Tensor]


class SynchronizerDouble(ABC):
    """NeMo RL's base class of synchronizers, as of August 2026: names and parameters."""

    @abstractmethod
    def sync_weights(self, *, timer: Any = None, kv_scales: Any = None) -> Any: ...

    @property
    @abstractmethod
    def is_stale(self) -> bool: ...

    @abstractmethod
    def init_communicator(self) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...


class Double(ABC):
    """NeMo RL's base class of checkpoint engines, as of August 2026: names and parameters."""

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


class Worker:
    """A policy worker, which passes calls on to its engine as NeMo RL's does."""

    def __init__(self, module: Any, rank: int) -> None:
        self.module, self.rank, self.state = module, rank, weights(0)
        self.engine: Any = None
        self.is_closed = False
        self.kv_scales: list[Any] = []

    async def checkpoint_engine_rpc(self, checkpoint_method: str, method_kwargs: dict[str, Any]) -> Any:
        if checkpoint_method == "init_checkpoint_engine":
            module_name, class_name = method_kwargs["backend"].split(":")
            make = getattr(sys.modules[module_name], class_name)
            self.engine = make(bucket_size=method_kwargs["bucket_size_bytes"], **method_kwargs["engine_kwargs"])
            return None
        if checkpoint_method == "prepare_checkpoint_engine":
            return {**self.engine.prepare(), "rank": self.rank}
        if checkpoint_method == "init_checkpoint_engine_process_group":
            return self.engine.init_policy_process_group(worker_rank=self.rank, **method_kwargs)
        if checkpoint_method == "send_weights_via_checkpoint_engine":
            self.kv_scales.append(method_kwargs["kv_scales"])
            return await self.engine.send_weights(iter(self.state.items()))
        self.is_closed = checkpoint_method == "close"
        return getattr(self.engine, checkpoint_method)(**method_kwargs)


class Policy:
    """A policy, whose worker group calls a method of all workers and returns references."""

    def __init__(self, module: Any, count: int) -> None:
        self.workers = [Worker(module, rank) for rank in range(count)]
        self.worker_group = self

    def run_all_workers_single_data(self, method_name: str, **arguments: Any) -> list[Any]:
        return [getattr(worker, method_name)(**arguments) for worker in self.workers]


class Timer:
    def __init__(self) -> None:
        self.names: list[str] = []

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        yield
        self.names.append(name)


def ray_get(references: list[Any]) -> list[Any]:
    async def gather() -> list[Any]:
        return await asyncio.gather(*references)

    return asyncio.run(gather())


RAY = ModuleType("ray")
RAY.get = ray_get  # type: ignore[attr-defined]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, imported with the double in place of NeMo RL."""
    doubles = {
        "nemo_rl.utils.checkpoint_engines.base": ("CheckpointEngine", Double),
        "nemo_rl.weight_sync.interfaces": ("WeightSynchronizer", SynchronizerDouble),
    }
    for path, (name, double) in doubles.items():
        parts = path.split(".")
        for count in range(1, len(parts) + 1):
            package = ".".join(parts[:count])
            if package not in sys.modules:
                monkeypatch.setitem(sys.modules, package, ModuleType(package))
        monkeypatch.setattr(sys.modules[path], name, double, raising=False)
    monkeypatch.setitem(sys.modules, "ray", RAY)
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
    """One refit with `release_after_refit`, in the order of NeMo RL's synchronizer."""
    await prepare(policy, rollout)

    async def batches(engine: Any) -> list[list[tuple[str, torch.Tensor]]]:
        return [batch async for batch in engine.receive_weight_batches()]

    received = asyncio.gather(*(batches(engine) for engine in rollout))
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
            assert same(dict(pair for batch in batches for pair in batch), state)
    assert Log(open_store(feed)).require_head().version == 2
    for engine in (*policy, *rollout):
        engine.close()


async def prepare(policy: list[Any], rollout: list[Any]) -> None:
    """What NeMo RL does once, unless `release_after_refit` is set."""
    metadata = [engine.prepare() for engine in (*policy, *rollout)]
    sizes = {"train_world_size": len(policy), "rollout_world_size": len(rollout), "metadata": metadata}
    for rank, engine in enumerate(policy):
        engine.init_policy_process_group(worker_rank=rank, **sizes)
    for rank, engine in enumerate(rollout):
        engine.init_rollout_process_group(rollout_rank=rank, **sizes)


async def receive(engine: Any) -> State:
    return dict([pair async for batch in engine.receive_weight_batches() for pair in batch])


def same(found: State, wanted: State) -> bool:
    return found.keys() == wanted.keys() and all(
        torch.equal(found[n].view(-1).view(torch.uint8), t.view(-1).view(torch.uint8)) for n, t in wanted.items()
    )


def test_many_refits_after_one_preparation(tmp_path: Path, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    feed = str(tmp_path / "feed")
    make = module.DeltasyncCheckpointEngine
    sender = make(bucket_size=1 << 20, feed=feed, release_after_refit=False)
    receiver = make(bucket_size=1 << 20, feed=feed, release_after_refit=False, wait_s=0.2)
    asyncio.run(prepare([sender], [receiver]))
    for version in range(3):
        asyncio.run(sender.send_weights(iter(weights(version).items())))
        assert same(asyncio.run(receive(receiver)), weights(version))
    # A refit that fails at the receiver: the next one brings its own weights, not those of the one that failed.
    asyncio.run(sender.send_weights(iter(weights(3).items())))
    with monkeypatch.context() as patch:
        patch.setattr(receiver._reader, "advance", lambda version: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            asyncio.run(receive(receiver))
    asyncio.run(sender.send_weights(iter(weights(4).items())))
    assert same(asyncio.run(receive(receiver)), weights(4))
    # One that was never sent.
    with pytest.raises(NotFoundError, match="version 5 was not committed"):
        asyncio.run(receive(receiver))
    for engine in (sender, receiver):
        engine.close()


def test_a_refit_digests_what_changed_and_not_all_weights(
    tmp_path: Path, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same engine serves verl. Blocks add up to the payload and payloads to the manifest: that proves a delta."""
    feed, make, chosen = str(tmp_path / "feed"), module.DeltasyncCheckpointEngine, type(kernels())
    sender, receiver = (make(bucket_size=1 << 20, feed=feed) for _ in range(2))
    asyncio.run(prepare([sender], [receiver]))
    state, digest, digested = weights(0), chosen.digest, 0

    def counted(self: Any, region: Any) -> Any:
        nonlocal digested
        digested += region.elements
        return digest(self, region)

    for refit in range(3):
        state["embed"][refit] += 1
        asyncio.run(sender.send_weights(iter(state.items())))
        with monkeypatch.context() as patch:
            patch.setattr(chosen, "digest", counted)
            assert same(asyncio.run(receive(receiver)), state)
        if refit == 0:
            digested = 0
    for engine in (sender, receiver):
        engine.close()
    elements = sum(tensor.numel() for tensor in state.values())
    assert digested < elements, f"{digested} elements for two refits of {elements} that change 16 each"


def test_a_synchronizer_publishes_for_replicas_that_follow(tmp_path: Path, module: Any) -> None:
    feed, policy, timer = str(tmp_path / "feed"), Policy(module, 2), Timer()
    synchronizer = module.DeltasyncWeightSynchronizer(policy, feed=feed, replicas=1, wait_s=60)
    with pytest.raises(InvalidInputError, match="init_communicator"):
        synchronizer.sync_weights()
    synchronizer.init_communicator()
    assert synchronizer.is_stale
    served = weights(9)
    with Follower(feed, ModuleTarget(served), replica="server") as follower:
        follower.start()
        for version in range(3):
            for worker in policy.workers:
                worker.state = weights(version)
            numbers = synchronizer.sync_weights(timer=timer, kv_scales={"k": 1.0} if version else None)
            assert numbers["deltasync/version"] == version
            assert numbers["deltasync/bytes"] > 0
            assert not synchronizer.is_stale
            assert same(served, weights(version)), "it has the version when sync_weights returns"
    assert timer.names == ["prepare_for_generation/transfer_and_update_weights"] * 3
    assert policy.workers[1].kv_scales == [None, {"k": 1.0}, {"k": 1.0}]
    synchronizer.shutdown()
    synchronizer.shutdown()
    assert all(worker.is_closed for worker in policy.workers)


def test_too_few_replicas_are_an_error_that_names_the_others(tmp_path: Path, module: Any) -> None:
    feed, policy = str(tmp_path / "feed"), Policy(module, 1)
    synchronizer = module.DeltasyncWeightSynchronizer(policy, feed=feed, replicas=1, wait_s=3)
    synchronizer.init_communicator()
    for name, facts in (("relay", {"engine": RELAY_ENGINE}), ("stranger", {"engine": "torch", "digest": "0" * 32})):
        Log(open_store(feed)).beat(Heartbeat(name, 0, int(time.time()), facts))
    with pytest.raises(EngineError, match=r"0 of 1 replicas serve version 0 .* live: none"):
        synchronizer.sync_weights()
    assert synchronizer.is_stale
    with Follower(feed, ModuleTarget(weights(9)), replica="late") as follower:
        follower.advance()
        with pytest.raises(EngineError, match=r"live: late \(version 0\)"):
            synchronizer.sync_weights()
        synchronizer.shutdown()
    without = module.DeltasyncWeightSynchronizer(policy, feed=feed)
    without.init_communicator()
    assert without.sync_weights()["deltasync/version"] == 2
    without.shutdown()


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


def test_a_release_without_the_seam_is_refused_at_import(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["nemo_rl.weight_sync.interfaces"], "WeightSynchronizer")
    monkeypatch.delitem(sys.modules, "deltasync.nemo_rl")
    with pytest.raises(InvalidInputError, match="WeightSynchronizer"):
        importlib.import_module("deltasync.nemo_rl")
    monkeypatch.setitem(sys.modules, "deltasync.nemo_rl", module)


def test_another_seam_is_refused(module: Any) -> None:
    class OtherEngine(Double):
        @abstractmethod
        async def send_weights(self, weights: Any, step: int) -> None: ...

    class OtherSynchronizer(SynchronizerDouble):
        @abstractmethod
        def mark_stale(self) -> None: ...

    module.require_seam(Double, SynchronizerDouble)
    with pytest.raises(InvalidInputError, match="another OtherEngine: send_weights differ"):
        module.require_seam(OtherEngine, SynchronizerDouble)
    with pytest.raises(InvalidInputError, match="another OtherSynchronizer: mark_stale differ"):
        module.require_seam(Double, OtherSynchronizer)
