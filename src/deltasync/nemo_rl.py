"""NeMo RL: a refit goes from the policy workers to NeMo RL's own rollout workers, or to servers that follow the feed.

policy:
  generation:
    refit_transport: "deltasync.nemo_rl:DeltasyncCheckpointEngine"
    refit_cfg:
      "deltasync.nemo_rl:DeltasyncCheckpointEngine":
        feed: s3://bucket/run-42

is the checkpoint engine for rollout workers. For servers that follow the feed by themselves:

    generation.weight_synchronizer = DeltasyncWeightSynchronizer(policy, feed="s3://bucket/run-42", replicas=2)
    generation.weight_synchronizer.init_communicator()
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import ray
import torch

from deltasync import EngineError, InvalidInputError, PublisherOptions, StoreError, arguments
from deltasync.frameworks import floating_type, publication_numbers, require_methods
from deltasync.torch import FeedReader, Publisher

try:
    from nemo_rl.utils.checkpoint_engines.base import CheckpointEngine
    from nemo_rl.weight_sync.interfaces import WeightSynchronizer
except ImportError as error:
    raise InvalidInputError(
        f"this release of NeMo RL has no checkpoint engines or weight synchronizers, or others: {error}",
        hint="deltasync.nemo_rl is made for the one of August 2026",
    ) from error

__all__ = ["DeltasyncCheckpointEngine", "DeltasyncWeightSynchronizer"]

_PEERS = ["train_world_size", "rollout_world_size", "metadata"]
_ENGINE = {
    "prepare": ["self"],
    "init_policy_process_group": ["self", "worker_rank", *_PEERS],
    "init_rollout_process_group": ["self", "rollout_rank", *_PEERS],
    "send_weights": ["self", "weights"],
    "receive_weight_batches": ["self"],
}
"""The methods that NeMo RL asks an engine for, and their parameters, as of August 2026."""
_SYNCHRONIZER = {
    "sync_weights": ["self", "timer", "kv_scales"],
    "is_stale": ["self"],
    "init_communicator": ["self"],
    "shutdown": ["self"],
}
"""The same for a synchronizer."""

_NONE = -1
_PHASE = "prepare_for_generation/transfer_and_update_weights"
"""Under this name NeMo RL shows the time of a refit."""
_POLL_S = 1.0


def require_seam(engine: type, synchronizer: type) -> None:
    """InvalidInputError, naming the difference, unless these base classes are those that are implemented here."""
    for base, expected in ((engine, _ENGINE), (synchronizer, _SYNCHRONIZER)):
        hint = "deltasync.nemo_rl is made for the one of August 2026"
        require_methods(base, expected, framework="NeMo RL", hint=hint)


require_seam(CheckpointEngine, WeightSynchronizer)


class DeltasyncCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Policy rank 0 publishes each refit as a version; each rollout worker fetches what changed since its last one.

    `bucket_size` is NeMo RL's own: the bytes of a batch of tensors. The other settings are those of `refit_cfg`:
    `feed`, a URL that both sides can reach; `dtype`, the name of a floating-point type to publish; `device`, where
    rollout workers put tensors, by default the accelerator; `wait_s`, how long they wait for a version.
    `release_after_refit` is NeMo RL's own, too: it then calls `finalize` after each refit, and prepares the next one.
    """

    def __init__(
        self,
        bucket_size: int,
        *,
        feed: str,
        dtype: str | None = None,
        device: str | None = None,
        wait_s: float = 600.0,
        release_after_refit: bool = False,
    ) -> None:
        self.bucket_size = arguments.whole_number("bucket_size", bucket_size, least=1)
        self._feed = feed
        self._dtype = floating_type(dtype)
        self._wait_s = arguments.seconds("wait_s", wait_s, is_zero_allowed=False)
        self._reader = FeedReader(feed, wait_s=wait_s, device=device)
        self._publisher: Publisher | None = None
        self._is_master = False
        self._wanted: int | None = None

    def prepare(self) -> dict[str, int]:
        """The version of the feed before this refit."""
        head = self._reader.head()
        return {"version": _NONE if head is None else head.version}

    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: Sequence[Any]
    ) -> None:
        """Note the version of the next refit, and whether this worker publishes it."""
        self._is_master = worker_rank == 0
        self._wanted = _next_version(metadata)

    def init_rollout_process_group(
        self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: Sequence[Any]
    ) -> None:
        """Note the version of the next refit."""
        self._wanted = _next_version(metadata)

    def finalize(self) -> None:
        """End a refit, or the last one. The feed, and what this worker holds, stay for the next one."""
        self._wanted = None

    def _next(self) -> int:
        """The version of this refit. The next one has the next version, whether this one succeeds or not."""
        if self._wanted is None:
            raise InvalidInputError("there is no refit", hint="NeMo RL calls prepare and init_…_process_group first")
        self._wanted += 1
        return self._wanted - 1

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Publish the weights, and wait for the commit. Workers other than rank 0 only take part in the gathering."""
        wanted = self._next()
        pairs = iter(weights)
        try:
            if not self._is_master:
                return
            if self._publisher is None:
                options = PublisherOptions(wait=True)
                self._publisher = Publisher(self._feed, dtype=self._dtype, options=options)
            publication = self._publisher.publish(pairs)
        finally:
            # Gathering a tensor is a collective: the other workers wait if one of them stops in the middle.
            for _ in pairs:
                pass
        manifest = await asyncio.to_thread(publication.wait, self._wait_s)
        if manifest.version != wanted:
            raise InvalidInputError(
                f"this refit became version {manifest.version}, not {wanted}",
                hint="does another trainer publish?",
            )

    async def receive_weight_batches(self) -> AsyncIterator[list[tuple[str, torch.Tensor]]]:
        """The weights of this refit's version, once it is committed, in batches of about `bucket_size` bytes."""
        await asyncio.to_thread(self._reader.advance, self._next())
        batch: list[tuple[str, torch.Tensor]] = []
        nbytes = 0
        for name, tensor in self._reader.tensors():
            if batch and nbytes + tensor.nbytes > self.bucket_size:
                yield batch
                batch, nbytes = [], 0
            batch.append((name, tensor))
            nbytes += tensor.nbytes
        if batch:
            yield batch

    def close(self) -> None:
        """Finish what is in flight, and release the feed."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()
        self._reader.close()


class DeltasyncWeightSynchronizer(WeightSynchronizer):  # type: ignore[misc]
    """Publishes the weights of a policy for servers that follow the feed: `deltasync serve`, `deltasync follow`.

    Nothing is sent to a generation object, so servers may be in another cluster, and come and go.
    `policy`: NeMo RL's policy, whose workers publish through `DeltasyncCheckpointEngine`; `feed`, `dtype` and `wait_s`
    as there. `replicas`: so many live ones must serve the version before `sync_weights` returns. With 0 it returns
    after the commit: servers take the version when they can.
    """

    def __init__(
        self, policy: Any, *, feed: str, dtype: str | None = None, wait_s: float = 600.0, replicas: int = 0
    ) -> None:
        self._policy = policy
        self._feed = feed
        self._wait_s = arguments.seconds("wait_s", wait_s, is_zero_allowed=False)
        self._replicas = arguments.whole_number("replicas", replicas)
        self._engine = {"feed": feed, "dtype": dtype, "wait_s": self._wait_s, "release_after_refit": False}
        self._reader: FeedReader | None = None
        self._stale = True

    @property
    def is_stale(self) -> bool:
        """Whether no refit has succeeded yet."""
        return self._stale

    def init_communicator(self) -> None:
        """Let the policy workers open the feed. Before that, a feed that cannot be reached is refused here."""
        self._reader = FeedReader(self._feed)
        self._reader.head()
        name = f"{__name__}:{DeltasyncCheckpointEngine.__name__}"
        self._run("init_checkpoint_engine", backend=name, bucket_size_bytes=1, engine_kwargs=self._engine)
        metadata = self._run("prepare_checkpoint_engine")
        sizes = {"train_world_size": len(metadata), "rollout_world_size": 0}
        self._run("init_checkpoint_engine_process_group", metadata=metadata, **sizes)

    def sync_weights(
        self, *, timer: Any = None, kv_scales: Mapping[str, float] | None = None
    ) -> dict[str, float] | None:
        """Publish the weights as a version, and wait for the replicas. Returns numbers for the trainer's log.

        EngineError if too few replicas serve the version in time: it is committed, and they may still get it.
        """
        if self._reader is None:
            raise InvalidInputError("the synchronizer is not initialized", hint="call init_communicator first")
        self._stale = True
        with nullcontext() if timer is None else timer.time(_PHASE):
            self._run("send_weights_via_checkpoint_engine", kv_scales=kv_scales)
            manifest = self._reader.head()
            if manifest is None:
                raise EngineError("the policy workers have published nothing", hint="look at their logs")
            self._await_replicas(self._reader, manifest.version)
        self._stale = False
        return publication_numbers(manifest)

    def shutdown(self) -> None:
        """Release the feed, here and in the policy workers."""
        reader, self._reader = self._reader, None
        if reader is not None:
            with reader:
                self._run("close")

    def _run(self, method: str, **arguments: Any) -> list[Any]:
        """What all policy workers return."""
        refs = self._policy.worker_group.run_all_workers_single_data(
            "checkpoint_engine_rpc", checkpoint_method=method, method_kwargs=arguments
        )
        results: list[Any] = ray.get(refs)
        return results

    def _await_replicas(self, reader: FeedReader, version: int) -> None:
        until_s = time.monotonic() + self._wait_s
        while self._replicas:
            try:
                live = reader.serving()
            except StoreError as error:
                if not error.transient or time.monotonic() > until_s:
                    raise
                time.sleep(_POLL_S)
                continue
            late = [f"{replica} (version {served})" for replica, served in live.items() if served < version]
            current = len(live) - len(late)
            if current >= self._replicas:
                return
            if time.monotonic() > until_s:
                raise EngineError(
                    f"{current} of {self._replicas} replicas serve version {version} after "
                    f"{self._wait_s:g} s; others that are live: {', '.join(late) or 'none':.200}",
                    version=version,
                    hint="`deltasync status` lists them",
                )
            time.sleep(_POLL_S)


def _next_version(metadata: Sequence[Any]) -> int:
    """The version after the one that all workers have found."""
    found = {item.get("version") if isinstance(item, dict) else None for item in metadata}
    versions = [version for version in found if isinstance(version, int)]
    if len(found) != 1 or len(versions) != 1:
        raise InvalidInputError(
            f"the workers do not see the same version of the feed: {sorted(map(str, found))!s:.200}",
            hint="does another trainer publish to it?",
        )
    return versions[0] + 1
