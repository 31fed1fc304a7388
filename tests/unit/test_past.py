"""Weights as they were, while the state that they are part of goes on."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.feeds import paper

from deltasync import blocks
from deltasync.blocks import layout_runs
from deltasync.format.layout import DTYPES, Layout, TensorSpec
from deltasync.format.weights import Changes, Readable, Weights
from deltasync.past import Past, bits_before
from deltasync.state import State
from deltasync.trainer.capture import capture

SHAPES = {"a": ("BF16", (7, 9)), "b": ("F32", (5,)), "c": ("BF16", (130,)), "none": ("BF16", (0, 3)), "z": ("I64", ())}
LAYOUT = Layout.of(TensorSpec(name, DTYPES[dtype], shape) for name, (dtype, shape) in SHAPES.items())


def weights(rng: np.random.Generator) -> Weights:
    """Few different values, so that elements often come back to what they were."""
    return Weights(LAYOUT, tuple(rng.integers(0, 3, t.elements).astype(t.dtype.bits_dtype) for t in LAYOUT.tensors))


def copied(of: Readable, elements: int = 50) -> list[list[int]]:
    """All elements, read in runs that are cut anywhere."""
    return [of.region(runs).gather().tolist() for runs in layout_runs(LAYOUT, elements=elements)]


def step(state: State, new: Weights, version: int, *, is_dense: bool = False, cut: int = 1 << 25) -> None:
    """Go to other weights, by blocks that are cut anywhere, or by ones that give every element."""
    parts = layout_runs(LAYOUT, elements=cut)
    if is_dense:
        changes = [Changes(runs, None, new.region(runs).gather()) for runs in parts]
    else:
        changes = [one for runs in parts for one in blocks.detect(state.require_weights(), new, runs)]
    state.apply(changes, paper("delta", version))


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 5), st.integers(1, 200), st.integers(1, 200), st.booleans())
def test_the_past_stays_as_it_was(seed: int, steps: int, cut: int, read: int, is_dense: bool) -> None:
    rng = np.random.default_rng(seed)
    state = State(weights(rng), paper("anchor", 0))
    first = copied(state.require_weights(), read)
    past = state.past()
    state.pasts.append(past)
    for version in range(1, steps + 1):
        step(state, weights(rng), version, is_dense=is_dense, cut=cut)
        assert copied(past, read) == first
    assert past.at.version == 0


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5))
def test_the_difference_takes_the_weights_back(seed: int, steps: int) -> None:
    rng = np.random.default_rng(seed)
    old = weights(rng)
    first, state = copied(old), State(old, paper("anchor", 0))
    past = state.past()
    state.pasts.append(past)
    for version in range(1, steps + 1):
        step(state, weights(rng), version)
    difference = past.difference()
    state.pasts.clear()
    counted = sum(len(one.values) for one in difference)
    assert counted == sum(len(one.values) for one in capture(state.require_weights(), past)), "none that came back"
    state.apply(difference, paper("delta", steps + 1))
    assert copied(state.require_weights()) == first


def test_a_past_absorbs_a_later_one() -> None:
    rng = np.random.default_rng(1)
    state = State(weights(rng), paper("anchor", 0))
    first = copied(state.require_weights())
    above, low = state.past(), state.past()
    state.pasts = [low]
    for version in range(1, 7):
        step(state, weights(rng), version)
        if version % 2 == 0:
            above.absorb(low)
            low.restart(paper("delta", version))
            assert copied(low) == copied(state.require_weights())
    assert copied(above) == first


def test_what_is_lost_stays_lost() -> None:
    rng = np.random.default_rng(2)
    state = State(weights(rng), paper("anchor", 0))
    above, low = state.past(), state.past()
    low.lose()
    low.keep([bits_before(state.require_weights(), one) for one in capture(state.require_weights(), weights(rng))])
    assert low.difference() == []
    above.absorb(low)
    assert above.is_lost


@pytest.mark.parametrize("is_dense", [False, True])
def test_bits_before_are_those_that_a_change_replaces(is_dense: bool) -> None:
    rng = np.random.default_rng(3)
    old, new = weights(rng), weights(rng)
    found = [Changes(runs, None, new.region(runs).gather()) for runs in layout_runs(LAYOUT)]
    changes = found if is_dense else capture(old, new)
    before = list(map(partial(bits_before, old), changes))
    assert [one.values.tolist() for one in before] == [one.values.tolist() for one in capture(new, old)]


def test_a_state_of_no_version_has_no_past() -> None:
    with pytest.raises(Exception, match="of no version"):
        State(weights(np.random.default_rng(4))).past()


def test_a_past_that_is_read_by_another_thread_takes_the_lock() -> None:
    rng = np.random.default_rng(5)
    state = State(weights(rng), paper("anchor", 0))
    held = []

    class Lock:
        def __enter__(self) -> None:
            held.append(True)

        def __exit__(self, *error: object) -> None:
            held.append(False)

    past = Past(state.require_weights(), paper("anchor", 0), Lock())  # type: ignore[arg-type]
    copied(past)
    assert held[:2] == [True, False]
