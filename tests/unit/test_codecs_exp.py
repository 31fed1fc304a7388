"""Steps of a block by its tables, against the steps themselves."""

from contextlib import suppress

import numpy as np
import pytest

from deltasync.codecs import exp
from deltasync.errors import CorruptError
from deltasync.format.layout import DTYPES, Layout, TensorSpec
from deltasync.format.payload import Block
from deltasync.format.weights import Changes, Weights, whole_runs
from deltasync.kernels.reference import zigzag_steps

READ_BYTES_MAX = 3 * 4096


def coded(dtype: str, changes: int, spread: float, seed: int) -> tuple[Block, np.ndarray]:
    """A block of changes, and how many of them are steps of each size."""
    rng = np.random.default_rng(seed)
    spec = TensorSpec("w", DTYPES[dtype], (4 * changes + 8,))
    bits_dtype = spec.dtype.bits_dtype
    middle = 1 << (8 * spec.dtype.width - 3)
    before = rng.integers(middle // 2, middle, spec.elements).astype(bits_dtype)
    old = Weights(Layout((spec,)), (before,))
    positions = np.sort(rng.choice(spec.elements, changes, replace=False)).astype(np.uint32)
    steps = np.minimum(1 + rng.exponential(spread, changes), middle // 4).astype(np.int64)
    values = (before[positions].astype(np.int64) + steps * rng.choice((-1, 1), changes)).astype(bits_dtype)
    block = exp.encode(old, Changes(whole_runs(old.layout, [0]), positions, values))
    sizes = zigzag_steps(spec.dtype, before[positions], values).astype(np.int64) // 2 + 1
    assert sizes.tolist() == steps.tolist()
    wanted = np.bincount([(int(size) - 1).bit_length() for size in sizes], minlength=exp.STEP_BINS)
    return block, wanted


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F8_E4M3", "I8", "I64"])
@pytest.mark.parametrize(("changes", "spread"), [(24, 1.0), (500, 0.4), (20_000, 0.2), (20_000, 9.0)])
def test_tables_say_how_large_the_steps_are(dtype: str, changes: int, spread: float) -> None:
    block, wanted = coded(dtype, changes, spread, seed=changes)
    if block.codec != exp.EXP:
        pytest.skip("these changes are shorter as absolute values, which have no steps")
    asked: list[int] = []

    def read(offset: int, length: int) -> bytes:
        asked.append(length)
        assert 0 <= offset < len(block.data)
        return block.data[offset : offset + length]

    found = exp.read_steps(read, len(block.data), DTYPES[dtype])
    assert len(asked) == 3
    assert sum(asked) <= READ_BYTES_MAX
    assert found.sum() == pytest.approx(changes)
    # A count has four significant bits in its table, and a frequency is a whole number of 4,096.
    allowed = wanted / 8 + 16 * changes * 20 / 4096
    assert (np.abs(found - wanted) <= allowed).all(), (found[:12], wanted[:12])
    assert not found[wanted == 0].any(), "a size that does not occur has no weight"


def test_a_block_that_breaks_off_is_refused() -> None:
    block, _ = coded("BF16", 2_000, 2.0, seed=3)
    assert block.codec == exp.EXP
    rules = set()
    for end in [*range(200), *range(200, len(block.data), 37)]:
        data = block.data[:end]
        try:
            exp.read_steps(lambda offset, length, data=data: data[offset : offset + length], end, DTYPES["BF16"])
        except CorruptError as error:
            rules.add(error.rule)
    assert rules == {"block.truncated"}


@pytest.mark.parametrize("seed", range(200))
def test_any_bytes_are_refused_or_read(seed: int) -> None:
    rng = np.random.default_rng(seed)
    data = bytearray(coded("BF16", 300, 2.0, seed=5)[0].data)
    for _ in range(4):
        data[rng.integers(0, min(len(data), 200))] = rng.integers(0, 256)
    with suppress(CorruptError):
        found = exp.read_steps(lambda offset, length: bytes(data[offset : offset + length]), len(data), DTYPES["BF16"])
        assert (found >= 0).all()
