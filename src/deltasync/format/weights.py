"""Weights in memory as flat arrays of raw bits, the regions of them that a block covers, and changes to them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from deltasync.errors import CorruptError, InvalidInputError
from deltasync.format.layout import DType, Layout, TensorSpec, dtype_of

Bits = NDArray[np.unsignedinteger]
"""A flat, contiguous array of the raw bits of elements."""

Buffer = bytes | memoryview
"""Bytes of a block: of its own, or a part of a larger buffer, flat and of type B."""

Runs = NDArray[np.int64]
"""Elements in a row, one run per row: tensor ordinal, first flat index, number of elements."""


@dataclass(frozen=True, slots=True)
class Region:
    """The elements of one block, wherever they lie in memory.

    `runs` has a row (array, offset, count) for each run; `keys` has the matching row (seed lane 0, seed
    lane 1, first flat index) for the digest. A position in the region counts elements along the runs.
    """

    dtype: DType
    arrays: tuple[Bits, ...]
    runs: NDArray[np.int64]
    keys: NDArray[np.uint64]

    @property
    def elements(self) -> int:
        return int(self.runs[:, 2].sum())

    def holding(self, bits: Bits) -> "Region":
        """The same elements, with their bits taken from one flat array."""
        ends = np.cumsum(self.runs[:, 2])
        runs = np.column_stack((np.zeros_like(ends), ends - self.runs[:, 2], self.runs[:, 2]))
        return Region(self.dtype, (bits,), runs, self.keys)

    def require_writable(self) -> None:
        """InvalidInputError unless the elements can be overwritten."""
        for array in self.arrays:
            if not array.flags.writeable:
                raise InvalidInputError("the arrays to overwrite must be writable, not read-only")

    def gather(self) -> Bits:
        """A contiguous copy of the bits."""
        runs = [self.arrays[a][o : o + n] for a, o, n in self.runs.tolist()]
        return np.concatenate(runs) if runs else np.empty(0, self.dtype.bits_dtype)


class Readable(Protocol):
    """Weights that can be read region by region, wherever they are."""

    @property
    def layout(self) -> Layout: ...

    def region(self, runs: Runs) -> Region:
        """The elements that `runs` names; all of its tensors must have one element type."""
        ...


@dataclass(frozen=True)
class Weights:
    """All tensors of a layout as flat arrays of raw bits, in layout order."""

    layout: Layout
    arrays: tuple[Bits, ...]

    def __post_init__(self) -> None:
        for spec, array in zip(self.layout.tensors, self.arrays, strict=True):
            if array.dtype != spec.dtype.bits_dtype or array.shape != (spec.elements,):
                raise InvalidInputError(
                    f"the bits of {spec} must be {spec.dtype.bits_dtype}[{spec.elements}], not "
                    f"{array.dtype}{list(array.shape)}"
                )

    @classmethod
    def of(cls, tensors: Mapping[str, np.ndarray]) -> "Weights":
        """From NumPy arrays of any shape; no copy where an array is contiguous."""
        specs = [TensorSpec(name, dtype_of(a), a.shape) for name, a in tensors.items()]
        layout = Layout.of(specs)
        return cls(layout, tuple(flat_bits(tensors[t.name], t.dtype) for t in layout.tensors))

    def write(self, runs: Runs, bits: Bits) -> None:
        """Overwrite the elements that `runs` names with `bits`, which has them one after the other."""
        end = 0
        for ordinal, first, count in runs.tolist():
            self.write_run(ordinal, first, bits[end : end + count])
            end += count

    def copy_from(self, other: "Weights") -> None:
        """Overwrite everything with the elements of other weights of the same layout."""
        for ordinal, array in enumerate(other.arrays):
            self.write_run(ordinal, 0, array)

    def write_run(self, ordinal: int, first: int, bits: Bits) -> None:
        """Overwrite elements in a row of one tensor."""
        self.arrays[ordinal][first : first + len(bits)] = bits

    def region(self, runs: Runs) -> Region:
        """The elements that `runs` names; all of its tensors must have one element type."""
        ordinals, local = np.unique(runs[:, 0], return_inverse=True)
        dtypes, arrays = set(), []
        for ordinal in ordinals.tolist():
            dtypes.add(self.layout.tensors[ordinal].dtype)
            arrays.append(self.arrays[ordinal])
        if len(dtypes) != 1:
            raise InvalidInputError(f"a region must have one element type, not {len(dtypes)}")
        return Region(
            dtype=dtypes.pop(),
            arrays=tuple(arrays),
            runs=np.column_stack((local.reshape(-1), runs[:, 1], runs[:, 2])).astype(np.int64),
            keys=region_keys(self.layout, runs),
        )


_ALIGNED = 64
"""Where the memory of a tensor begins: at multiples of this many bytes, as lines of the cache do."""


def zeros(layout: Layout) -> Weights:
    """Weights to be overwritten; CorruptError, with the size, if there is no memory for them."""
    ends = list(accumulate(-(-t.nbytes // _ALIGNED) * _ALIGNED for t in layout.tensors))
    try:
        # In one piece, which NumPy asks the system to back with huge pages: small tensors would have none.
        memory = np.zeros(ends[-1] if ends else 0, np.uint8)
        starts = zip([0, *ends], layout.tensors, strict=False)
        return Weights(layout, tuple(memory[at : at + t.nbytes].view(t.dtype.bits_dtype) for at, t in starts))
    except MemoryError as error:
        raise CorruptError(
            f"there is no memory for the {layout.nbytes} bytes of this layout",
            rule="layout.memory",
            hint="if the model is that large, use a machine with more memory",
        ) from error


def region_keys(layout: Layout, runs: Runs) -> NDArray[np.uint64]:
    """The rows of `Region.keys` for runs of a layout."""
    return np.column_stack((layout.seeds[runs[:, 0]], runs[:, 1].astype(np.uint64))).astype(np.uint64)


def flat_bits(array: np.ndarray, dtype: DType) -> Bits:
    """The raw bits of an array, flat, in C order, aligned; no copy where the array is so already."""
    return np.require(array, requirements=("C", "A")).reshape(-1).view(dtype.bits_dtype)


def whole_runs(layout: Layout, ordinals: Iterable[int]) -> Runs:
    """Runs that cover the given tensors whole; empty tensors have none."""
    rows = [(t, 0, layout.tensors[t].elements) for t in ordinals if layout.tensors[t].elements]
    return np.array(rows, np.int64).reshape(-1, 3)


Positions = NDArray[np.uint32]
"""Positions of elements, counted along the runs of a block."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedPositions:
    """Ascending positions in half the memory: their lower halves, and how many there are for each upper half."""

    low: NDArray[np.uint16]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, positions: Positions) -> "PackedPositions":
        highest = int(positions[-1]) >> 16 if len(positions) else 0
        begins = np.searchsorted(positions, np.arange(highest + 1, dtype=np.uint32) << np.uint32(16))
        return cls(positions.astype(np.uint16), np.diff(begins, append=len(positions)))

    def unpacked(self) -> Positions:
        high = np.arange(len(self.counts), dtype=np.uint32) << np.uint32(16)
        return np.repeat(high, self.counts) | self.low


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """New bits for some elements of `runs`.

    `held` has their positions, which ascend, as they are or packed; None where every element is given.
    """

    runs: Runs
    held: Positions | PackedPositions | None
    values: Bits

    @property
    def positions(self) -> Positions | None:
        """The positions; a new array if they are packed."""
        return self.held.unpacked() if isinstance(self.held, PackedPositions) else self.held

    def packed(self) -> "Changes":
        """The same with packed positions, to be kept for a while."""
        if self.held is None or isinstance(self.held, PackedPositions):
            return self
        return Changes(self.runs, PackedPositions.of(self.held), self.values)


