"""Capture: what differs from the shadow, copied out of the trainer's weights while it waits.

A capture is absolute: new bits of the elements that differ from the shadow. So a later capture against the same shadow
takes the place of an earlier one, and none of the two has to be sent for the other to be right.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from deltasync.detect import detect, stretches
from deltasync.errors import InvalidInputError, MismatchError
from deltasync.format import limits
from deltasync.format.changes import Changes, cut_runs, slice_runs
from deltasync.format.dtypes import DType
from deltasync.format.layout import Layout, TensorSpec
from deltasync.format.weights import Bits, Readable, Region, Runs, Weights, whole_runs
from deltasync.kernels.dispatch import kernels
from deltasync.parallel import each

_HINT = "publish the same tensors every time; another model needs a new feed, or `deltasync publish --anchor`"

PIECE_ELEMENTS = 1 << 24
"""Elements that one thread takes at a time: few enough to share the work, enough to hand it out seldom."""

CHUNK_ELEMENTS = 1 << 19
"""Elements that are cast or copied at a time before they are compared: they stay in the cache in between."""

_NO_KEYS = np.zeros((1, 3), np.uint64)


@dataclass(frozen=True, slots=True)
class Masters:
    """Float32 elements that are published as bfloat16, rounded; a NaN becomes `nan`."""

    region: Region
    nan: int


@runtime_checkable
class Converted(Readable, Protocol):
    """Weights whose regions may be made on the fly. Then one is valid until its thread asks for the next."""

    @property
    def is_converted(self) -> bool: ...

    def masters(self, runs: Runs) -> Masters | None:
        """What lies behind a region where rounding it is all that has to be done: the kernel does that as it reads."""
        ...


def capture(shadow: Weights, new: Readable, *, threads: int | None = None) -> list[Changes]:
    """Every element of `new` that differs from the shadow, bit by bit."""
    require_same(shadow.layout, new.layout)
    return _compare(shadow, new, stretches(new.layout, elements=PIECE_ELEMENTS), threads)


def require_same(feed: Layout, weights: Layout) -> None:
    """InvalidInputError that names the first tensor of the weights that is not as the feed has it."""
    try:
        feed.require_equal(weights, ours="the feed", theirs="the weights")
    except MismatchError as error:
        raise InvalidInputError(error.message, rule=error.rule, hint=_HINT) from error


def capture_each(
    shadow: Weights, tensors: Iterable[tuple[TensorSpec, Bits]], *, threads: int | None = None
) -> list[Changes]:
    """The same from tensors that come one by one and are gone afterwards. Each must come exactly once."""
    found: list[tuple[int, list[Changes]]] = []
    for ordinal, bits in _once_each(shadow.layout, tensors):
        arrays = shadow.arrays
        new = Weights(shadow.layout, (*arrays[:ordinal], bits, *arrays[ordinal + 1 :]))
        pieces = cut_runs(whole_runs(shadow.layout, [ordinal]), PIECE_ELEMENTS)
        found.append((ordinal, _compare(shadow, new, pieces, threads)))
    return [changes for _, captured in sorted(found, key=lambda pair: pair[0]) for changes in captured]


def collect(tensors: Iterable[tuple[TensorSpec, Bits]]) -> Weights:
    """Copies of tensors that come one by one, as weights of a layout of their own."""
    found: dict[str, tuple[TensorSpec, Bits]] = {}
    for spec, bits in tensors:
        if spec.name in found:
            raise InvalidInputError(f"tensor {spec.name!r:.200} came twice", hint=_HINT)
        found[spec.name] = spec, bits.copy()
    layout = Layout.of(spec for spec, _ in found.values())
    return Weights(layout, tuple(found[spec.name][1] for spec in layout.tensors))


def copy_into(target: Weights, source: Readable, *, threads: int | None = None) -> None:
    """All elements of `source`."""

    def copy(runs: Runs) -> None:
        bits = source.region(runs).gather()
        begin = 0
        for ordinal, first, count in runs.tolist():
            target.arrays[ordinal][first : first + count] = bits[begin : begin + count]
            begin += count

    for _ in each(copy, stretches(target.layout, elements=CHUNK_ELEMENTS), threads=threads):
        pass


def copy_each(target: Weights, tensors: Iterable[tuple[TensorSpec, Bits]]) -> None:
    """All elements of tensors that come one by one."""
    for ordinal, bits in _once_each(target.layout, tensors):
        target.arrays[ordinal][:] = bits


def _compare(shadow: Weights, new: Readable, pieces: Sequence[Runs], threads: int | None) -> list[Changes]:
    def compare(runs: Runs) -> list[Changes]:
        if not (isinstance(new, Converted) and new.is_converted):
            return list(detect(shadow, new, runs))
        masters = new.masters(runs)
        return list(_detect_chunks(shadow, new, runs) if masters is None else _detect_masters(shadow, masters, runs))

    return [changes for piece in each(compare, pieces, threads=threads) for changes in piece]


def _detect_masters(shadow: Weights, masters: Masters, runs: Runs) -> Iterator[Changes]:
    """As `detect` does it."""
    detect_in, before = kernels().detect_rounded, shadow.region(runs)
    start, elements = 0, before.elements
    while start < elements:
        positions, values, stop = detect_in(
            before,
            masters.region,
            start,
            cell=limits.CELL_ELEMENTS,
            enough=limits.BLOCK_CHANGES_SOFT,
            nan=masters.nan,
        )
        if len(positions):
            yield Changes(slice_runs(runs, start, stop), positions, values)
        start = stop


def _detect_chunks(shadow: Weights, new: Readable, runs: Runs) -> Iterator[Changes]:
    """As `detect` does it, chunk by chunk. Lean, as there are thousands of chunks and only one of us runs Python."""
    detect_in = kernels().detect
    for ordinal, first, count in runs.tolist():
        dtype, old = shadow.layout.tensors[ordinal].dtype, shadow.arrays[ordinal]
        for at in range(first, first + count, CHUNK_ELEMENTS):
            run = np.array([[ordinal, at, min(CHUNK_ELEMENTS, first + count - at)]])
            before = _flat(dtype, old[at : at + int(run[0, 2])])
            positions, values, _ = detect_in(
                before, new.region(run), 0, cell=limits.CELL_ELEMENTS, enough=CHUNK_ELEMENTS
            )
            if len(positions):
                yield Changes(run, positions, values)


def _flat(dtype: DType, bits: Bits) -> Region:
    """A region to compare: it has no keys for a digest."""
    return Region(dtype, (bits,), np.array([[0, 0, len(bits)]]), _NO_KEYS)


def _once_each(layout: Layout, tensors: Iterable[tuple[TensorSpec, Bits]]) -> Iterator[tuple[int, Bits]]:
    """Ordinals and bits of tensors that must be those of the layout, in any order."""
    missing = set(layout.ordinals)
    for spec, bits in tensors:
        if spec.name not in missing:
            told = "came twice" if spec.name in layout.ordinals else "is not in the feed"
            raise InvalidInputError(f"tensor {spec.name!r:.200} {told}", hint=_HINT)
        ordinal = layout.ordinals[spec.name]
        if spec != layout.tensors[ordinal]:
            raise InvalidInputError(f"the feed has {layout.tensors[ordinal]}, the weights have {spec}", hint=_HINT)
        missing.discard(spec.name)
        yield ordinal, bits
    if missing:
        raise InvalidInputError(f"tensor {min(missing)!r:.200} did not come", hint=_HINT)
