"""Makes inputs of the fuzz target from blocks that the encoder wrote, for a corpus to begin with.

    python tests/fuzz/seeds.py FOLDER

Then `build/fuzz/decode_fuzz -merge=1 tests/fuzz/corpus FOLDER` keeps those that reach something new.
"""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from support.helpers import ChangesParts, encode_with
from support.strategies import MOVES, random_change

from deltasync.format.layout import DTYPES, DType
from deltasync.format.weights import Bits, Region
from deltasync.kernels import reference

KINDS = [DTYPES[n] for n in ("BF16", "F16", "F32", "F8_E4M3", "F8_E5M2", "U8", "U16", "U32", "U64")]
UNIFORM, WEIGHTS, SPECIAL, CONSTANT = LOOKS = range(4)
RELATIVE, ABSOLUTE, PLANES = range(3)
FEW_ELEMENTS = 200


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


def head(kind: int, mode: int, look: int, seed: int, sizes: list[int]) -> bytes:
    coded_sizes = (n if n < FEW_ELEMENTS else n | 0x8000 for n in sizes)
    return (
        bytes((kind, mode, look))
        + seed.to_bytes(4, "little")
        + bytes((len(sizes) - 1,))
        + b"".join(n.to_bytes(2, "little") for n in coded_sizes)
    )


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


def seeds() -> Iterator[bytes]:
    rng = np.random.default_rng(3)
    for kind, dtype in enumerate(KINDS):
        for look, move, share in itertools.product(LOOKS, MOVES, (0.02, 0.3, 1.0)):
            sizes = [[65, 3, 130], [199], [4096, 70]][int(rng.integers(3))]
            seed = int(rng.integers(1 << 32))
            old = elements(dtype, look, seed, sum(sizes))
            new = random_change(rng, dtype, old, share, move)
            region, positions = region_of(dtype, old), np.flatnonzero(old != new).astype(np.uint32)
            classes = int(rng.integers(1, 17))
            for chosen in ([], thresholds(dtype, classes)):
                absolute, block = encode_with(chosen, region, positions, new[positions])
                yield head(kind, int(absolute), look, seed, sizes) + block
            if not absolute and len(positions):
                parts = ChangesParts.read(block, absolute=False)
                values = reference.encode_planes(region_of(dtype, new[positions]))
                yield head(kind, ABSOLUTE, look, seed, sizes) + block[: -len(parts.steps.build())] + values
                if move == "ulp" and share < 1:
                    yield from (head(kind, RELATIVE, look, seed, sizes) + bad for bad in broken(parts))
            yield head(kind, PLANES, look, seed, sizes) + reference.encode_planes(region_of(dtype, new))


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    for count, data in enumerate(seeds(), 1):
        (folder / f"seed-{count:04d}").write_bytes(data[:4096])
    print(f"{count} seeds")


if __name__ == "__main__":
    main()
