"""Placements, against copying for real; stages, and files of them that are damaged."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltasync.engines.memory import SEGMENT_ELEMENTS, Placement, Segment, is_covered, read_stage, segments, write_stage
from deltasync.errors import CorruptError
from deltasync.format.layout import DTYPES, TensorSpec
from deltasync.format.safetensors import header_bytes


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


Parts = list[tuple[list[int], list[int]]]


def joined(parts: Parts, width: int = 2) -> list[Segment]:
    return list(segments(3, [(np.array(p, np.int64), np.array(v, f"u{width}")) for p, v in parts]))


def flat(found: list[Segment]) -> dict[int, int]:
    return {
        segment.first + int(at): int(value)
        for segment in found
        for at, value in zip(segment.positions, segment.values, strict=True)
    }


PARTS: dict[str, tuple[Parts, dict[int, int]]] = {
    "one": ([([2, 5], [20, 50])], {2: 20, 5: 50}),
    "one after the other": ([([2, 5], [20, 50]), ([7], [70])], {2: 20, 5: 50, 7: 70}),
    "the other way round": ([([7], [70]), ([2, 5], [20, 50])], {2: 20, 5: 50, 7: 70}),
    "woven": ([([1, 9], [10, 90]), ([4, 11], [40, 110])], {1: 10, 4: 40, 9: 90, 11: 110}),
    "the last wins": ([([1, 4, 9], [1, 1, 1]), ([4], [2]), ([1, 4], [3, 3])], {1: 3, 4: 3, 9: 1}),
    "the last wins, in order already": ([([4], [1]), ([4], [2])], {4: 2}),
    "not ascending, as a transposed tensor has it": ([([9, 1, 5], [90, 10, 50])], {1: 10, 5: 50, 9: 90}),
    "one part is empty": ([([], []), ([4], [1])], {4: 1}),
    "nothing at all": ([([], []), ([], [])], {}),
    "on both sides of 2**32": (
        [([SEGMENT_ELEMENTS - 1, SEGMENT_ELEMENTS, 5 * SEGMENT_ELEMENTS + 3], [1, 2, 3])],
        {SEGMENT_ELEMENTS - 1: 1, SEGMENT_ELEMENTS: 2, 5 * SEGMENT_ELEMENTS + 3: 3},
    ),
    "2**32 apart is not the same place": ([([4], [1]), ([4 + SEGMENT_ELEMENTS], [2])], {4: 1, 4 + SEGMENT_ELEMENTS: 2}),
}


@pytest.mark.parametrize(("parts", "wanted"), PARTS.values(), ids=PARTS.keys())
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_parts_become_segments_and_a_file(parts: Parts, wanted: dict[int, int], width: int, tmp_path: Path) -> None:
    found = joined(parts, width)
    assert flat(found) == wanted
    # Every place once and in order; each fits into 4 bytes; no segment without changes.
    for segment in found:
        assert (segment.storage, segment.positions.dtype, segment.values.dtype) == (3, np.uint32, np.dtype(f"u{width}"))
        assert (np.diff(segment.positions.astype(np.int64)) > 0).all()
        assert segment.first % SEGMENT_ELEMENTS == 0
    assert len(found) == len({place // SEGMENT_ELEMENTS for place in wanted})
    path = tmp_path / "stage"
    assert write_stage(path, found) == path.stat().st_size
    again = read_stage(path)
    assert flat(again) == wanted
    assert {segment.values.dtype.itemsize for segment in again} <= {width}


def test_storages_of_all_widths_in_one_file(tmp_path: Path) -> None:
    """Bits at their limits; all of it is mapped, whatever the widths."""
    wanted = {
        storage: np.array([0, 1, 2 ** (8 * width) - 1], f"u{width}") for storage, width in enumerate((1, 8, 2, 4, 1))
    }
    places = np.array([0, 7, SEGMENT_ELEMENTS - 1], np.int64)
    found = [segment for storage, values in wanted.items() for segment in segments(storage, [(places, values)])]
    write_stage(tmp_path / "stage", found)
    again = {segment.storage: segment for segment in read_stage(tmp_path / "stage")}
    assert again.keys() == wanted.keys()
    for storage, values in wanted.items():
        assert again[storage].positions.tolist() == places.tolist()
        assert again[storage].values.dtype == values.dtype
        assert np.array_equal(again[storage].values, values)
        assert not again[storage].values.flags.owndata


def test_a_new_stage_leaves_the_one_that_is_mapped(tmp_path: Path) -> None:
    path = tmp_path / "stage"
    write_stage(path, joined([([1, 2], [10, 20])]))
    mapped = read_stage(path)
    write_stage(path, joined([([3], [30])]))
    assert flat(mapped) == {1: 10, 2: 20}
    assert flat(read_stage(path)) == {3: 30}
    assert [entry.name for entry in tmp_path.iterdir()] == ["stage"]


def stage_of(**arrays: np.ndarray) -> bytes:
    """A file with any names; `__` stands for a dot."""
    named = {name.replace("__", ".").removeprefix("s"): array for name, array in arrays.items()}
    specs = [TensorSpec(name, DTYPES[f"U{8 * a.itemsize}"], a.shape) for name, a in named.items()]
    return header_bytes(specs, {}) + b"".join(array.tobytes() for array in named.values())


GOOD = {"s0__0__values": np.array([5, 6], np.uint32), "s0__0__positions": np.array([1, 2], np.uint32)}
HOSTILE: dict[str, Callable[[], bytes]] = {
    "no file": lambda: b"",
    "cut in the header": lambda: stage_of(**GOOD)[:20],
    "cut in the values": lambda: stage_of(**GOOD)[:-1],
    "no positions": lambda: stage_of(s0__0__values=GOOD["s0__0__values"]),
    "no values": lambda: stage_of(s0__0__positions=GOOD["s0__0__positions"]),
    "fewer values": lambda: stage_of(**{**GOOD, "s0__0__values": np.array([5], np.uint32)}),
    "no values inside": lambda: stage_of(s0__0__values=np.empty(0, np.uint32), s0__0__positions=np.empty(0, np.uint32)),
    "wide positions": lambda: stage_of(**{**GOOD, "s0__0__positions": np.array([1, 2], np.uint64)}),
    "a place twice": lambda: stage_of(**{**GOOD, "s0__0__positions": np.array([2, 2], np.uint32)}),
    "descending places": lambda: stage_of(**{**GOOD, "s0__0__positions": np.array([2, 1], np.uint32)}),
    "another name": lambda: stage_of(**GOOD, other=np.array([1], np.uint8)),
    "a storage below zero": lambda: stage_of(
        **{"s-1__0__values": np.array([1], np.uint8), "s-1__0__positions": np.array([1], np.uint32)}
    ),
    "no storage": lambda: stage_of(s__values=np.array([1], np.uint8), s__positions=np.array([1], np.uint32)),
}


@pytest.mark.parametrize("made", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_damaged_stage_is_refused(made: Callable[[], bytes], tmp_path: Path) -> None:
    path = tmp_path / "stage"
    path.write_bytes(stage_of(**GOOD))
    assert flat(read_stage(path)) == {1: 5, 2: 6}
    path.write_bytes(made())
    with pytest.raises(CorruptError, match=re.escape(str(path))):
        read_stage(path)
