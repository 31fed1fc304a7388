"""The shadow, and captures against it.

The shadow is the trainer's copy of the weights that were committed last. A capture holds the new bits of all elements
that differ from the shadow, copied while the trainer waits. Captures are absolute: a later capture against the same
shadow replaces an earlier one. A rebase turns a capture against one version into a capture against the next.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from deltasync.blocks import Changed, detect, layout_runs
from deltasync.checkpoint import mapped_weights
from deltasync.errors import InvalidInputError, MismatchError
from deltasync.feed.replay import zeros
from deltasync.files import locked
from deltasync.format import limits
from deltasync.format.layout import DType, Layout, TensorSpec
from deltasync.format.manifest import Manifest
from deltasync.format.weights import (
    Bits,
    Changes,
    Readable,
    Region,
    Runs,
    Weights,
    cut_runs,
    slice_runs,
    tensor_parts,
    whole_runs,
)
from deltasync.kernels import kernels
from deltasync.parallel import each

Part = tuple[NDArray[np.unsignedinteger], Bits]
"""Ascending indices and new bits of one tensor."""

_WINDOW = 1 << 18
"""Changes that are rebased at a time: what is needed on the way stays small."""


def tensors_of(layout: Layout, captured: Iterable[Changes], *, in_place: bool = False) -> Iterator[tuple[str, Part]]:
    """Captured changes as ascending indices and bits of each tensor, by its name.

    Captures come in the order of the layout, at least those of one type.

    `in_place`: the captures are used up. A tensor that lies in one of them keeps that memory: hardly more is needed.
    """
    seen: set[str] = set()
    found = (part for changes in captured for part in tensor_parts(layout, changes, in_place=in_place))
    for ordinal, parts in groupby(found, key=lambda part: part[0]):
        name = layout.tensors[ordinal].name
        if name in seen:
            raise ValueError(f"the changes of {name!r} did not come together")
        seen.add(name)
        yield name, _joined([(indices, values) for _, indices, values in parts])


def bits_at(weights: Weights, changed: Changed) -> Changed:
    """The bits that `weights` has where something changed."""
    ordinals = weights.layout.ordinals
    return {name: (indices, weights.arrays[ordinals[name]][indices]) for name, (indices, _) in changed.items()}


def overwrite_all(weights: Weights, changed: Changed) -> None:
    """Write the new bits into `weights`."""
    ordinals = weights.layout.ordinals
    for name, (indices, values) in changed.items():
        weights.arrays[ordinals[name]][indices] = values


def rebase(pending: Iterable[tuple[str, Part]], sent: Changed, before: Changed) -> Changed:
    """`pending`, captured against a shadow to which `sent` was applied since; `before` has the bits that it replaced.

    What was sent and is back to its old bits has to be sent again; what was sent as it still is has not.
    """
    result: dict[str, Part] = {}
    for name, part in pending:
        result[name] = _rebased(part, sent[name], before[name][1]) if name in sent else part
    for name in sent.keys() - result.keys():
        result[name] = before[name]
    return {name: part for name, part in result.items() if len(part[0])}


def _rebased(pending: Part, sent: Part, before: Bits) -> Part:
    (indices, values), (sent_indices, sent_values) = pending, sent
    here = [*range(0, max(len(indices), 1), _WINDOW), len(indices)]
    there = [0, *np.searchsorted(sent_indices, indices[here[1:-1]]).tolist(), len(sent_indices)]
    windows = zip(pairwise(here), pairwise(there), strict=True)
    return _joined(
        [
            _rebased_window(
                (indices[lo:hi], values[lo:hi]), (sent_indices[first:last], sent_values[first:last]), before[first:last]
            )
            for (lo, hi), (first, last) in windows
        ]
    )


def _joined(parts: list[Part]) -> Part:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([indices for indices, _ in parts]), np.concatenate([values for _, values in parts])


def _rebased_window(pending: Part, sent: Part, before: Bits) -> Part:
    sent_indices, sent_values = sent
    indices, values = pending
    at = np.searchsorted(sent_indices, indices)
    inside = at < len(sent_indices)
    again = np.zeros(len(indices), bool)
    again[inside] = sent_indices[at[inside]] == indices[inside]
    # Sent before, and the same still: nothing to do. Sent before, and not captured now: back to the old bits.
    same = np.zeros(len(indices), bool)
    same[again] = sent_values[at[again]] == values[again]
    back = np.ones(len(sent_indices), bool)
    back[at[again]] = False
    merged = np.concatenate((indices[~same], sent_indices[back]))
    order = np.argsort(merged, kind="stable")
    return merged[order], np.concatenate((values[~same], before[back]))[order]


class Shadow:
    """`weights` are those of version `head`, or not yet of any. `lock` is held to compare or overwrite them."""

    def __init__(self, weights: Weights, head: Manifest | None) -> None:
        self.weights = weights
        self.head = head
        self.lock = threading.RLock()
        self.followers: list[Callable[[Changed], None]] = []
        """Told what the weights were overwritten with, with the lock held: copies elsewhere that must stay equal."""

    def advance(self, changed: Changed, head: Manifest) -> Changed:
        """Move on to a version that is committed; the bits that it replaced."""
        with self.lock:
            before = bits_at(self.weights, changed)
            overwrite_all(self.weights, changed)
            for follow in self.followers:
                follow(changed)
            self.head = head
            return before


def lock_shadow(path: Path | None) -> ExitStack:
    """Keeps other processes off a mapped shadow until it is closed; InvalidInputError if one of them has it."""
    held = ExitStack()
    if path is not None:
        held.enter_context(locked(path))
    return held


def shadow_weights(layout: Layout, path: Path | None) -> Weights:
    """Room for a shadow: zeros in memory, or what the mapped file at `path` holds, made if it is not there.

    A file of another layout is replaced. Whether its bits are those of a version is for the caller to prove.
    """
    return zeros(layout) if path is None else mapped_weights(layout, path)


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


def capture(shadow: Weights, new: Readable) -> list[Changes]:
    """Every element of `new` that differs from the shadow, bit by bit."""
    require_same(shadow.layout, new.layout)
    return _compare(shadow, new, layout_runs(new.layout, elements=PIECE_ELEMENTS))


def require_same(feed: Layout, weights: Layout) -> None:
    """InvalidInputError that names the first tensor of the weights that is not as the feed has it."""
    try:
        feed.require_equal(weights, ours="the feed", theirs="the weights")
    except MismatchError as error:
        raise InvalidInputError(error.message, rule=error.rule, hint=_HINT) from error


def capture_each(shadow: Weights, tensors: Iterable[tuple[TensorSpec, Bits]]) -> list[Changes]:
    """The same from tensors that come one by one and are gone afterwards. Each must come exactly once."""
    found: list[tuple[int, list[Changes]]] = []
    for ordinal, bits in _once_each(shadow.layout, tensors):
        arrays = shadow.arrays
        new = Weights(shadow.layout, (*arrays[:ordinal], bits, *arrays[ordinal + 1 :]))
        pieces = cut_runs(whole_runs(shadow.layout, [ordinal]), PIECE_ELEMENTS)
        found.append((ordinal, _compare(shadow, new, pieces)))
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


def copy_into(target: Weights, source: Readable) -> None:
    """All elements of `source`."""

    def copy(runs: Runs) -> None:
        bits = source.region(runs).gather()
        begin = 0
        for ordinal, first, count in runs.tolist():
            target.arrays[ordinal][first : first + count] = bits[begin : begin + count]
            begin += count

    for _ in each(copy, layout_runs(target.layout, elements=CHUNK_ELEMENTS)):
        pass


def copy_each(target: Weights, tensors: Iterable[tuple[TensorSpec, Bits]]) -> None:
    """All elements of tensors that come one by one."""
    for ordinal, bits in _once_each(target.layout, tensors):
        target.arrays[ordinal][:] = bits


def _compare(shadow: Weights, new: Readable, pieces: Sequence[Runs]) -> list[Changes]:
    def compare(runs: Runs) -> list[Changes]:
        if not (isinstance(new, Converted) and new.is_converted):
            return list(detect(shadow, new, runs))
        masters = new.masters(runs)
        return list(_detect_chunks(shadow, new, runs) if masters is None else _detect_masters(shadow, masters, runs))

    return [changes for piece in each(compare, pieces) for changes in piece]


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
