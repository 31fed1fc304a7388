"""Placements: where an element of the checkpoint lies, found by arithmetic, against copying for real."""

import math
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltasync.engines.memory import Placement, is_covered


def copy_between(source: torch.Tensor, target: torch.Tensor, storage: int = 0) -> Placement:
    return Placement.of(
        storage,
        target.shape,
        source=int(source.storage_offset()),
        source_strides=source.stride(),
        target=int(target.storage_offset()),
        target_strides=target.stride(),
    )


def really(source: torch.Tensor, target: torch.Tensor, elements: int, room: int) -> dict[int, list[int]]:
    """Places of each element that is copied. Both are views of numbers that count from 0."""
    found: dict[int, list[int]] = {}
    for there, here in zip(source.reshape(-1).tolist(), target.reshape(-1).tolist(), strict=True):
        found.setdefault(there, []).append(here)
    assert all(0 <= there < elements for there in found)
    assert all(0 <= here < room for places in found.values() for here in places)
    return found


def located(placement: Placement, indices: np.ndarray) -> dict[int, list[int]]:
    which, places = placement.locate(indices)
    return {int(i): [int(place)] for i, place in zip(indices[which], places, strict=True)}


@st.composite
def view_of(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    """A view by a chain of what loaders do."""
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["narrow", "permute", "chunk", "select", "reshape", "step"]))
        dim = draw(st.integers(0, tensor.dim() - 1)) if tensor.dim() else None
        if dim is None:
            break
        size = tensor.shape[dim]
        if kind == "narrow":
            first = draw(st.integers(0, size))
            tensor = tensor.narrow(dim, first, draw(st.integers(0, size - first)))
        elif kind == "permute":
            tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
        elif kind == "chunk" and size:
            tensor = draw(st.sampled_from(tensor.chunk(draw(st.integers(1, 3)), dim)))
        elif kind == "select" and size:
            tensor = tensor.select(dim, draw(st.integers(0, size - 1)))
        elif kind == "step":
            tensor = tensor[(slice(None),) * dim + (slice(None, None, draw(st.integers(1, 3))),)]
        elif kind == "reshape" and tensor.is_contiguous() and tensor.numel():
            tensor = tensor.view(draw(st.sampled_from(splits(tensor.numel()))))
    return tensor


def splits(elements: int) -> list[tuple[int, ...]]:
    return [(elements,), *((d, elements // d) for d in range(1, elements + 1) if elements % d == 0)]


@st.composite
def placements(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Equal shapes: views of a tensor and of a larger storage, in any order of dimensions."""
    shape = draw(st.lists(st.integers(0, 5), min_size=0, max_size=3))
    elements = math.prod(shape)
    source = draw(view_of(torch.arange(elements).view(shape)))
    # Room around the target in each dimension, and an order of its own.
    order = draw(st.permutations(range(source.dim())))
    margins = [(draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in order]
    outer = [before + source.shape[d] + after for d, (before, after) in zip(order, margins, strict=True)]
    stack, at = draw(st.integers(1, 3)), draw(st.integers(0, 2))
    room = torch.arange(stack * math.prod(outer)).view(stack, *outer)
    target = room[min(at, stack - 1)]
    for dim, (d, (before, _)) in enumerate(zip(order, margins, strict=True)):
        target = target.narrow(dim, before, source.shape[d])
    if order:
        target = target.permute([order.index(d) for d in range(len(order))])
    return source, target, elements, room.numel()


@given(placements(), st.randoms(use_true_random=False))
def test_the_arithmetic_agrees_with_a_copy(pair: tuple[torch.Tensor, torch.Tensor, int, int], random: Random) -> None:
    source, target, elements, room = pair
    wanted = really(source, target, elements, room)
    placement = copy_between(source, target)
    assert placement == Placement.from_json(placement.to_json())
    assert placement.elements == len(wanted)
    assert located(placement, np.arange(elements)) == wanted
    some = np.array(sorted(i for i in range(elements) if random.random() < 0.4), np.int64)
    assert located(placement, some) == {i: wanted[i] for i in some.tolist() if i in wanted}


WEIGHT = torch.arange(12 * 8).view(12, 8)
STACK = torch.arange(3 * 12 * 8).view(3, 12, 8)
JOINED = {
    "all of it": (WEIGHT, WEIGHT, (96,), (1,)),
    "rows": (WEIGHT[4:8], STACK[1, 2:6], (32,), (1,)),
    "columns": (WEIGHT[:, 2:5], STACK[0, :, 5:], (12, 3), (8, 1)),
    "all columns of a wider place": (WEIGHT.view(24, 4), STACK.view(-1, 8)[:24, :4], (24, 4), (4, 1)),
    "transposed": (WEIGHT.t(), STACK[2].reshape(8, 12), (12, 8), (8, 1)),
    "a dimension of one": (WEIGHT[3:4, :, None], STACK[0, 0:1, :, None], (8,), (1,)),
    "one element": (WEIGHT[5, 5], STACK[1, 1, 1], (1,), (1,)),
}


@pytest.mark.parametrize(("source", "target", "shape", "strides"), JOINED.values(), ids=JOINED.keys())
def test_the_shortest_form(
    source: torch.Tensor, target: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    placement = copy_between(source, target)
    assert (placement.shape, placement.source_strides) == (shape, strides)
    assert located(placement, np.arange(96)) == really(source, target, 96, 288)


def test_an_empty_part_holds_nothing() -> None:
    placement = copy_between(WEIGHT[3:3], STACK[0, 3:3])
    assert placement.elements == 0
    assert located(placement, np.arange(96)) == {}
    assert located(copy_between(WEIGHT[:, 4:4], STACK[0, :, 4:4]), np.arange(96)) == {}


def test_indices_beyond_four_bytes() -> None:
    """An index of 2**32 does not wrap around, in neither coordinate."""
    far = 1 << 32
    placement = Placement.of(0, (4, far), source=far, source_strides=(2 * far, 1), target=7, target_strides=(far, 1))
    indices = np.array([0, far - 1, far, 2 * far - 1, 2 * far, 3 * far + 5, 7 * far], np.int64)
    which, places = placement.locate(indices)
    assert indices[which].tolist() == [far, 2 * far - 1, 3 * far + 5, 7 * far]
    assert places.tolist() == [7, 7 + far - 1, 7 + far + 5, 7 + 3 * far]


TOP, BOTTOM = copy_between(WEIGHT[:6], STACK[0, :6]), copy_between(WEIGHT[6:], STACK[0, 6:])
LEFT, RIGHT = copy_between(WEIGHT[:, :4], STACK[0, :, :4]), copy_between(WEIGHT[:, 4:], STACK[0, :, 4:])
COVERED = {
    "rows of two ranks": ([[TOP], [BOTTOM]], True),
    "columns of two ranks": ([[LEFT], [RIGHT]], True),
    "both with one rank": ([[LEFT, RIGHT], []], True),
    "all with each rank": ([[copy_between(WEIGHT, STACK[0])], [copy_between(WEIGHT, STACK[1])]], True),
    "the same part in two places": ([[TOP], [copy_between(WEIGHT[:6], STACK[2, :6])]], False),
    "one rank is missing": ([[LEFT]], False),
    "no rank has any": ([[], []], False),
}


@pytest.mark.parametrize(("ranks", "is_all"), COVERED.values(), ids=COVERED.keys())
def test_whether_ranks_hold_all(ranks: list[list[Placement]], is_all: bool) -> None:
    assert is_covered(96, ranks) is is_all


def test_an_empty_tensor_is_covered() -> None:
    assert is_covered(0, [[], []])
