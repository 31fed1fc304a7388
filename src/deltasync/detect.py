"""Step 1: which elements changed against the old weights, bit by bit, and in which blocks they are told.

Blocks are cut by one rule, whatever the changes come from: tensors of one element type are strung together in layout
order and cut every `BLOCK_ELEMENTS_MAX` elements; inside such a stretch a block ends early, at a multiple of
`CELL_ELEMENTS`, once `BLOCK_CHANGES_SOFT` elements changed in it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltasync.errors import InvalidInputError
from deltasync.format import limits
from deltasync.format.changes import Changes, cut_runs, slice_runs
from deltasync.format.layout import Layout
from deltasync.format.weights import Bits, Readable, Runs, Weights, whole_runs
from deltasync.kernels.dispatch import kernels

Changed = Mapping[str, tuple[NDArray[Any], Bits]]
"""Tensor name to (ascending flat indices, new bits), as they come from an accelerator that did the comparison."""


def stretches(layout: Layout, *, elements: int = limits.BLOCK_ELEMENTS_MAX) -> list[Runs]:
    """All elements of a layout as stretches of one element type."""
    by_dtype: dict[str, list[int]] = {}
    for ordinal, spec in enumerate(layout.tensors):
        by_dtype.setdefault(spec.dtype.name, []).append(ordinal)
    return [piece for ordinals in by_dtype.values() for piece in cut_runs(whole_runs(layout, ordinals), elements)]


def detect(old: Weights, new: Readable, stretch: Runs) -> Iterator[Changes]:
    """The changed elements of one stretch, block by block; blocks without changes are left out."""
    k, before, after = kernels(), old.region(stretch), new.region(stretch)
    start, elements = 0, before.elements
    while start < elements:
        positions, values, stop = k.detect(
            before, after, start, cell=limits.CELL_ELEMENTS, enough=limits.BLOCK_CHANGES_SOFT
        )
        if len(positions):
            yield Changes(slice_runs(stretch, start, stop), positions, values)
        start = stop


def regroup(layout: Layout, changed: Changed, stretch: Runs) -> Iterator[Changes]:
    """The same blocks as `detect` gives, from elements that are already known to have changed."""
    positions, values = _along(layout, changed, stretch)
    elements = int(stretch[:, 2].sum())
    start = done = 0
    while start < elements:
        ends = np.minimum(np.arange(start, elements, limits.CELL_ELEMENTS) + limits.CELL_ELEMENTS, elements)
        counts = np.searchsorted(positions, ends) - done
        last = min(int(np.searchsorted(counts, limits.BLOCK_CHANGES_SOFT)), len(ends) - 1)
        stop, block = int(ends[last]), slice(done, done + int(counts[last]))
        if counts[last]:
            yield Changes(slice_runs(stretch, start, stop), (positions[block] - start).astype(np.uint32), values[block])
        start, done = stop, block.stop


def check_changed(layout: Layout, changed: Changed) -> None:
    """InvalidInputError unless `changed` fits the layout and is ascending."""
    for name, (indices, values) in changed.items():
        ordinal = layout.ordinals.get(name)
        if ordinal is None:
            raise InvalidInputError(f"tensor {name!r} is not in the layout", rule="changes.name")
        spec = layout.tensors[ordinal]
        if values.dtype != spec.dtype.bits_dtype or values.shape != indices.shape or values.ndim != 1:
            raise InvalidInputError(f"changes of {spec} are {values.dtype}{list(values.shape)}", rule="changes.length")
        ascending = (indices[1:] > indices[:-1]).all()
        if len(indices) and not (ascending and indices[0] >= 0 and indices[-1] < spec.elements):
            raise InvalidInputError(f"indices into {spec} are not ascending inside it", rule="changes.order")


def _along(layout: Layout, changed: Changed, stretch: Runs) -> tuple[NDArray[np.int64], Bits]:
    """All changes of a stretch: positions along it, and new bits."""
    none = np.empty(0, np.int64), np.empty(0, layout.tensors[stretch[0, 0]].dtype.bits_dtype)
    parts, start = [none], 0
    for ordinal, first, count in stretch.tolist():
        indices, values = changed.get(layout.tensors[ordinal].name, none)
        lo, hi = np.searchsorted(indices, (first, first + count))
        parts.append((indices[lo:hi].astype(np.int64) - first + start, values[lo:hi]))
        start += count
    return np.concatenate([p for p, _ in parts]), np.concatenate([v for _, v in parts])
