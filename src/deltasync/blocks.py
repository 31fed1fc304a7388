"""Two states to blocks, and blocks to changes, on all cores.

Blocks are cut by one rule, independent of the source of the changes: tensors of one element type are concatenated in
layout order and cut every `BLOCK_ELEMENTS_MAX` elements; inside such runs a block ends early, at a multiple of
`CELL_ELEMENTS`, once `BLOCK_CHANGES_SOFT` elements have changed in it. Blocks never overlap, so threads never write to
the same element; the kernels release the GIL.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltasync.checkpoint import FileWeights
from deltasync.codecs import coo, exp, planes
from deltasync.errors import CorruptError, FormatError, InvalidInputError, MismatchError
from deltasync.format import limits
from deltasync.format.digest import StateDigest, layout_digest
from deltasync.format.layout import Layout
from deltasync.format.payload import Block
from deltasync.format.weights import Bits, Changes, Readable, Region, Runs, Weights, cut_runs, slice_runs, whole_runs
from deltasync.kernels import kernels
from deltasync.parallel import each

OnProgress = Callable[[int], None]
"""Called with the number of elements that were just done."""


def layout_runs(layout: Layout, *, elements: int = limits.BLOCK_ELEMENTS_MAX) -> list[Runs]:
    """All elements of a layout: runs of one element type each, cut every `elements` elements."""
    by_dtype: dict[str, list[int]] = {}
    for ordinal, spec in enumerate(layout.tensors):
        by_dtype.setdefault(spec.dtype.name, []).append(ordinal)
    found: list[Runs] = []
    for ordinals in by_dtype.values():
        found += cut_runs(whole_runs(layout, ordinals), elements)
    return found


def detect(old: Readable, new: Readable, runs: Runs) -> Iterator[Changes]:
    """The changed elements of `runs`, block by block; blocks without changes are left out."""
    return detect_by(kernels().detect, old.region(runs), new.region(runs), runs)


def detect_by(
    find: Callable[..., tuple[Any, Bits, int]], before: Region, after: Region, runs: Runs
) -> Iterator[Changes]:
    """The same by any function of the kernels that compares two regions, those of `runs`."""
    start, elements = 0, before.elements
    while start < elements:
        positions, values, stop = find(
            before, after, start, cell=limits.CELL_ELEMENTS, enough=limits.BLOCK_CHANGES_SOFT
        )
        if len(positions):
            yield Changes(slice_runs(runs, start, stop), positions, values)
        start = stop


def cut_changes(runs: Runs, positions: NDArray[Any], values: Bits) -> Iterator[Changes]:
    """The same blocks as `detect` gives, from ascending positions along the runs and their new bits."""
    elements = int(runs[:, 2].sum())
    ends = np.minimum(np.arange(0, elements, limits.CELL_ELEMENTS) + limits.CELL_ELEMENTS, elements)
    counts = np.searchsorted(positions, ends.astype(positions.dtype))
    start = done = 0
    while start < elements:
        last = min(int(np.searchsorted(counts, done + limits.BLOCK_CHANGES_SOFT)), len(ends) - 1)
        stop, block = int(ends[last]), slice(done, int(counts[last]))
        if block.stop > done:
            local = positions[block] - positions.dtype.type(start) if start else positions[block]
            yield Changes(slice_runs(runs, start, stop), local.astype(np.uint32, copy=False), values[block])
        start, done = stop, block.stop


class CutTensors:
    """Changes of whole tensors that come one by one, in any order, cut into the same blocks as `detect` gives.

    A run of the layout is cut as soon as all tensors in it have come: most are inside one tensor.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._runs = layout_runs(layout)
        self._rows: dict[int, list[tuple[int, int]]] = {}
        """The runs, and the rows in them, that a tensor is in."""
        for number, runs in enumerate(self._runs):
            for row, ordinal in enumerate(runs[:, 0].tolist()):
                self._rows.setdefault(ordinal, []).append((number, row))
        self._waiting: list[dict[int, tuple[NDArray[np.int64], Bits]]] = [{} for _ in self._runs]
        self._cut: list[list[Changes]] = [[] for _ in self._runs]

    def add(self, ordinal: int, indices: NDArray[np.unsignedinteger], values: Bits) -> None:
        """Take the changes of a tensor: ascending flat indices and new bits."""
        for number, row in self._rows.get(ordinal, ()):
            runs, waiting = self._runs[number], self._waiting[number]
            _, first, count = runs[row].tolist()
            lo, hi = np.searchsorted(indices, (first, first + count))
            start = int(runs[:row, 2].sum()) - first
            waiting[row] = indices[lo:hi].astype(np.int64) + start, values[lo:hi].copy()
            if len(waiting) == len(runs):
                self._finish(number)

    def blocks(self) -> list[Changes]:
        """All blocks, in the order of the layout. Tensors that have not come did not change."""
        for number, waiting in enumerate(self._waiting):
            if waiting:
                self._finish(number)
        return [changes for part in self._cut for changes in part]

    def _finish(self, number: int) -> None:
        runs, waiting = self._runs[number], self._waiting[number]
        parts = [waiting[row] for row in sorted(waiting)]
        positions, values = (np.concatenate([part[i] for part in parts]) for i in range(2))
        self._cut[number] = [changes.packed() for changes in cut_changes(runs, positions, values)]
        waiting.clear()


