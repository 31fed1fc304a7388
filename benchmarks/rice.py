"""The size of a change in old-exponent classes with Rice codes. Size only: exact, but no bytes are produced.

The old exponents are cut into eight ranges, chosen so that the positions have the least entropy. Within a
class the rank gap between changed elements takes a Rice code, and so does the step in units in the last
place (zigzag, from 0), each with its best parameter. A block also pays for a table: the ends of the ranges,
parameters and counts.
"""

import numpy as np
from numpy.typing import NDArray

from benchmarks.bits import Bits, ElementType, exponents, steps
from benchmarks.entropy import binary_entropies

CLASSES = 8
TABLE_BITS = CLASSES * (8 + 5 + 5 + 32)  # end of the range, two parameters, number of changes
LARGEST_PARAMETER = 31


def exponent_rice_bits(old: Bits, new: Bits, kind: ElementType) -> int:
    """Return the exact size in bits of one block's change."""
    changed = old != new
    if not changed.any():
        return TABLE_BITS
    exponent = exponents(old, kind)
    moved = np.flatnonzero(changed)
    seen = np.bincount(exponent, minlength=kind.exponents)
    hits = np.bincount(exponent[moved], minlength=kind.exponents)
    table = choose_classes(seen, hits)
    classes = table[exponent]
    step = steps(old[moved], new[moved], kind)
    zigzag = np.where(step > 0, 2 * step - 2, -2 * step - 1)
    bits = TABLE_BITS
    for index in range(int(table.max()) + 1):
        ranks = np.flatnonzero(changed[classes == index])
        bits += rice_bits(np.diff(ranks, prepend=-1) - 1)
        bits += rice_bits(zigzag[classes[moved] == index])
    return bits


def rice_bits(values: NDArray[np.int64]) -> int:
    """Return the bits of a Rice code of non-negative integers with the best parameter."""
    if not values.size:
        return 0
    # The size is convex in the parameter, with its minimum next to log2 of the mean.
    centre = int(np.log2(max(1.0, float(values.mean()))))
    candidates = range(max(0, centre - 2), min(LARGEST_PARAMETER, centre + 2) + 1)
    return min(int((values >> k).sum()) + values.size * (k + 1) for k in candidates)


def choose_classes(seen: NDArray[np.int64], hits: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Cut the exponents into at most eight ranges of least total entropy; return the class of each exponent."""
    present = np.flatnonzero(seen)
    count = present.size
    totals = np.concatenate([[0], np.cumsum(seen[present])])
    changes = np.concatenate([[0], np.cumsum(hits[present])])
    # cost[i, j]: bits of the positions in a class of the present exponents i to j - 1.
    cost = binary_entropies(totals[None, :] - totals[:, None], changes[None, :] - changes[:, None])
    cost[np.tril_indices(count + 1)] = np.inf
    best = cost[0].copy()
    cuts: list[NDArray[np.int64]] = []
    for _ in range(min(CLASSES, count) - 1):
        through = best[:, None] + cost
        cuts.append(through.argmin(0))
        best = through.min(0)
    ends = [count]
    for cut in reversed(cuts):
        ends.append(int(cut[ends[-1]]))
    table = np.zeros(seen.size, np.uint8)
    for end in ends[1:]:
        table[present[end:]] += 1
    return table
