"""Bytes and bits on the wire: LEB128 varints, a checked reader, and LSB-first bit packing in NumPy."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltasync.errors import CorruptError

_VARINT_BYTES_MAX = 5


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
        self._at = 0

    def take(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            raise CorruptError(f"the block ends before byte {self._at + count}", rule="block.truncated")
        self._at += count
        return self._data[self._at - count : self._at]

    def byte(self) -> int:
        return self.take(1)[0]

    def varint(self) -> int:
        value = 0
        for i in range(_VARINT_BYTES_MAX):
            byte = self.byte()
            value |= (byte & 0x7F) << (7 * i)
            if byte < 0x80:
                if byte == 0 and i > 0:
                    break
                return value
        raise CorruptError("a varint is too long", rule="block.varint")

    def array(self, dtype: Any, count: int) -> NDArray[Any]:
        wide = np.dtype(dtype)
        return np.frombuffer(self.take(count * wide.itemsize), wide)

    def require_end(self) -> None:
        if self._at != len(self._data):
            raise CorruptError(f"{len(self._data) - self._at} bytes after the end", rule="block.trailing")


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
        raise CorruptError(f"{len(data)} bytes of extra bits where {total} bits belong", rule="sequence.extra")
    # Sum the bits of each item, weighted by their place, as differences of one running sum (modulo 2^64).
    ends = np.cumsum(widths)
    place = np.arange(total) - np.repeat(ends - widths, widths)
    running = np.zeros(total + 1, np.uint64)
    np.cumsum(bits[:total].astype(np.uint64) << place.astype(np.uint64), out=running[1:])
    unpacked: NDArray[np.uint64] = running[ends] - running[ends - widths]
    return unpacked
