"""Hypothesis strategies for states of a model: layouts, weights, pairs of an old and a new state, and runs of them.

They lean towards what breaks codecs: signed zeros, infinities, NaN payloads, subnormals, the largest finite value,
exponent boundaries, steps of one unit in the last place, sign flips, empty tensors and scalars, no change at all and
nothing but changes. Arrays are filled from a drawn seed, so that large states cost little to draw.

This module needs `hypothesis`, which deltasync itself does not.
"""

from typing import Literal, get_args

import numpy as np
from hypothesis import strategies as st

from deltasync.format.layout import DTYPES, DType, Layout, TensorSpec
from deltasync.format.weights import Bits, Runs, Weights

Look = Literal["weights", "uniform", "special", "constant"]
"""What the bits of a state look like: trained weights, any bits, boundary values, or one value everywhere."""

Move = Literal["ulp", "sign", "exponent", "special", "replace"]
"""What a change does: small steps, sign flips, twice or half the value, boundary values, or any bits."""

LOOKS: tuple[Look, ...] = get_args(Look)
MOVES: tuple[Move, ...] = get_args(Move)
SHARES = (0.0, 0.001, 0.01, 0.1, 0.5, 0.9, 1.0)
"""Shares of elements that change."""

_NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
_SEEDS = st.integers(0, 2**32 - 1)
_CHANGES = st.tuples(st.sampled_from(SHARES), st.sampled_from(MOVES), st.booleans())


