"""Capture from arrays: all at once, or tensor by tensor; with blocks so small that there are many."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.changes import ByTensor, by_tensor, in_blocks
from support.feeds import paper
from support.helpers import State, changed, same_bits, state

from deltasync import state as held
from deltasync.blocks import encode_changes, encode_delta, layout_runs
from deltasync.errors import InvalidInputError
from deltasync.format import limits
from deltasync.format.layout import TensorSpec
from deltasync.format.payload import Block
from deltasync.format.weights import Bits, Changes, Region, Runs, Weights
from deltasync.trainer import capture as module
from deltasync.trainer.capture import (
    capture,
    capture_each,
    collect,
    copy_each,
    copy_into,
)

Tensors = list[tuple[TensorSpec, Bits]]


class OnTheFly:
    """Weights whose regions share one array in each thread, as those do that have to be cast first."""

    is_converted = True

    def __init__(self, weights: Weights) -> None:
        self.layout = weights.layout
        self._weights = weights
        self._scratch = threading.local()

    def region(self, runs: Runs) -> Region:
        region = self._weights.region(runs)
        bits = region.gather()
        if not hasattr(self._scratch, "room"):
            self._scratch.room = np.empty(self.layout.nbytes, np.uint8)
        room = self._scratch.room[: bits.nbytes].view(bits.dtype)
        room[:] = bits
        return region.holding(room)

    def masters(self, runs: Runs) -> None:
        return None


def one_by_one(weights: Weights) -> Tensors:
    return list(zip(weights.layout.tensors, weights.arrays, strict=True))


def differences(old: Weights, new: Weights) -> dict[str, tuple[list[int], list[int]]]:
    found = {}
    for spec, a, b in zip(old.layout.tensors, old.arrays, new.arrays, strict=True):
        at = np.flatnonzero(a != b)
        if len(at):
            found[spec.name] = at.tolist(), b[at].tolist()
    return found


def plain(changes: ByTensor) -> dict[str, tuple[list[int], list[int]]]:
    return {name: (indices.tolist(), values.tolist()) for name, (indices, values) in changes.items()}


# Elements of a region, of a cell and compared at a time, and the changes after which a block ends.
SIZES = [(1 << 25, 1 << 20, 1 << 19, 1 << 19), (640, 64, 640, 40), (1000, 128, 7, 20), (99, 33, 40, 1)]


@pytest.fixture(params=SIZES, ids=lambda sizes: "/".join(map(str, sizes)))
def _sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    elements, cell, cached, changes = request.param
    monkeypatch.setitem(layout_runs.__kwdefaults__, "elements", elements)
    monkeypatch.setattr(limits, "BLOCK_ELEMENTS_MAX", elements)
    monkeypatch.setattr(limits, "CELL_ELEMENTS", cell)
    monkeypatch.setattr(limits, "BLOCK_CHANGES_SOFT", changes)
    monkeypatch.setattr(module, "CACHED_ELEMENTS", cached)


Way = Callable[[Weights, Weights], list[Changes]]

WAYS: dict[str, Way] = {
    "all at once": capture,
    "on the fly": lambda shadow, new: capture(shadow, OnTheFly(new)),
    "one by one": lambda shadow, new: capture_each(shadow, one_by_one(new)),
    "backwards": lambda shadow, new: capture_each(shadow, one_by_one(new)[::-1]),
}

PAIRS: dict[str, tuple[State, State]] = {
    "nothing": (state(), state()),
    "a little": (state(), changed(state(), share=0.01)),
    "much": (state(), changed(state(), share=0.6)),
    "all": (state(), changed(state(), share=1.0)),
    "other weights": (state(0), state(1)),
}


@pytest.mark.usefixtures("_sizes", "every_kernels")
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize(("old", "new"), PAIRS.values(), ids=PAIRS.keys())
def test_every_way_finds_the_same(way: Way, old: State, new: State) -> None:
    shadow, after = Weights.of(old), Weights.of(new)
    assert plain(by_tensor(shadow.layout, way(shadow, after))) == differences(shadow, after)
    target = held.State(Weights(shadow.layout, tuple(array.copy() for array in shadow.arrays)))
    target.apply(way(shadow, after), paper("anchor", 0))
    assert all(np.array_equal(a, b) for a, b in zip(target.require_weights().arrays, after.arrays, strict=True))


@pytest.mark.usefixtures("_sizes")
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize(("old", "new"), PAIRS.values(), ids=PAIRS.keys())
def test_a_capture_is_encoded_as_it_is(way: Way, old: State, new: State) -> None:
    """The blocks are those of two states, and those of changes by tensor: the same runs and the same bytes."""
    shadow, after = Weights.of(old), Weights.of(new)
    captured = way(shadow, after)
    found = block_fields(encode_changes(shadow, captured))
    assert found == block_fields(encode_delta(shadow, after))
    assert found == block_fields(encode_changes(shadow, in_blocks(shadow.layout, by_tensor(shadow.layout, captured))))
    assert bool(found) == bool(differences(shadow, after))


def block_fields(blocks: list[Block]) -> list[tuple[object, ...]]:
    return [(b.codec, b.runs.tolist(), b.changed, b.digest, bytes(b.data)) for b in blocks]


def test_bits_are_compared_and_not_numbers() -> None:
    """An unchanged NaN is no change; another NaN is one, and so is -0.0 for 0.0."""
    old = {"w": np.array([0x7FC00000, 0x7FC00000, 0, 0x7F800000], np.uint32).view(np.float32)}
    new = {"w": np.array([0x7FC00000, 0x7FC00001, 1 << 31, 0x7F800000], np.uint32).view(np.float32)}
    found = by_tensor(Weights.of(old).layout, capture(Weights.of(old), Weights.of(new)))
    assert plain(found) == {"w": ([1, 2], [0x7FC00001, 1 << 31])}


def test_a_capture_is_a_copy() -> None:
    """Training goes on and overwrites the weights."""
    new = changed(state())
    shadow, expected = Weights.of(state()), differences(Weights.of(state()), Weights.of(new))
    each = capture(shadow, Weights.of(new)), capture_each(shadow, one_by_one(Weights.of(new)))
    for array in Weights.of(new).arrays:
        array[:] = 0
    assert [plain(by_tensor(shadow.layout, found)) for found in each] == [expected, expected]


@pytest.mark.usefixtures("_sizes")
@pytest.mark.parametrize("of", [Weights.of, lambda tensors: OnTheFly(Weights.of(tensors))], ids=["views", "on the fly"])
def test_copies_are_whole(of: Any) -> None:
    new = changed(state())
    target = Weights.of({name: np.zeros_like(array) for name, array in new.items()})
    # One thread: the regions of `OnTheFly` share one array among all threads.
    copy_into(target, of(new))
    assert all(np.array_equal(a, b) for a, b in zip(target.arrays, Weights.of(new).arrays, strict=True))


def test_copies_of_tensors_that_come_one_by_one() -> None:
    new = Weights.of(changed(state()))
    target = Weights.of({name: np.zeros_like(array) for name, array in state().items()})
    copy_each(target, one_by_one(new)[::-1])
    assert same_bits(dict(enumerate_arrays(target)), dict(enumerate_arrays(new)))
    gathered = collect(one_by_one(new)[::-1])
    assert gathered.layout == new.layout
    assert same_bits(dict(enumerate_arrays(gathered)), dict(enumerate_arrays(new)))
    assert not any(np.shares_memory(a, b) for a, b in zip(gathered.arrays, new.arrays, strict=True))


def enumerate_arrays(weights: Weights) -> Iterator[tuple[str, np.ndarray]]:
    return ((spec.name, array) for spec, array in zip(weights.layout.tensors, weights.arrays, strict=True))


def without(name: str) -> State:
    return {n: array for n, array in state().items() if n != name}


OTHERS: dict[str, tuple[State, str]] = {
    "vanished": (without("embed"), "'embed'"),
    "appeared": ({**state(), "extra.bias": np.zeros(3, np.float32)}, "'extra.bias'"),
    "another shape": ({**state(), "embed": state()["embed"].reshape(32, 64)}, r"embed: BF16\[32, 64\]"),
    "another size": ({**state(), "embed": state()["embed"][1:]}, r"embed: BF16\[63, 32\]"),
    "another type": ({**state(), "embed": state()["embed"].view(np.float16)}, r"embed: F16\[64, 32\]"),
}


@pytest.mark.parametrize(("other", "named"), OTHERS.values(), ids=OTHERS.keys())
def test_other_tensors_are_refused_by_name(other: State, named: str) -> None:
    shadow, new = Weights.of(state()), Weights.of(other)
    for way in WAYS.values():
        with pytest.raises(InvalidInputError, match=named) as caught:
            way(shadow, new)
        assert "--anchor" in str(caught.value)


def test_a_tensor_that_comes_twice_is_refused() -> None:
    weights = Weights.of(state())
    twice = [*one_by_one(weights), one_by_one(weights)[0]]
    for way in (lambda: capture_each(weights, twice), lambda: copy_each(weights, twice), lambda: collect(twice)):
        with pytest.raises(InvalidInputError, match=r"'counter' came twice"):
            way()
