"""The arithmetic of shards, against brute force."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from deltasync.errors import (
    InvalidInputError,
)
from deltasync.format.layout import Layout
from deltasync.format.weights import Weights
from deltasync.trainer.shards import Box, Shards, Spans, chunk, cut, joined


def indices(spans: Spans) -> list[int]:
    return [i for start, count in spans for i in range(start, start + count)]


def flat(box: Box) -> np.ndarray:
    """Every element of a box by brute force: its index in the tensor, in the order that it has here."""
    whole = np.arange(math.prod(box.shape)).reshape(box.shape)
    return whole[np.ix_(*(indices(spans) for spans in box.spans))].reshape(-1)


@st.composite
def spans_of(draw: st.DrawFn, size: int) -> Spans:
    """A part of a dimension, cut once or twice, from the left or from the right."""
    spans: Spans = ((0, size),) if size else ()
    for _ in range(draw(st.integers(0, 2))):
        parts = draw(st.integers(1, 5))
        number, factor = draw(st.integers(0, parts - 1)), draw(st.integers(1, 3))
        spans = joined(chunk(chunk(spans, first, factor), number, parts) for first in range(factor))
    return spans


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=4)))
    return Box(shape, tuple(draw(spans_of(size)) for size in shape))


@given(boxes(), st.data())
@example(Box((2, 3, 4), (((0, 2),), ((1, 1),), ((0, 4),))), None)
@example(Box((2, 4, 3), (((1, 1),), ((0, 2), (3, 1)), ((1, 2),))), None)
def test_places_are_where_brute_force_finds_them(box: Box, data: st.DataObject | None) -> None:
    expected = flat(box)
    assert box.elements == len(expected)
    if not len(expected):
        assert box.local_shape == (0,)
        assert box.runs == 0
        return
    first = 0 if data is None else data.draw(st.integers(0, len(expected) - 1))
    count = len(expected) if data is None else data.draw(st.integers(1, len(expected) - first))
    starts, counts = box.places(first, count)
    found = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
    assert found.tolist() == expected[first : first + count].tolist()
    assert len(box.places(0, box.elements)[0]) == box.runs


@given(boxes(), st.integers(1, 4))
def test_rows_fill_what_a_box_has_of_them(box: Box, step: int) -> None:
    whole = np.arange(1, math.prod(box.shape) + 1, dtype=np.uint32)
    row = math.prod(box.shape[1:])
    local = np.zeros(box.elements, np.uint32)
    for first in range(0, box.shape[0] if row and box.elements else 0, step):
        box.copy_rows(local, whole[first * row : (first + step) * row], first)
    assert local.tolist() == (flat(box) + 1).tolist()


@given(st.integers(0, 40), st.integers(1, 9))
def test_chunks_are_those_of_torch(size: int, parts: int) -> None:
    whole = torch.arange(size)
    expected = [piece.tolist() for piece in torch.chunk(whole, parts)]
    found = [indices(chunk(((0, size),) if size else (), number, parts)) for number in range(parts)]
    assert [piece for piece in found if piece] == [piece for piece in expected if piece]


def test_cut_counts_along_the_spans() -> None:
    spans = ((5, 3), (20, 2), (0, 4))
    assert cut(spans, 2, 7) == ((7, 1), (20, 2), (0, 2))
    assert cut(spans, 9, 99) == ()
    assert joined([((0, 2),), ((2, 3),), (), ((6, 1),)]) == ((0, 5), (6, 1))


def test_shards_of_single_elements_are_refused_where_there_are_too_many() -> None:
    spec = Weights.of({"w": np.zeros((2, 2), np.float32)}).layout.tensors[0]
    for rows, fine in ((1 << 20, True), (1 << 21, False)):
        layout = Layout.of([type(spec)("w", spec.dtype, (rows, 2))])
        box = Box((rows, 2), (((0, rows),), ((0, 1),)))
        if fine:
            assert Shards(layout, [box]).boxes[0].runs == rows
        else:
            with pytest.raises(InvalidInputError, match="tensor 'w' lies in too many short runs"):
                Shards(layout, [box])
