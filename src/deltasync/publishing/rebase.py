"""Changes by tensor, and what becomes of a capture when the shadow moves on under it."""

from collections.abc import Iterable, Iterator
from itertools import groupby, pairwise

import numpy as np
from numpy.typing import NDArray

from deltasync.detect import Changed
from deltasync.format.changes import Changes, tensor_parts
from deltasync.format.layout import Layout
from deltasync.format.weights import Bits, Weights

Part = tuple[NDArray[np.unsignedinteger], Bits]
"""Ascending indices and new bits of one tensor."""

_WINDOW = 1 << 18
"""Changes that are rebased at a time: what is needed on the way stays small."""


def tensors_of(layout: Layout, captured: Iterable[Changes], *, in_place: bool = False) -> Iterator[tuple[str, Part]]:
    """Captured changes as ascending indices and bits of each tensor, by its name.

    Captures come in the order of the layout, at least those of one type.

    `in_place`: the captures are used up. A tensor that lies in one of them keeps that memory: hardly more is needed.
    """
    seen: set[str] = set()
    found = (part for changes in captured for part in tensor_parts(layout, changes, in_place=in_place))
    for ordinal, parts in groupby(found, key=lambda part: part[0]):
        name = layout.tensors[ordinal].name
        if name in seen:
            raise ValueError(f"the changes of {name!r} did not come together")
        seen.add(name)
        yield name, _joined([(indices, values) for _, indices, values in parts])


def bits_at(weights: Weights, changed: Changed) -> Changed:
    """The bits that `weights` has where something changed."""
    ordinals = weights.layout.ordinals
    return {name: (indices, weights.arrays[ordinals[name]][indices]) for name, (indices, _) in changed.items()}


def overwrite_all(weights: Weights, changed: Changed) -> None:
    """Write the new bits into `weights`."""
    ordinals = weights.layout.ordinals
    for name, (indices, values) in changed.items():
        weights.arrays[ordinals[name]][indices] = values


def rebase(pending: Iterable[tuple[str, Part]], sent: Changed, before: Changed) -> Changed:
    """`pending`, captured against a shadow to which `sent` was applied since; `before` has the bits that it replaced.

    What was sent and is back to its old bits has to be sent again; what was sent as it still is has not.
    """
    result: dict[str, Part] = {}
    for name, part in pending:
        result[name] = _rebased(part, sent[name], before[name][1]) if name in sent else part
    for name in sent.keys() - result.keys():
        result[name] = before[name]
    return {name: part for name, part in result.items() if len(part[0])}


def _rebased(pending: Part, sent: Part, before: Bits) -> Part:
    (indices, values), (sent_indices, sent_values) = pending, sent
    here = [*range(0, max(len(indices), 1), _WINDOW), len(indices)]
    there = [0, *np.searchsorted(sent_indices, indices[here[1:-1]]).tolist(), len(sent_indices)]
    windows = zip(pairwise(here), pairwise(there), strict=True)
    return _joined(
        [
            _rebased_window(
                (indices[lo:hi], values[lo:hi]), (sent_indices[first:last], sent_values[first:last]), before[first:last]
            )
            for (lo, hi), (first, last) in windows
        ]
    )


def _joined(parts: list[Part]) -> Part:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([indices for indices, _ in parts]), np.concatenate([values for _, values in parts])


def _rebased_window(pending: Part, sent: Part, before: Bits) -> Part:
    sent_indices, sent_values = sent
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
