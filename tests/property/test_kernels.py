"""The native kernels against the reference: the same arrays, the same bytes, and the same errors."""

import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support import repeats, strategies
from support.helpers import ChangesParts, encode_with, numbers
from support.strategies import Look, Move, random_bits, random_change

from deltasync.errors import DeltasyncError, InvalidInputError
from deltasync.format import limits
from deltasync.format.layout import DTYPES, DType, Layout, TensorSpec
from deltasync.format.weights import Region, Weights, whole_runs
from deltasync.kernels import Kernels, available, load, reference

REFERENCE = load("reference")
TRIED = [name for name in available() if name != "reference"]
"""The sets to compare with the reference: those of the variable, or all that this machine has."""

NATIVE = [load(name) for name in TRIED]
FLOATS = [d for d in DTYPES.values() if d.is_float]
KINDS = {(d.width, d.exponent_shift, d.exponent_mask): d for d in DTYPES.values()}
"""One element type for each kind that the kernels distinguish."""

# In CI a build without them is a failure, not a reason to skip.
assert NATIVE or "CI" not in os.environ, "CI must build the native kernels"
pytestmark = [pytest.mark.soak, pytest.mark.skipif(not NATIVE, reason="the native kernels are not built")]
some = settings(max_examples=repeats(80, soak=2000), deadline=None)
many = settings(max_examples=repeats(120, soak=3000), deadline=None)


