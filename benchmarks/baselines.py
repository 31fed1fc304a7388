"""Encoders to compare with: how the same change looks in the layouts that are in use elsewhere.

Each works on flat bits of any element width (1, 2 or 4 bytes) and gives the sections of its message. The
layouts of others go tensor by tensor, as they do there; Rice codes go by blocks, which spares them tables.
`check` decodes what `encode` made.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from benchmarks.bits import UNSIGNED, Bits, ElementType
from benchmarks.data.pair import Pair, blocks
from benchmarks.rice import exponent_rice_bits

Encode = Callable[[Bits, Bits], list[bytes]]
Decode = Callable[[Bits, Sequence[bytes]], Bits]
SizeInBits = Callable[[Bits, Bits, ElementType], int]
Changes = tuple[NDArray[np.int64], Bits]
"""Ascending positions, and the values there."""

U16_LIMIT = (1 << 16) - 1


@dataclass(frozen=True, slots=True)
class Baseline:
    """A layout with both directions."""

    name: str
    encode: Encode
    decode: Decode

    def pair_bytes(self, pair: Pair) -> int:
        """Return the size of the whole change; framing and names are not counted, in favour of the baseline."""
        return sum(len(section) for old, new in pair.tensors() for section in self.encode(old, new))

    def check(self, old: Bits, new: Bits) -> None:
        """Raise if a round trip does not give the new bits."""
        if not np.array_equal(self.decode(old, self.encode(old, new)), new):
            raise AssertionError(f"{self.name}: the round trip is not exact")


@dataclass(frozen=True, slots=True)
class SizeOnly:
    """A layout whose exact size is counted, without producing its bytes."""

    name: str
    size_in_bits: SizeInBits

    def pair_bytes(self, pair: Pair) -> int:
        """Return the size of the whole change, each block in whole bytes; framing is not counted."""
        return sum(-(-self.size_in_bits(old, new, pair.kind) // 8) for old, new in blocks(pair))

    def check(self, old: Bits, new: Bits) -> None:
        """Do nothing: there are no bytes to decode."""


def self_check(*, seed: int = 0, elements: int = 1 << 18) -> None:
    """Round trip every baseline at every width: no, few and many changes, and a gap beyond 16 bits."""
    random = np.random.default_rng(seed)
    for unsigned in UNSIGNED.values():
        old = random.integers(0, np.iinfo(unsigned).max, elements, unsigned, endpoint=True)
        for density in (0.0, 0.0001, 0.01, 0.6, 1.0):
            new = old.copy()
            moved = np.flatnonzero(random.random(elements) < density)
            new[moved[moved > U16_LIMIT + 1]] ^= unsigned(1)
            for baseline in BASELINES:
                baseline.check(old, new)


def encode_index_value(old: Bits, new: Bits) -> list[bytes]:
    """Positions as int32, then the new values."""
    changed = np.flatnonzero(old != new)
    return [changed.astype("<i4").tobytes(), new[changed].tobytes()]


def decode_index_value(old: Bits, message: Sequence[bytes]) -> Bits:
    """Invert `encode_index_value`."""
    return _scatter(old, *read_index_value(message, old.dtype))


def read_index_value(message: Sequence[bytes], dtype: np.dtype[Any]) -> Changes:
    """What `encode_index_value` found."""
    changed, values = message
    return np.frombuffer(changed, "<i4").astype(np.int64), np.frombuffer(values, dtype)


def encode_gaps_u16(old: Bits, new: Bits) -> list[bytes]:
    """Gaps as u16, or as u32 for the whole tensor if one does not fit, then the new values."""
    changed = np.flatnonzero(old != new)
    gaps = np.diff(changed, prepend=0)
    width = "<u4" if gaps.size and int(gaps.max()) > U16_LIMIT else "<u2"
    return [gaps.astype(width).tobytes(), new[changed].tobytes()]


def decode_gaps_u16(old: Bits, message: Sequence[bytes]) -> Bits:
    """Invert `encode_gaps_u16`."""
    return _scatter(old, *read_gaps(message, old.dtype))


def read_gaps(message: Sequence[bytes], dtype: np.dtype[Any]) -> Changes:
    """What `encode_gaps_u16` found; the lengths of the sections give the width of the gaps."""
    gaps, values = message
    count = len(values) // dtype.itemsize
    width = f"<u{len(gaps) // count}" if count else "<u2"
    return np.cumsum(np.frombuffer(gaps, width), dtype=np.int64), np.frombuffer(values, dtype)


def encode_gaps_zstd(old: Bits, new: Bits) -> list[bytes]:
    """Gaps as int32, then the new values, each through zstd-1."""
    changed = np.flatnonzero(old != new)
    gaps = np.diff(changed, prepend=0).astype("<i4")
    return [_compress(gaps, level=1), _compress(new[changed], level=1)]


def encode_narrow_gaps_zstd(old: Bits, new: Bits) -> list[bytes]:
    """Gaps in the narrowest of u8, u16 and u32 that fits, then the new values, each through zstd-1."""
    changed = np.flatnonzero(old != new)
    gaps = np.diff(changed, prepend=0)
    width = np.min_scalar_type(int(gaps.max())) if gaps.size else np.dtype(np.uint8)
    return [_compress(gaps.astype(width), level=1), _compress(new[changed], level=1)]


def decode_gaps_zstd(old: Bits, message: Sequence[bytes]) -> Bits:
    """Invert `encode_gaps_zstd` and `encode_narrow_gaps_zstd`."""
    return _scatter(old, *read_gaps_zstd(message, old.dtype))


def read_gaps_zstd(message: Sequence[bytes], dtype: np.dtype[Any]) -> Changes:
    """What `encode_gaps_zstd` and `encode_narrow_gaps_zstd` found, or the positions and flips of the one with XOR."""
    return read_gaps([_decompress(section) for section in message], dtype)


def encode_gaps_xor_zstd(old: Bits, new: Bits) -> list[bytes]:
    """Gaps in u16, or in u32 if one does not fit, then old XOR new of what changed, each through zstd-1."""
    changed = np.flatnonzero(old != new)
    gaps, _ = encode_gaps_u16(old, new)
    return [_compress(np.frombuffer(gaps, np.uint8), level=1), _compress(old[changed] ^ new[changed], level=1)]


def decode_gaps_xor_zstd(old: Bits, message: Sequence[bytes]) -> Bits:
    """Invert `encode_gaps_xor_zstd`."""
    changed, flips = read_gaps_zstd(message, old.dtype)
    return _scatter(old, changed, old[changed] ^ flips)


def encode_xor(old: Bits, new: Bits) -> list[bytes]:
    """All elements as old XOR new, through zstd-1."""
    return [_compress(old ^ new, level=1)]


def decode_xor(old: Bits, message: Sequence[bytes]) -> Bits:
    """Invert `encode_xor`."""
    return old ^ np.frombuffer(_decompress(message[0]), old.dtype)


def encode_full(old: Bits, new: Bits) -> list[bytes]:
    """All new values through zstd-3; the old ones are not used."""
    del old
    return [_compress(new, level=3)]


def decode_full(old: Bits, message: Sequence[bytes]) -> Bits:
    """Invert `encode_full`."""
    return np.frombuffer(_decompress(message[0]), old.dtype)


BASELINES: tuple[Baseline | SizeOnly, ...] = (
    Baseline("int32 index + value", encode_index_value, decode_index_value),
    Baseline("u16 gaps + value", encode_gaps_u16, decode_gaps_u16),
    Baseline("int32 gaps + value, zstd-1", encode_gaps_zstd, decode_gaps_zstd),
    Baseline("narrow gaps + value, zstd-1", encode_narrow_gaps_zstd, decode_gaps_zstd),
    Baseline("u16 gaps + XOR, zstd-1", encode_gaps_xor_zstd, decode_gaps_xor_zstd),
    SizeOnly("exponent classes, Rice", exponent_rice_bits),
    Baseline("dense XOR, zstd-1", encode_xor, decode_xor),
    Baseline("full weights, zstd-3", encode_full, decode_full),
)


def _scatter(old: Bits, changed: NDArray[np.int64], values: Bits) -> Bits:
    new = old.copy()
    new[changed] = values
    return new


def _compress(data: np.ndarray[tuple[int], np.dtype[np.generic]], *, level: int) -> bytes:
    section: bytes = zstandard.ZstdCompressor(level=level).compress(np.ascontiguousarray(data).data)
    return section


def _decompress(section: bytes) -> bytes:
    data: bytes = zstandard.ZstdDecompressor().decompress(section)
    return data
