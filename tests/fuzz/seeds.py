"""Inputs of the native fuzz targets, made from blocks that the encoder wrote, for a corpus to begin with.

    PYTHONPATH=tests python -m fuzz.seeds FOLDER

Then `FUZZ_TARGET=relative build/fuzz/clang++/decode_fuzz -merge=1 tests/fuzz/corpus/relative FOLDER/relative`, and the
same for the other targets, keeps those that reach something new.
"""

import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from support.helpers import ChangesParts, encode_with, numbers
from support.strategies import MOVES, random_change

from deltasync.format import limits
from deltasync.format.layout import DTYPES, DType
from deltasync.format.weights import Bits, Region
from deltasync.kernels import rans, reference
from deltasync.kernels.rans import varint

KINDS = [DTYPES[n] for n in ("BF16", "F16", "F32", "F8_E4M3", "F8_E5M2", "U8", "U16", "U32", "U64")]
UNIFORM, WEIGHTS, SPECIAL, CONSTANT = LOOKS = range(4)
CODECS = RELATIVE, ABSOLUTE, PLANES = ("relative", "absolute", "planes")
FEW_ELEMENTS, MANY_ELEMENTS, RUNS_MAX = 200, 4300, 4
NARROW = (0, 1, 3, 4, 5, 6)
"""The kinds that `large` uses: up to 2 bytes wide."""

SEQUENCE_BITS = (8, 16, limits.BLOCK_ELEMENTS_LOG2, 32, 64)

Seed = tuple[str, bytes]
"""A target and an input of it."""


