"""Steps 1, 2 and 6 together: a pair of states to blocks, and blocks to changes, on all cores.

Stretches and blocks do not overlap, so that threads never meet; the kernels release the GIL.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from deltasync.apply import overwrite
from deltasync.codecs import coo, exp, planes
from deltasync.detect import Changed, check_changed, detect, regroup, stretches
from deltasync.errors import CorruptError, FormatError, InvalidInputError, MismatchError
from deltasync.format import limits
from deltasync.format.changes import Changes, cut_runs
from deltasync.format.digest import StateDigest, layout_digest
from deltasync.format.layout import Layout
from deltasync.format.payload import Block
from deltasync.format.weights import Readable, Region, Runs, Weights, whole_runs
from deltasync.kernels.dispatch import kernels
from deltasync.parallel import each

OnProgress = Callable[[int], None]
"""Called with the number of elements that were just done."""

Source = Callable[[Runs], Iterator[Changes]]


def encode_delta(
    old: Weights,
    new: Weights,
    *,
    codec: str = exp.EXP,
    threads: int | None = None,
    on_progress: OnProgress | None = None,
) -> list[Block]:
    """What changed from `old` to `new`. Each block has the smallest of the codecs that `codec` stands for."""
    old.layout.require_equal(new.layout, ours="the old state", theirs="the new state")

    def exp_blocks(runs: Runs) -> list[Block]:
        found = exp.encode_difference(old, new, runs)
        return [_smallest(old.layout, block, partial(new.region, block.runs)) for block in found]

    return _encode(old, exp_blocks, lambda runs: detect(old, new, runs), codec, threads, on_progress)


def encode_changed(
    old: Weights,
    changed: Changed,
    *,
    codec: str = exp.EXP,
    threads: int | None = None,
    on_progress: OnProgress | None = None,
) -> list[Block]:
    """The same blocks from elements that are known to have changed, as an accelerator finds them."""
    check_changed(old.layout, changed)

    def exp_blocks(runs: Runs) -> list[Block]:
        found = regroup(old.layout, changed, runs)
        return [_smallest(old.layout, exp.encode(old, changes), partial(_after, old, changes)) for changes in found]

    return _encode(old, exp_blocks, lambda runs: regroup(old.layout, changed, runs), codec, threads, on_progress)


def encode_anchor(
    weights: Readable, *, threads: int | None = None, on_progress: OnProgress | None = None
) -> Iterator[Block]:
    """All weights, block by block."""
    pieces = stretches(weights.layout, elements=limits.PLANES_ELEMENTS)
    return each(lambda runs: planes.encode(weights, runs), pieces, threads=threads, on_done=_counter(on_progress))


def decode(
    old: Weights,
    blocks: Iterable[Block],
    *,
    relative: bool = True,
    threads: int | None = None,
    on_progress: OnProgress | None = None,
) -> Iterator[Changes]:
    """Verified changes, in the order of the blocks. `relative` is False for the blocks of an anchor.

    MismatchError if a block does not add up against `old`: then these are not the bits that it was made against.
    """

    def one(block: Block) -> list[Changes]:
        return _decode_block(old, block, relative=relative)

    done = _counter(on_progress)
    for parts in each(one, blocks, threads=threads, on_done=lambda block: done(block.runs)):
        yield from parts


def decode_into(
    target: Weights,
    old: Weights,
    blocks: Iterable[Block],
    *,
    relative: bool = True,
    threads: int | None = None,
    on_progress: OnProgress | None = None,
) -> None:
    """Decode against `old` and overwrite `target`, a copy of it, block by block without staging the whole.

    On an error `target` is half written: give it one that nobody else can see yet.
    """

    def one(block: Block) -> None:
        for changes in _decode_block(old, block, relative=relative):
            overwrite(target, changes)

    done = _counter(on_progress)
    for _ in each(one, blocks, threads=threads, on_done=lambda block: done(block.runs)):
        pass


def digest(weights: Weights, *, threads: int | None = None, on_progress: OnProgress | None = None) -> StateDigest:
    """The state digest of all weights."""
    pieces = stretches(weights.layout, elements=limits.PLANES_ELEMENTS)
    lanes = each(
        lambda runs: kernels().digest(weights.region(runs)), pieces, threads=threads, on_done=_counter(on_progress)
    )
    return sum((StateDigest(*pair) for pair in lanes), layout_digest(weights.layout))


def _encode(
    old: Weights,
    exp_blocks: Callable[[Runs], list[Block]],
    source: Source,
    codec: str,
    threads: int | None,
    on_progress: OnProgress | None,
) -> list[Block]:
    if codec == exp.EXP:
        encode, pieces = exp_blocks, stretches(old.layout)
    elif codec == coo.COO:
        encode = partial(_coo, old, source)
        pieces = [whole_runs(old.layout, [t]) for t, spec in enumerate(old.layout.tensors) if spec.elements]
    else:
        raise InvalidInputError(f"no codec {codec!r} for a delta", hint=f"use {exp.EXP} or {coo.COO}")
    found = each(encode, pieces, threads=threads, on_done=_counter(on_progress))
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
        parts, gained = planes.decode(old, block, relative=relative)
    elif not relative:
        raise FormatError(f"codec {block.codec!r} in an anchor", rule="anchor.codec")
    elif block.codec in (exp.EXP, exp.ABS):
        parts, gained = exp.decode(old, block)
    elif block.codec == coo.COO:
        parts, gained = coo.decode(old, block)
    else:
        raise FormatError(f"codec {block.codec!r} is not known", rule="block.codec", hint="upgrade deltasync")
    if gained != block.digest:
        told = f"a block gives {gained.hex} where {block.digest.hex} was promised"
        if not relative:
            raise CorruptError(told, rule="block.digest")
        hint = "the old weights are not the ones that this delta was made against"
        raise MismatchError(told, rule="block.digest", hint=hint)
    count = sum(len(p.values) for p in parts)
    if block.codec != planes.PLANES and count != block.changed:
        raise CorruptError(f"{count} changes where {block.changed} were promised", rule="block.changed")
    return parts


def _counter(on_progress: OnProgress | None) -> Callable[[Runs], None]:
    return lambda runs: None if on_progress is None else on_progress(int(runs[:, 2].sum()))
