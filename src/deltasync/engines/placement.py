"""Placements: where the elements of a checkpoint tensor lie in the memory of a worker, as strided boxes.

A placement is a few numbers, and divisions alone give the place of an element, for any kind of fusing, sharding,
transposing and packing.

Changes in runtime coordinates go from the API server to the workers on the same host in stages: one safetensors file
per worker, in shared memory. A worker maps it and writes its values as they are.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

from deltasync.checkpoint import open_checkpoint
from deltasync.errors import CorruptError
from deltasync.files import temporary_beside
from deltasync.format import limits
from deltasync.format.layout import DTYPES, TensorSpec
from deltasync.format.safetensors import header_bytes
from deltasync.format.weights import Bits

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


_BITS = {1: DTYPES["U8"], 2: DTYPES["U16"], 4: DTYPES["U32"], 8: DTYPES["U64"]}
_POSITIONS = DTYPES["U32"]
_NAME = re.compile(r"(\d{1,18})\.(\d{1,18})\.positions")
_HINT = "stage the version again"
SEGMENT_ELEMENTS = limits.BLOCK_ELEMENTS_MAX
"""Elements of a storage that one segment can address: as many as a kernel overwrites in one call."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """New bits for elements of one storage, at `first` plus each of the ascending `positions`."""

    storage: int
    first: int
    positions: NDArray[np.uint32]
    values: Bits


def segments(storage: int, writes: Sequence[tuple[Indices, Bits]]) -> Iterator[Segment]:
    """The writes to one storage as segments, with every place once. Where writes overlap, the last one wins."""
    places = np.concatenate([indices for indices, _ in writes])
    values = np.concatenate([bits for _, bits in writes])
    if (np.diff(places) <= 0).any():
        order = np.argsort(places, kind="stable")
        places, values = places[order], values[order]
        is_last = np.append(places[1:] != places[:-1], True)
        places, values = places[is_last], values[is_last]
    for first in range(0, int(places[-1]) + 1 if len(places) else 0, SEGMENT_ELEMENTS):
        lo, hi = np.searchsorted(places, (first, first + SEGMENT_ELEMENTS)).tolist()
        if lo < hi:
            yield Segment(storage, first, (places[lo:hi] - first).astype(np.uint32), values[lo:hi])


def write_stage(path: Path, staged: Iterable[Segment]) -> int:
    """Write segments to a file and return its size in bytes."""
    tensors: list[tuple[TensorSpec, NDArray[np.unsignedinteger]]] = []
    for segment in staged:
        name = f"{segment.storage}.{segment.first}"
        tensors.append((TensorSpec(f"{name}.positions", _POSITIONS, segment.positions.shape), segment.positions))
        width = _BITS[segment.values.dtype.itemsize]
        tensors.append((TensorSpec(f"{name}.values", width, segment.values.shape), segment.values))
    # The widest tensors come first, so that all are aligned and can be mapped.
    tensors.sort(key=lambda pair: -pair[0].dtype.width)
    header = header_bytes([spec for spec, _ in tensors], {})
    size = len(header)
    with temporary_beside(path) as temporary:
        with temporary.open("xb") as file:
            file.write(header)
            for _, array in tensors:
                size += file.write(np.ascontiguousarray(array).data.cast("B"))
        temporary.replace(path)
    return size


def read_stage(path: Path) -> list[Segment]:
    """The segments of a file, mapped; CorruptError unless it is as `write_stage` writes it."""
    weights = open_checkpoint(path).weights
    arrays = {spec.name: bits for spec, bits in zip(weights.layout.tensors, weights.arrays, strict=True)}
    result = []
    for name, positions in arrays.items():
        match = _NAME.fullmatch(name)
        if match is not None:
            values = arrays.get(f"{match[1]}.{match[2]}.values")
            if values is None or not _is_ascending(positions) or len(values) != len(positions):
                raise CorruptError(
                    f"{path}: {name!r:.80} must be ascending, with as many values", rule="stage.pair", hint=_HINT
                )
            result.append(Segment(int(match[1]), int(match[2]), positions, values))
    if len(arrays) != 2 * len(result):
        raise CorruptError(f"{path} has tensors that are neither positions nor values", rule="stage.name", hint=_HINT)
    return result


def _is_ascending(positions: Bits) -> TypeGuard[NDArray[np.uint32]]:
    return positions.dtype == np.uint32 and len(positions) > 0 and not (positions[1:] <= positions[:-1]).any()
