"""The live elements of a copy beside those of a checkpoint: compared bit by bit, whatever their strides are."""

import warnings
from collections.abc import Iterable, Sequence

import torch

from deltasync.format.layout import TensorSpec
from deltasync.format.weights import Bits
from deltasync.torch.copies import Copy
from deltasync.torch.memory import Span
from deltasync.torch.tensors import bits_type, torch_dtype

_COMPARE_ELEMENTS = 1 << 24
"""Elements that are compared in one call, which bounds the temporary memory on an accelerator."""


def pair(spans: Sequence[Span], copy: Copy, spec: TensorSpec, bits: Bits) -> tuple[torch.Tensor, torch.Tensor]:
    """The live elements of a copy and the wanted ones, which are cast as engines cast them if the live type differs."""
    flat = spans[copy.storage].flat
    live = flat.as_strided(copy.shape, copy.target_strides, copy.target + int(flat.storage_offset()))
    wanted = as_tensor(spec, bits).reshape(-1).as_strided(copy.shape, copy.source_strides, copy.source)
    return live, wanted if wanted.dtype == live.dtype else wanted.to(live.dtype)


def count_differing(spans: Sequence[Span], copies: Iterable[Copy], spec: TensorSpec, bits: Bits) -> int:
    """How many live elements of these copies are not those of a tensor."""
    count = 0
    for copy in copies:
        live, wanted = pair(spans, copy, spec, bits)
        rows = max(1, _COMPARE_ELEMENTS * len(live) // copy.elements)
        for first in range(0, len(live), rows):
            here, there = live[first : first + rows], wanted[first : first + rows]
            there = there.to(here.device)
            is_other = here.view(bits_type(here)) != there.view(bits_type(there))
            if torch_dtype(spec.dtype) != here.dtype:
                # The bits of a NaN after a cast depend on the strides of the elements.
                is_other &= ~(here.isnan() & there.isnan())
            count += int(is_other.sum())
    return count


def as_tensor(spec: TensorSpec, bits: Bits) -> torch.Tensor:
    """A tensor of a checkpoint over the bits of a mapped file, which must not be written to."""
    return from_mapped(bits).view(torch_dtype(spec.dtype)).view(spec.shape)


def from_mapped(bits: Bits) -> torch.Tensor:
    """A tensor of signed integers over the bits of a mapped file, which must not be written to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(bits.view(f"i{bits.dtype.itemsize}"))
