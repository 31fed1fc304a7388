"""Weights in memory, positions of changes in them, and indices as wide as needed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.changes import ByTensor, by_tensor
from support.helpers import state

from deltasync.format import limits
from deltasync.format.layout import DTYPES, Layout, TensorSpec
from deltasync.format.weights import Changes, PackedPositions, Weights, index_dtype, whole_runs, zeros


def test_whole_runs_leave_out_empty_tensors() -> None:
    layout = Layout.of(TensorSpec(n, DTYPES["U8"], shape) for n, shape in (("a", (0, 3)), ("b", ()), ("c", (2, 2))))
    assert whole_runs(layout, range(3)).tolist() == [[1, 0, 1], [2, 0, 4]]


def plain(changed: ByTensor) -> dict[str, tuple[list[int], list[int]]]:
    return {name: (indices.tolist(), values.tolist()) for name, (indices, values) in changed.items()}


@pytest.mark.parametrize(("elements", "expected"), [(1, "u4"), (1 << 32, "u4"), ((1 << 32) + 1, "u8")])
def test_indices_are_as_wide_as_needed(elements: int, expected: str) -> None:
    layout = Layout.of([TensorSpec("a", DTYPES["U8"], (elements,))])
    assert index_dtype(layout, 0) == np.dtype(expected)


def test_indices_beyond_four_bytes() -> None:
    """A run far into a tensor of more than 2^32 elements, behind another run: no array of that size is needed."""
    layout = Layout.of([TensorSpec("a", DTYPES["U8"], (10,)), TensorSpec("b", DTYPES["U8"], (1 << 33,))])
    far = (1 << 32) + 5
    runs = np.array([[0, 0, 10], [1, far, 20]], np.int64)
    changes = Changes(runs, np.array([3, 10, 29], np.uint32), np.array([1, 2, 3], np.uint8))
    found = by_tensor(layout, [changes])
    assert plain(found) == {"a": ([3], [1]), "b": ([far, far + 19], [2, 3])}


@given(st.sets(st.one_of(st.integers(0, 300), st.integers(0, limits.BLOCK_ELEMENTS_MAX - 1), st.just(1 << 16))))
def test_packed_positions_come_back(drawn: set[int]) -> None:
    positions = np.array(sorted(drawn), np.uint32)
    packed = PackedPositions.of(positions)
    assert packed.unpacked().dtype == np.uint32
    assert packed.unpacked().tolist() == positions.tolist()
    assert packed.low.nbytes * 2 == positions.nbytes


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"a": np.empty((0, 3), np.float16), "b": np.empty(0, np.uint8)},
        {"a": np.array(3, np.int64)},
        {
            "a": np.zeros(3, np.uint8),
            "b": np.zeros(5, np.float64),
            "c": np.empty(0, np.float32),
            "d": np.zeros(7, bool),
        },
        state(),
    ],
    ids=["no tensors", "no elements", "a scalar", "of odd sizes", "of many types"],
)
def test_memory_for_weights(tensors: dict[str, np.ndarray]) -> None:
    """Zeros of the right types that can be written, each of its own and aligned."""
    layout = Weights.of(tensors).layout
    weights = zeros(layout)
    assert [(a.size, a.dtype) for a in weights.arrays] == [(t.elements, t.dtype.bits_dtype) for t in layout.tensors]
    for number, array in enumerate(weights.arrays):
        assert not array.any(), "nothing else has written here"
        assert array.flags.c_contiguous
        assert array.flags.aligned
        array.fill(number + 1)
    for number, array in enumerate(weights.arrays):
        assert (array == number + 1).all()
