"""Weights that go from version to version, and what an attempt that failed leaves behind."""

import pytest
from support.feeds import Feed, flip, same_weights

from deltasync.feed.plan import Edge, Plan
from deltasync.feed.route import Blocked, Route
from deltasync.format import keys
from deltasync.state import Applied, State


def edge(feed: Feed, version: int) -> Edge:
    return Edge(keys.version_key(version), feed.log.read(version))


@pytest.mark.parametrize("is_scratch", [False, True])
def test_another_plan_after_some_edges_of_the_first(is_scratch: bool) -> None:
    """The anchor was written, and a delta over it: the next plan that starts with the anchor must write it again."""
    feed = Feed.of(3)
    feed.skip(0, 2)
    flip(feed.store, feed.payload_keys(feed.log.read(2))[0])
    state, route = State(scratch=is_scratch), Route(feed.log, feed.log.read(2))
    with pytest.raises(Blocked):
        state.follow(route, Plan((edge(feed, 0), edge(feed, 1), edge(feed, 2))))
    assert state.version == (None if is_scratch else 1)
    state.advance(route)
    assert state.version == 2
    assert same_weights(state.require_weights(), feed.states[2])


@pytest.mark.parametrize("is_scratch", [False, True])
def test_an_advance_costs_the_change(is_scratch: bool) -> None:
    feed = Feed.of(3)
    state, applied = State(scratch=is_scratch), Applied()
    state.advance(Route(feed.log, feed.log.read(1)))
    state.advance(Route(feed.log, feed.log.read(2)), applied)
    assert (applied.edges, applied.nbytes) == (["delta"], feed.log.read(2).nbytes)
    assert same_weights(state.require_weights(), feed.states[2])


def test_a_feed_that_was_rolled_back_and_went_on_differently() -> None:
    feed, other = Feed.of(3), Feed.of(1)
    other.delta(feed.states[2])
    goal = other.delta(feed.states[1])
    state, applied = State(), Applied()
    state.advance(Route(feed.log, feed.log.read(2)))
    state.advance(Route(other.log, goal), applied)
    assert (state.at, applied.rebuilt) == (goal, 1)
    assert same_weights(state.require_weights(), other.states[2])