def overwrite(target: Weights, changes: Changes) -> None:
    """Write the new bits into `target`'s arrays."""
    if changes.positions is None:
        target.write(changes.runs, changes.values)
    else:
        kernels().overwrite(target.region(changes.runs), changes.positions, changes.values)


def overwrite_all(target: Weights, changes: Iterable[Changes]) -> None:
    """Write changes on all cores. No element may be in more than one of them: threads keep no order."""
    for _ in each(partial(overwrite, target), changes):
        pass


def encode_delta(
    old: Weights, new: Weights, *, codec: str = exp.EXP, on_progress: OnProgress | None = None
) -> list[Block]:
    """The changes from `old` to `new`. Each block has the smallest of the codecs that `codec` stands for."""
    old.layout.require_equal(new.layout, ours="the old state", theirs="the new state")
    encode: Callable[[Weights, Weights, Runs], list[Block]]
    if codec == exp.EXP:
        encode, all_runs = _exp_blocks, layout_runs(old.layout)
    elif codec == coo.COO:
        tensors = (whole_runs(old.layout, [ordinal]) for ordinal in range(len(old.layout.tensors)))
        encode, all_runs = _coo_blocks, [runs for runs in tensors if len(runs)]
    else:
        raise InvalidInputError(
            f"the codec of a delta must be {exp.EXP} or {coo.COO}, not {codec!r:.80}", hint=f"use {exp.EXP}"
        )
    encoded = each(partial(encode, old, new), all_runs, on_done=_counter(on_progress))
    return [block for blocks in encoded for block in blocks]


def encode_difference(old: Readable, new: Readable) -> list[Block]:
    """The same blocks as `encode_delta` gives, from states that need not be in memory as a whole."""
    return [block for blocks in each(partial(_exp_blocks, old, new), layout_runs(old.layout)) for block in blocks]


def _exp_blocks(old: Readable, new: Readable, runs: Runs) -> list[Block]:
    coded = exp.encode_difference(old, new, runs)
    return [_smallest(old.layout, block, partial(new.region, block.runs)) for block in coded]


def _coo_blocks(old: Weights, new: Weights, tensor: Runs) -> list[Block]:
    parts = cut_runs(tensor, limits.BLOCK_ELEMENTS_MAX)
    block = coo.encode(old, int(tensor[0, 0]), (changes for runs in parts for changes in detect(old, new, runs)))
    return [] if block is None else [block]


def encode_changes(old: Weights, changes: Iterable[Changes]) -> Iterator[Block]:
    """The same blocks from changes that are already cut as `detect` cuts them: one block for each, as it is encoded."""
    return each(partial(_encode_block, old), changes)


def _smallest(layout: Layout, block: Block, new: Callable[[], Region]) -> Block:
    """The block, or all of its elements as they are in `new`, whichever is smaller."""
    weights_bytes = int(block.runs[:, 2].sum()) * layout.tensors[block.runs[0, 0]].dtype.width
    # Compressed weights take about two thirds of their size: below a quarter there is nothing to win.
    if 4 * len(block.data) < weights_bytes:
        return block
    dense = planes.encode_whole(block, new())
    return dense if len(dense.data) < len(block.data) else block


