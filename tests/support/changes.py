"""Changes by tensor, as tests state and compare them, and in blocks, as the product has them."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltasync.blocks import CutTensors
from deltasync.format.layout import Layout
from deltasync.format.weights import Bits, Changes, tensor_parts

ByTensor = Mapping[str, tuple[NDArray[Any], Bits]]
"""Tensor name to ascending flat indices and bits."""


def in_blocks(layout: Layout, changed: ByTensor) -> list[Changes]:
    cut = CutTensors(layout)
    for name, (indices, values) in changed.items():
        cut.add(layout.ordinals[name], indices, values)
    return cut.blocks()


def by_tensor(layout: Layout, blocks: Iterable[Changes]) -> dict[str, tuple[NDArray[Any], Bits]]:
    """The changes of each tensor, which must ascend."""
    parts: dict[str, list[tuple[NDArray[Any], Bits]]] = {}
    for changes in blocks:
        for ordinal, indices, values in tensor_parts(layout, changes):
            parts.setdefault(layout.tensors[ordinal].name, []).append((indices, values))
    found = {
        name: (np.concatenate([i for i, _ in some]), np.concatenate([v for _, v in some]))
        for name, some in parts.items()
    }
    for name, (indices, _) in found.items():
        assert (indices[1:] > indices[:-1]).all(), name
        assert indices[-1] < layout.tensors[layout.ordinals[name]].elements, name
    return found
