"""`planes/1`: all elements of a block, split into byte planes, each entropy-coded where that helps.

Anchors consist of it, and a block of a delta falls back to it when so much changed that the weights are smaller.
"""

from dataclasses import replace

import numpy as np

from deltasync.format.digest import StateDigest
from deltasync.format.payload import Block
from deltasync.format.weights import Changes, Readable, Region, Runs, Weights
from deltasync.kernels import kernels

PLANES = "planes/1"


def encode(new: Readable, runs: Runs) -> Block:
    """A block of an anchor. Its digest is the sum over all of its elements, as if they had been zero before."""
    region = new.region(runs)
    return Block(
        codec=PLANES,
        runs=runs,
        changed=region.elements,
        digest=StateDigest(*kernels().digest(region)),
        data=kernels().encode_planes(region),
    )


def encode_whole(block: Block, new: Region) -> Block:
    """The same change as `block`, given as all of its elements after the change."""
    return replace(block, codec=PLANES, data=kernels().encode_planes(new))


def decode_into(target: Weights, block: Block) -> StateDigest:
    """Overwrite the elements of a block of an anchor in one pass, and give what they add to a state of zeros."""
    return StateDigest(*kernels().decode_planes_into(block.data, target.region(block.runs)))


def decode(old: Weights, block: Block, *, relative: bool) -> tuple[list[Changes], StateDigest]:
    """All elements, and what they add to the digest: of `old` if `relative`, else of a state of zeros."""
    region = old.region(block.runs)
    bits = np.empty(region.elements, region.dtype.bits_dtype)
    digest_delta = StateDigest(*kernels().decode_planes_into(block.data, region.holding(bits)))
    if relative:
        digest_delta -= StateDigest(*kernels().digest(region))
    return [Changes(block.runs, None, bits)], digest_delta
