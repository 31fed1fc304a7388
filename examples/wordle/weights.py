"""The weights of a torch model as the feed has them: a copy to follow with, and its digest."""

from collections.abc import Mapping

import torch

from deltasync import blocks
from deltasync.format.digest import StateDigest
from deltasync.format.weights import Weights
from deltasync.torch.tensors import TorchState, dtype_of, host_bits, layout_of, named_tensors

PUBLISHED = torch.bfloat16


def published_copy(model: TorchState) -> dict[str, torch.Tensor]:
    """A copy in the published type, under the names of the feed."""
    return {name: tensor.to(dtype_of(tensor, PUBLISHED), copy=True) for name, tensor in named_tensors(model).items()}


def load(model: TorchState, published: Mapping[str, torch.Tensor]) -> None:
    """Overwrite a model in float32 with a published copy. Every bfloat16 is a float32, so nothing is lost."""
    with torch.no_grad():
        for name, tensor in named_tensors(model).items():
            tensor.copy_(published[name])


def digest_of(published: Mapping[str, torch.Tensor]) -> StateDigest:
    """The state digest of a published copy, computed from its bits alone."""
    layout = layout_of(published)
    bits = tuple(host_bits(published[spec.name], spec.dtype) for spec in layout.tensors)
    return blocks.digest(Weights(layout, bits))
