"""Which elements of a distributed tensor a rank publishes: every element is published by exactly one."""

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from deltasync.errors import InvalidInputError
from deltasync.shards import Box, Spans, chunk, joined


def owned(name: str, tensor: torch.Tensor, rank: int) -> tuple[Box, torch.Tensor]:
    """What this rank publishes of a tensor: where it lies, and the elements, of the shape that the box has here.

    Of a DTensor that is its own shard; where several ranks have the same elements, the first of them along the mesh;
    where several meshes have a copy of the tensor each, the one of rank 0. Any other tensor is the same on all ranks,
    and rank 0 publishes it.
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
    # Made from right to left: another mesh dimension cut it first, and each of its pieces was cut again by this one.
    factor = int(placement.split_factor)
    return joined(chunk(chunk(spans, first, factor), number, parts) for first in range(factor))
