"""Sequences of numbers as interleaved rANS streams with static tables, and the varints and bit fields around them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltasync.errors import CorruptError
from deltasync.format import limits

VARINT_BYTES_MAX = 5


def varint(value: int) -> bytes:
    """LEB128: 7 bits a byte, least significant first."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


class ByteReader:
    """Reads a block front to back; CorruptError instead of a read past the end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def take(self, count: int) -> bytes:
        if count > len(self._data) - self.at:
            raise CorruptError(f"the block ends before byte {self.at + count}", rule="block.truncated")
        self.at += count
        return self._data[self.at - count : self.at]

    def byte(self) -> int:
        return self.take(1)[0]

    def varint(self) -> int:
        value = 0
        for i in range(VARINT_BYTES_MAX):
            byte = self.byte()
            value |= (byte & 0x7F) << (7 * i)
            if byte < 0x80:
                if byte == 0 and i > 0:
                    break
                return value
        raise CorruptError("a varint of the block is too long", rule="block.varint")

    def array(self, dtype: Any, count: int) -> NDArray[Any]:
        wide = np.dtype(dtype)
        return np.frombuffer(self.take(count * wide.itemsize), wide)

    def require_end(self) -> None:
        if self.at != len(self._data):
            raise CorruptError(f"the block has {len(self._data) - self.at} bytes after its end", rule="block.trailing")


def pack_bits(values: NDArray[np.uint64], widths: NDArray[np.int64]) -> bytes:
    """Concatenate the low `widths[i]` bits of each value, LSB first; the last byte is filled with zeros."""
    total = int(widths.sum())
    item = np.repeat(np.arange(len(values)), widths)
    bit = np.arange(total) - np.repeat(np.cumsum(widths) - widths, widths)
    bits = (values[item] >> bit.astype(np.uint64)) & np.uint64(1)
    return np.packbits(bits.astype(np.uint8), bitorder="little").tobytes()


def unpack_bits(data: bytes, widths: NDArray[np.int64]) -> NDArray[np.uint64]:
    """The inverse of `pack_bits`; CorruptError unless the data has exactly the bits asked for and zero padding."""
    total = int(widths.sum())
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    if len(data) != (total + 7) // 8 or bits[total:].any():
        raise CorruptError(
            f"the extra bits have {len(data)} bytes, or padding that is not zero; they must have {total} bits",
            rule="sequence.extra",
        )
    # Sum the bits of each item, weighted by their place, as differences of one running sum (modulo 2^64).
    ends = np.cumsum(widths)
    place = np.arange(total) - np.repeat(ends - widths, widths)
    running = np.zeros(total + 1, np.uint64)
    np.cumsum(bits[:total].astype(np.uint64) << place.astype(np.uint64), out=running[1:])
    unpacked: NDArray[np.uint64] = running[ends] - running[ends - widths]
    return unpacked


Symbols = NDArray[np.uint8]

PRECISION = 12
SLOTS = 1 << PRECISION
STATE_MIN = 1 << 16
EXACT = 16
BUCKETS_MAX = EXACT + 2 * 60


def encode_buckets(values: NDArray[np.uint64], counts: list[int]) -> bytes:
    """A sequence of numbers, `counts[c]` of them under context c, in context order."""
    symbols, extra, widths = buckets(values)
    packed = pack_bits(extra, widths)
    return encode_symbols(symbols, counts) + varint(len(packed)) + packed


def decode_buckets(reader: ByteReader, counts: list[int], *, value_bits: int) -> NDArray[np.uint64]:
    """The inverse of `encode_buckets`, for numbers of at most `value_bits` bits."""
    symbols = decode_symbols(reader, counts, alphabet=EXACT + 2 * (value_bits - 4))
    above = np.maximum(symbols.astype(np.int64) - EXACT, 0)
    big = symbols >= EXACT
    widths = np.where(big, above // 2 + 3, 0)
    extra = unpack_bits(reader.take(reader.varint()), widths)
    base = (np.uint64(2) + (above % 2).astype(np.uint64)) << widths.astype(np.uint64)
    return np.where(big, base + extra, symbols.astype(np.uint64))


def buckets(values: NDArray[np.uint64]) -> tuple[Symbols, NDArray[np.uint64], NDArray[np.int64]]:
    """Bucket, extra bits, and number of extra bits of each value."""
    exponent = np.zeros(len(values), np.int64)
    rest = values.copy()
    for shift in (32, 16, 8, 4, 2, 1):
        high = rest >> np.uint64(shift)
        exponent += np.where(high != 0, shift, 0)
        rest = np.where(high != 0, high, rest)
    big = values >= EXACT
    widths = np.where(big, exponent - 1, 0)
    half = ((values >> widths.astype(np.uint64)) & np.uint64(1)).astype(np.int64)
    symbols = np.where(big, EXACT + 2 * (exponent - 4) + half, values.astype(np.int64))
    extra = values & ((np.uint64(1) << widths.astype(np.uint64)) - np.uint64(1))
    return symbols.astype(np.uint8), extra, widths


def encode_symbols(symbols: Symbols, counts: list[int]) -> bytes:
    """Lanes, tables, number of words, final states, words."""
    lanes_log2 = min(max(len(symbols).bit_length() - 12, 0), limits.LANES_LOG2_MAX)
    lanes = 1 << lanes_log2
    out = bytearray((lanes_log2,))
    frequency, start = [], []
    for of_context in np.split(symbols, np.cumsum(counts)[:-1]):
        if len(of_context):
            weights = _quantise(np.bincount(of_context))
            out += bytes((len(weights) - 1,)) + weights.tobytes()
            f = _frequencies(weights)
            frequency.append(f[of_context])
            start.append((np.cumsum(f) - f)[of_context])
    f = np.concatenate(frequency) if frequency else np.empty(0, np.uint64)
    s = np.concatenate(start) if start else np.empty(0, np.uint64)
    states, words = _rans_encode(f, s, lanes)
    return bytes(out) + varint(len(words)) + states.astype("<u4").tobytes() + words.astype("<u2").tobytes()


def decode_symbols(reader: ByteReader, counts: list[int], *, alphabet: int) -> Symbols:
    """The inverse of `encode_symbols`; symbols are below `alphabet`."""
    lanes, tables, word_count = read_tables(reader, counts, alphabet=alphabet)
    states = reader.array("<u4", lanes).astype(np.uint64)
    words = reader.array("<u2", word_count).astype(np.uint64)
    if not tables:
        tables = [np.ones(1, np.uint64)]
    offsets = np.cumsum([len(t) for t in tables]) - [len(t) for t in tables]
    frequency = np.concatenate(tables)
    start = np.concatenate([np.cumsum(t) - t for t in tables])
    slots = np.repeat(np.arange(len(frequency)), frequency.astype(np.int64))
    used = [c for c in counts if c]
    table_of = np.repeat(np.arange(len(used)), used)
    ids = _rans_decode(states, words, table_of, slots, frequency, start)
    symbols: Symbols = (ids - offsets[table_of]).astype(np.uint8)
    return symbols


def read_tables(reader: ByteReader, counts: list[int], *, alphabet: int) -> tuple[int, list[NDArray[np.uint64]], int]:
    """What a sequence begins with: the number of lanes, the frequencies of each context in use, the number of words."""
    lanes_log2 = reader.byte()
    if lanes_log2 > limits.LANES_LOG2_MAX:
        raise CorruptError(
            f"a sequence has 2^{lanes_log2} lanes; at most 2^{limits.LANES_LOG2_MAX} are allowed", rule="sequence.lanes"
        )
    tables = [_read_table(reader, alphabet) for count in counts if count]
    return 1 << lanes_log2, tables, reader.varint()


def _rans_encode(
    f: NDArray[np.uint64], s: NDArray[np.uint64], lanes: int
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Symbol i belongs to lane i mod lanes. The coder runs backwards so that the decoder runs forwards."""
    x = np.full(lanes, STATE_MIN, np.uint64)
    rows: list[NDArray[np.uint64]] = []
    for row in range((len(f) - 1) // lanes, -1, -1):
        fr, st = f[row * lanes : (row + 1) * lanes], s[row * lanes : (row + 1) * lanes]
        y = x[: len(fr)]
        full = y >= fr << np.uint64(32 - PRECISION)
        rows.append(y[full] & np.uint64(0xFFFF))
        y = np.where(full, y >> np.uint64(16), y)
        x[: len(fr)] = ((y // fr) << np.uint64(PRECISION)) + y % fr + st
    rows.reverse()
    return x, np.concatenate(rows) if rows else np.empty(0, np.uint64)


def _rans_decode(
    x: NDArray[np.uint64],
    words: NDArray[np.uint64],
    table_of: NDArray[np.int64],
    slots: NDArray[np.int64],
    frequency: NDArray[np.uint64],
    start: NDArray[np.uint64],
) -> NDArray[np.int64]:
    lanes, count, at = len(x), len(table_of), 0
    if (x < STATE_MIN).any():
        raise CorruptError(f"a state must be at least {STATE_MIN}", rule="sequence.state")
    ids = np.empty(count, np.int64)
    for row in range(0, count, lanes):
        lane_row = slice(row, min(row + lanes, count))
        y = x[: lane_row.stop - row]
        slot = y & np.uint64(SLOTS - 1)
        symbol = slots[table_of[lane_row] * SLOTS + slot.astype(np.int64)]
        ids[lane_row] = symbol
        y = frequency[symbol] * (y >> np.uint64(PRECISION)) + slot - start[symbol]
        low = y < STATE_MIN
        need = int(low.sum())
        if at + need > len(words):
            raise CorruptError("the words of a sequence end too early", rule="sequence.words")
        y[low] = (y[low] << np.uint64(16)) | words[at : at + need]
        at += need
        x[: len(y)] = y
    if at != len(words) or (x != STATE_MIN).any():
        raise CorruptError("a sequence must end in the states in which the encoder began", rule="sequence.state")
    return ids


def _quantise(counts: NDArray[np.int64]) -> Symbols:
    """Counts as bytes: below 16 exact, above with 3 bits after the leading one, rounded down; 0 stays 0."""
    weights = np.zeros(len(counts), np.uint8)
    for i, n in enumerate(counts.tolist()):
        shift = max(n.bit_length() - 4, 0)
        weights[i] = n if n < 16 else (shift << 3) + (n >> shift)
    return weights


def _frequencies(weights: Symbols) -> NDArray[np.uint64]:
    """Frequencies that sum to 4096: one for each used symbol, the rest by weight, what is left to the heaviest."""
    byte = weights.astype(np.uint64)
    scale = np.where(byte < 16, np.uint64(0), (byte >> np.uint64(3)) - np.uint64(1))
    weight = np.where(byte < 16, byte, (np.uint64(8) + (byte & np.uint64(7))) << scale)
    used = weight > 0
    spare = np.uint64(SLOTS - int(used.sum()))
    f = np.where(used, np.uint64(1) + weight * spare // weight.sum(), np.uint64(0)).astype(np.uint64)
    f[int(np.argmax(weight))] += np.uint64(SLOTS) - f.sum()
    return f


def _read_table(reader: ByteReader, alphabet: int) -> NDArray[np.uint64]:
    size = reader.byte() + 1
    if size > alphabet:
        raise CorruptError(f"a table has {size} symbols; at most {alphabet} are possible", rule="table.size")
    weights = reader.array(np.uint8, size)
    if weights[-1] == 0:
        raise CorruptError("a table must not end with an unused symbol", rule="table.end")
    return _frequencies(weights)
