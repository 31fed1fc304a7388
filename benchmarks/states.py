"""Pairs as deltasync sees them: weights of one layout, and the files that they turn into."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from benchmarks.bits import Bits
from benchmarks.data.pair import Pair
from deltasync import blocks
from deltasync.codecs import planes
from deltasync.format import limits
from deltasync.format.layout import DTYPES, Layout, TensorSpec
from deltasync.format.payload import Block, Payload, PayloadHeader, write_payload
from deltasync.format.weights import Weights
from deltasync.parallel import each


@dataclass(frozen=True, slots=True)
class States:
    """The weights before and after a step; the arrays are those of the pair."""

    old: Weights
    new: Weights


def states_of(pair: Pair) -> States:
    """See a pair as weights of its element type, without a copy."""
    return States(old=_weights(pair.old, pair.kind.name), new=_weights(pair.new, pair.kind.name))


def copy_of(weights: Weights) -> Weights:
    """Copy the arrays."""
    return Weights(weights.layout, tuple(array.copy() for array in weights.arrays))


def restore(target: Weights, source: Weights) -> None:
    """Overwrite all of `target` with the bits of `source`."""
    for array, bits in zip(target.arrays, source.arrays, strict=True):
        np.copyto(array, bits)


def is_equal(one: Weights, other: Weights) -> bool:
    """Return whether two states have the same bits."""
    return all(np.array_equal(a, b) for a, b in zip(one.arrays, other.arrays, strict=True))


def last_tensors(weights: Weights, *, nbytes: int) -> Weights:
    """Return the shortest tail of the tensors that holds at least `nbytes`, or all."""
    count = total = 0
    while count < len(weights.arrays) and total < nbytes:
        count += 1
        total += weights.arrays[-count].nbytes
    return Weights(Layout.of(weights.layout.tensors[-count:]), weights.arrays[-count:])


def delta_file(states: States, found: list[Block]) -> bytes:
    """Return the whole payload file of a delta."""
    parent = blocks.digest(states.old)
    digest = sum((block.digest for block in found), parent)
    return write_payload(PayloadHeader("delta", states.old.layout, parent, digest), found)


def anchor_blocks(weights: Weights) -> list[Block]:
    """Encode all weights as the blocks of an anchor."""
    all_runs = blocks.layout_runs(weights.layout, elements=limits.PLANES_ELEMENTS)
    return list(each(lambda runs: planes.encode(weights, runs), all_runs))


def anchor_file(weights: Weights) -> bytes:
    """Return the whole payload file of an anchor: all weights, compressed."""
    found = anchor_blocks(weights)
    digest = blocks.digest(weights)
    return write_payload(PayloadHeader("anchor", weights.layout, None, digest), found)


def restores(states: States, file: bytes) -> bool:
    """Return whether a delta file makes exactly the new state of a copy of the old one."""
    target = copy_of(states.old)
    blocks.decode_into(target, states.old, Payload.parse(file).blocks())
    return is_equal(target, states.new)


def _weights(tensors: Mapping[str, Bits], dtype: str) -> Weights:
    layout = Layout.of(TensorSpec(name, DTYPES[dtype], bits.shape) for name, bits in tensors.items())
    return Weights(layout, tuple(tensors[spec.name].reshape(-1) for spec in layout.tensors))
