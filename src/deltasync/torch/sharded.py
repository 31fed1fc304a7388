"""`ShardedPublisher`: every rank of a sharded trainer publishes its own shard; together they commit one version."""

import pickle
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from deltasync import arguments
from deltasync.errors import InvalidInputError
from deltasync.format.layout import Layout
from deltasync.format.weights import Bits, Changes, Weights
from deltasync.state import State
from deltasync.store import Feed
from deltasync.torch.device import DeviceCapture, source_of
from deltasync.torch.publisher import TorchPublisher
from deltasync.torch.tensors import TorchState, layout_of, named_tensors, unwrapped
from deltasync.trainer.capture import Source, WeightsSource, require_same
from deltasync.trainer.events import Publication
from deltasync.trainer.group import Group, Message, lost_contact
from deltasync.trainer.publisher import FeedPublisher, PublisherOptions
from deltasync.trainer.shards import Box, Shards, ShardWeights, chunk, joined


class ShardedPublisher(TorchPublisher):
    """Publishes the weights of a model that is spread over the ranks of torch.distributed, as FSDP2 does.

    Every rank creates one and calls `publish` and `close`. A rank reads, compares, encodes and puts only its own
    elements: the model is never gathered. Rank 0 opens the feed and commits. Where several ranks have the same
    elements, the first of them publishes; tensors that are not DTensors are published by rank 0, so that under
    DistributedDataParallel a `Publisher` on rank 0 does the same with less communication.

    An error of one rank is raised on all of them. After any but a StoreError, and when a rank is lost, the publisher
    has stopped: what was not committed is invisible, and a new publisher continues from the head of the feed, with any
    number of ranks. `timeout_s` is how long rank 0 waits for the slowest rank; the others wait twice as long for it.
    Encoding and putting a shard (of all weights, for the first version) must take less time than that.

    `options.shadow_path` is a folder; each rank keeps a file there. A publication always waits for the one before. The
    observer receives the events of whole versions, on every rank that has one.
    """

    def __init__(
        self,
        feed: Feed,
        *,
        dtype: torch.dtype | None = None,
        timeout_s: float = 600.0,
        options: PublisherOptions = PublisherOptions(),
    ) -> None:
        if isinstance(options, PublisherOptions) and options.skips:
            raise InvalidInputError(
                "a sharded publisher writes no skips: no rank has all weights",
                hint="leave out skips, and run `deltasync compact --follow` beside it",
            )
        super().__init__(feed, dtype=dtype, options=options)
        self._timeout_s = arguments.seconds("timeout_s", timeout_s, is_zero_allowed=False)
        self._group: Group | None = None
        self._is_closed = False

    def publish(
        self,
        weights: TorchState,
        *,
        step: int | None = None,
        anchor: bool = False,
        extra: Mapping[str, str] | None = None,
    ) -> Publication:
        """Make these weights the next version: a module or a state dict. All ranks call this, with the same step.

        Returns once the publication before is complete and what changed is captured: the weights may change again.
        `anchor`, on rank 0, requests an anchor in addition. `extra`, on rank 0, is metadata that the manifest carries.
        """
        self._require_here()
        if self._is_closed:
            raise InvalidInputError("this publisher is closed", hint="open a new one")
        if self._feed is None or self._group is None:
            self._group = TorchRanks.open(timeout_s=self._timeout_s)
            self._feed = FeedPublisher(self._store, self._options, self._group)
            self._resources.callback(self._feed.close)
        feed, group = self._feed, self._group
        if feed.needs_files and group.rank == 0:
            with group.report_errors():
                feed.files, feed.default_files = self._files(weights)
        source = _ShardSource(weights, group.rank, self._dtype, self._on_device)
        return feed.publish(source, step=step, anchor=anchor, extra=extra)

    def close(self) -> None:
        """Finish what is in flight, anchors included, and release the feed and the groups of ranks."""
        self._is_closed = True
        super().close()


class _ShardSource(Source):
    """The elements of a model that this rank publishes."""

    def __init__(
        self, weights: TorchState, rank: int, dtype: torch.dtype | None, on_device: DeviceCapture | None
    ) -> None:
        self._weights = weights
        self._rank = rank
        self._dtype = dtype
        self._on_device = on_device

    @property
    def layout(self) -> Layout | None:
        # Rank 0 chooses which of several tied names counts: a rank whose shards are empty cannot do so.
        return layout_of(named_tensors(self._weights), cast=self._dtype) if self._rank == 0 else None

    def shards(self, layout: Layout) -> Shards:
        return Shards(layout, self._boxes(layout)[0])

    def copy_into(self, weights: Weights) -> None:
        self._local(weights).copy_into(weights)

    def changes(self, shadow: State) -> list[Changes]:
        return self._local(shadow.require_weights()).changes(shadow)

    def _local(self, weights: Weights) -> WeightsSource:
        """The local elements, which must be in the boxes that the shadow has."""
        if not isinstance(weights, ShardWeights):
            raise TypeError("the shadow of a rank has shards")
        boxes, tensors = self._boxes(weights.shards.layout)
        weights.shards.require(boxes)
        return source_of(tensors, self._dtype, self._on_device)

    def _boxes(self, layout: Layout) -> tuple[list[Box], dict[str, torch.Tensor]]:
        """The box and the elements of each tensor of the layout that this rank publishes."""
        weights, rank = self._weights, self._rank
        if rank == 0:
            tensors = named_tensors(weights)
        else:
            state = unwrapped(weights).state_dict() if isinstance(weights, torch.nn.Module) else weights
            tensors = {spec.name: state[spec.name].detach() for spec in layout.tensors if spec.name in state}
        require_same(layout, layout_of(tensors, cast=self._dtype, known=layout))
        shards = {spec.name: owned(spec.name, tensors[spec.name], rank) for spec in layout.tensors}
        return [box for box, _ in shards.values()], {name: local for name, (_, local) in shards.items()}


