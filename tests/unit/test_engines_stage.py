"""Stages: parts of a storage put together, written, mapped; a file that is damaged is refused."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from deltasync.engines.memory import SEGMENT_ELEMENTS, Segment, read_stage, segments, write_stage
from deltasync.errors import CorruptError
from deltasync.format.layout import DTYPES, TensorSpec
from deltasync.format.safetensors import header_bytes

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
