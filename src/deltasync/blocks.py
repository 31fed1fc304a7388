"""Two states to blocks, and blocks to changes, on all cores.

Blocks are cut by one rule, independent of the source of the changes: tensors of one element type are concatenated in
layout order and cut every `BLOCK_ELEMENTS_MAX` elements; inside such a stretch a block ends early, at a multiple of
`CELL_ELEMENTS`, once `BLOCK_CHANGES_SOFT` elements have changed in it. Blocks never overlap, so threads never write to
the same element; the kernels release the GIL.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltasync.codecs import coo, exp, planes
from deltasync.errors import CorruptError, FormatError, InvalidInputError, MismatchError
from deltasync.format import limits
from deltasync.format.digest import StateDigest, layout_digest
from deltasync.format.layout import Layout
from deltasync.format.payload import Block
from deltasync.format.weights import Bits, Changes, Readable, Region, Runs, Weights, cut_runs, slice_runs, whole_runs
from deltasync.kernels import kernels
from deltasync.parallel import each

Changed = Mapping[str, tuple[NDArray[Any], Bits]]
"""Tensor name to (ascending flat indices, new bits), as they come from an accelerator that did the comparison."""


def stretches(layout: Layout, *, elements: int = limits.BLOCK_ELEMENTS_MAX) -> list[Runs]:
    """All elements of a layout as stretches of one element type."""
    by_dtype: dict[str, list[int]] = {}
    for ordinal, spec in enumerate(layout.tensors):
        by_dtype.setdefault(spec.dtype.name, []).append(ordinal)
    return [piece for ordinals in by_dtype.values() for piece in cut_runs(whole_runs(layout, ordinals), elements)]


def detect(old: Weights, new: Readable, stretch: Runs) -> Iterator[Changes]:
    """The changed elements of one stretch, block by block; blocks without changes are left out."""
    k, before, after = kernels(), old.region(stretch), new.region(stretch)
    start, elements = 0, before.elements
    while start < elements:
        positions, values, stop = k.detect(
            before, after, start, cell=limits.CELL_ELEMENTS, enough=limits.BLOCK_CHANGES_SOFT
        )
        if len(positions):
            yield Changes(slice_runs(stretch, start, stop), positions, values)
        start = stop


def regroup(layout: Layout, changed: Changed, stretch: Runs) -> Iterator[Changes]:
    """The same blocks as `detect` gives, from elements that are already known to have changed."""
    positions, values = _along(layout, changed, stretch)
    elements = int(stretch[:, 2].sum())
    start = done = 0
    while start < elements:
        ends = np.minimum(np.arange(start, elements, limits.CELL_ELEMENTS) + limits.CELL_ELEMENTS, elements)
        counts = np.searchsorted(positions, ends) - done
        last = min(int(np.searchsorted(counts, limits.BLOCK_CHANGES_SOFT)), len(ends) - 1)
        stop, block = int(ends[last]), slice(done, done + int(counts[last]))
        if counts[last]:
            yield Changes(slice_runs(stretch, start, stop), (positions[block] - start).astype(np.uint32), values[block])
        start, done = stop, block.stop


def check_changed(layout: Layout, changed: Changed) -> None:
    """InvalidInputError unless `changed` fits the layout and is ascending."""
    for name, (indices, values) in changed.items():
        ordinal = layout.ordinals.get(name)
        if ordinal is None:
            raise InvalidInputError(f"tensor {name!r} is not in the layout", rule="changes.name")
        spec = layout.tensors[ordinal]
        if values.dtype != spec.dtype.bits_dtype or values.shape != indices.shape or values.ndim != 1:
            raise InvalidInputError(f"changes of {spec} are {values.dtype}{list(values.shape)}", rule="changes.length")
        ascending = (indices[1:] > indices[:-1]).all()
        if len(indices) and not (ascending and indices[0] >= 0 and indices[-1] < spec.elements):
            raise InvalidInputError(f"indices into {spec} are not ascending inside it", rule="changes.order")


def _along(layout: Layout, changed: Changed, stretch: Runs) -> tuple[NDArray[np.int64], Bits]:
    """All changes of a stretch: positions along it, and new bits."""
    none = np.empty(0, np.int64), np.empty(0, layout.tensors[stretch[0, 0]].dtype.bits_dtype)
    parts, start = [none], 0
    for ordinal, first, count in stretch.tolist():
        indices, values = changed.get(layout.tensors[ordinal].name, none)
        lo, hi = np.searchsorted(indices, (first, first + count))
        parts.append((indices[lo:hi].astype(np.int64) - first + start, values[lo:hi]))
        start += count
    return np.concatenate([p for p, _ in parts]), np.concatenate([v for _, v in parts])


def overwrite(target: Weights, changes: Changes) -> None:
    """Write the new bits into `target`'s arrays."""
    region = target.region(changes.runs)
    if changes.positions is not None:
        kernels().overwrite(region, changes.positions, changes.values)
        return
    ends = np.cumsum(region.runs[:, 2])
    for (array, offset, count), end in zip(region.runs.tolist(), ends.tolist(), strict=True):
        region.arrays[array][offset : offset + count] = changes.values[end - count : end]


