"""Runs on the wire: [tensor, start, count], or [tensor, start, count, stride, repeat] for equal pieces in step.

The second form is how the column shard of a sharded trainer looks: one piece of every row.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from deltasync.errors import CorruptError
from deltasync.format import limits
from deltasync.format.layout import Layout
from deltasync.format.strict_json import is_count
from deltasync.format.weights import Runs


def pack_runs(runs: Runs) -> list[list[int]]:
    """The JSON form. Greedy, so that equal runs give equal bytes."""
    packed: list[list[int]] = []
    rows = runs.tolist()
    tensor, start, count = (runs[:, i] for i in range(3))
    stride = np.diff(start)
    joined = (np.diff(tensor) == 0) & (np.diff(count) == 0) & (stride >= count[:-1])
    stride = np.where(joined, stride, -1)
    # A segment is a maximal range of neighbours at one stride; the row that two segments share goes to the first.
    edges = np.flatnonzero(np.diff(stride)) + 1
    free = 0
    for first, last in zip((0, *edges.tolist()), (*edges.tolist(), len(stride)), strict=True):
        if first == last or stride[first] < 0:
            continue
        begin = max(first, free)
        if last + 1 - begin < 2:
            continue
        packed.extend(rows[free:begin])
        packed.append([*rows[begin], int(stride[first]), last + 1 - begin])
        free = last + 1
    packed.extend(rows[free:])
    return packed


def unpack_runs(value: Any, layout: Layout, *, elements_max: int, runs_max: int) -> Runs:
    """The inverse of `pack_runs`. Everything is checked before anything is spelled out.

    CorruptError unless every run is well formed and inside its tensor, all tensors have one element type, and the
    runs have at most `elements_max` elements in at most `runs_max` pieces.
    """
    if not isinstance(value, list) or not value:
        raise CorruptError("a block has no list of runs", rule="runs.entry")
    checked = [_checked(item, layout) for item in value]
    pieces = sum(repeat for *_, repeat in checked)
    elements = sum(count * repeat for _, _, count, _, repeat in checked)
    if elements > elements_max:
        raise CorruptError(f"a block of {elements} elements, at most {elements_max} are allowed", rule="runs.elements")
    if pieces > runs_max:
        raise CorruptError(f"more than {limits.RUNS_MAX} runs in a payload", rule="runs.pieces")
    dtypes = {layout.tensors[tensor].dtype.name for tensor, *_ in checked}
    if len(dtypes) != 1:
        raise CorruptError(f"a block mixes the types {', '.join(sorted(dtypes))}", rule="runs.dtype")
    table = np.array(checked, np.int64)
    row = np.repeat(np.arange(len(table)), table[:, 4])
    step = np.arange(pieces) - np.repeat(np.cumsum(table[:, 4]) - table[:, 4], table[:, 4])
    return np.column_stack((table[row, 0], table[row, 1] + step * table[row, 3], table[row, 2]))


def require_disjoint(all_runs: Sequence[Runs], layout: Layout) -> None:
    """CorruptError if any element is in two runs."""
    if not all_runs:
        return
    runs = np.concatenate(all_runs)
    runs = runs[np.lexsort((runs[:, 1], runs[:, 0]))]
    ends = runs[:-1, 1] + runs[:-1, 2]
    overlaps = (runs[1:, 0] == runs[:-1, 0]) & (runs[1:, 1] < ends)
    if overlaps.any():
        tensor, start, _ = runs[1:][int(np.argmax(overlaps))].tolist()
        name = layout.tensors[tensor].name
        raise CorruptError(f"element {start} of tensor {name!r:.200} is in two runs", rule="runs.overlap")


def elements_of(runs: Runs) -> int:
    """How many elements the runs cover."""
    return int(runs[:, 2].sum())


def _checked(item: Any, layout: Layout) -> tuple[int, int, int, int, int]:
    """(tensor, start, count, stride, repeat), each inside its bounds."""
    if not isinstance(item, list) or len(item) not in (3, 5) or not _counts(item):
        raise CorruptError(f"a run is {item!r:.120}, not 3 or 5 numbers", rule="runs.entry")
    tensor, start, count, stride, repeat = item if len(item) == 5 else (*item, item[2], 1)
    if tensor >= len(layout.tensors):
        raise CorruptError(f"a run in tensor {tensor} of {len(layout.tensors)}", rule="runs.tensor")
    if count == 0:
        raise CorruptError(f"an empty run in tensor {tensor}", rule="runs.empty")
    if len(item) == 5 and (repeat < 2 or stride < count):
        raise CorruptError(f"a run of {count} elements, {repeat} times at stride {stride}", rule="runs.stride")
    end = start + (repeat - 1) * stride + count
    spec = layout.tensors[tensor]
    if end > spec.elements:
        raise CorruptError(
            f"a run ends at element {end} of {spec.elements} in tensor {spec.name!r:.200}", rule="runs.range"
        )
    return tensor, start, count, stride, repeat


def _counts(values: Iterable[Any]) -> bool:
    return all(is_count(v, most=limits.ELEMENTS_MAX) for v in values)
