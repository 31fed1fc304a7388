"""Changes: which elements of a block's runs got which new bits."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deltasync.format.layout import Layout
from deltasync.format.weights import Bits, Runs

Positions = NDArray[np.uint32]
"""Places of elements, counted along the runs of a block."""


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """New bits for some elements of `runs`; `positions` is ascending, or None where every element is given."""

    runs: Runs
    positions: Positions | None
    values: Bits


def slice_runs(runs: Runs, start: int, stop: int) -> Runs:
    """The part of `runs` that covers positions `start` to `stop`."""
    ends = np.cumsum(runs[:, 2])
    begins = ends - runs[:, 2]
    lo, hi = np.maximum(begins, start), np.minimum(ends, stop)
    kept = lo < hi
    first = runs[:, 1] + lo - begins
    part: Runs = np.column_stack((runs[:, 0], first, hi - lo))[kept].astype(np.int64)
    return part


def cut_runs(runs: Runs, elements: int) -> list[Runs]:
    """`runs` in pieces of `elements` each; the last may be shorter."""
    total = int(runs[:, 2].sum())
    return [slice_runs(runs, start, min(start + elements, total)) for start in range(0, total, elements)]


def tensor_parts(
    layout: Layout, changes: Changes, *, in_place: bool = False
) -> Iterator[tuple[int, NDArray[np.unsignedinteger], Bits]]:
    """Tensor ordinal, ascending flat indices and new bits of each run that has changes.

    `in_place`: the changes are not needed afterwards, and their positions become the indices where they are as wide.
    """
    begin = lo = 0
    ends = np.cumsum(changes.runs[:, 2])
    cuts = ends if changes.positions is None else np.searchsorted(changes.positions, ends)
    for (ordinal, first, count), end, hi in zip(changes.runs.tolist(), ends.tolist(), cuts.tolist(), strict=True):
        if hi > lo:
            wide = index_dtype(layout, ordinal)
            if changes.positions is None:
                indices = np.arange(first, first + count, dtype=wide)
            else:
                # The difference can be negative, the sum is not: unsigned arithmetic wraps around to it.
                shift = np.array(first - begin).astype(np.int64).astype(wide)
                indices = changes.positions[lo:hi].astype(wide, copy=not in_place)
                indices += shift
            yield ordinal, indices, changes.values[lo:hi]
        begin, lo = end, hi


def index_dtype(layout: Layout, ordinal: int) -> "np.dtype[np.unsignedinteger]":
    """4 bytes while every index fits: changes are held in memory."""
    return np.dtype(np.uint32 if layout.tensors[ordinal].elements <= 1 << 32 else np.uint64)
