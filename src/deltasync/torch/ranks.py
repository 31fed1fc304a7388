"""The ranks of torch.distributed: which elements each rank publishes, and how they exchange messages."""

import pickle
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from deltasync.errors import InvalidInputError
from deltasync.format.weights import Bits
from deltasync.trainer.group import Group, Message, lost_contact
from deltasync.trainer.shards import Box, Spans, chunk, joined


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
        elif isinstance(placement, _StridedShard | Shard):
            spans[placement.dim] = _part(spans[placement.dim], number, parts, placement)
        else:
            raise InvalidInputError(
                f"tensor {name!r:.200} is placed as {placement}, which cannot be published",
                hint="redistribute it to Shard or Replicate first",
            )
    return Box(box.shape, tuple(spans))


def _part(spans: Spans, number: int, parts: int, placement: Placement) -> Spans:
    if not isinstance(placement, _StridedShard):
        return chunk(spans, number, parts)
    # Sharded from right to left: another mesh dimension cut it first, and this one cut each of the results again.
    factor = int(placement.split_factor)
    return joined(chunk(chunk(spans, first, factor), number, parts) for first in range(factor))


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
