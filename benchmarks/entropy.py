"""What a change must cost at least, given what the receiver already holds: the old weights.

An element changes only if its update crosses half a unit in the last place, and the old exponent sets that
unit. The bound is H(changed | old exponent) + H(ulp step | old exponent), from the counts of each block.
The tables that a decoder would need are not counted: where steps take very many values (float32), no real
code reaches the bound.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.bits import Bits, ElementType, exponents, steps

CHUNK = 1 << 21
NEAR = 128  # steps in [-NEAR, NEAR) are counted in a table, the rest by sorting
_STEP_SPAN = 1 << 34  # wider than any difference of two 32-bit keys
_STEP_ZERO = _STEP_SPAN >> 1


@dataclass(frozen=True, slots=True)
class Entropy:
    """Totals in bits over all blocks; the properties are bits per changed element."""

    elements: int
    changed: int
    change_bits: float
    step_bits: float

    @property
    def change(self) -> float:
        """H(changed | old exponent), per changed element."""
        return self.change_bits / self.changed if self.changed else 0.0

    @property
    def step(self) -> float:
        """H(ulp step | old exponent), per changed element."""
        return self.step_bits / self.changed if self.changed else 0.0

    @property
    def total(self) -> float:
        """The bound: change plus step."""
        return self.change + self.step

    @property
    def nbytes(self) -> float:
        """The bound as a file size."""
        return (self.change_bits + self.step_bits) / 8


def conditional_entropy(blocks: Iterable[tuple[Bits, Bits]], kind: ElementType) -> Entropy:
    """Sum the conditional entropies of blocks, each given as flat old and new bits."""
    elements = changed = 0
    change_bits = step_bits = 0.0
    for old, new in blocks:
        seen, moved, block_steps = _block(old, new, kind)
        elements += int(seen.sum())
        changed += int(moved.sum())
        change_bits += float(binary_entropies(seen, moved).sum())
        step_bits += block_steps
    return Entropy(elements=elements, changed=changed, change_bits=change_bits, step_bits=step_bits)


def binary_entropies(seen: NDArray[np.int64], moved: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the bits that say which `moved` of `seen` alike elements changed, for arrays of both counts."""
    return _plogp(seen) - _plogp(moved) - _plogp(seen - moved)


def _block(old: Bits, new: Bits, kind: ElementType) -> tuple[NDArray[np.int64], NDArray[np.int64], float]:
    """Count elements and changes by old exponent, and return the bits of all steps given the exponent."""
    classes = kind.exponents
    seen = np.zeros(classes, np.int64)
    near = np.zeros(classes * 2 * NEAR, np.int64)
    far: list[NDArray[np.int64]] = []
    for start in range(0, old.size, CHUNK):
        part = slice(start, start + CHUNK)
        exponent = exponents(old[part], kind)
        seen += np.bincount(exponent, minlength=classes)
        moved = np.flatnonzero(old[part] != new[part])
        step = steps(old[part][moved], new[part][moved], kind)
        which = exponent[moved].astype(np.int64)
        is_near = (step >= -NEAR) & (step < NEAR)
        near += np.bincount(which[is_near] * (2 * NEAR) + step[is_near] + NEAR, minlength=near.size)
        far.append(which[~is_near] * _STEP_SPAN + step[~is_near] + _STEP_ZERO)
    keys, counts = np.unique(np.concatenate(far) if far else np.empty(0, np.int64), return_counts=True)
    by_class = near.reshape(classes, 2 * NEAR).sum(1)
    np.add.at(by_class, keys // _STEP_SPAN, counts)
    bits = _plogp(by_class).sum() - _plogp(near).sum() - _plogp(counts).sum()
    return seen, by_class, float(bits)


def _plogp(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return n log2 n, with 0 at 0 and below."""
    values = counts.astype(np.float64)
    return values * np.log2(np.maximum(values, 1.0))
