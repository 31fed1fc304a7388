"""The kernels in NumPy: the readable definition of docs/format.md, and the oracle for the native kernels.

Every function here has a native twin that returns the same bytes, the same arrays and the same errors.

The state digest is, in each of two lanes, the sum over all elements of key(tensor, index) * bits, modulo 2^64. A key is
the product of a row part (tensor and index >> 10) and a column part (index & 1023). Keys are odd, so a change of any
single element always changes the digest. An 8-byte element counts as two 4-byte ones, low half first: the top bits of a
64-bit product would depend on too few bits of the key.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from deltasync.errors import CorruptError, InvalidInputError
from deltasync.format import limits
from deltasync.format.layout import DType
from deltasync.format.weights import Bits, Buffer, Positions, Region, slice_runs
from deltasync.kernels import rans
from deltasync.kernels.rans import ByteReader, varint

name = "reference"
"""This module is a set of kernels of that name."""

COLUMNS = 1024
LANES = 2
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64-bit numbers that scatters them well (the finalizer of splitmix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@cache
def columns(lane: int) -> NDArray[np.uint64]:
    """The column parts of one lane."""
    return mix(np.arange(1, COLUMNS + 1, dtype=np.uint64) + np.uint64(lane << 32)) | np.uint64(1)


def gain(region: Region, positions: NDArray[np.uint32], before: Bits, after: Bits) -> tuple[int, int]:
    """The sum of key * (after - before) over the elements at `positions`, per lane."""
    ends = np.cumsum(region.runs[:, 2])
    run = np.searchsorted(ends, positions, side="right")
    index = positions.astype(np.uint64) - (ends - region.runs[:, 2])[run].astype(np.uint64) + region.keys[run, 2]
    if region.dtype.width == 8:
        run = np.repeat(run, 2)
        index = (np.column_stack((index, index)) * np.uint64(2) + np.arange(2, dtype=np.uint64)).reshape(-1)
        before, after = before.view("<u4"), after.view("<u4")
    amounts = after.astype(np.uint64) - before.astype(np.uint64)
    sums = []
    for lane in range(LANES):
        row = mix(region.keys[run, lane] + ((index >> np.uint64(10)) + np.uint64(1)) * _GOLDEN) | np.uint64(1)
        key = row * columns(lane)[index & np.uint64(COLUMNS - 1)]
        sums.append(int((key * amounts).sum(dtype=np.uint64)))
    return sums[0], sums[1]


CLASSES_MAX = limits.CLASSES_MAX

# These constants affect the writer only; a reader accepts any valid thresholds.
CLASSES_WANTED = 10
CLASS_COST_BITS = 320
ELEMENTS_ALL_BELOW, CHANGES_ALL_BELOW = 1 << 19, 1 << 15
SAMPLE_RUN, SAMPLE_SCALE = 256, 124


def exponents(dtype: DType, bits: Bits) -> NDArray[np.uint64]:
    """The exponent field of each element; 0 for integers."""
    wide: NDArray[np.uint64] = bits.astype(np.uint64)
    fields: NDArray[np.uint64] = (wide >> np.uint64(dtype.exponent_shift)) & np.uint64(dtype.exponent_mask)
    return fields


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
    if len(before) >= ELEMENTS_ALL_BELOW and len(positions) >= CHANGES_ALL_BELOW:
        scale, sampled = SAMPLE_SCALE, _in_sample(positions)
        positions, values = positions[sampled], values[sampled]
    were = before[positions]
    symbols = rans.buckets(zigzag_steps(dtype, were, values))[0]
    steps = np.zeros((dtype.exponent_mask + 1, rans.BUCKETS_MAX), np.int64)
    np.add.at(steps, (exponents(dtype, were).astype(np.int64), symbols), scale)
    total = np.maximum(_population(dtype, before), steps.sum(axis=1))
    firsts = np.flatnonzero(total).tolist()
    groups = [(int(total[e]), steps[e]) for e in firsts]
    costs = [_cost(*g) for g in groups]
    joined = [_joined(groups, i) for i in range(len(groups) - 1)]
    while joined:
        growth = [_cost(*joined[i]) - costs[i] - costs[i + 1] for i in range(len(joined))]
        i = int(np.argmin(growth))
        if len(groups) <= CLASSES_WANTED and growth[i] > CLASS_COST_BITS << 12:
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
    sampled: NDArray[np.bool_] = positions % (SAMPLE_RUN * SAMPLE_SCALE) < SAMPLE_RUN
    return sampled


def _population(dtype: DType, before: Bits) -> NDArray[np.int64]:
    """How many elements have each exponent: counted in small blocks, estimated from the sample in large ones."""
    scale = 1
    if len(before) >= ELEMENTS_ALL_BELOW:
        scale, before = SAMPLE_SCALE, before[_in_sample(np.arange(len(before)))]
    return np.bincount(exponents(dtype, before).astype(np.int64), minlength=dtype.exponent_mask + 1) * scale


def _joined(groups: list[tuple[int, NDArray[np.int64]]], i: int) -> tuple[int, NDArray[np.int64]]:
    (a, b), (c, d) = groups[i], groups[i + 1]
    return a + c, b + d


def _cost(total: int, steps: NDArray[np.int64]) -> int:
    """Bits, in 1/4096, to code which of `total` elements changed and by which step symbol."""
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


Lanes = tuple[int, int]


def detect(old: Region, new: Region, start: int, *, cell: int, enough: int) -> tuple[Positions, Bits, int]:
    """Elements from position `start` on whose bits differ, up to the multiple of `cell` by which `enough` were found.

    Returns their positions, counted from `start`, their new bits, and the position where the search stopped.
    """
    before, after = old.gather()[start:], new.gather()[start:]
    different = before != after
    counts = np.concatenate(([0], np.cumsum(different)))
    ends = np.minimum(np.arange(cell, len(before) + cell, cell), len(before))
    full = np.flatnonzero(counts[ends] >= enough)
    stop = min((int(full[0]) + 1) * cell, len(before)) if len(full) else len(before)
    positions = np.flatnonzero(different[:stop]).astype(np.uint32)
    return positions, after[positions], start + stop


def detect_rounded(
    old: Region, new: Region, start: int, *, cell: int, enough: int, nan: int
) -> tuple[Positions, Bits, int]:
    """As `detect`, of bfloat16 elements and float32 ones that are rounded to them. A NaN becomes `nan`."""
    return detect(old, new.holding(_bfloat16(new.gather(), nan)), start, cell=cell, enough=enough)


def overwrite(target: Region, positions: Positions, values: Bits) -> None:
    """Write `values` at `positions`, in place."""
    target.require_writable()
    _check_pairs(positions, values, target.elements)
    at = positions.astype(np.int64)
    start = 0
    for array, offset, count in target.runs.tolist():
        lo, hi = np.searchsorted(at, (start, start + count))
        target.arrays[array][at[lo:hi] - start + offset] = values[lo:hi]
        start += count


def digest(region: Region) -> Lanes:
    """The sum of key times bits over all elements of the region."""
    bits = region.gather()
    return gain(region, np.arange(len(bits), dtype=np.uint32), np.zeros_like(bits), bits)


def digest_change(old: Region, positions: Positions, values: Bits) -> Lanes:
    """The change of the digest when `values` overwrite `old` at `positions`."""
    _check_pairs(positions, values, old.elements)
    return gain(old, positions, old.gather()[positions], np.ascontiguousarray(values))


def _by_class(
    exponents: NDArray[np.uint64], thresholds: NDArray[np.uint8]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The positions of elements, class by class, and where each class begins among them."""
    member = np.searchsorted(thresholds.astype(np.uint64), exponents, side="right")
    totals = np.bincount(member, minlength=len(thresholds) + 1)
    return np.argsort(member, kind="stable"), np.concatenate(([0], np.cumsum(totals)))