OnProgress = Callable[[int], None]
"""Called with the number of elements that were just done."""

Source = Callable[[Runs], Iterator[Changes]]


def encode_delta(
    old: Weights,
    new: Weights,
    *,
    codec: str = exp.EXP,
    on_progress: OnProgress | None = None,
) -> list[Block]:
    """What changed from `old` to `new`. Each block has the smallest of the codecs that `codec` stands for."""
    old.layout.require_equal(new.layout, ours="the old state", theirs="the new state")

    def exp_blocks(runs: Runs) -> list[Block]:
        found = exp.encode_difference(old, new, runs)
        return [_smallest(old.layout, block, partial(new.region, block.runs)) for block in found]

    return _encode(old, exp_blocks, lambda runs: detect(old, new, runs), codec, on_progress)


def encode_changed(
    old: Weights,
    changed: Changed,
    *,
    codec: str = exp.EXP,
    on_progress: OnProgress | None = None,
) -> list[Block]:
    """The same blocks from elements that are known to have changed, as an accelerator finds them."""
    check_changed(old.layout, changed)

    def exp_blocks(runs: Runs) -> list[Block]:
        found = regroup(old.layout, changed, runs)
        return [_smallest(old.layout, exp.encode(old, changes), partial(_after, old, changes)) for changes in found]

    return _encode(old, exp_blocks, lambda runs: regroup(old.layout, changed, runs), codec, on_progress)


def encode_anchor(weights: Readable, *, on_progress: OnProgress | None = None) -> Iterator[Block]:
    """All weights, block by block."""
    pieces = stretches(weights.layout, elements=limits.PLANES_ELEMENTS)
    return each(lambda runs: planes.encode(weights, runs), pieces, on_done=_counter(on_progress))


def decode(
    old: Weights,
    blocks: Iterable[Block],
    *,
    relative: bool = True,
    on_progress: OnProgress | None = None,
) -> Iterator[Changes]:
    """Verified changes, in the order of the blocks. `relative` is False for the blocks of an anchor.

    MismatchError if a block does not add up against `old`: then these are not the bits that it was made against.
    """

    def one(block: Block) -> list[Changes]:
        return _decode_block(old, block, relative=relative)

    done = _counter(on_progress)
    for parts in each(one, blocks, on_done=lambda block: done(block.runs)):
        yield from parts


