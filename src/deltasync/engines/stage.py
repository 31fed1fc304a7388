"""From the API server to the workers on the same host: changes in runtime coordinates.

There is one safetensors file per worker, in shared memory. A worker maps it and writes its values as they are.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

from deltasync.checkpoint import open_checkpoint
from deltasync.engines.placement import Indices
from deltasync.errors import CorruptError
from deltasync.files import temporary_beside
from deltasync.format import limits
from deltasync.format.layout import DTYPES, TensorSpec
from deltasync.format.safetensors import header_bytes
from deltasync.format.weights import Bits

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