def slice_runs(runs: Runs, start: int, stop: int) -> Runs:
    """The runs that cover positions `start` to `stop` of `runs`."""
    ends = np.cumsum(runs[:, 2])
    begins = ends - runs[:, 2]
    lo, hi = np.maximum(begins, start), np.minimum(ends, stop)
    kept = lo < hi
    first = runs[:, 1] + lo - begins
    covered: Runs = np.column_stack((runs[:, 0], first, hi - lo))[kept].astype(np.int64)
    return covered


def cut_runs(runs: Runs, elements: int) -> list[Runs]:
    """`runs`, cut every `elements` elements; the last may have fewer."""
    total, cut = int(runs[:, 2].sum()), []
    for start in range(0, total, elements):
        cut.append(slice_runs(runs, start, min(start + elements, total)))
    return cut


def tensor_parts(layout: Layout, changes: Changes) -> Iterator[tuple[int, NDArray[np.unsignedinteger], Bits]]:
    """Tensor ordinal, ascending flat indices and new bits of each run that has changes."""
    begin = lo = 0
    # Those that were packed are an array of our own, which becomes the indices.
    must_copy = not isinstance(changes.held, PackedPositions)
    positions, ends = changes.positions, np.cumsum(changes.runs[:, 2])
    cuts = ends if positions is None else np.searchsorted(positions, ends)
    for (ordinal, first, count), end, hi in zip(changes.runs.tolist(), ends.tolist(), cuts.tolist(), strict=True):
        if hi > lo:
            wide = index_dtype(layout, ordinal)
            if positions is None:
                indices = np.arange(first, first + count, dtype=wide)
            else:
                # The difference can be negative, the sum is not: unsigned arithmetic wraps around to it.
                shift = np.array(first - begin).astype(np.int64).astype(wide)
                indices = positions[lo:hi].astype(wide, copy=must_copy)
                indices += shift
            yield ordinal, indices, changes.values[lo:hi]
        begin, lo = end, hi


def index_dtype(layout: Layout, ordinal: int) -> "np.dtype[np.unsignedinteger]":
    """The type of indices into a tensor in memory: 4 bytes wide where every index fits."""
    return np.dtype(np.uint32 if layout.tensors[ordinal].elements <= 1 << 32 else np.uint64)