def elements(dtype: DType, look: int, seed: int, count: int) -> Bits:
    """The elements that the target makes of a head: the twin of `element` in decode_fuzz.cpp."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    hashed = reference.mix(np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * golden)
    sign, exponent = 1 << (8 * dtype.width - 1), dtype.exponent_mask << dtype.exponent_shift
    special = np.array([0, 1, sign, sign | 1, sign - 1, 2**64 - 1, exponent, exponent | 1], np.uint64)
    bits = hashed
    if look == SPECIAL:
        bits = special[(hashed % np.uint64(8)).astype(np.int64)]
    elif look == CONSTANT:
        bits = np.full(count, reference.mix(np.array([seed], np.uint64))[0])
    elif look == WEIGHTS and dtype.is_float:
        high = (hashed >> np.uint64(32)) | np.uint64(1 << 12)
        below = np.log2((high & (~high + np.uint64(1))).astype(np.float64)).astype(np.uint64)
        below %= np.uint64(dtype.exponent_mask // 2 + 1)
        field = (np.uint64(dtype.exponent_mask // 2) - below) << np.uint64(dtype.exponent_shift)
        bits = (hashed & np.uint64(~exponent & (2**64 - 1))) | field
    return bits.astype(dtype.bits_dtype)


@dataclass(frozen=True)
class Head:
    """Which elements an input is about."""

    dtype: DType
    look: int
    seed: int
    sizes: tuple[int, ...]

    def build(self) -> bytes:
        kind = KINDS.index(self.dtype)
        return bytes((kind, self.look)) + self.seed.to_bytes(4, "little") + bytes((len(self.sizes) - 1,)) + self._sizes

    @classmethod
    def read(cls, data: bytes) -> "tuple[Head, bytes]":
        """The head of an input as the native target reads it, and the block. What is missing counts as zeros."""
        padded = data.ljust(7 + 2 * RUNS_MAX, b"\0")
        count = 1 + padded[6] % RUNS_MAX
        raw = [int.from_bytes(padded[7 + 2 * i : 9 + 2 * i], "little") for i in range(count)]
        sizes = tuple((n & 0x7FFF) % MANY_ELEMENTS if n >> 15 else n % FEW_ELEMENTS for n in raw)
        dtype, look = KINDS[padded[0] % len(KINDS)], padded[1] % len(LOOKS)
        return cls(dtype, look, int.from_bytes(padded[2:6], "little"), sizes), data[7 + 2 * count :]

    def region(self) -> Region:
        """The elements, run by run, each run in an array of its own, with the keys that the native target uses."""
        bits = elements(self.dtype, self.look, self.seed, sum(self.sizes))
        arrays = tuple(np.split(bits, np.cumsum(self.sizes)[:-1]))
        runs = np.array([[r, 0, n] for r, n in enumerate(self.sizes)], np.int64)
        spread = reference.mix(np.array([[self.seed + r, self.seed - r] for r in range(len(runs))]).astype(np.uint64))
        first = np.array([1000 * r + r % 3 for r in range(len(runs))], np.uint64)
        return Region(self.dtype, arrays, runs, np.column_stack((spread, first)))

    @property
    def _sizes(self) -> bytes:
        return b"".join((n if n < FEW_ELEMENTS else n | 0x8000).to_bytes(2, "little") for n in self.sizes)


def region_of(dtype: DType, bits: Bits) -> Region:
    return Region(dtype, (bits,), np.array([[0, 0, len(bits)]]), np.zeros((1, 3), np.uint64))


def thresholds(dtype: DType, classes: int) -> list[int]:
    """Bounds around the exponents that most weights have."""
    top = dtype.exponent_mask // 2 + 1
    return list(range(max(1, top - classes + 2), top + 1)) if dtype.is_float else []


def broken(parts: ChangesParts) -> Iterator[bytes]:
    """A block with one field of its first sequence broken, in ways that are not found soon by chance."""
    yield parts.with_gaps(words=b"", word_count=0)
    yield parts.with_gaps(words=parts.gaps.words + b"12", word_count=parts.gaps.word_count + 1)
    yield parts.with_gaps(states=bytes(len(parts.gaps.states)))
    yield parts.with_gaps(tables=tuple(t + b"\0" for t in parts.gaps.tables))
    yield parts.with_gaps(tables=tuple(bytes(100) for _ in parts.gaps.tables))
    yield parts.with_gaps(lanes_log2=6)


def changes() -> Iterator[Seed]:
    """Blocks of changes and of planes, as the encoder writes them and with one field broken."""
    rng = np.random.default_rng(3)
    for dtype in KINDS:
        for look, move, share in itertools.product(LOOKS, MOVES, (0.02, 0.3, 1.0)):
            sizes = ((65, 3, 130), (199,), (4096, 70))[int(rng.integers(3))]
            head = Head(dtype, look, int(rng.integers(1 << 32)), sizes)
            old = elements(dtype, look, head.seed, sum(sizes))
            new = random_change(rng, dtype, old, share, move)
            region, positions = region_of(dtype, old), np.flatnonzero(old != new).astype(np.uint32)
            classes = int(rng.integers(1, 17))
            for chosen in ([], thresholds(dtype, classes)):
                absolute, block = encode_with(chosen, region, positions, new[positions])
                yield ABSOLUTE if absolute else RELATIVE, head.build() + block
            if not absolute and len(positions):
                parts = ChangesParts.read(block, absolute=False)
                values = reference.encode_planes(region_of(dtype, new[positions]))
                yield ABSOLUTE, head.build() + block[: -len(parts.steps.build())] + values
                if move == "ulp" and share < 1:
                    yield from ((RELATIVE, head.build() + bad) for bad in broken(parts))
            yield PLANES, head.build() + reference.encode_planes(region_of(dtype, new))


def sequences() -> Iterator[Seed]:
    """Numbers of every width, under one context and under several."""
    rng = np.random.default_rng(4)
    for (i, bits), contexts in itertools.product(enumerate(SEQUENCE_BITS), (1, 3, 16)):
        counts = [int(n) for n in rng.integers(0, 60, contexts)]
        values = rng.integers(0, (1 << bits) - 1, sum(counts), np.uint64, endpoint=True) >> rng.integers(
            0, bits, sum(counts), np.uint64
        )
        head = bytes((i, contexts - 1)) + b"".join(n.to_bytes(2, "little") for n in counts)
        yield "sequence", head + rans.encode_buckets(values, counts)


def large() -> Iterator[Seed]:
    """Short blocks of up to as many elements as a block may have: most symbols cost nothing.

    Where every element changes, 2^25 of them take half a minute under sanitizers: such blocks have 2^20.
    """
    zeros, ones = numbers([0], [1]).build(), numbers([1], [1]).build()
    steps = numbers([1, 2, 3], [3]).build()
    for (place, kind), shift, look in itertools.product(enumerate(NARROW), (0, 5, 9), (UNIFORM, WEIGHTS)):
        dtype, count = KINDS[kind], limits.BLOCK_ELEMENTS_MAX >> shift
        if shift < 9 and (look, dtype.name) not in ((UNIFORM, "U8"), (WEIGHTS, "BF16")):
            continue
        planes = (b"\1" + rans.encode_symbols(np.ones(1, np.uint8), [1])) * dtype.width
        found = [
            (RELATIVE, b"\1" + varint(count + 1) + zeros + ones),
            (RELATIVE, b"\1" + varint(3) + numbers([0, count // 2, 5], [3]).build() + steps),
            (RELATIVE, b"\1" + varint(3) + numbers([0, count - 2, 5], [3]).build() + steps),
            (PLANES, planes),
        ]
        if shift:
            found.append((RELATIVE, b"\1" + varint(count) + zeros + ones))
            found.append((ABSOLUTE, b"\1" + varint(count) + zeros + planes))
        if dtype.is_float:
            split = numbers([9, 8, 7, count // 64], [2, 2]).build()
            found.append((RELATIVE, bytes((2, dtype.exponent_mask // 2)) + varint(2) * 2 + split + split))
        for codec, block in found:
            yield "large", bytes((place, look, 1, shift, CODECS.index(codec))) + block


def main() -> None:
    folder, count = Path(sys.argv[1]), 0
    for count, (target, data) in enumerate(itertools.chain(changes(), sequences(), large()), 1):
        (folder / target).mkdir(parents=True, exist_ok=True)
        (folder / target / f"seed-{count:04d}").write_bytes(data[:4096])
    print(f"{count} seeds")


if __name__ == "__main__":
    main()