def encode_changes(old: Region, positions: Positions, values: Bits) -> tuple[bool, bytes, Lanes]:
    """One block: where elements changed, by classes of the old exponent, then steps (`exp/1`) or values (`abs/1`).

    `positions` must be ascending and each value must differ from the old bits. Returns whether the values are absolute,
    the block, and the change of the digest.
    """
    before = old.gather()
    _check_pairs(positions, values, len(before))
    if (before[positions] == values).any():
        raise InvalidInputError("an element is listed as changed but has its old bits", rule="changes.unchanged")
    chosen = choose(old.dtype, before, positions, values)
    order, starts = _by_class(exponents(old.dtype, before), chosen)
    rank_of = np.empty(len(before), np.int64)
    rank_of[order] = np.arange(len(before))
    # Sorting by place in class order lists the changed elements class by class, ascending inside each.
    place = rank_of[positions]
    by_class = np.argsort(place, kind="stable")
    place = place[by_class]
    counts = np.diff(np.searchsorted(place, starts)).tolist()
    gaps = _gaps(place, counts, starts)
    out = bytearray((len(chosen) + 1,))
    out += chosen.tobytes()
    for count in counts:
        out += varint(count)
    out += rans.encode_buckets(gaps, counts)
    steps = zigzag_steps(old.dtype, before[positions], values)
    relative = rans.encode_buckets(steps[by_class], counts)
    # Steps this long are not small moves of old values; the new values by themselves may be shorter.
    wide = 8 * len(relative) > STEP_BITS_WIDE * len(positions)
    planes = _encode_planes(values, old.dtype) if wide else relative
    absolute = len(planes) < len(relative)
    out += planes if absolute else relative
    return absolute, bytes(out), digest_change(old, positions, values)


