"""`coo/1`: plain indices and values, one pair for each tensor, that any safetensors reader can open and apply.

for name in changed:
    weights[name].view(-1)[f[name + ".indices"].long()] = f[name + ".values"]
"""

from collections.abc import Iterable

import numpy as np

from deltasync.errors import CorruptError, InvalidInputError
from deltasync.format import limits
from deltasync.format.digest import StateDigest
from deltasync.format.layout import TensorSpec
from deltasync.format.payload import Block, index_dtype
from deltasync.format.weights import Changes, Weights, cut_runs, whole_runs
from deltasync.kernels import kernels

COO = "coo/1"


def encode(old: Weights, ordinal: int, run_changes: Iterable[Changes]) -> Block | None:
    """The changes of one tensor, given run by run in order; None if there are none."""
    spec = old.layout.tensors[ordinal]
    indices, values, digest_delta = [np.empty(0, np.int64)], [np.empty(0, spec.dtype.bits_dtype)], StateDigest.ZERO
    for changes in run_changes:
        assert changes.positions is not None
        indices.append(changes.positions.astype(np.int64) + changes.runs[0, 1])
        values.append(changes.values)
        digest_delta += StateDigest(
            *kernels().digest_change(old.region(changes.runs), changes.positions, changes.values)
        )
    flat, bits = np.concatenate(indices), np.concatenate(values)
    if not len(flat):
        return None
    if (old.arrays[ordinal][flat] == bits).any():
        raise InvalidInputError(
            f"an element of {spec} is listed as changed but has its old bits", rule="changes.unchanged"
        )
    return Block(
        codec=COO,
        runs=whole_runs(old.layout, [ordinal]),
        changed=len(flat),
        digest=digest_delta,
        data=flat.astype(index_dtype(spec)).tobytes() + bits.tobytes(),
    )


def decode(old: Weights, block: Block) -> tuple[list[Changes], StateDigest]:
    """The changes, cut into runs of the usual size, and what they add to the digest of `old`."""
    spec = old.layout.tensors[block.runs[0, 0]]
    indices, values = _arrays(spec, block)
    decoded, digest_delta = [], StateDigest.ZERO
    for runs in cut_runs(block.runs, limits.BLOCK_ELEMENTS_MAX):
        first, count = int(runs[0, 1]), int(runs[0, 2])
        lo, hi = np.searchsorted(indices, (first, first + count))
        if lo == hi:
            continue
        positions = (indices[lo:hi] - first).astype(np.uint32)
        digest_delta += StateDigest(*kernels().digest_change(old.region(runs), positions, values[lo:hi]))
        decoded.append(Changes(runs, positions, values[lo:hi]))
    return decoded, digest_delta


def _arrays(spec: TensorSpec, block: Block) -> tuple[np.ndarray, np.ndarray]:
    index_type = index_dtype(spec)
    nbytes = block.changed * (index_type.itemsize + spec.dtype.width)
    if len(block.data) != nbytes:
        raise CorruptError(
            f"{block.changed} changes of {spec} have {len(block.data)} bytes; they must have {nbytes}", rule="coo.size"
        )
    indices = np.frombuffer(block.data, index_type, block.changed).astype(np.int64)
    values = np.frombuffer(block.data, spec.dtype.bits_dtype, block.changed, block.changed * index_type.itemsize)
    if len(indices) and (indices[0] < 0 or indices[-1] >= spec.elements or (np.diff(indices) <= 0).any()):
        raise CorruptError(f"indices into {spec} must ascend and stay inside it", rule="coo.indices")
    return indices, values