def special_bits(dtype: DType) -> Bits:
    """Boundary values of an element type as bits: for floats, boundary exponents with boundary mantissas."""
    width, kind = 8 * dtype.width, dtype.bits_dtype.type
    if not dtype.is_float:
        edges = {0, 1, 2, (1 << width) - 1, (1 << width) - 2, 1 << (width - 1), (1 << (width - 1)) - 1}
        return np.array(sorted(edges), kind)
    top, last = dtype.exponent_mask, (1 << dtype.exponent_shift) - 1
    exponents = {0, 1, top // 2, top // 2 + 1, top - 1, top}
    mantissas = {0, 1, last // 2 + 1, last - 1, last}
    positive = {e << dtype.exponent_shift | m for e in exponents for m in mantissas}
    return np.array(sorted(positive | {p | 1 << (width - 1) for p in positive}), kind)


def random_bits(rng: np.random.Generator, dtype: DType, elements: int, look: Look) -> Bits:
    """Bits of that look. Equal generators give equal bits."""
    kind = dtype.bits_dtype
    if look == "constant":
        return np.full(elements, rng.choice(special_bits(dtype)), kind)
    if look == "special":
        return np.asarray(rng.choice(special_bits(dtype), elements), kind)
    uniform = rng.integers(0, np.iinfo(kind).max, elements, kind, endpoint=True)
    if look == "uniform" or not dtype.is_float:
        return uniform
    # Exponents fall off below a maximum, as those of normally distributed weights do.
    below = np.minimum(rng.geometric(0.5, elements) - 1, dtype.exponent_mask // 2)
    exponents = (dtype.exponent_mask // 2 - below).astype(kind) << kind.type(dtype.exponent_shift)
    others = kind.type(~(dtype.exponent_mask << dtype.exponent_shift) & np.iinfo(kind).max)
    mixed: Bits = (uniform & others) | exponents
    return mixed


def random_change(rng: np.random.Generator, dtype: DType, old: Bits, share: float, move: Move) -> Bits:
    """A copy of `old` in which about that share of the elements differs; with a share of 1, every element does."""
    at = np.flatnonzero(rng.random(len(old)) < share)
    new = old.copy()
    new[at] = _moved(rng, dtype, old[at], move)
    same = at[new[at] == old[at]]
    new[same] ^= old.dtype.type(1)
    return new


def dtypes() -> st.SearchStrategy[DType]:
    """Every element type that the format knows."""
    return st.sampled_from(list(DTYPES.values()))


def shapes(*, elements_max: int = 400) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of up to three dimensions: scalars, empty ones, rows, matrices."""
    side = max(1, int(elements_max ** (1 / 3)))
    return st.one_of(
        st.just(()),
        st.tuples(st.integers(0, elements_max)),
        st.tuples(st.integers(0, side), st.integers(0, elements_max // side)),
        st.tuples(st.integers(0, side), st.integers(0, side), st.integers(0, side)),
    )


@st.composite
def layouts(
    draw: st.DrawFn,
    *,
    of: st.SearchStrategy[DType] | None = None,
    tensors_min: int = 0,
    tensors_max: int = 5,
    elements_max: int = 400,
) -> Layout:
    """Layouts of any names and of element types from `of`; `elements_max` bounds each tensor."""
    entries = st.tuples(_NAMES, dtypes() if of is None else of, shapes(elements_max=elements_max))
    chosen = draw(st.lists(entries, min_size=tensors_min, max_size=tensors_max, unique_by=lambda entry: entry[0]))
    return Layout.of(TensorSpec(*entry) for entry in chosen)


@st.composite
def weights(draw: st.DrawFn, layout: Layout | None = None) -> Weights:
    """A state of the layout, or of any."""
    found = draw(layouts()) if layout is None else layout
    rng = np.random.default_rng(draw(_SEEDS))
    looks = draw(st.tuples(*(st.sampled_from(LOOKS) for _ in found.tensors)))
    return Weights(
        found,
        tuple(random_bits(rng, t.dtype, t.elements, look) for t, look in zip(found.tensors, looks, strict=True)),
    )


@st.composite
def pairs(draw: st.DrawFn, layout: Layout | None = None) -> tuple[Weights, Weights]:
    """An old and a new state of one layout. In each tensor there is its own kind of change, or none."""
    old = draw(weights(layout))
    rng = np.random.default_rng(draw(_SEEDS))
    new = []
    for spec, bits in zip(old.layout.tensors, old.arrays, strict=True):
        share, move, single = draw(_CHANGES)
        after = random_change(rng, spec.dtype, bits, share, move)
        if single and len(after):
            # Single values that hypothesis can shrink.
            after[draw(st.integers(0, len(after) - 1))] = draw(st.sampled_from(special_bits(spec.dtype).tolist()))
        new.append(after)
    return old, Weights(old.layout, tuple(new))


@st.composite
def run_tables(draw: st.DrawFn, layout: Layout) -> Runs:
    """Runs that one block could cover: pieces of tensors of one type, disjoint, in any order; may be empty."""
    by_dtype: dict[str, list[int]] = {}
    for ordinal, spec in enumerate(layout.tensors):
        if spec.elements:
            by_dtype.setdefault(spec.dtype.name, []).append(ordinal)
    if not by_dtype:
        return np.empty((0, 3), np.int64)
    ordinals = by_dtype[draw(st.sampled_from(sorted(by_dtype)))]
    rows = [row for t in ordinals for row in draw(_pieces(t, layout.tensors[t]))]
    return np.array(draw(st.permutations(rows)) if len(rows) <= 8 else rows, np.int64).reshape(-1, 3)


@st.composite
def _pieces(draw: st.DrawFn, ordinal: int, spec: TensorSpec) -> list[tuple[int, int, int]]:
    """One tensor whole, a part of it, two parts, some columns of every row, or nothing."""
    n, columns = spec.elements, spec.shape[-1] if spec.shape else 1
    how = draw(st.sampled_from(("whole", "part", "parts", "columns", "nothing")))
    if how == "whole":
        return [(ordinal, 0, n)]
    if how == "nothing":
        return []
    if how == "columns":
        first = draw(st.integers(0, columns - 1))
        count = draw(st.integers(1, columns - first))
        return [(ordinal, row * columns + first, count) for row in range(n // columns)]
    cuts = sorted(draw(st.lists(st.integers(0, n), min_size=4, max_size=4)))
    spans = [(cuts[0], cuts[1]), (cuts[2], cuts[3])] if how == "parts" else [(cuts[0], cuts[3])]
    return [(ordinal, begin, end - begin) for begin, end in spans if begin < end]


def _moved(rng: np.random.Generator, dtype: DType, old: Bits, move: Move) -> Bits:
    kind = old.dtype.type
    if move == "replace":
        return random_bits(rng, dtype, len(old), "uniform")
    if move == "special":
        return random_bits(rng, dtype, len(old), "special")
    if move == "sign":
        return old ^ kind(1 << (8 * dtype.width - 1))
    unit = kind(1) << kind(dtype.exponent_shift if move == "exponent" else 0)
    steps = np.minimum(rng.geometric(0.6, len(old)), 100).astype(old.dtype) * unit
    return np.where(rng.random(len(old)) < 0.5, old + steps, old - steps).astype(old.dtype)


def state_pair(
    dtype: str, elements: int, share: float, *, look: Look = "weights", move: Move = "replace"
) -> tuple[Weights, Weights]:
    """One tensor, before and after."""
    rng = np.random.default_rng(elements)
    layout = Layout.of([TensorSpec("w", DTYPES[dtype], (elements,))])
    old = random_bits(rng, DTYPES[dtype], elements, look)
    return Weights(layout, (old,)), Weights(layout, (random_change(rng, DTYPES[dtype], old, share, move),))