def owned(name: str, tensor: torch.Tensor, rank: int) -> tuple[Box, torch.Tensor]:
    """What this rank publishes of a tensor: its box in the tensor, and the elements, in the local shape of the box.

    Of a DTensor it is the shard of this rank. Where several ranks have the same elements, the first of them along the
    mesh publishes them; where several meshes have a copy of the tensor each, the mesh of rank 0 does. Any other tensor
    is the same on all ranks, and rank 0 publishes it.
    """
    if isinstance(tensor, DTensor):
        box, local = _box(name, tensor), tensor.to_local()
    else:
        box, local = (Box.whole if rank == 0 else Box.empty)(tensor.shape), tensor
    if not box.elements:
        return box, local.new_empty(0)
    if local.numel() != box.elements:
        raise InvalidInputError(
            f"rank {rank} has {list(local.shape)} of tensor {name!r:.200} where {list(box.local_shape)} belongs",
            hint="make the DTensor from the shape and placements that its shards have",
        )
    return box, local.reshape(box.local_shape)


def _box(name: str, tensor: DTensor) -> Box:
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    box = Box.whole(tensor.shape)
    if coordinate is None or not bool((mesh.mesh == 0).any()):
        return Box.empty(tensor.shape)
    spans = list(box.spans)
    for number, parts, placement in zip(coordinate, mesh.shape, tensor.placements, strict=True):
        if placement.is_replicate():
            if number:
                return Box.empty(tensor.shape)
        elif isinstance(placement, _StridedShard):
            # Sharded from right to left: another mesh dimension cut it first, and this one cut each of the results.
            whole, factor = spans[placement.dim], int(placement.split_factor)
            cuts = (chunk(chunk(whole, first, factor), number, parts) for first in range(factor))
            spans[placement.dim] = joined(cuts)
        elif isinstance(placement, Shard):
            spans[placement.dim] = chunk(spans[placement.dim], number, parts)
        else:
            raise InvalidInputError(
                f"tensor {name!r:.200} is placed as {placement}, which cannot be published",
                hint="redistribute it to Shard or Replicate first",
            )
    return Box(box.shape, tuple(spans))


class TorchRanks(Group):
    """All ranks, in a process group of their own that does not interfere with those of the training."""

    def __init__(self, group: dist.ProcessGroup, *, timeout_s: float) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group), timeout_s=timeout_s)
        self._group = group

    @classmethod
    def open(cls, *, timeout_s: float) -> "TorchRanks":
        """Called by all ranks. `timeout_s` is how long rank 0 waits for the slowest of the others."""
        if not dist.is_available() or not dist.is_initialized():
            raise InvalidInputError(
                "torch.distributed is not initialized",
                hint="call init_process_group first, or use Publisher where there is one process",
            )
        try:
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=2 * timeout_s))
        except RuntimeError as error:
            raise lost_contact("another rank", error) from error
        return cls(group, timeout_s=timeout_s)

    def fork(self) -> "TorchRanks":
        """The same ranks with a process group of their own. All of them call this."""
        return TorchRanks.open(timeout_s=self._timeout_s)

    def share(self, bits: Bits) -> None:
        """Overwrite `bits` on all ranks with those of rank 0. They must have the same size everywhere."""
        self.require_all()
        try:
            dist.broadcast(torch.from_numpy(bits.view("u1")), group_src=0, group=self._group)
        except RuntimeError as error:
            raise self.lose("another rank", error) from error

    def close(self) -> None:
        """Release the process group. The other ranks need not do so at the same time."""
        if dist.is_initialized():
            dist.destroy_process_group(self._group)

    def _send(self, rank: int, message: Message) -> None:
        data = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
        try:
            dist.send(torch.tensor([data.numel()]), group=self._group, group_dst=rank)
            dist.send(data, group=self._group, group_dst=rank)
        except RuntimeError as error:
            raise self.lose(f"rank {rank}", error) from error

    def _receive(self, rank: int, timeout_s: float) -> Message:
        size = torch.zeros(1, dtype=torch.int64)
        try:
            self._fill(size, rank, timeout_s)
            data = torch.zeros(int(size), dtype=torch.uint8)
            self._fill(data, rank, timeout_s)
        except RuntimeError as error:
            raise self.lose(f"rank {rank}", error) from error
        message: Message = pickle.loads(data.numpy().tobytes())
        return message

    def _fill(self, tensor: torch.Tensor, rank: int, timeout_s: float) -> None:
        work = dist.irecv(tensor, group=self._group, group_src=rank)
        if work is None:
            raise RuntimeError("this rank is not in the group")
        work.wait(timedelta(seconds=timeout_s))