def _encode_block(old: Weights, changes: Changes) -> Block:
    def after() -> Region:
        """The elements of the runs after the changes, in memory of their own."""
        region = old.region(changes.runs)
        bits = region.gather()
        bits[changes.positions] = changes.values
        return region.holding(bits)

    return _smallest(old.layout, exp.encode(old, changes), after)


def decode(
    old: Weights, blocks: Iterable[Block], *, relative: bool = True, on_progress: OnProgress | None = None
) -> Iterator[Changes]:
    """Verified changes, in the order of the blocks. `relative` is False for the blocks of an anchor.

    MismatchError if a block does not add up against `old`: then these are not the bits that it was made against.
    """
    done = _counter(on_progress)
    decode_one = partial(decode_block, old, relative=relative)
    for decoded in each(decode_one, blocks, on_done=lambda block: done(block.runs)):
        yield from decoded


def decode_into(
    target: Weights,
    old: Weights,
    blocks: Iterable[Block],
    *,
    relative: bool = True,
    on_progress: OnProgress | None = None,
) -> None:
    """Decode against `old` and overwrite `target`, a copy of it, block by block without staging the whole.

    On an error `target` is half written, so give one that nothing else uses yet.
    """

    def decode_one(block: Block) -> None:
        if not relative:
            restore_block(target, block)
            return
        for changes in decode_block(old, block, relative=True):
            overwrite(target, changes)

    done = _counter(on_progress)
    for _ in each(decode_one, blocks, on_done=lambda block: done(block.runs)):
        pass


def restore_block(target: Weights, block: Block) -> None:
    """Overwrite the elements of one block of an anchor, and verify them where they are then.

    On an error some of them are overwritten, so give weights that nothing else uses yet.
    """
    if isinstance(target, FileWeights):
        for changes in decode_block(target, block, relative=False):
            overwrite(target, changes)
        return
    _require_anchor(block)
    _require_digest(block, planes.decode_into(target, block), relative=False)


def decode_block(old: Weights, block: Block, *, relative: bool) -> list[Changes]:
    """The verified changes of one block, as `decode` gives them."""
    if not relative:
        _require_anchor(block)
    if block.codec == planes.PLANES:
        decoded, digest_delta = planes.decode(old, block, relative=relative)
    elif block.codec in (exp.EXP, exp.ABS):
        decoded, digest_delta = exp.decode(old, block)
    elif block.codec == coo.COO:
        decoded, digest_delta = coo.decode(old, block)
    else:
        raise FormatError(
            f"this release does not know the codec {block.codec!r:.80}", rule="block.codec", hint="upgrade deltasync"
        )
    _require_digest(block, digest_delta, relative=relative)
    count = sum(len(changes.values) for changes in decoded)
    if block.codec != planes.PLANES and count != block.changed:
        raise CorruptError(
            f"a block decodes to {count} changes, but its index says {block.changed}", rule="block.changed"
        )
    return decoded


def _require_anchor(block: Block) -> None:
    if block.codec != planes.PLANES:
        raise FormatError(
            f"an anchor has a block in codec {block.codec!r:.80}; only {planes.PLANES} is allowed", rule="anchor.codec"
        )


def _require_digest(block: Block, digest_delta: StateDigest, *, relative: bool) -> None:
    if digest_delta != block.digest:
        message = f"a block decodes to the digest {digest_delta}, but its index says {block.digest}"
        if not relative:
            raise CorruptError(message, rule="block.digest")
        hint = "the old weights are not the ones that this delta was made against"
        raise MismatchError(message, rule="block.digest", hint=hint)


def digest(weights: Weights, *, on_progress: OnProgress | None = None) -> StateDigest:
    """The state digest of all weights."""
    all_runs = layout_runs(weights.layout, elements=limits.PLANES_ELEMENTS)
    lanes = each(lambda runs: kernels().digest(weights.region(runs)), all_runs, on_done=_counter(on_progress))
    return sum((StateDigest(*pair) for pair in lanes), layout_digest(weights.layout))


def _counter(on_progress: OnProgress | None) -> Callable[[Runs], None]:
    return lambda runs: None if on_progress is None else on_progress(int(runs[:, 2].sum()))
