"""Where the elements of checkpoint tensors lie in the memory of a worker: strided copies, and arithmetic on them.

A worker cuts, joins and stacks the tensors of a checkpoint when it loads them. Each cut is one copy between two strided
views, so that an element's place is found by divisions alone, for any kind of fusing and sharding.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
"""Flat places of elements, in a tensor of the checkpoint or in a storage of the worker."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A part of one checkpoint tensor, and the storage of a worker that it goes to.

    `source` and `target` are the first element's places, the strides count elements. Dimensions are in descending order
    of the source's strides, and as few as can be.
    """

    storage: int
    shape: tuple[int, ...]
    source: int
    source_strides: tuple[int, ...]
    target: int
    target_strides: tuple[int, ...]

    @classmethod
    def of(
        cls,
        storage: int,
        shape: Iterable[int],
        *,
        source: int,
        source_strides: Iterable[int],
        target: int,
        target_strides: Iterable[int],
    ) -> "Copy":
        """A copy in its shortest form: dimensions of one element are left out, neighbours joined."""
        dims = [d for d in zip(shape, source_strides, target_strides, strict=True) if d[0] != 1]
        joined: list[tuple[int, int, int]] = []
        for size, there, here in sorted(dims, key=lambda dim: -dim[1]):
            if joined and joined[-1][1] == size * there and joined[-1][2] == size * here:
                joined[-1] = joined[-1][0] * size, there, here
            else:
                joined.append((size, there, here))
        if not joined:
            joined = [(1, 1, 1)]
        sizes, theirs, ours = zip(*joined, strict=True)
        return cls(storage, sizes, source, theirs, target, ours)

    @classmethod
    def from_json(cls, fields: list[object]) -> "Copy":
        """What `to_json` gave."""
        storage, shape, source, source_strides, target, target_strides = fields
        return cls(storage, tuple(shape), source, tuple(source_strides), target, tuple(target_strides))  # type: ignore[arg-type]

    def to_json(self) -> list[object]:
        """For the way between processes."""
        return [self.storage, self.shape, self.source, self.source_strides, self.target, self.target_strides]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def part(self) -> tuple[object, ...]:
        """Which elements of the tensor these are; equal for workers that hold the same."""
        return self.shape, self.source, self.source_strides

    def locate(self, indices: Indices) -> tuple[slice | NDArray[np.bool_], Indices]:
        """Which of the ascending `indices` are copied (for `indices[…]`), and their places in the storage."""
        last = self.source + sum((n - 1) * s for n, s in zip(self.shape, self.source_strides, strict=True))
        first, end = np.searchsorted(indices, (self.source, last + 1)).tolist()
        rest = indices[first:end] - self.source
        if len(self.shape) == 1 and self.source_strides[0] == 1:
            return slice(first, end), rest * self.target_strides[0] + self.target
        places = np.full_like(rest, self.target)
        is_copied = np.ones(len(rest), np.bool_)
        for size, there, here in zip(self.shape, self.source_strides, self.target_strides, strict=True):
            at, rest = np.divmod(rest, there)
            is_copied &= at < size
            places += at * here
        is_copied &= rest == 0
        whole = np.zeros(len(indices), np.bool_)
        whole[first:end] = is_copied
        return whole, places[is_copied]


def is_covered(elements: int, ranks: Iterable[Iterable[Copy]]) -> bool:
    """Whether the copies of all ranks can take every element of a tensor. Equal parts count once."""
    parts = {copy.part: copy.elements for copies in ranks for copy in copies}
    return sum(parts.values()) >= elements
