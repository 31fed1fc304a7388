"""Changes by tensor, and captures that the shadow moved on under."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.changes import ByTensor, by_tensor, in_blocks
from support.feeds import paper

from deltasync import blocks as cuts
from deltasync.blocks import detect, layout_runs
from deltasync.format import limits
from deltasync.format.layout import DTYPES, Layout, TensorSpec
from deltasync.format.manifest import Manifest
from deltasync.format.weights import Weights, zeros
from deltasync.state import State
from deltasync.trainer import capture as module
from deltasync.trainer.capture import rebase

SHAPES = {"a": ("BF16", (7, 9)), "b": ("F32", (5,)), "c": ("BF16", (130,)), "none": ("BF16", (0, 3)), "z": ("I64", ())}
HEAD: Manifest = paper("anchor", 3)
LAYOUT = Layout.of(TensorSpec(name, DTYPES[dtype], shape) for name, (dtype, shape) in SHAPES.items())


@dataclass(frozen=True)
class Cuts:
    """How many changes are rebased at a time, and where captures are cut: runs, cells and changes of a block."""

    window: int
    run: int = limits.BLOCK_ELEMENTS_MAX
    cell: int = limits.CELL_ELEMENTS
    changes: int = limits.BLOCK_CHANGES_SOFT


@pytest.fixture(
    autouse=True, scope="module", params=[Cuts(1 << 18), Cuts(5), Cuts(1), Cuts(3, run=50, cell=8, changes=4)], ids=str
)
def _cuts(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_WINDOW", request.param.window)
        for one in (module, cuts):
            patch.setattr(one, "layout_runs", partial(layout_runs, elements=request.param.run))
        patch.setattr(limits, "CELL_ELEMENTS", request.param.cell)
        patch.setattr(limits, "BLOCK_CHANGES_SOFT", request.param.changes)
        yield


def weights(rng: np.random.Generator, values: int) -> Weights:
    """Few different values, so that elements often come back to what they were."""
    return Weights(
        LAYOUT, tuple(rng.integers(0, values, t.elements).astype(t.dtype.bits_dtype) for t in LAYOUT.tensors)
    )


def differences(old: Weights, new: Weights) -> ByTensor:
    """By NumPy alone."""
    found = {}
    for spec, a, b in zip(LAYOUT.tensors, old.arrays, new.arrays, strict=True):
        at = np.flatnonzero(a != b)
        if len(at):
            found[spec.name] = at.astype(np.uint32), b[at]
    return found


def copy(of: Weights) -> Weights:
    return Weights(of.layout, tuple(array.copy() for array in of.arrays))


def plain(changed: ByTensor) -> dict[str, tuple[list[int], list[int]]]:
    return {name: (indices.tolist(), values.tolist()) for name, (indices, values) in changed.items()}


relaxed = settings(deadline=None)
states = st.tuples(st.integers(0, 2**32), st.integers(1, 5))


@relaxed
@given(states)
def test_a_rebased_capture_leads_to_the_same_weights(drawn: tuple[int, int]) -> None:
    seed, values = drawn
    rng = np.random.default_rng(seed)
    old, first, second = (weights(rng, values) for _ in range(3))
    shadow = State(copy(old), None)
    rebased = advanced(shadow, differences(old, first), differences(old, second))
    # Not one element more or less than the difference: a publication without changes must have none.
    assert plain(rebased) == plain(differences(first, second))
    shadow.apply(in_blocks(LAYOUT, rebased), HEAD)
    assert all(np.array_equal(a, b) for a, b in zip(shadow.require_weights().arrays, second.arrays, strict=True))


def advanced(shadow: State, sent: ByTensor, pending: ByTensor) -> Any:
    """`pending` after the shadow has advanced by `sent`."""
    blocks = in_blocks(LAYOUT, sent)
    before = shadow.bits_before(blocks)
    shadow.apply(blocks, HEAD)
    (rebased,) = rebase(LAYOUT, [in_blocks(LAYOUT, pending)], blocks, before)
    return by_tensor(LAYOUT, rebased)


@relaxed
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_rebased_again_and_again(seed: int, count: int) -> None:
    """A publication that waits while several others are committed."""
    rng = np.random.default_rng(seed)
    chain = [weights(rng, 3) for _ in range(count + 1)]
    last = weights(rng, 3)
    shadow, pending = State(copy(chain[0]), None), differences(chain[0], last)
    for old, new in pairwise(chain):
        pending = advanced(shadow, differences(old, new), pending)
    assert plain(pending) == plain(differences(chain[-1], last))


CASES: dict[str, tuple[Any, Any, Any]] = {
    # old, sent, pending, as bits of one tensor; the rest is what must come out
    "sent and the same still": ([1, 1], [1, 2], [1, 2]),
    "sent and back again": ([1, 1], [1, 2], [1, 1]),
    "sent and changed further": ([1, 1], [1, 2], [1, 3]),
    "changed beside what was sent": ([1, 1], [1, 2], [5, 2]),
    "nothing was sent": ([1, 1], [1, 1], [4, 1]),
    "all at once": ([0, 0, 0, 0, 0], [1, 1, 1, 0, 0], [1, 2, 0, 3, 0]),
}


@pytest.mark.parametrize(("old", "sent", "pending"), CASES.values(), ids=CASES.keys())
def test_rebase_by_hand(old: list[int], sent: list[int], pending: list[int]) -> None:
    def change(to: list[int]) -> ByTensor:
        at = [i for i, (a, b) in enumerate(zip(old, to, strict=True)) if a != b]
        return {"a": (np.array(at, np.uint32), np.array([to[i] for i in at], np.uint16))} if at else {}

    shadow = State(zeros(LAYOUT), None)
    shadow.require_weights().arrays[0][: len(old)] = old
    found = advanced(shadow, change(sent), change(pending))
    expected = {i: b for i, (a, b) in enumerate(zip(sent, pending, strict=True)) if a != b}
    indices, values = found.get("a", (np.empty(0), np.empty(0)))
    assert dict(zip(indices.tolist(), values.tolist(), strict=True)) == expected
    assert ("a" in found) == bool(expected)


@relaxed
@given(states, st.integers(1, 200))
def test_blocks_have_what_a_plain_loop_finds(drawn: tuple[int, int], elements: int) -> None:
    """Pieces cut anywhere: tensors lie across their borders, and several in one piece."""
    seed, values = drawn
    rng = np.random.default_rng(seed)
    old, new = weights(rng, values), weights(rng, values)
    captured = [changes for piece in layout_runs(LAYOUT, elements=elements) for changes in detect(old, new, piece)]
    found = by_tensor(LAYOUT, captured)
    assert plain(found) == plain(differences(old, new))


def test_rebase_uses_up_what_it_is_given() -> None:
    """Several captures wait, and nothing of what was sent stays in memory."""
    rng = np.random.default_rng(0)
    old, first, *later = (weights(rng, 3) for _ in range(4))
    shadow = State(copy(old), None)
    sent = in_blocks(LAYOUT, differences(old, first))
    before = shadow.bits_before(sent)
    captures = [in_blocks(LAYOUT, differences(old, state)) for state in later]
    found = rebase(LAYOUT, captures, sent, before)
    assert [plain(by_tensor(LAYOUT, one)) for one in found] == [plain(differences(first, s)) for s in later]
    assert not any((*captures, sent, before))


def test_no_block_is_lost_in_silence() -> None:
    """A capture that is not cut as the layout is cannot be rebased."""
    rng = np.random.default_rng(0)
    old, first, second = (weights(rng, 3) for _ in range(3))
    shadow = State(copy(old), None)
    sent = in_blocks(LAYOUT, differences(old, first))
    captured = in_blocks(LAYOUT, differences(old, second))[::-1]
    with pytest.raises(ValueError, match="some of them were not rebased"):
        rebase(LAYOUT, [captured], sent, shadow.bits_before(sent))
