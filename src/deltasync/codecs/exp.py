"""`exp/1`: changes, conditioned on the old exponents, which the receiver has. `abs/1`: the same with absolute values.

Inside each class of old exponents the gaps between changed elements are coded, then the steps in units in the last
place (`exp/1`) or the new bits as they are (`abs/1`), whichever is smaller.
"""

from collections.abc import Iterator

from deltasync.errors import InvalidInputError
from deltasync.format import limits
from deltasync.format.digest import StateDigest
from deltasync.format.payload import Block
from deltasync.format.weights import Changes, Readable, Runs, Weights, slice_runs
from deltasync.kernels import kernels

EXP = "exp/1"
ABS = "abs/1"


def encode(old: Weights, changes: Changes) -> Block:
    """One block, `exp/1` or `abs/1`."""
    if changes.positions is None:
        raise InvalidInputError("exp/1 codes changed elements: the changes must have positions")
    absolute, data, lanes = kernels().encode_changes(old.region(changes.runs), changes.positions, changes.values)
    return Block(
        codec=ABS if absolute else EXP,
        runs=changes.runs,
        changed=len(changes.positions),
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
