"""A checkpoint engine for verl: weights go from the actors to the rollout workers through a feed.

    actor_rollout_ref.rollout.checkpoint_engine.backend=deltasync
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=deltasync.verl
    +actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.deltasync.feed=s3://bucket/run-42

verl imports this module in actors, rollout workers and its manager, which registers the engine.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import torch

from deltasync import InvalidInputError, PublisherOptions, arguments
from deltasync.frameworks import floating_type, publication_numbers, require_methods
from deltasync.torch import FeedReader, Publisher

try:
    from verl.checkpoint_engine.base import CheckpointEngineRegistry, CheckpointEngineWithCache
except ImportError as error:
    raise InvalidInputError(
        f"this release of verl has no checkpoint engines, or others: {error}",
        hint="deltasync.verl is made for verl 0.9.1",
    ) from error

__all__ = ["DeltasyncCheckpointEngine"]

BACKEND = "deltasync"

_EXPECTED = {
    "prepare": ["self"],
    "build_topology": ["actor_wg_world_size", "rollout_world_size", "metadata"],
    "init_process_group": ["self", "kwargs"],
    "finalize": ["self"],
    "send_weights": ["self", "weights", "global_steps"],
    "receive_weights": ["self", "global_steps"],
    "get_weights": ["self"],
}
"""The methods that verl 0.9.1 asks an engine for, and their parameters."""

_NONE = -1


def require_seam(base: type) -> None:
    """InvalidInputError, naming the difference, unless verl's base class is the one that this engine implements."""
    require_methods(base, _EXPECTED, framework="verl", hint="deltasync.verl is made for verl 0.9.1")


require_seam(CheckpointEngineWithCache)


@CheckpointEngineRegistry.register(BACKEND)
class DeltasyncCheckpointEngine(CheckpointEngineWithCache):  # type: ignore[misc]
    """Actor rank 0 publishes each round as a version; each rollout worker fetches what changed since its last one.

    `feed`: a URL that actors and rollout workers can reach.
    `dtype`: publish floating-point weights as this type, such as "bfloat16"; they are sent as they are otherwise.
    `device`: where the rollout workers put the tensors; by default the accelerator, if there is one.
    `wait_s`: how long a rollout worker waits for the version of a round, and an actor for its commit.
    `bucket_size` and `is_master` are verl's own.

    Every worker keeps a copy of the weights in the memory of its host, so that a round fetches only changes.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        feed: str,
        dtype: str | None = None,
        device: str | None = None,
        wait_s: float = 600.0,
    ) -> None:
        self.bucket_size = bucket_size
        self.is_master = is_master
        self._feed = feed
        self._dtype = floating_type(dtype)
        self._wait_s = arguments.seconds("wait_s", wait_s, is_zero_allowed=False)
        self._publisher: Publisher | None = None
        self._reader = FeedReader(feed, wait_s=wait_s, device=device)
        self._wanted: int | None = None

    def prepare(self) -> dict[str, Any]:
        """What the manager needs: the master says which version the feed has before this round."""
        if not self.is_master:
            return {}
        head = self._reader.head()
        return {"feed": self._feed, "version": _NONE if head is None else head.version}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Announce to every worker which version this round makes. Nothing else connects them."""
        masters = [item for item in metadata if "version" in item]
        if len(masters) != 1:
            raise InvalidInputError(f"one actor must be the master, not {len(masters)}")
        version = masters[0]["version"] + 1
        return {"version": [version] * actor_wg_world_size}, {"version": [version] * rollout_world_size}

    def init_process_group(self, **kwargs: Any) -> None:
        """Note the version of this round."""
        self._wanted = arguments.whole_number("version", kwargs.get("version"))

    def finalize(self) -> None:
        """End the round. The feed, and what this worker holds, stay for the next one."""
        self._wanted = None

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Publish the weights, and wait for the commit. Actors other than the master only take part in the gathering.

        Returns numbers for the trainer's log.
        """
        if not self.is_master:
            await _exhaust(weights)
            return {}
        if self._publisher is None:
            options = PublisherOptions(wait=True)
            self._publisher = Publisher(self._feed, dtype=self._dtype, options=options)
        publisher = self._publisher
        weights = aiter(weights) if hasattr(weights, "__aiter__") else iter(weights)
        try:
            if hasattr(weights, "__aiter__"):
                pairs = _from_thread(weights, asyncio.get_running_loop())
                publication = await asyncio.to_thread(publisher.publish, pairs, step=global_steps)
            else:
                publication = publisher.publish(weights, step=global_steps)
        finally:
            # Gathering a tensor is a collective: the other actors wait if one of them stops in the middle.
            await _exhaust(weights)
        manifest = await asyncio.to_thread(publication.wait, self._wait_s)
        if self._wanted is not None and manifest.version != self._wanted:
            raise InvalidInputError(
                f"this round became version {manifest.version}, not {self._wanted}",
                hint="does another trainer publish?",
            )
        return publication_numbers(manifest)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """The weights of this round's version, once it is committed."""
        if self._wanted is None:
            raise InvalidInputError("receive_weights needs a round", hint="verl calls init_process_group first")
        manifest = await asyncio.to_thread(self._reader.advance, self._wanted)
        if global_steps is not None and manifest.step != global_steps:
            raise InvalidInputError(
                f"version {manifest.version} is of step {manifest.step}, not of {global_steps}",
                hint="only the actors of this run may publish to the feed: use a feed of its own",
            )
        for pair in self._reader.tensors():
            yield pair

    async def get_weights(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """The weights of the newest version, for rollout workers that fetch whenever they are free."""
        await asyncio.to_thread(self._reader.advance)
        for pair in self._reader.tensors():
            yield pair

    def close(self) -> None:
        """Finish what is in flight, and release the feed."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()
        self._reader.close()


async def _exhaust(weights: Any) -> None:
    """Iterate to the end."""
    if hasattr(weights, "__aiter__"):
        async for _ in weights:
            pass
    else:
        for _ in weights:
            pass


def _from_thread(weights: Any, loop: asyncio.AbstractEventLoop) -> Iterator[tuple[str, torch.Tensor]]:
    """An asynchronous iterator of a running loop, for a thread."""

    async def following() -> Any:
        return await anext(weights, None)

    while (item := asyncio.run_coroutine_threadsafe(following(), loop).result()) is not None:
        yield item
