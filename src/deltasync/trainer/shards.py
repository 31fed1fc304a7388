"""The shard of one process of a sharded trainer: its elements of each tensor, and their places in the whole.

A process works in local coordinates, on flat arrays of its own elements. What it writes is in the coordinates of the
layout: the keys of the digest and the runs of blocks. Local neighbours need not be neighbours in the whole.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np
from numpy.typing import NDArray

from deltasync.errors import InvalidInputError
from deltasync.format import limits
from deltasync.format.layout import Layout, TensorSpec
from deltasync.format.payload import Block
from deltasync.format.weights import Bits, Region, Runs, Weights, region_keys

Spans = tuple[tuple[int, int], ...]
"""Ranges (first index, number of indices) of one dimension, none of them empty, in local order."""

_SHORT_RUN = 16
_SHORT_RUNS_MAX = limits.RUNS_MAX // 4
"""With no more short runs than this, no block of the largest size has more runs than a payload may have."""


def chunk(spans: Spans, number: int, parts: int) -> Spans:
    """Part `number` of `parts`, cut as torch.chunk cuts: equal, but the last ones may be shorter or empty."""
    total = sum(count for _, count in spans)
    size = -(-total // parts)
    return cut(spans, number * size, (number + 1) * size)


def cut(spans: Spans, first: int, last: int) -> Spans:
    """The positions `first` to `last`, counted along the spans."""
    result, begin = [], 0
    for start, count in spans:
        lo, hi = max(first, begin), min(last, begin + count)
        if lo < hi:
            result.append((start + lo - begin, hi - lo))
        begin += count
    return tuple(result)


def joined(pieces: Iterable[Spans]) -> Spans:
    """All spans one after the other; neighbours become one."""
    result: list[tuple[int, int]] = []
    for start, count in (span for spans in pieces for span in spans):
        if result and sum(result[-1]) == start:
            result[-1] = result[-1][0], result[-1][1] + count
        else:
            result.append((start, count))
    return tuple(result)


@dataclass(frozen=True)
class Box:
    """The elements of a tensor of `shape` that a process has: those with indices in the spans of each dimension.

    A scalar counts as one dimension of one element.
    """

    shape: tuple[int, ...]
    spans: tuple[Spans, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        sizes = tuple(shape) if shape else (1,)
        return cls(sizes, tuple(_all(size) for size in sizes))

    @classmethod
    def empty(cls, shape: Sequence[int]) -> "Box":
        """A box without elements: other processes have them."""
        sizes = tuple(shape) if shape else (1,)
        return cls(sizes, tuple(() for _ in sizes))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the local elements; (0,) if there are none."""
        sizes = tuple(sum(count for _, count in spans) for spans in self.spans)
        return sizes if math.prod(sizes) else (0,)

    @property
    def elements(self) -> int:
        return math.prod(self.local_shape)

    @property
    def runs(self) -> int:
        """The number of contiguous runs of the tensor in this box."""
        return self.elements // self._sizes.sum() * len(self._sizes) if self.elements else 0

    def places(self, first: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where `count` elements from the local position `first` on are in the tensor: starts and lengths of runs."""
        number = np.arange(self._piece(first), self._piece(first + count - 1) + 1)
        period, ends = int(self._sizes.sum()), np.cumsum(self._sizes)
        outer, span = np.divmod(number, len(ends))
        local = outer * period + (ends - self._sizes)[span]
        begin = np.maximum(local, first)
        end = np.minimum(local + self._sizes[span], first + count)
        inner = np.array([start for start, _ in self.spans[self._axis]], np.int64) * self._strides[self._axis]
        return self._outer(outer) + inner[span] + begin - local, end - begin

    def copy_rows(self, local: Bits, rows: Bits, first: int) -> None:
        """Copy the elements of this box from `rows`, whole rows of the tensor from row `first` on, into `local`."""
        behind = self.shape[1:]
        there = rows.reshape(-1, *behind)
        here = local.reshape(self.local_shape)
        for at in product(*(_along(spans) for spans in self.spans)):
            (row, place, count), *others = at
            lo, hi = max(row, first), min(row + count, first + len(there))
            if lo >= hi:
                continue
            to = (slice(place + lo - row, place + hi - row), *(slice(p, p + n) for _, p, n in others))
            of = (slice(lo - first, hi - first), *(slice(i, i + n) for i, _, n in others))
            here[to] = there[of]

    @cached_property
    def _axis(self) -> int:
        """The innermost dimension of which only a part is local: elements behind it are contiguous."""
        partial = [d for d, size in enumerate(self.shape) if self.spans[d] != _all(size)]
        return max(partial, default=0)

    @cached_property
    def _strides(self) -> list[int]:
        return [math.prod(self.shape[d + 1 :]) for d in range(len(self.shape))]

    @cached_property
    def _sizes(self) -> NDArray[np.int64]:
        """Elements of each span of the axis, with all that lies behind it."""
        return np.array([count for _, count in self.spans[self._axis]], np.int64) * self._strides[self._axis]

    def _piece(self, place: int) -> int:
        outer, rest = divmod(place, int(self._sizes.sum()))
        return outer * len(self._sizes) + int(np.searchsorted(np.cumsum(self._sizes), rest, side="right"))

    def _outer(self, number: NDArray[np.int64]) -> NDArray[np.int64]:
        """First element, in the tensor, of what lies before the axis."""
        offsets = np.zeros_like(number)
        shape = self.local_shape[: self._axis]
        for d, at in enumerate(np.unravel_index(number, shape) if shape else ()):
            starts, counts = np.array(self.spans[d], np.int64).T
            ends = np.cumsum(counts)
            span = np.searchsorted(ends, at, side="right")
            offsets += (starts[span] + at - (ends - counts)[span]) * self._strides[d]
        return offsets


class Shards:
    """One box of each tensor of a layout. The other processes have the rest."""

    def __init__(self, layout: Layout, boxes: Sequence[Box]) -> None:
        self.layout = layout
        self.boxes = tuple(boxes)
        self.local = Layout(
            tuple(TensorSpec(t.name, t.dtype, box.local_shape) for t, box in zip(layout.tensors, boxes, strict=True))
        )
        """The local elements, under the names and ordinals of the layout."""
        short = [box.runs for box in self.boxes if box.runs and box.elements // box.runs < _SHORT_RUN]
        if sum(short) > _SHORT_RUNS_MAX:
            name = layout.tensors[max(range(len(self.boxes)), key=lambda i: self.boxes[i].runs)].name
            raise InvalidInputError(
                f"the shard of tensor {name!r:.200} lies in too many short runs", hint="shard it by another dimension"
            )

    def require(self, boxes: Sequence[Box]) -> None:
        """InvalidInputError that names a tensor if this process now has another box of it."""
        for spec, mine, other in zip(self.layout.tensors, self.boxes, boxes, strict=True):
            if mine != other:
                raise InvalidInputError(
                    f"tensor {spec.name!r:.200} is sharded in another way than before",
                    hint="open a new publisher: it continues from the head of the feed",
                )

    def spread(self, runs: Runs) -> tuple[Runs, Runs]:
        """Local runs, cut where they are not contiguous in the whole: as local runs, and as runs of the whole."""
        here, there = [], []
        for ordinal, first, count in runs.tolist():
            starts, counts = self.boxes[ordinal].places(first, count)
            number = np.full_like(starts, ordinal)
            here.append(np.column_stack((number, first + np.cumsum(counts) - counts, counts)))
            there.append(np.column_stack((number, starts, counts)))
        return np.concatenate(here), np.concatenate(there)

    def place(self, blocks: Iterable[Block]) -> Iterator[Block]:
        """Blocks of the local elements as blocks of the whole."""
        return (replace(block, runs=self.spread(block.runs)[1]) for block in blocks)


@dataclass(frozen=True)
class ShardWeights(Weights):
    """The elements of a shard, with the digest keys that they have in the whole."""

    shards: Shards

    def region(self, runs: Runs) -> Region:
        """The elements that local `runs` name; all of its tensors must have one element type."""
        here, there = self.shards.spread(runs)
        return replace(super().region(here), keys=region_keys(self.shards.layout, there))


def _all(size: int) -> Spans:
    return ((0, size),) if size else ()


def _along(spans: Spans) -> Iterator[tuple[int, int, int]]:
    """First index, local position and length of each span."""
    place = 0
    for start, count in spans:
        yield start, place, count
        place += count
