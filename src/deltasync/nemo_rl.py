"""A checkpoint engine for NeMo RL: a refit goes from the policy workers to the rollout workers through a feed.

policy:
  generation:
    refit_transport: "deltasync.nemo_rl:DeltasyncCheckpointEngine"
    refit_cfg:
      "deltasync.nemo_rl:DeltasyncCheckpointEngine":
        feed: s3://bucket/run-42
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import torch
from nemo_rl.utils.checkpoint_engines.base import CheckpointEngine

from deltasync import arguments
from deltasync.errors import InvalidInputError
from deltasync.torch.held import HeldVersion, require_methods
from deltasync.torch.publisher import Publisher
from deltasync.trainer.publisher import PublisherOptions

__all__ = ["DeltasyncCheckpointEngine"]

_PEERS = ["train_world_size", "rollout_world_size", "metadata"]
_EXPECTED = {
    "prepare": ["self"],
    "init_policy_process_group": ["self", "worker_rank", *_PEERS],
    "init_rollout_process_group": ["self", "rollout_rank", *_PEERS],
    "send_weights": ["self", "weights"],
    "receive_weight_batches": ["self"],
}
"""The methods that NeMo RL asks an engine for, and their parameters, as of August 2026."""

_NONE = -1


def require_seam(base: type) -> None:
    """InvalidInputError, naming the difference, unless the base class is the one that this engine implements."""
    require_methods(base, _EXPECTED, framework="NeMo RL", hint="deltasync.nemo_rl is made for the one of August 2026")


require_seam(CheckpointEngine)


class DeltasyncCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Policy rank 0 publishes each refit as a version; each rollout worker fetches what changed since its last one.

    `bucket_size` is NeMo RL's own: the bytes of a batch of tensors. The other settings are those of `refit_cfg`:
    `feed`, a URL that both sides can reach; `dtype`, the name of a floating-point type to publish; `device`, where
    rollout workers put tensors, by default the accelerator; `wait_s`, how long they wait for a version.
    """

    def __init__(
        self, bucket_size: int, *, feed: str, dtype: str | None = None, device: str | None = None, wait_s: float = 600.0
    ) -> None:
        self.bucket_size = arguments.whole_number("bucket_size", bucket_size, least=1)
        cast = None if dtype is None else getattr(torch, dtype, None)
        if dtype is not None and not (isinstance(cast, torch.dtype) and cast.is_floating_point):
            raise InvalidInputError(f"dtype must be the name of a floating-point type of torch, not {dtype!r:.40}")
        self._feed = feed
        self._dtype = cast
        self._wait_s = arguments.seconds("wait_s", wait_s, is_zero_allowed=False)
        self._held = HeldVersion(feed, wait_s=wait_s, device=device)
        self._publisher: Publisher | None = None
        self._is_master = False
        self._wanted: int | None = None

    def prepare(self) -> dict[str, int]:
        """The version of the feed before this refit."""
        head = self._held.head()
        return {"version": _NONE if head is None else head}

    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: Sequence[Any]
    ) -> None:
        """Note the version of this refit, and whether this worker publishes it."""
        self._is_master = worker_rank == 0
        self._wanted = _next_version(metadata)

    def init_rollout_process_group(
        self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: Sequence[Any]
    ) -> None:
        """Note the version of this refit."""
        self._wanted = _next_version(metadata)

    def finalize(self) -> None:
        """End the refit. The feed, and what this worker holds, stay for the next one."""
        self._wanted = None

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Publish the weights, and wait for the commit. Workers other than rank 0 only take part in the gathering."""
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
        if manifest.version != self._wanted:
            raise InvalidInputError(
                f"this refit became version {manifest.version}, not {self._wanted}",
                hint="does another trainer publish?",
            )

    async def receive_weight_batches(self) -> AsyncIterator[list[tuple[str, torch.Tensor]]]:
        """The weights of this refit's version, once it is committed, in batches of about `bucket_size` bytes."""
        if self._wanted is None:
            raise InvalidInputError("there is no refit", hint="NeMo RL calls init_rollout_process_group first")
        await asyncio.to_thread(self._held.advance, self._wanted)
        batch: list[tuple[str, torch.Tensor]] = []
        nbytes = 0
        for name, tensor in self._held.tensors():
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
        self._held.close()


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