def plain(value: Any) -> Any:
    """Arrays as type and bytes, so that == compares everything."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    return tuple(map(plain, value)) if isinstance(value, tuple) else value


def outcome(call: Callable[[], Any]) -> Any:
    """The result, or the class and the rule of the error. Other errors than ours are not caught."""
    try:
        return plain(call())
    except DeltasyncError as error:
        return type(error).__name__, error.rule


def copied(region: Region) -> Region:
    return Region(region.dtype, tuple(a.copy() for a in region.arrays), region.runs, region.keys)


def overwritten(k: Kernels, region: Region, positions: Any, values: Any) -> tuple[Any, ...]:
    target = copied(region)
    k.overwrite(target, positions, values)
    return target.arrays


def restored(k: Kernels, region: Region, data: bytes) -> tuple[Any, ...]:
    target = copied(region)
    lanes = k.decode_planes_into(memoryview(data), target)
    return target.arrays, lanes


def everything(k: Kernels, old: Region, new: Region) -> Iterator[tuple[str, Any]]:
    """The results of all kernels on a pair of regions, by name."""
    positions, values, stop = k.detect(old, new, 0, cell=1 << 20, enough=1 << 30)
    yield "detect", (positions, values, stop)
    absolute, data, lanes = k.encode_changes(old, positions, values)
    yield "encode_changes", (absolute, data, lanes)
    yield "encode_difference", k.encode_difference(old, new, 0, cell=1 << 20, enough=1 << 30)
    yield "decode_changes", k.decode_changes(old, data, absolute=absolute)
    planes = k.encode_planes(new)
    yield "encode_planes", planes
    yield "decode_planes", k.decode_planes(planes, new.elements, new.dtype)
    yield "decode_planes_into", restored(k, old, planes)
    yield "digest", (k.digest(old), k.digest(new))
    yield "digest_change", k.digest_change(old, positions, values)
    yield "overwrite", overwritten(k, old, positions, values)


def require_right(found: dict[str, Any], old: Region, new: Region) -> None:
    """The reference itself: what it encodes it decodes, and its digests add up."""
    positions, values, _ = found["detect"]
    assert plain(found["decode_changes"]) == plain((positions, values, found["encode_changes"][2]))
    assert plain(found["decode_planes"]) == plain(new.gather())
    arrays, lanes = found["decode_planes_into"]
    assert plain(Region(old.dtype, arrays, old.runs, old.keys).gather()) == plain(new.gather())
    assert lanes == found["digest"][1]
    absolute, data, lanes = found["encode_changes"]
    if len(positions):
        assert found["encode_difference"] == (len(positions), old.elements, absolute, data, lanes)
    before, after = found["digest"]
    digest_delta = tuple((b - a) % 2**64 for a, b in zip(before, after, strict=True))
    assert digest_delta == found["digest_change"] == found["encode_changes"][2]
    target = Region(old.dtype, found["overwrite"], old.runs, old.keys)
    assert plain(target.gather()) == plain(new.gather())


def require_same(old: Region, new: Region) -> None:
    expected = dict(everything(REFERENCE, old, new))
    require_right(expected, old, new)
    for k in NATIVE:
        for name, result in everything(k, old, new):
            assert plain(result) == plain(expected[name]), (k.name, name)


def regions(
    dtype: DType, sizes: list[int], share: float, *, look: Look = "weights", move: Move = "ulp", offset: int = 0
) -> tuple[Region, Region]:
    """Old and new region of tensors of these sizes, without the first `offset` elements of each."""
    rng = np.random.default_rng(len(sizes) * 1000 + sizes[0])
    layout = Layout.of(TensorSpec(f"t{i}", dtype, (size + offset,)) for i, size in enumerate(sizes))
    old = Weights(layout, tuple(random_bits(rng, dtype, t.elements, look) for t in layout.tensors))
    new = Weights(layout, tuple(random_change(rng, dtype, a, share, move) for a in old.arrays))
    runs = whole_runs(layout, range(len(sizes))) + np.array([0, offset, -offset])
    return old.region(runs), new.region(runs)


@some
@given(st.data())
def test_any_change_of_any_runs(data: st.DataObject) -> None:
    old, new = data.draw(strategies.pairs())
    runs = data.draw(strategies.run_tables(old.layout))
    assume(len(runs))
    require_same(old.region(runs), new.region(runs))


@pytest.mark.parametrize("dtype", KINDS.values(), ids=lambda d: d.name)
def test_every_tail(dtype: DType) -> None:
    """Vectors have 64 elements and tiles 4096: what is left over is handled apart."""
    for size in (*range(1, 66), 127, 128, 129, 4095, 4096, 4097, 8193):
        require_same(*regions(dtype, [size], 0.2, offset=size % 5))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("runs", [0, 2])
def test_no_elements(dtype: DType, runs: int) -> None:
    empty = np.empty(0, dtype.bits_dtype)
    region = Region(dtype, (empty,), np.zeros((runs, 3), np.int64), np.zeros((runs, 3), np.uint64))
    require_same(region, region)


LARGE: dict[str, tuple[str, list[int], float, Look, Move]] = {
    "weights, few changes": ("BF16", [200_000, 64, 3], 0.01, "weights", "ulp"),
    "weights, many changes": ("BF16", [140_000], 0.4, "weights", "ulp"),
    "weights, enough to sample changes": ("BF16", [524_000, 3, 70_000], 0.1, "weights", "ulp"),
    "weights, just too few to sample changes": ("BF16", [600_000], 0.054, "weights", "ulp"),
    "16 bits, enough to sample changes": ("F16", [530_000], 0.2, "weights", "ulp"),
    "32 bits, enough to sample changes": ("F32", [530_000], 0.1, "weights", "ulp"),
    "8 bits, enough to sample changes": ("F8_E5M2", [600_000], 0.1, "weights", "ulp"),
    "weights, other values": ("BF16", [140_000], 0.3, "weights", "replace"),
    "any bits, many changes": ("BF16", [70_001], 1.0, "uniform", "exponent"),
    "constant, many changes": ("F16", [524_287, 1], 0.1, "constant", "sign"),
    "just enough to sample elements": ("F16", [524_288], 0.01, "uniform", "special"),
    "32 bits": ("F32", [100_000, 40_000], 0.3, "weights", "ulp"),
    "32 bits, other values": ("F32", [40_000], 0.9, "uniform", "replace"),
    "8 bits, few exponents": ("F8_E4M3", [150_000], 0.3, "weights", "ulp"),
    "8 bits, more exponents": ("F8_E5M2", [4096 * 5 + 1, 4095], 0.5, "uniform", "replace"),
    "integers of 8 bits": ("U8", [140_000], 0.5, "uniform", "replace"),
    "integers of 16 bits": ("I16", [9_000], 0.5, "uniform", "ulp"),
    "integers of 64 bits": ("I64", [9_000], 0.5, "uniform", "replace"),
    "floats as integers": ("F64", [40_000], 0.9, "special", "special"),
    "many small runs": ("BF16", [37] * 400, 0.05, "weights", "ulp"),
}


@pytest.mark.parametrize(("dtype", "sizes", "share", "look", "move"), LARGE.values(), ids=LARGE.keys())
def test_large_regions(dtype: str, sizes: list[int], share: float, look: Look, move: Move) -> None:
    require_same(*regions(DTYPES[dtype], sizes, share, look=look, move=move, offset=3))


@many
@given(
    st.sampled_from([DTYPES[n] for n in ("U8", "BF16", "F32", "I64")]),
    st.lists(st.integers(1, 300), min_size=1, max_size=4),
    st.sampled_from(strategies.SHARES),
    st.integers(1, 200),
    st.integers(1, 100),
    st.integers(0, 400),
)
def test_detect_stops_where_enough_is_found(
    dtype: DType, sizes: list[int], share: float, cell: int, enough: int, start: int
) -> None:
    old, new = regions(dtype, sizes, share)
    start = min(start, old.elements)
    expected = plain(REFERENCE.detect(old, new, start, cell=cell, enough=enough))
    for k in NATIVE:
        assert plain(k.detect(old, new, start, cell=cell, enough=enough)) == expected, k.name
    expected = REFERENCE.encode_difference(old, new, start, cell=cell, enough=enough)
    for k in NATIVE:
        assert k.encode_difference(old, new, start, cell=cell, enough=enough) == expected, k.name


NANS = (0xFFFF, 0x7FC0)
LOW_HALVES = (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)


def float32_bits() -> Any:
    """Every upper half with the lower halves that decide about rounding: below, at and above half a unit."""
    high, low = np.meshgrid(np.arange(1 << 16, dtype=np.uint32), np.array(LOW_HALVES, np.uint32))
    return (high << np.uint32(16) | low).reshape(-1)


def flat(dtype: str, *pieces: Any) -> Region:
    counts = [len(piece) for piece in pieces]
    runs = np.array([(i, 0, count) for i, count in enumerate(counts)])
    return Region(DTYPES[dtype], pieces, runs, np.zeros((len(counts), 3), np.uint64))


@pytest.mark.parametrize("nan", NANS)
def test_rounding_is_that_of_bfloat16(nan: int) -> None:
    bits = float32_bits()
    with np.errstate(invalid="ignore"):
        expected = bits.view(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
    expected = np.where(np.isnan(bits.view(np.float32)), np.uint16(nan), expected)
    for k in (REFERENCE, *NATIVE):
        # Against its own complement every element has changed, and the values are all there.
        found = k.detect_rounded(flat("BF16", ~expected), flat("F32", bits), 0, cell=1 << 20, enough=1 << 30, nan=nan)
        assert plain(found) == plain((np.arange(len(bits), dtype=np.uint32), expected, len(bits))), k.name
        same = k.detect_rounded(flat("BF16", expected), flat("F32", bits), 0, cell=1 << 20, enough=1 << 30, nan=nan)
        assert not len(same[0]), k.name


@many
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=4),
    st.sampled_from(strategies.SHARES),
    st.integers(1, 200),
    st.integers(1, 100),
    st.integers(0, 400),
    st.sampled_from(NANS),
)
def test_detect_rounded_of_any_runs(
    sizes: list[int], share: float, cell: int, enough: int, start: int, nan: int
) -> None:
    rng = np.random.default_rng(sum(sizes))
    new = [rng.choice(float32_bits(), size) for size in sizes]
    # What the reference finds against zeros, in part put there: the rest has changed.
    old = [np.zeros(size, np.uint16) for size in sizes]
    for before, after in zip(old, new, strict=True):
        positions, values, _ = REFERENCE.detect_rounded(
            flat("BF16", before), flat("F32", after), 0, cell=1 << 20, enough=1 << 30, nan=nan
        )
        kept = rng.random(len(positions)) >= share
        before[positions[kept]] = values[kept]
    start = min(start, sum(sizes))
    options = {"cell": cell, "enough": enough, "nan": nan}
    expected = plain(REFERENCE.detect_rounded(flat("BF16", *old), flat("F32", *new), start, **options))
    for k in NATIVE:
        assert plain(k.detect_rounded(flat("BF16", *old), flat("F32", *new), start, **options)) == expected, k.name


@pytest.mark.parametrize("start", [0, 5000])
@pytest.mark.parametrize(("cell", "enough"), [(200_000, 45_000), (1 << 20, 1 << 19), (1000, 62_000)])
def test_blocks_of_a_difference(start: int, cell: int, enough: int) -> None:
    """The native kernels choose classes before they know where a block ends; it must not show."""
    old, new = regions(DTYPES["BF16"], [300_000, 1, 299_999], 0.1)
    while start < old.elements:
        expected = REFERENCE.encode_difference(old, new, start, cell=cell, enough=enough)
        for k in NATIVE:
            assert k.encode_difference(old, new, start, cell=cell, enough=enough) == expected, k.name
        start = expected[1]


def test_element_types_of_different_widths_take_turns() -> None:
    """The native kernels keep memory from call to call: wide elements first, then more of narrow ones.

    The sample of the second block has few changes and the rest many, so that it has more of them than its classes were
    chosen for.
    """
    cell, enough = 1 << 20, 1 << 19
    wide, wide_new = regions(DTYPES["F32"], [1 << 19], 0.1)
    narrow, _ = regions(DTYPES["F8_E4M3"], [1 << 21], 0)
    bits, places = narrow.gather(), np.arange(1 << 21)
    exponents = bits >> 3 & 0x0F
    sampled = places % (reference.SAMPLE_RUN * reference.SAMPLE_SCALE) < reference.SAMPLE_RUN
    changed = np.where(sampled, (places % 16 < 1) | ((exponents < 4) & (places % 2 < 1)), True)
    narrow_new = narrow.holding(bits ^ changed.astype(np.uint8))
    for k in NATIVE:
        k.encode_difference(wide, wide_new, 0, cell=cell, enough=enough)
        positions, values, stop = k.detect(narrow, narrow_new, 0, cell=cell, enough=enough)
        block = narrow.holding(bits)
        first = Region(block.dtype, block.arrays, np.array([[0, 0, stop]]), block.keys)
        expected = len(positions), stop, *k.encode_changes(first, positions, values)
        assert k.encode_difference(narrow, narrow_new, 0, cell=cell, enough=enough) == expected, k.name


def require_same_decoding(old: Region, data: bytes, *, absolute: bool) -> Any:
    expected = outcome(lambda: REFERENCE.decode_changes(old, data, absolute=absolute))
    for k in NATIVE:
        assert outcome(lambda k=k: k.decode_changes(old, data, absolute=absolute)) == expected, k.name
    return expected


@many
@given(st.data())
def test_any_number_of_classes(data: st.DataObject) -> None:
    """Readers take up to 16 classes, more than this writer ever makes."""
    dtype = data.draw(st.sampled_from(FLOATS))
    exponents = st.integers(1, dtype.exponent_mask)
    thresholds = sorted(data.draw(st.sets(exponents, max_size=15)))
    look, move = data.draw(st.sampled_from(strategies.LOOKS)), data.draw(st.sampled_from(strategies.MOVES))
    sizes = data.draw(st.lists(st.integers(1, 200), min_size=1, max_size=3))
    old, new = regions(dtype, sizes, 0.3, look=look, move=move)
    positions, values, _ = REFERENCE.detect(old, new, 0, cell=1 << 20, enough=1 << 30)
    absolute, block = encode_with(thresholds, old, positions, values)
    lanes = REFERENCE.digest_change(old, positions, values)
    assert require_same_decoding(old, block, absolute=absolute) == plain((positions, values, lanes))


Edit = tuple[str, int, int]
edits = st.lists(
    st.tuples(
        st.sampled_from(("flip", "set", "insert", "delete", "cut", "append")),
        st.one_of(st.integers(0, 40), st.integers(0, 5000)),
        st.integers(0, 255),
    ),
    min_size=1,
    max_size=3,
)


def edited(block: bytes, changes: list[Edit]) -> bytes:
    data = bytearray(block)
    for what, place, byte in changes:
        at = place % (len(data) + 1)
        match what:
            case "flip" if at < len(data):
                data[at] ^= byte
            case "set" if at < len(data):
                data[at] = byte
            case "delete":
                del data[at : at + 1 + byte % 4]
            case "cut":
                del data[at:]
            case "insert":
                data.insert(at, byte)
            case "append":
                data.append(byte)
    return bytes(data)


@many
@given(
    st.sampled_from(list(DTYPES.values())),
    st.lists(st.integers(1, 300), min_size=1, max_size=3),
    st.sampled_from(strategies.SHARES),
    st.sampled_from(strategies.LOOKS),
    st.sampled_from(strategies.MOVES),
    st.booleans(),
    edits,
)
def test_damaged_changes(
    dtype: DType, sizes: list[int], share: float, look: Look, move: Move, swap: bool, changes: list[Edit]
) -> None:
    old, new = regions(dtype, sizes, share, look=look, move=move)
    positions, values, _ = REFERENCE.detect(old, new, 0, cell=1 << 20, enough=1 << 30)
    absolute, block, _ = REFERENCE.encode_changes(old, positions, values)
    require_same_decoding(old, edited(block, changes), absolute=absolute != swap)


@many
@given(
    st.sampled_from(list(DTYPES.values())),
    st.integers(1, 600),
    st.sampled_from(strategies.LOOKS),
    st.integers(-1, 1),
    edits,
)
def test_damaged_planes(dtype: DType, elements: int, look: Look, more: int, changes: list[Edit]) -> None:
    old, _ = regions(dtype, [elements], 0, look=look)
    block = edited(REFERENCE.encode_planes(old), changes)
    claimed = elements + more
    expected = outcome(lambda: REFERENCE.decode_planes(block, claimed, dtype))
    into = flat(dtype.name, np.zeros(claimed, dtype.bits_dtype))
    expected_into = outcome(lambda: REFERENCE.decode_planes_into(block, copied(into)))
    for k in NATIVE:
        assert outcome(lambda k=k: k.decode_planes(block, claimed, dtype)) == expected, k.name
        assert outcome(lambda k=k: k.decode_planes_into(block, copied(into))) == expected_into, k.name


@many
@given(st.data())
def test_well_formed_nonsense(data: st.DataObject) -> None:
    """Sequences that decode, of numbers that may make no sense: gaps past the end of a class, steps of any size."""
    dtype = data.draw(st.sampled_from(list(DTYPES.values())))
    old, _ = regions(dtype, data.draw(st.lists(st.integers(1, 200), min_size=1, max_size=3)), 0, look="uniform")
    classes = data.draw(st.integers(1, 16 if dtype.is_float else 1))
    thresholds = data.draw(st.lists(st.integers(0, 255), min_size=classes - 1, max_size=classes - 1).map(sorted))
    counts = data.draw(st.lists(st.integers(0, 12), min_size=classes, max_size=classes))
    total = sum(counts)
    gap = st.one_of(st.integers(0, 3), st.integers(0, 40), st.integers(0, 2 * limits.BLOCK_ELEMENTS_MAX))
    gaps = data.draw(st.lists(gap, min_size=total, max_size=total))
    step = st.one_of(st.integers(0, 40), st.integers(0, 2 ** (8 * dtype.width) - 1))
    steps = data.draw(st.lists(step, min_size=total, max_size=total))
    parts = ChangesParts(bytes(thresholds), tuple(counts), numbers(gaps, counts), numbers(steps, counts), b"")
    require_same_decoding(old, parts.build(), absolute=False)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_steps_of_every_size(dtype: DType) -> None:
    bits = 8 * dtype.width
    steps = sorted({n for k in range(bits) for n in (2**k - 1, 2**k, 2**k + 1) if n < 2**bits})
    old, _ = regions(dtype, [len(steps)], 0, look="uniform")
    sequences = numbers([0] * len(steps), [len(steps)]), numbers(steps, [len(steps)])
    found = require_same_decoding(old, ChangesParts(b"", (len(steps),), *sequences, b"").build(), absolute=False)
    if not dtype.is_float:
        moves = (-(n // 2 + 1) if n % 2 else n // 2 + 1 for n in steps)
        expected = [(int(a) + move) % 2**bits for a, move in zip(old.gather(), moves, strict=True)]
        assert found[1] == plain(np.array(expected, dtype.bits_dtype))


SYMBOLS: dict[str, tuple[list[int], list[float]]] = {
    "one": ([7], [1]),
    "one, hardly any others": ([7, 6, 255], [0.9999, 0.00005, 0.00005]),
    "one more often than all others": ([3, 4, 200], [0.7, 0.25, 0.05]),
    "a window of 64": (list(range(100, 164)), [1 / 64] * 64),
    "a window of 64, few others": ([0, *range(90, 120), 255], [0.0005, *[0.999 / 30] * 30, 0.0005]),
    "all": (list(range(256)), [(i + 1) / 32896 for i in range(256)]),
}
"""Symbols and their probabilities: tables that the native coders treat differently."""


@pytest.mark.parametrize(("symbols", "probabilities"), SYMBOLS.values(), ids=SYMBOLS.keys())
def test_rows_of_all_lanes(symbols: list[int], probabilities: list[float]) -> None:
    """Sequences with the most lanes are coded in vectors; damage must still give the same errors."""
    rng = np.random.default_rng(len(symbols))
    region = flat("U8", rng.choice(np.array(symbols, np.uint8), 70_001, p=probabilities))
    block = REFERENCE.encode_planes(region)
    assert block[:2] == bytes((1, limits.LANES_LOG2_MAX)), "coded, with all lanes"
    damaged = [block, block[:-3], block + b"\0"]
    for place in rng.integers(2, len(block), 12).tolist():
        damaged.append(block[:place] + bytes((block[place] ^ 1 << place % 8,)) + block[place + 1 :])
    expected = [outcome(lambda data=data: REFERENCE.decode_planes(data, 70_001, region.dtype)) for data in damaged]
    assert expected[0] == plain(region.gather())
    parts = flat("U8", np.zeros(30_001, np.uint8), np.zeros(0, np.uint8), np.zeros(40_000, np.uint8))
    expected_parts = [outcome(lambda data=data: restored(REFERENCE, parts, data)) for data in damaged]
    for k in NATIVE:
        assert k.encode_planes(region) == block, k.name
        found = [outcome(lambda k=k, data=data: k.decode_planes(data, 70_001, region.dtype)) for data in damaged]
        assert found == expected, k.name
        found = [outcome(lambda k=k, data=data: restored(k, parts, data)) for data in damaged]
        assert found == expected_parts, k.name


@pytest.mark.parametrize("symbols", [2, 16, 128, *range(224, 257, 2)])
def test_planes_that_hardly_shrink(symbols: int) -> None:
    """Somewhere here coding a plane stops to pay: both sides draw the line at the same place."""
    bits = (np.arange(6000) % symbols).astype(np.uint8)
    layout = Layout.of([TensorSpec("w", DTYPES["U8"], bits.shape)])
    region = Weights(layout, (bits,)).region(whole_runs(layout, [0]))
    expected = REFERENCE.encode_planes(region)
    assert len(expected) <= len(bits) + 1
    assert plain(REFERENCE.decode_planes(expected, len(bits), region.dtype)) == plain(bits)
    for k in NATIVE:
        assert k.encode_planes(region) == expected, k.name


@pytest.mark.parametrize("dtype", KINDS.values(), ids=lambda d: d.name)
def test_every_truncation(dtype: DType) -> None:
    old, new = regions(dtype, [130, 7], 0.3)
    positions, values, _ = REFERENCE.detect(old, new, 0, cell=1 << 20, enough=1 << 30)
    absolute, block, _ = REFERENCE.encode_changes(old, positions, values)
    for size in range(len(block)):
        kind, _ = require_same_decoding(old, block[:size], absolute=absolute)
        assert kind == "CorruptError"


WRONG: dict[str, tuple[list[int], list[int], str]] = {
    "fewer values": ([1, 2], [9], "changes.length"),
    "one value for all": ([1, 2, 3], [9], "changes.length"),
    "more values": ([1], [9, 9], "changes.length"),
    "descending": ([2, 1], [9, 9], "changes.order"),
    "twice": ([1, 1], [9, 9], "changes.order"),
    "at the end": ([0, 100], [9, 9], "changes.order"),
    "far away": ([2**32 - 1], [9], "changes.order"),
}


@pytest.mark.parametrize(("positions", "values", "rule"), WRONG.values(), ids=WRONG.keys())
@pytest.mark.parametrize("k", [*NATIVE, REFERENCE], ids=lambda k: k.name)
def test_wrong_calls(k: Kernels, positions: list[int], values: list[int], rule: str) -> None:
    old, _ = regions(DTYPES["BF16"], [60, 40], 0, look="constant")
    arguments = np.array(positions, np.uint32), np.array(values, np.uint16)
    for call in (k.encode_changes, k.digest_change, k.overwrite):
        target = copied(old)
        with pytest.raises(InvalidInputError) as caught:
            call(target, *arguments)
        assert caught.value.rule == rule, call
        assert plain(target.arrays) == plain(old.arrays), "nothing is written"


@pytest.mark.parametrize("k", [*NATIVE, REFERENCE], ids=lambda k: k.name)
def test_what_did_not_change_is_no_change(k: Kernels) -> None:
    old, _ = regions(DTYPES["BF16"], [60, 40], 0)
    positions = np.array([3, 70], np.uint32)
    with pytest.raises(InvalidInputError) as caught:
        k.encode_changes(old, positions, old.gather()[positions])
    assert caught.value.rule == "changes.unchanged"


@pytest.mark.parametrize("k", [*NATIVE, REFERENCE], ids=lambda k: k.name)
def test_read_only_arrays_are_not_overwritten(k: Kernels) -> None:
    old, _ = regions(DTYPES["BF16"], [60], 0)
    old.arrays[0].flags.writeable = False
    with pytest.raises(InvalidInputError):
        k.overwrite(old, np.array([1], np.uint32), np.array([7], np.uint16))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_any_single_change_changes_both_lanes(dtype: DType) -> None:
    """Keys are odd."""
    old, _ = regions(dtype, [1500], 0)
    for bit in range(8 * dtype.width):
        new = old.holding(old.gather())
        new.arrays[0][1100] ^= dtype.bits_dtype.type(1 << bit)
        for k in [*NATIVE, REFERENCE]:
            assert all(a != b for a, b in zip(k.digest(old), k.digest(new), strict=True))


def test_run_borders_do_not_matter() -> None:
    """The digest of a region is that of its pieces together, wherever it is cut."""
    old, _ = regions(DTYPES["BF16"], [5000], 0, offset=1000)
    (array, offset, count), (lane0, lane1, index) = old.runs[0].tolist(), old.keys[0].tolist()
    cuts = [0, 1, 23, 24, 1024, 3000, 4097, count]
    runs = np.array([(array, offset + a, b - a) for a, b in pairwise(cuts)])
    keys = np.array([(lane0, lane1, index + a) for a, _ in pairwise(cuts)], np.uint64)
    for k in [*NATIVE, REFERENCE]:
        assert k.digest(Region(old.dtype, old.arrays, runs, keys)) == REFERENCE.digest(old)
