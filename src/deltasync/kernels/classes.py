"""Classes of old exponents, and steps in units in the last place: the model behind `exp/1`."""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from deltasync.format import limits
from deltasync.format.dtypes import DType
from deltasync.format.weights import Bits
from deltasync.kernels import sequence

CLASSES_MAX = limits.CLASSES_MAX

# The rest of this module's constants steer the writer only; a reader takes whatever thresholds it finds.
_CLASSES_WANTED = 10
_CLASS_COST_BITS = 320
_ELEMENTS_ALL_BELOW, _CHANGES_ALL_BELOW = 1 << 19, 1 << 15
_SAMPLE_RUN, _SAMPLE_SCALE = 256, 124


def exponents(dtype: DType, bits: Bits) -> NDArray[np.uint64]:
    """The exponent field of each element; 0 for integers."""
    wide: NDArray[np.uint64] = bits.astype(np.uint64)
    found: NDArray[np.uint64] = (wide >> np.uint64(dtype.exponent_shift)) & np.uint64(dtype.exponent_mask)
    return found


def zigzag_steps(dtype: DType, before: Bits, after: Bits) -> NDArray[np.uint64]:
    """Signed distance in the order of values, folded: +1, -1, +2, -2, ... become 0, 1, 2, 3, ..."""
    width = 8 * dtype.width
    step = (_ordinal(dtype, after) - _ordinal(dtype, before)).astype(before.dtype)
    negative = (step >> before.dtype.type(width - 1)) != 0
    magnitude = np.where(negative, (~step + before.dtype.type(1)), step).astype(np.uint64)
    folded: NDArray[np.uint64] = (magnitude - np.uint64(1)) * np.uint64(2) + negative
    return folded


def step_from(dtype: DType, before: Bits, zigzag: NDArray[np.uint64]) -> Bits:
    """The inverse of `zigzag_steps`: new bits from old bits."""
    magnitude = ((zigzag >> np.uint64(1)) + np.uint64(1)).astype(before.dtype)
    ordinal = _ordinal(dtype, before)
    moved = np.where(zigzag & np.uint64(1), ordinal - magnitude, ordinal + magnitude).astype(before.dtype)
    return _from_ordinal(dtype, moved)


def choose(dtype: DType, before: Bits, positions: NDArray[np.uint32], values: Bits) -> NDArray[np.uint8]:
    """Thresholds between classes: neighbouring exponents are merged while that costs less than a class's tables."""
    if not dtype.is_float:
        return np.empty(0, np.uint8)
    scale = 1
    if len(before) >= _ELEMENTS_ALL_BELOW and len(positions) >= _CHANGES_ALL_BELOW:
        scale, sampled = _SAMPLE_SCALE, _in_sample(positions)
        positions, values = positions[sampled], values[sampled]
    were = before[positions]
    symbols = sequence.buckets(zigzag_steps(dtype, were, values))[0]
    steps = np.zeros((dtype.exponent_mask + 1, sequence.BUCKETS_MAX), np.int64)
    np.add.at(steps, (exponents(dtype, were).astype(np.int64), symbols), scale)
    total = np.maximum(_population(dtype, before), steps.sum(axis=1))
    firsts = np.flatnonzero(total).tolist()
    groups = [(int(total[e]), steps[e]) for e in firsts]
    costs = [_cost(*g) for g in groups]
    joined = [_joined(groups, i) for i in range(len(groups) - 1)]
    while joined:
        growth = [_cost(*joined[i]) - costs[i] - costs[i + 1] for i in range(len(joined))]
        i = int(np.argmin(growth))
        if len(groups) <= _CLASSES_WANTED and growth[i] > _CLASS_COST_BITS << 12:
            break
        groups[i : i + 2] = [joined[i]]
        costs[i : i + 2] = [_cost(*joined[i])]
        del firsts[i + 1]
        del joined[i]
        for j in (i - 1, i):
            if 0 <= j < len(joined):
                joined[j] = _joined(groups, j)
    return np.array(firsts[1:], np.uint8)


def entropy_q12(counts: NDArray[np.int64]) -> int:
    """Bits to code symbols with these counts by an ideal order-0 coder, in units of 1/4096 bit."""
    total = int(counts.sum())
    return _n_log2_n(total) - sum(_n_log2_n(int(c)) for c in counts.tolist())


def _ordinal(dtype: DType, bits: Bits) -> Bits:
    """Floats: bits as integers that ascend with the value, -0.0 just below +0.0. Integers: as they are."""
    if not dtype.is_float:
        return bits
    sign = bits.dtype.type(1 << (8 * dtype.width - 1))
    return np.where(bits & sign, ~bits, bits | sign).astype(bits.dtype)


def _from_ordinal(dtype: DType, ordinal: Bits) -> Bits:
    if not dtype.is_float:
        return ordinal
    sign = ordinal.dtype.type(1 << (8 * dtype.width - 1))
    return np.where(ordinal & sign, ordinal ^ sign, ~ordinal).astype(ordinal.dtype)


def _in_sample(positions: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Which positions belong to the fixed sample of a large block."""
    found: NDArray[np.bool_] = positions % (_SAMPLE_RUN * _SAMPLE_SCALE) < _SAMPLE_RUN
    return found


def _population(dtype: DType, before: Bits) -> NDArray[np.int64]:
    """How many elements have each exponent: counted in small blocks, estimated from the sample in large ones."""
    scale = 1
    if len(before) >= _ELEMENTS_ALL_BELOW:
        scale, before = _SAMPLE_SCALE, before[_in_sample(np.arange(len(before)))]
    return np.bincount(exponents(dtype, before).astype(np.int64), minlength=dtype.exponent_mask + 1) * scale


def _joined(groups: list[tuple[int, NDArray[np.int64]]], i: int) -> tuple[int, NDArray[np.int64]]:
    (a, b), (c, d) = groups[i], groups[i + 1]
    return a + c, b + d


def _cost(total: int, steps: NDArray[np.int64]) -> int:
    """Bits, in 1/4096, to tell which of `total` elements changed and by which step symbol."""
    cost = _n_log2_n(total) - _n_log2_n(total - int(steps.sum()))
    return cost - sum(_n_log2_n(int(n)) for n in steps[steps > 0].tolist())


@cache
def _log2_table() -> list[int]:
    """floor(2^24 * log2(1 + i/256)) by repeated squaring: integers only, so that every machine gets the same table."""
    table = []
    for i in range(256):
        y, value = (256 + i) << 22, 0
        for _ in range(24):
            y = y * y >> 30
            value *= 2
            if y >> 31:
                y >>= 1
                value += 1
        table.append(value)
    return [*table, 1 << 24]


def _n_log2_n(n: int) -> int:
    """n * log2(n) in units of 1/4096, with straight lines between 256 places an octave; 0 for 0."""
    if n == 0:
        return 0
    e = n.bit_length() - 1
    place, rest = divmod(((n << 32) >> e) & 0xFFFFFFFF, 1 << 24)
    low, high = _log2_table()[place : place + 2]
    return n * ((e << 24) + low + ((high - low) * rest >> 24)) >> 12