def encode_difference(
    old: Region, new: Region, start: int, *, cell: int, enough: int
) -> tuple[int, int, bool, bytes, Lanes]:
    """`detect` and `encode_changes` in one: the block that begins at `start`.

    Returns the number of changed elements, the end of the block, and the result of `encode_changes`, empty if none did.
    """
    positions, values, stop = detect(old, new, start, cell=cell, enough=enough)
    if not len(positions):
        return 0, stop, False, b"", (0, 0)
    return len(positions), stop, *encode_changes(_slice(old, start, stop), positions, values)


def decode_changes(old: Region, data: Buffer, *, absolute: bool) -> tuple[Positions, Bits, Lanes]:
    """The inverse of `encode_changes`; CorruptError with the broken rule on anything else."""
    before = old.gather()
    reader = ByteReader(bytes(data))
    thresholds = read_thresholds(reader, old.dtype)
    counts = [reader.varint() for _ in range(len(thresholds) + 1)]
    if sum(counts) > len(before):
        raise CorruptError(f"a block of {len(before)} elements has {sum(counts)} changes", rule="changes.count")
    gaps = rans.decode_buckets(reader, counts, value_bits=limits.BLOCK_ELEMENTS_LOG2)
    if absolute:
        values = _decode_planes(reader, len(gaps), old.dtype)
    else:
        steps = rans.decode_buckets(reader, counts, value_bits=8 * old.dtype.width)
    reader.require_end()
    order, starts = _by_class(exponents(old.dtype, before), thresholds)
    by_class = order[_places(gaps, counts, starts)]
    ascending = np.argsort(by_class)
    positions = by_class[ascending].astype(np.uint32)
    if not absolute:
        values = step_from(old.dtype, before[positions], steps[ascending])
    return positions, values, digest_change(old, positions, values)


def encode_planes(region: Region) -> bytes:
    """All elements (`planes/1`): byte planes, most significant first, each entropy-coded if that is smaller."""
    return _encode_planes(region.gather(), region.dtype)


def decode_planes(data: Buffer, elements: int, dtype: DType) -> Bits:
    """The inverse of `encode_planes`; CorruptError with the broken rule on anything else."""
    reader = ByteReader(bytes(data))
    bits = _decode_planes(reader, elements, dtype)
    reader.require_end()
    return bits


def decode_planes_into(data: Buffer, target: Region) -> Lanes:
    """Overwrite the elements of `target` with the decoded ones; returns their digest. After an error some may be."""
    target.require_writable()
    bits = decode_planes(data, target.elements, target.dtype)
    end = 0
    for array, offset, count in target.runs.tolist():
        target.arrays[array][offset : offset + count] = bits[end : end + count]
        end += count
    return digest(target)


def _bfloat16(bits: Bits, nan: int) -> Bits:
    """Float32 to bfloat16: to nearest, ties to even."""
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    # Half a unit is added before the lower half is cut off, less a bit where the result is even.
    near = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(is_nan, np.uint16(nan), near.astype(np.uint16))


def _slice(region: Region, start: int, stop: int) -> Region:
    """The elements at positions `start` to `stop`."""
    ends = np.cumsum(region.runs[:, 2])
    begins = ends - region.runs[:, 2]
    keys = region.keys.copy()
    keys[:, 2] += np.maximum(start - begins, 0).astype(np.uint64)
    kept = np.maximum(begins, start) < np.minimum(ends, stop)
    return Region(region.dtype, region.arrays, slice_runs(region.runs, start, stop), keys[kept])


