"""Placements: where the elements of a checkpoint tensor lie in the memory of a worker, as strided boxes.

A placement is a few numbers, and divisions alone give the place of an element, for any kind of fusing, sharding,
transposing and packing.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
"""Flat indices of elements, in a tensor of the checkpoint or in a span of the worker."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Elements of one checkpoint tensor, and where they are in a span of a worker.

    `source` and `target` are the indices of the first element; strides count elements. Dimensions are in descending
    order of the source's strides, and as few as possible.
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
    ) -> "Placement":
        """A placement in its shortest form: without dimensions of one element, and with adjacent dimensions joined."""
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
    def from_json(cls, fields: list[object]) -> "Placement":
        """The placement that `to_json` describes."""
        storage, shape, source, source_strides, target, target_strides = fields
        return cls(storage, tuple(shape), source, tuple(source_strides), target, tuple(target_strides))  # type: ignore[arg-type]

    def to_json(self) -> list[object]:
        """The placement as JSON, for another process."""
        return [self.storage, self.shape, self.source, self.source_strides, self.target, self.target_strides]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def part(self) -> tuple[object, ...]:
        """Identifies the elements of the tensor; equal for workers that hold the same elements."""
        return self.shape, self.source, self.source_strides

    @property
    def is_nested(self) -> bool:
        """Whether divisions find each element: every stride of the source is beyond what the later ones reach."""
        reach = 1
        for size, stride in zip(reversed(self.shape), reversed(self.source_strides), strict=True):
            if stride < reach:
                return False
            reach += (size - 1) * stride
        return True

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


def is_covered(elements: int, ranks: Iterable[Iterable[Placement]]) -> bool:
    """Whether the placements of all ranks together have every element of a tensor."""
    parts = {placement.part: placement for placements in ranks for placement in placements}
    if elements in (0, *(placement.elements for placement in parts.values())):
        return True
    if sum(placement.elements for placement in parts.values()) < elements:
        return False
    is_copied = np.zeros(elements, np.bool_)
    for part in parts.values():
        np.lib.stride_tricks.as_strided(is_copied[part.source :], part.shape, part.source_strides)[...] = True
    return bool(is_copied.all())


def fit(storage: int, places: Indices, sources: Indices, *, at_most: int) -> list[Placement] | None:
    """Placements that say where each of the `sources` is, for ascending `places`; None if it takes more than `at_most`.

    The innermost run of equal steps is a dimension if the whole sequence consists of such runs; then the beginnings of
    the runs are a shorter sequence of the same kind. Where that ends, the sequence is cut.
    """
    placements: list[Placement] = []
    while len(places):
        dims: list[tuple[int, int, int]] = []
        here, there = places, sources
        while len(here) > 1:
            step, jump = int(here[1] - here[0]), int(there[1] - there[0])
            is_same = (np.diff(here) == step) & (np.diff(there) == jump)
            size = len(here) if is_same.all() else int(np.argmin(is_same)) + 1
            whole = len(here) // size
            if whole > 1:
                is_run = np.append(is_same[: whole * size - 1], True).reshape(whole, size)[:, :-1].all(axis=1)
                whole = whole if is_run.all() else int(np.argmin(is_run))
            dims.append((size, jump, step))
            here, there = here[: whole * size : size], there[: whole * size : size]
        placement = _box(storage, dims, source=int(sources[0]), target=int(places[0]))
        while not placement.is_nested:
            # Divisions do not find such elements, for example those in descending order: each box is a placement.
            dims.pop()
            placement = _box(storage, dims, source=int(sources[0]), target=int(places[0]))
        if len(placements) == at_most:
            return None
        placements.append(placement)
        places, sources = places[placement.elements :], sources[placement.elements :]
    return placements


def _box(storage: int, dims: Sequence[tuple[int, int, int]], *, source: int, target: int) -> Placement:
    sizes, jumps, steps = zip(*dims, strict=True) if dims else ((), (), ())
    return Placement.of(storage, sizes, source=source, source_strides=jumps, target=target, target_strides=steps)


def joined(placements: Iterable[Placement]) -> list[Placement]:
    """The same placements, with those that repeat at equal distances as one with a further dimension."""
    result: list[Placement] = []
    for (storage, shape, theirs, ours), group in groupby(
        placements, key=lambda p: (p.storage, p.shape, p.source_strides, p.target_strides)
    ):
        alike = list(group)
        places, sources = np.array([[placement.target, placement.source] for placement in alike], np.int64).T
        starts = fit(storage, places, sources, at_most=len(alike)) if (np.diff(places) > 0).all() else None
        boxes = [
            Placement.of(
                storage,
                (*start.shape, *shape),
                source=start.source,
                source_strides=(*start.source_strides, *theirs),
                target=start.target,
                target_strides=(*start.target_strides, *ours),
            )
            for start in starts or ()
        ]
        result += boxes if boxes and all(box.is_nested for box in boxes) else alike
    return result