def decode_into(
    target: Weights,
    old: Weights,
    blocks: Iterable[Block],
    *,
    relative: bool = True,
    on_progress: OnProgress | None = None,
) -> None:
    """Decode against `old` and overwrite `target`, a copy of it, block by block without staging the whole.

    On an error `target` is half written: give it one that nobody else can see yet.
    """

    def one(block: Block) -> None:
        for changes in _decode_block(old, block, relative=relative):
            overwrite(target, changes)

    done = _counter(on_progress)
    for _ in each(one, blocks, on_done=lambda block: done(block.runs)):
        pass


def digest(weights: Weights, *, on_progress: OnProgress | None = None) -> StateDigest:
    """The state digest of all weights."""
    pieces = stretches(weights.layout, elements=limits.PLANES_ELEMENTS)
    lanes = each(lambda runs: kernels().digest(weights.region(runs)), pieces, on_done=_counter(on_progress))
    return sum((StateDigest(*pair) for pair in lanes), layout_digest(weights.layout))


def _encode(
    old: Weights,
    exp_blocks: Callable[[Runs], list[Block]],
    source: Source,
    codec: str,
    on_progress: OnProgress | None,
) -> list[Block]:
    if codec == exp.EXP:
        encode, pieces = exp_blocks, stretches(old.layout)
    elif codec == coo.COO:
        encode = partial(_coo, old, source)
        pieces = [whole_runs(old.layout, [t]) for t, spec in enumerate(old.layout.tensors) if spec.elements]
    else:
        raise InvalidInputError(f"no codec {codec!r} for a delta", hint=f"use {exp.EXP} or {coo.COO}")
    found = each(encode, pieces, on_done=_counter(on_progress))
    return [block for blocks in found for block in blocks]


def _smallest(layout: Layout, block: Block, new: Callable[[], Region]) -> Block:
    """The block, or all of its elements as they are in `new`, whichever is smaller."""
    weights_bytes = int(block.runs[:, 2].sum()) * layout.tensors[block.runs[0, 0]].dtype.width
    # Compressed weights take about two thirds of their size: below a quarter there is nothing to win.
    if 4 * len(block.data) < weights_bytes:
        return block
    dense = planes.encode_whole(block, new())
    return dense if len(dense.data) < len(block.data) else block


def _after(old: Weights, changes: Changes) -> Region:
    """The elements of the runs after the changes, in memory of their own."""
    region = old.region(changes.runs)
    bits = region.gather()
    bits[changes.positions] = changes.values
    return region.holding(bits)


def _coo(old: Weights, source: Source, runs: Runs) -> list[Block]:
    parts = (changes for piece in cut_runs(runs, limits.BLOCK_ELEMENTS_MAX) for changes in source(piece))
    block = coo.encode(old, int(runs[0, 0]), parts)
    return [] if block is None else [block]


def _decode_block(old: Weights, block: Block, *, relative: bool) -> list[Changes]:
    if block.codec == planes.PLANES:
        parts, digest_delta = planes.decode(old, block, relative=relative)
    elif not relative:
        raise FormatError(f"codec {block.codec!r} in an anchor", rule="anchor.codec")
    elif block.codec in (exp.EXP, exp.ABS):
        parts, digest_delta = exp.decode(old, block)
    elif block.codec == coo.COO:
        parts, digest_delta = coo.decode(old, block)
    else:
        raise FormatError(f"codec {block.codec!r} is not known", rule="block.codec", hint="upgrade deltasync")
    if digest_delta != block.digest:
        message = f"a block gives {digest_delta.hex} where {block.digest.hex} was promised"
        if not relative:
            raise CorruptError(message, rule="block.digest")
        hint = "the old weights are not the ones that this delta was made against"
        raise MismatchError(message, rule="block.digest", hint=hint)
    count = sum(len(p.values) for p in parts)
    if block.codec != planes.PLANES and count != block.changed:
        raise CorruptError(f"{count} changes where {block.changed} were promised", rule="block.changed")
    return parts


def _counter(on_progress: OnProgress | None) -> Callable[[Runs], None]:
    return lambda runs: None if on_progress is None else on_progress(int(runs[:, 2].sum()))
