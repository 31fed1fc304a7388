"""In a trainer's process: the trainer's half of vLLM's weight transfer, which publishes to a feed.

    engine = WeightTransferTrainerFactory.trainer_init(
        DeltasyncTrainerInitInfo("s3://bucket/run-42", rank=rank), client=client, source=ModuleSource(model)
    )
    engine.send_weights()  # after each optimizer step, on every rank
    engine.shutdown()

Servers that follow the feed (`deltasync serve`) move by themselves, without a call and without waiting for the trainer.
With `moves_servers`, the client asks servers that follow nothing to move to each version, as vLLM's other backends do.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
import vllm

from deltasync.errors import InvalidInputError
from deltasync.feed.log import Log
from deltasync.feed.route import Route
from deltasync.format.layout import Layout, TensorSpec
from deltasync.frameworks import require_methods
from deltasync.store import opened
from deltasync.torch.publisher import Publisher
from deltasync.torch.tensors import element_type, require_dtype
from deltasync.trainer.events import Publication
from deltasync.trainer.publisher import PublisherOptions, require_layout

try:
    from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
except ImportError as error:
    raise InvalidInputError(
        f"vLLM {vllm.__version__} has no trainer's half of weight transfer, or another one: {error}",
        hint="TrainerWeightTransferEngine and WeightTransferTrainerFactory are expected, as in vLLM 0.32",
    ) from error

require_methods(
    TrainerWeightTransferEngine,
    {"trainer_init": ["init_info", "client", "source"], "send_weights": ["self"]},
    framework="vLLM",
    hint="deltasync.vllm.trainer is made for the one of vLLM 0.32",
)

BACKEND = "deltasync"


def register() -> None:
    """Register the trainer's half with vLLM. It may be called several times in one process."""
    registered = WeightTransferTrainerFactory._registry
    if BACKEND not in registered:
        WeightTransferTrainerFactory.register_engine(BACKEND, DeltasyncTrainer)


@dataclass
class DeltasyncTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """Where to publish, and how. Creating one registers the backend.

    `dtype`: publish floating-point weights as this type, such as bfloat16 for fp32 master weights.
    `options`: as for every publisher. `wait_s` is how long `send_weights` waits for the commit; without it, it returns
    once the change is captured.
    `moves_servers`: move the servers of the client to each version, once it is committed. Only for servers that have
    the backend and follow no feed.
    """

    backend: ClassVar[str] = BACKEND

    feed: str
    dtype: torch.dtype | None = None
    options: PublisherOptions = field(default_factory=PublisherOptions)
    wait_s: float | None = None
    moves_servers: bool = False

    def __post_init__(self) -> None:
        if self.dtype is not None:
            require_dtype(self.dtype)
        if self.moves_servers and self.wait_s is None:
            raise InvalidInputError(
                "moves_servers needs wait_s: servers can move only to a version that is committed", hint="wait_s=300"
            )
        register()


class DeltasyncTrainer(TrainerWeightTransferEngine[DeltasyncTrainerInitInfo]):  # type: ignore[misc]
    """Publishes the tensors of a source to a feed. Rank 0 publishes; the others only take part in its collectives."""

    init_info_cls = DeltasyncTrainerInitInfo

    def __init__(self, init_info: DeltasyncTrainerInitInfo, *, client: Any, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self._init_info = init_info
        self._publisher: Publisher | None = None
        self._newest: Publication | None = None
        self._rounds = 0

    @classmethod
    def trainer_init(cls, init_info: DeltasyncTrainerInitInfo, *, client: Any, source: Any = None) -> Self:
        """Check the source against the feed, and open the servers' side if they are to be moved.

        InvalidInputError, before any weight is read, if the source does not yield whole tensors, has a type that cannot
        be published, or has other tensors than the feed.
        """
        if source is None:
            raise InvalidInputError("this backend needs a source", hint="source=ModuleSource(model)")
        if getattr(source, "held_names", lambda: None)() is not None:
            raise InvalidInputError(
                "this source yields only the tensors that each rank holds; whole ones are needed",
                hint="use a source that gathers, or publish shards with deltasync.torch.ShardedPublisher",
            )
        engine = cls(init_info, client=client, source=source)
        if engine.is_sender:
            engine._require_layout()
            engine._publisher = Publisher(init_info.feed, dtype=init_info.dtype, options=init_info.options)
            if init_info.moves_servers:
                client.init_weight_transfer_engine({"feed": init_info.feed})
        return engine

    def send_weights(self) -> None:
        """Publish the tensors of the source as the next version. Called on every rank.

        An error of an earlier round is raised here, once this round's tensors were gathered on all ranks.
        """
        pairs = iter(self.source)
        try:
            if self.is_sender:
                self._publish(pairs)
        finally:
            # Gathering a tensor is a collective: the other ranks wait if one of them stops in the middle.
            for _ in pairs:
                pass

    def shutdown(self) -> None:
        """Finish what is in flight, and release the feed. Raises the error of the last round if it failed."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()
        newest, self._newest = self._newest, None
        if newest is not None:
            newest.wait(0)

    def _publish(self, pairs: Iterator[tuple[str, torch.Tensor]]) -> None:
        publisher, wait_s = self._publisher, self._init_info.wait_s
        if publisher is None:
            raise InvalidInputError("this engine was shut down", hint="call trainer_init again")
        failed = None if self._newest is None else self._newest.error
        if failed is not None:
            self._newest = None
            raise failed
        self._newest = publisher.publish(pairs, step=self._rounds)
        self._rounds += 1
        if wait_s is None:
            return
        manifest = self._newest.wait(wait_s)
        if self._init_info.moves_servers:
            self.client.start_weight_update()
            self.client.update_weights({"version": manifest.version})
            self.client.finish_weight_update(str(manifest.version))

    def _require_layout(self) -> None:
        cast = self._init_info.dtype
        specs = []
        for meta in self.source.metadata():
            dtype = cast if cast is not None and meta.dtype.is_floating_point else meta.dtype
            specs.append(TensorSpec(meta.name, element_type(meta.name, dtype), tuple(meta.shape)))
        layout = Layout.of(specs)
        with opened(self._init_info.feed) as store:
            log = Log(store)
            head = log.head()
            if head is not None:
                require_layout(Route(log, head), layout)


__all__ = ["BACKEND", "DeltasyncTrainer", "DeltasyncTrainerInitInfo", "register"]
