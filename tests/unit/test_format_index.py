from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltasync.errors import CorruptError
from deltasync.format.index import pack_runs, require_disjoint, unpack_runs
from deltasync.format.layout import DTYPES, Layout, TensorSpec
from deltasync.format.weights import Runs

LAYOUT = Layout.of(
    [
        TensorSpec("a", DTYPES["BF16"], (1000,)),
        TensorSpec("b", DTYPES["BF16"], (1000,)),
        TensorSpec("c", DTYPES["F32"], (9,)),
    ]
)


def unpack(value: Any, *, elements_max: int = 10_000, runs_max: int = 10_000) -> Runs:
    return unpack_runs(value, LAYOUT, elements_max=elements_max, runs_max=runs_max)


@st.composite
def runs(draw: st.DrawFn) -> Runs:
    """Runs in any order, biased towards equal counts and strides, which packing joins."""
    rows = []
    for _ in range(draw(st.integers(1, 6))):
        tensor, count = draw(st.integers(0, 1)), draw(st.integers(1, 4))
        stride, repeat, start = draw(st.integers(0, 9)), draw(st.integers(1, 6)), draw(st.integers(0, 900))
        rows += [(tensor, start + i * stride, count) for i in range(repeat)]
    return np.array(rows, np.int64)


@settings(deadline=None)
@given(runs())
def test_round_trip(rows: Runs) -> None:
    packed = pack_runs(rows)
    assert unpack(packed).tolist() == rows.tolist()
    assert len(packed) <= len(rows)


@pytest.mark.parametrize(
    ("rows", "packed"),
    [
        ([[0, 5, 7]], [[0, 5, 7]]),
        ([[0, 0, 4], [0, 10, 4], [0, 20, 4]], [[0, 0, 4, 10, 3]]),
        ([[0, 0, 4], [1, 10, 4]], [[0, 0, 4], [1, 10, 4]]),
        ([[0, 0, 4], [0, 10, 5]], [[0, 0, 4], [0, 10, 5]]),
        ([[0, 10, 4], [0, 0, 4]], [[0, 10, 4], [0, 0, 4]]),
        ([[0, 0, 4], [0, 10, 4], [0, 20, 4], [0, 25, 4], [0, 30, 4]], [[0, 0, 4, 10, 3], [0, 25, 4, 5, 2]]),
        ([[1, 9, 1], [0, 0, 2], [0, 4, 2], [1, 0, 2]], [[1, 9, 1], [0, 0, 2, 4, 2], [1, 0, 2]]),
    ],
)
def test_packing(rows: list[list[int]], packed: list[list[int]]) -> None:
    assert pack_runs(np.array(rows, np.int64)) == packed


BAD: dict[str, tuple[Any, str]] = {
    "not a list": ({}, "runs.entry"),
    "none": ([], "runs.entry"),
    "a run is a number": ([3], "runs.entry"),
    "four numbers": ([[0, 0, 1, 1]], "runs.entry"),
    "a text": ([[0, 0, "1"]], "runs.entry"),
    "a bool": ([[0, 0, True]], "runs.entry"),
    "negative start": ([[0, -1, 1]], "runs.entry"),
    "huge count": ([[0, 0, 2**63]], "runs.entry"),
    "huge repeat": ([[0, 0, 1, 1, 2**200]], "runs.entry"),
    "no such tensor": ([[3, 0, 1]], "runs.tensor"),
    "empty": ([[0, 0, 0]], "runs.empty"),
    "past the end": ([[0, 999, 2]], "runs.range"),
    "strided past the end": ([[0, 0, 2, 100, 11]], "runs.range"),
    "stride below count": ([[0, 0, 3, 2, 2]], "runs.stride"),
    "repeat 1": ([[0, 0, 3, 3, 1]], "runs.stride"),
    "two types": ([[0, 0, 3], [2, 0, 3]], "runs.dtype"),
}


@pytest.mark.parametrize(("value", "rule"), BAD.values(), ids=BAD.keys())
def test_refused(value: Any, rule: str) -> None:
    with pytest.raises(CorruptError) as caught:
        unpack(value)
    assert caught.value.rule == rule


def test_elements_and_pieces_are_bounded_before_they_are_spelled_out() -> None:
    big = Layout.of([TensorSpec("huge", DTYPES["U8"], (1 << 48,))])
    bomb = [[0, 0, 1, 2, 1 << 46]]
    with pytest.raises(CorruptError) as caught:
        unpack_runs(bomb, big, elements_max=1 << 24, runs_max=1 << 22)
    assert caught.value.rule == "runs.elements"
    with pytest.raises(CorruptError) as caught:
        unpack_runs(bomb, big, elements_max=1 << 50, runs_max=1 << 22)
    assert caught.value.rule == "runs.pieces"
    assert len(unpack([[0, 0, 1, 2, 10]], elements_max=10, runs_max=10)) == 10


@settings(deadline=None)
@given(st.lists(runs(), max_size=3))
def test_disjoint_says_what_counting_says(parts: list[Runs]) -> None:
    seen = np.zeros((2, 1000), np.int64)
    for rows in parts:
        for tensor, start, count in rows.tolist():
            seen[tensor, start : start + count] += 1
    if (seen > 1).any():
        with pytest.raises(CorruptError) as caught:
            require_disjoint(parts, LAYOUT)
        assert caught.value.rule == "runs.overlap"
    else:
        require_disjoint(parts, LAYOUT)
