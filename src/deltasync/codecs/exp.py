"""`exp/1`: changes, conditioned on the old exponents, which the receiver has. `abs/1`: the same with absolute values.

Inside each class of old exponents the gaps between changed elements are coded, then the steps in units in the last
place (`exp/1`) or the new bits as they are (`abs/1`), whichever is smaller.
"""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from deltasync.errors import InvalidInputError
from deltasync.format import limits
from deltasync.format.digest import StateDigest
from deltasync.format.layout import DType
from deltasync.format.payload import Block
from deltasync.format.weights import Changes, Readable, Runs, Weights, slice_runs
from deltasync.kernels import kernels, rans
from deltasync.kernels.reference import read_thresholds

EXP = "exp/1"
ABS = "abs/1"

STEP_BINS = 65
"""Steps of 1, 2, 3 to 4, 5 to 8 units in the last place, and so on: bin k ends with 2^k."""

_TABLES_BYTES_MAX = 4096
"""Room for what stands before the words of a sequence: classes, thresholds, counts, 16 tables, the number of words."""


def encode(old: Weights, changes: Changes) -> Block:
    """One block, `exp/1` or `abs/1`."""
    positions = changes.positions
    if positions is None:
        raise InvalidInputError("exp/1 codes changed elements: the changes must have positions")
    absolute, data, lanes = kernels().encode_changes(old.region(changes.runs), positions, changes.values)
    return Block(
        codec=ABS if absolute else EXP,
        runs=changes.runs,
        changed=len(positions),
        digest=StateDigest(*lanes),
        data=data,
    )


def encode_difference(old: Readable, new: Readable, runs: Runs) -> Iterator[Block]:
    """The blocks of `runs`, as `detect` cuts them and `encode` codes them, in one pass over memory."""
    before, after = old.region(runs), new.region(runs)
    start, elements = 0, before.elements
    while start < elements:
        changed, stop, absolute, data, lanes = kernels().encode_difference(
            before, after, start, cell=limits.CELL_ELEMENTS, enough=limits.BLOCK_CHANGES_SOFT
        )
        if changed:
            covered = slice_runs(runs, start, stop)
            yield Block(ABS if absolute else EXP, covered, changed, StateDigest(*lanes), data)
        start = stop


def decode(old: Weights, block: Block) -> tuple[list[Changes], StateDigest]:
    """The changes, and what they add to the digest of `old`."""
    region = old.region(block.runs)
    positions, values, lanes = kernels().decode_changes(region, block.data, absolute=block.codec == ABS)
    return [Changes(block.runs, positions, values)], StateDigest(*lanes)


def read_steps(read: Callable[[int, int], bytes], nbytes: int, dtype: DType) -> NDArray[np.float64]:
    """How many changes of an `exp/1` block are steps of each size, by `STEP_BINS`, from its tables alone.

    `read` returns a range of the block, which has `nbytes` bytes. Three small ranges are read, and nothing is decoded:
    the steps do not depend on the old weights, and the tables that they are coded with say how often each occurs, to
    about one part in eight of a bin. CorruptError with the broken rule if the block is no such block.
    """

    def reader(offset: int) -> rans.ByteReader:
        left = nbytes - offset
        return rans.ByteReader(read(offset, min(_TABLES_BYTES_MAX, left)) if left > 0 else b"")

    head = reader(0)
    counts = [head.varint() for _ in range(len(read_thresholds(head, dtype)) + 1)]
    lanes, _, words = rans.read_tables(head, counts, alphabet=rans.EXACT + 2 * (limits.BLOCK_ELEMENTS_LOG2 - 4))
    at = head.at + 4 * lanes + 2 * words
    between = reader(at)
    extra_bytes = between.varint()
    _, tables, _ = rans.read_tables(
        reader(at + between.at + extra_bytes), counts, alphabet=rans.EXACT + 2 * (8 * dtype.width - 4)
    )
    bins = np.zeros(STEP_BINS)
    for count, frequencies in zip((count for count in counts if count), tables, strict=True):
        symbols = np.arange(len(frequencies))
        # Two neighbouring numbers are steps up and down by the same size; above 8, two buckets make a bin.
        sizes = np.array([0, 1, 2, 2, 3, 3, 3, 3])
        of_symbol = np.where(symbols < rans.EXACT, sizes[np.minimum(symbols, 15) // 2], 4 + (symbols - rans.EXACT) // 2)
        bins += count * np.bincount(of_symbol, weights=frequencies, minlength=STEP_BINS)[:STEP_BINS] / rans.SLOTS
    return bins