_RAW, _CODED = 0, 1
STEP_BITS_WIDE = 6


def _encode_planes(bits: Bits, dtype: DType) -> bytes:
    rotated = _rotate(bits, dtype, left=True)
    planes = rotated.view(np.uint8).reshape(-1, dtype.width)
    out = bytearray()
    for plane in range(dtype.width - 1, -1, -1):
        out += _encode_plane(np.ascontiguousarray(planes[:, plane]))
    return bytes(out)


def _decode_planes(reader: ByteReader, elements: int, dtype: DType) -> Bits:
    planes = np.empty((elements, dtype.width), np.uint8)
    for plane in range(dtype.width - 1, -1, -1):
        mode = reader.byte()
        if mode == _RAW:
            planes[:, plane] = reader.array(np.uint8, elements)
        elif mode == _CODED and elements:
            planes[:, plane] = rans.decode_symbols(reader, [elements], alphabet=256)
        else:
            raise CorruptError(f"the mode of a plane must be {_RAW} or {_CODED}, not {mode}", rule="planes.mode")
    return _rotate(planes.reshape(-1).view(dtype.bits_dtype), dtype, left=False)


def _encode_plane(plane: NDArray[np.uint8]) -> bytes:
    raw = bytes((_RAW,)) + plane.tobytes()
    counts = np.bincount(plane, minlength=256)
    # A plane that would shrink by less than 1/64 stays raw: reading it is then free.
    if entropy_q12(counts) >= (len(plane) * 8 - len(plane) // 8) << 12:
        return raw
    coded = bytes((_CODED,)) + rans.encode_symbols(plane, [len(plane)])
    return coded if len(coded) < len(raw) else raw


def _rotate(bits: Bits, dtype: DType, *, left: bool) -> Bits:
    """Floats: the sign moves to the lowest bit, so that the exponent has a byte of its own."""
    if not dtype.is_float:
        return bits
    one, rest = bits.dtype.type(1), bits.dtype.type(8 * dtype.width - 1)
    up, down = (one, rest) if left else (rest, one)
    return (bits << up) | (bits >> down)


def _check_pairs(positions: Positions, values: Bits, elements: int) -> None:
    if len(positions) != len(values):
        raise InvalidInputError(
            f"there are {len(positions)} positions, but {len(values)} values", rule="changes.length"
        )
    if len(positions) and (int(positions[-1]) >= elements or (np.diff(positions.astype(np.int64)) <= 0).any()):
        raise InvalidInputError("positions must ascend and stay inside the block", rule="changes.order")


def _gaps(place: NDArray[np.int64], counts: list[int], starts: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Unchanged elements of the class before each changed one, since the last changed one."""
    previous = np.concatenate(([-1], place[:-1]))
    first = np.cumsum(counts) - counts
    for c, count in enumerate(counts):
        if count:
            previous[first[c]] = starts[c] - 1
    return (place - previous[: len(place)] - 1).astype(np.uint64)


def _places(gaps: NDArray[np.uint64], counts: list[int], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    place = np.empty(len(gaps), np.int64)
    first = 0
    for c, count in enumerate(counts):
        own = slice(first, first + count)
        place[own] = np.cumsum(gaps[own].astype(np.int64) + 1) - 1 + starts[c]
        if count and place[own][-1] >= starts[c + 1]:
            raise CorruptError(f"a rank in class {c} is after the last element of the class", rule="changes.rank")
        first += count
    return place


def read_thresholds(reader: ByteReader, dtype: DType) -> NDArray[np.uint8]:
    """What a block of changes begins with: the old exponents at which the next class begins."""
    count = reader.byte()
    if not 1 <= count <= CLASSES_MAX or (count > 1 and not dtype.is_float):
        raise CorruptError(f"a block of {dtype.name} cannot have {count} classes", rule="changes.classes")
    thresholds = reader.array(np.uint8, count - 1)
    wide = thresholds.astype(np.int64)
    if (np.diff(wide, prepend=0) <= 0).any() or (wide > dtype.exponent_mask).any():
        raise CorruptError("class thresholds must be ascending exponents", rule="changes.thresholds")
    return thresholds
