"""Changes by tensor, and what becomes of a capture when the shadow moves on under it."""

from collections.abc import Iterable, Iterator
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from deltasync.detect import Changed
from deltasync.format.changes import Changes
from deltasync.format.layout import Layout
from deltasync.format.weights import Bits, Weights


def by_tensor(layout: Layout, captured: Iterable[Changes]) -> Changed:
    """Captured changes as ascending indices and bits of each tensor.

    Captures come in the order of the layout, at least for tensors of one element type. Nothing of one is kept once its
    tensors are done, so that an iterator that gives them away needs hardly more memory than they did.
    """
    result: dict[str, tuple[NDArray[np.unsignedinteger], Bits]] = {}
    for ordinal, parts in groupby(_parts(layout, captured), key=lambda part: part[0]):
        found = [(indices, values) for _, indices, values in parts]
        name = layout.tensors[ordinal].name
        if name in result:
            raise ValueError(f"the changes of {name!r} did not come together")
        result[name] = np.concatenate([i for i, _ in found]), np.concatenate([v for _, v in found])
    return result


def _parts(layout: Layout, captured: Iterable[Changes]) -> Iterator[tuple[int, NDArray[np.unsignedinteger], Bits]]:
    """Ordinal, indices and bits of each run that has changes."""
    for changes in captured:
        if changes.positions is None:
            raise ValueError("a capture has positions")
        ends = np.cumsum(changes.runs[:, 2])
        cuts = np.searchsorted(changes.positions, ends)
        lo = 0
        for (ordinal, first, count), end, hi in zip(changes.runs.tolist(), ends.tolist(), cuts.tolist(), strict=True):
            if hi > lo:
                wide = index_dtype(layout, ordinal)
                # The difference can be negative, the sum is not: unsigned arithmetic wraps around to it.
                shift = np.array(first - (end - count)).astype(np.int64).astype(wide)
                yield ordinal, changes.positions[lo:hi].astype(wide) + shift, changes.values[lo:hi]
            lo = hi


def index_dtype(layout: Layout, ordinal: int) -> "np.dtype[np.unsignedinteger]":
    """4 bytes while every index fits: captures are held in memory."""
    return np.dtype(np.uint32 if layout.tensors[ordinal].elements <= 1 << 32 else np.uint64)


def bits_at(weights: Weights, changed: Changed) -> Changed:
    """The bits that `weights` has where something changed."""
    ordinals = weights.layout.ordinals
    return {name: (indices, weights.arrays[ordinals[name]][indices]) for name, (indices, _) in changed.items()}


def overwrite_all(weights: Weights, changed: Changed) -> None:
    """Write the new bits into `weights`."""
    ordinals = weights.layout.ordinals
    for name, (indices, values) in changed.items():
        weights.arrays[ordinals[name]][indices] = values


def rebase(pending: Changed, sent: Changed, before: Changed) -> Changed:
    """`pending`, captured against a shadow to which `sent` was applied since; `before` has the bits that it replaced.

    What was sent and is back to its old bits has to be sent again; what was sent as it still is has not.
    """
    result: dict[str, tuple[NDArray[np.unsignedinteger], Bits]] = {}
    for name in pending.keys() | sent.keys():
        if name not in sent:
            result[name] = pending[name]
            continue
        indices, values = _rebased(pending.get(name), sent[name], before[name][1])
        if len(indices):
            result[name] = indices, values
    return result


def _rebased(
    pending: tuple[NDArray[np.unsignedinteger], Bits] | None,
    sent: tuple[NDArray[np.unsignedinteger], Bits],
    before: Bits,
) -> tuple[NDArray[np.unsignedinteger], Bits]:
    sent_indices, sent_values = sent
    if pending is None:
        return sent_indices, before
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
