"""The shadow, captures against it, and the sources that publishers capture from.

The shadow is the trainer's copy of the weights that were committed last. A capture holds the new bits of all elements
that differ from the shadow, copied while the trainer waits. It comes in blocks that are cut as the encoder cuts them
(`deltasync.blocks`), so that it is encoded as it is. Captures are absolute: a later capture against the same shadow
replaces an earlier one. A rebase turns a capture against one version into a capture against the next.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from deltasync.blocks import CutTensors, cut_changes, detect_by, layout_runs
from deltasync.checkpoint import mapped_weights, require_mapped
from deltasync.errors import InvalidInputError, MismatchError
from deltasync.files import locked
from deltasync.format import limits
from deltasync.format.layout import Layout, TensorSpec
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
    zeros,
)
from deltasync.kernels import kernels
from deltasync.parallel import each
from deltasync.state import State
from deltasync.trainer.shards import Shards

_Found = tuple[NDArray[np.unsignedinteger], Bits]
"""Ascending positions or indices, and new bits."""

_WINDOW = 1 << 15
"""Changes that are rebased at a time: temporary memory stays small."""


def rebase(
    layout: Layout, captures: list[list[Changes]], sent: list[Changes], before: list[Changes]
) -> list[list[Changes]]:
    """Captures against a shadow to which `sent` was applied since; `before` has the bits that it replaced.

    An element that was sent and has its old bits again must be sent again; one that is still as it was sent need not.
    All lists are in blocks and are used up: what is done is freed on the way.
    """
    if not captures:
        return []
    for blocks in (*captures, sent, before):
        blocks.reverse()

    def taken() -> Iterator[tuple[Runs, list[list[_Placed]]]]:
        for runs in layout_runs(layout):
            yield runs, [_taken(blocks, runs) for blocks in (*captures, sent, before)]

    def rebased(item: tuple[Runs, list[list[_Placed]]]) -> list[list[Changes]]:
        runs, (*mine, theirs, replaced) = item
        now, old = _along(theirs, layout, runs), _values(replaced, layout, runs)
        found = (_rebased(_along(one, layout, runs), now, old) for one in mine)
        # As they are kept: one publication may wait for another, and both are in memory then.
        return [[changes.packed() for changes in cut_changes(runs, *one)] for one in found]

    results: list[list[Changes]] = [[] for _ in captures]
    for parts in each(rebased, taken()):
        for result, blocks in zip(results, parts, strict=True):
            result += blocks
    if any((*captures, sent, before)):
        raise ValueError("blocks must be cut as the layout is, and come in its order: some of them were not rebased")
    return results


_Placed = tuple[int, Changes]
"""A block, and where it begins along the runs that it is inside of."""


def _taken(blocks: list[Changes], runs: Runs) -> list[_Placed]:
    """Takes the blocks inside `runs`, one of those that a layout is cut into, from the end of a list, as they are.

    They are unpacked where they are rebased: fewer are rebased at a time than are taken.
    """
    ends = np.cumsum(runs[:, 2])
    taken: list[_Placed] = []
    while blocks:
        ordinal, first, _ = blocks[-1].runs[0].tolist()
        row = int(np.searchsorted(runs[:, 0], ordinal))
        if row == len(runs) or not 0 <= first - (start := int(runs[row, 1])) < runs[row, 2] or runs[row, 0] != ordinal:
            break
        taken.append((int(ends[row] - runs[row, 2]) + first - start, blocks.pop()))
    return taken


def _along(blocks: list[_Placed], layout: Layout, runs: Runs) -> _Found:
    """The positions of blocks along the runs, and their values. The list is used up."""
    places = [np.empty(0, np.uint32)]
    for start, changes in blocks:
        positions = changes.positions
        if positions is None:
            raise ValueError("a capture must list the elements that changed")
        places.append(positions + np.uint32(start))
    return places[1] if len(places) == 2 else np.concatenate(places), _values(blocks, layout, runs)


def _values(blocks: list[_Placed], layout: Layout, runs: Runs) -> Bits:
    """The values of blocks inside runs. The list is used up."""
    none = np.empty(0, layout.tensors[int(runs[0, 0])].dtype.bits_dtype)
    parts = [none, *(changes.values for _, changes in blocks)]
    blocks.clear()
    return parts[1] if len(parts) == 2 else np.concatenate(parts)


def _rebased(pending: _Found, sent: _Found, before: Bits) -> _Found:
    all_indices, all_values = pending
    here = [*range(0, max(len(all_indices), 1), _WINDOW), len(all_indices)]
    there = [0, *np.searchsorted(sent[0], all_indices[here[1:-1]]).tolist(), len(sent[0])]
    parts: list[_Found] = []
    for (lo, hi), (first, last) in zip(pairwise(here), pairwise(there), strict=True):
        indices, values = all_indices[lo:hi], all_values[lo:hi]
        sent_indices, sent_values = sent[0][first:last], sent[1][first:last]
        at = np.searchsorted(sent_indices, indices)
        inside = at < len(sent_indices)
        again = np.zeros(len(indices), bool)
        again[inside] = sent_indices[at[inside]] == indices[inside]
        # Sent before and unchanged since: nothing to do. Sent before and not in this capture: back to the old bits.
        same = np.zeros(len(indices), bool)
        same[again] = sent_values[at[again]] == values[again]
        back = np.ones(len(sent_indices), bool)
        back[at[again]] = False
        merged = np.concatenate((indices[~same], sent_indices[back]))
        order = np.argsort(merged, kind="stable")
        parts.append((merged[order], np.concatenate((values[~same], before[first:last][back]))[order]))
    return _joined(parts)


def _joined(parts: list[_Found]) -> _Found:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([indices for indices, _ in parts]), np.concatenate([values for _, values in parts])


def lock_shadow(path: Path | None) -> ExitStack:
    """Keep other processes from using a mapped shadow until it is closed.

    InvalidInputError if one of them uses it, or if something else is at the path.
    """
    held = ExitStack()
    if path is not None:
        require_mapped(path)
        held.enter_context(locked(path))
    return held


def shadow_weights(layout: Layout, path: Path | None) -> Weights:
    """Memory for a shadow: zeros, or the mapped file at `path`, which is created if it is missing.

    A shadow of another layout is replaced, and anything else that is there is refused: InvalidInputError. The caller
    must check that the bits are those of a version.
    """
    if path is None:
        return zeros(layout)
    require_mapped(path)
    return mapped_weights(layout, path)


_HINT = "publish the same tensors every time; another model needs a new feed, or `deltasync publish --anchor`"

CACHED_ELEMENTS = 1 << 19
"""Elements that are cast or copied at a time before they are compared: they stay in the cache in between."""

_NO_KEYS = np.zeros((1, 3), np.uint64)


Masters = tuple[Region, int]
"""Float32 elements that are published as bfloat16, rounded, and what a NaN becomes."""


@runtime_checkable
class Converted(Readable, Protocol):
    """Weights whose regions may be computed on demand. Such a region is valid until its thread asks for the next."""

    @property
    def is_converted(self) -> bool: ...

    def masters(self, runs: Runs) -> Masters | None:
        """The elements behind a region if the kernel only has to round them as it reads; else None."""
        ...


def capture(shadow: Weights, new: Readable) -> list[Changes]:
    """Every element of `new` that differs from the shadow, bit by bit."""
    require_same(shadow.layout, new.layout)
    return [changes for blocks in each(partial(_compare, shadow, new), layout_runs(new.layout)) for changes in blocks]


def require_same(feed: Layout, weights: Layout) -> None:
    """InvalidInputError that names the first tensor of the weights that is not as the feed has it."""
    try:
        feed.require_equal(weights, ours="the feed", theirs="the weights")
    except MismatchError as error:
        raise InvalidInputError(error.message, rule=error.rule, hint=_HINT) from error


def capture_each(shadow: Weights, tensors: Iterable[tuple[TensorSpec, Bits]]) -> list[Changes]:
    """The same from tensors that come one by one and are gone afterwards. Each must come exactly once."""
    captured = CutTensors(shadow.layout)
    for ordinal, bits in _once_each(shadow.layout, tensors):
        arrays = shadow.arrays
        new = Weights(shadow.layout, (*arrays[:ordinal], bits, *arrays[ordinal + 1 :]))
        runs = cut_runs(whole_runs(shadow.layout, [ordinal]), limits.BLOCK_ELEMENTS_MAX)
        compared = each(partial(_compare, shadow, new), runs)
        parts = [part for blocks in compared for changes in blocks for part in tensor_parts(shadow.layout, changes)]
        none = np.empty(0, np.uint32), bits[:0]
        captured.add(ordinal, *_joined([(indices, values) for _, indices, values in parts] or [none]))
    return captured.blocks()


def collect(tensors: Iterable[tuple[TensorSpec, Bits]]) -> Weights:
    """Copies of tensors that come one by one, as weights of a layout of their own."""
    copies: dict[str, tuple[TensorSpec, Bits]] = {}
    for spec, bits in tensors:
        if spec.name in copies:
            raise InvalidInputError(f"tensor {spec.name!r:.200} came twice", hint=_HINT)
        copies[spec.name] = spec, bits.copy()
    layout = Layout.of(spec for spec, _ in copies.values())
    return Weights(layout, tuple(copies[spec.name][1] for spec in layout.tensors))


def copy_into(target: Weights, source: Readable) -> None:
    """Copy all elements of `source`."""

    def copy(runs: Runs) -> None:
        target.write(runs, source.region(runs).gather())

    for _ in each(copy, layout_runs(target.layout, elements=CACHED_ELEMENTS)):
        pass


def copy_each(target: Weights, tensors: Iterable[tuple[TensorSpec, Bits]]) -> None:
    """Copy all elements of tensors that come one by one."""
    for ordinal, bits in _once_each(target.layout, tensors):
        target.write_run(ordinal, 0, bits)


def _compare(shadow: Weights, new: Readable, runs: Runs) -> list[Changes]:
    """The blocks of one run of elements."""
    if not (isinstance(new, Converted) and new.is_converted):
        found = detect_by(kernels().detect, shadow.region(runs), new.region(runs), runs)
    elif (masters := new.masters(runs)) is not None:
        region, nan = masters
        found = detect_by(partial(kernels().detect_rounded, nan=nan), shadow.region(runs), region, runs)
    else:
        found = _detect_converted(shadow, new, runs)
    return [changes.packed() for changes in found]


def _detect_converted(shadow: Weights, new: Readable, runs: Runs) -> Iterator[Changes]:
    """The same as `detect`, of elements that are cast or copied first, few enough at a time to stay in the cache."""
    detect_in, elements = kernels().detect, int(runs[:, 2].sum())
    parts: list[_Found] = []
    start = stop = 0
    for cell in cut_runs(runs, limits.CELL_ELEMENTS):
        for ordinal, first, count in cell.tolist():
            dtype, old = shadow.layout.tensors[ordinal].dtype, shadow.arrays[ordinal]
            for at in range(first, first + count, CACHED_ELEMENTS):
                run = np.array([[ordinal, at, min(CACHED_ELEMENTS, first + count - at)]])
                size = int(run[0, 2])
                # It is only compared: it has no keys for a digest.
                before = Region(dtype, (old[at : at + size],), np.array([[0, 0, size]]), _NO_KEYS)
                positions, values, _ = detect_in(before, new.region(run), 0, cell=size, enough=size)
                if len(positions):
                    positions += np.uint32(stop - start)
                    parts.append((positions, values))
                stop += size
        if stop == elements or sum(len(values) for _, values in parts) >= limits.BLOCK_CHANGES_SOFT:
            if parts:
                yield Changes(slice_runs(runs, start, stop), *_joined(parts))
            start, parts = stop, []


def _once_each(layout: Layout, tensors: Iterable[tuple[TensorSpec, Bits]]) -> Iterator[tuple[int, Bits]]:
    """Ordinals and bits of tensors that must be those of the layout, in any order."""
    missing = set(layout.ordinals)
    for spec, bits in tensors:
        if spec.name not in missing:
            problem = "came twice" if spec.name in layout.ordinals else "is not in the feed"
            raise InvalidInputError(f"tensor {spec.name!r:.200} {problem}", hint=_HINT)
        ordinal = layout.ordinals[spec.name]
        if spec != layout.tensors[ordinal]:
            raise InvalidInputError(f"the feed has {layout.tensors[ordinal]}, the weights have {spec}", hint=_HINT)
        missing.discard(spec.name)
        yield ordinal, bits
    if missing:
        raise InvalidInputError(f"tensor {min(missing)!r:.200} is missing", hint=_HINT)


class Source(ABC):
    """The weights of one publication. A publisher asks once for their changes, or for a copy where it has no shadow."""

    @property
    def layout(self) -> Layout | None:
        """Of all weights; None if it is not known before the tensors come, or if another process knows it."""
        return None

    def shards(self, layout: Layout) -> Shards | None:
        """The part of the weights that this process has; None if it has all of them."""
        return None

    def collect(self) -> Weights:
        """Copies of all weights, whose layout is not known before. What is asked for later is taken from them."""
        raise InvalidInputError("the feed has no version yet", hint="publish all weights first")

    @abstractmethod
    def copy_into(self, weights: Weights) -> None:
        """Copy all weights."""

    @abstractmethod
    def changes(self, shadow: State) -> list[Changes]:
        """What differs from the shadow, whose lock is held."""


class WeightsSource(Source):
    """Weights in memory, or in mapped files."""

    def __init__(self, weights: Readable) -> None:
        self._weights = weights

    @property
    def layout(self) -> Layout | None:
        return self._weights.layout

    def copy_into(self, weights: Weights) -> None:
        require_same(weights.layout, self._weights.layout)
        copy_into(weights, self._weights)

    def changes(self, shadow: State) -> list[Changes]:
        # No digest is computed of what is compared, so that runs of a shard need not be contiguous in whole tensors.
        weights = shadow.require_weights()
        return capture(Weights(weights.layout, weights.arrays), self._weights)


class StreamSource(Source):
    """Tensors that come one by one, and once, so that the model never has to exist twice."""

    def __init__(self, tensors: Iterable[tuple[TensorSpec, Bits]]) -> None:
        self._tensors = tensors
        self._collected: Weights | None = None

    def collect(self) -> Weights:
        self._collected = collect(self._tensors)
        return self._collected

    def copy_into(self, weights: Weights) -> None:
        if self._collected is None:
            copy_each(weights, self._tensors)
        elif self._collected is not weights:
            copy_into(weights, self._collected)

    def changes(self, shadow: State) -> list[Changes]:
        return capture_each(shadow.require_weights(), self._tensors)
