"""Random graphs of edges: every way to a version gives the same digest and the same bits, not only the cheapest one."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import repeats
from support.feeds import Feed, replay, same_weights
from support.helpers import state
from support.strategies import MOVES, random_change

from deltasync import blocks
from deltasync.errors import NotFoundError
from deltasync.feed.log import manifest_key
from deltasync.feed.plan import Edge, Plan, plan
from deltasync.format import keys
from deltasync.format.weights import Weights, zeros

VERSIONS_MAX = 6

_SHARES = st.sampled_from([0.0, 0.001, 0.05, 0.5, 1.0])
_STEPS = st.tuples(_SHARES, st.sampled_from(MOVES), st.integers(1, 3), st.integers(0, 2**32))


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Feed, list[Edge]]:
    """A feed of deltas by one to three ranks, with anchors and skips between any two versions; and all its edges.

    A version may take back what an earlier one changed: a skip over both then has fewer changes than either.
    """
    feed = Feed()
    edges = [Edge(keys.version_key(0), feed.anchor(state()))]
    for share, move, ranks, seed in draw(st.lists(_STEPS, min_size=1, max_size=VERSIONS_MAX - 1)):
        old = feed.states[draw(st.sampled_from([0, -1]))]
        rng = np.random.default_rng(seed)
        parts = zip(old.layout.tensors, old.arrays, strict=True)
        new = Weights(old.layout, tuple(random_change(rng, t.dtype, bits, share, move) for t, bits in parts))
        manifest = feed.delta(new, ranks=ranks)
        edges.append(Edge(manifest_key(manifest), manifest))
    head = len(feed.states) - 1
    for version in draw(st.sets(st.integers(1, head), max_size=2)):
        edges.append(Edge(keys.anchor_key(version), feed.late_anchor(version)))
    pairs = [(start, end) for end in range(head + 1) for start in range(end - 1)]
    for start, end in draw(st.sets(st.sampled_from(pairs), min_size=1, max_size=5)) if pairs else ():
        skip = feed.skip(start, end)
        edges.append(Edge(manifest_key(skip), skip))
    return feed, edges


def ways(edges: Sequence[Edge], start: int | None, end: int) -> Iterator[tuple[Edge, ...]]:
    """Every path from a version, or from nothing, to another one."""
    for edge in edges:
        if edge.end == end:
            if edge.start == start:
                yield (edge,)
            if edge.start is not None:
                yield from ((*before, edge) for before in ways(edges, start, edge.start))


@pytest.mark.soak
@settings(max_examples=repeats(40, soak=1000), deadline=None)
@given(graph=graphs())
def test_every_way_to_a_version_gives_the_same_digest(graph: tuple[Feed, list[Edge]]) -> None:
    feed, edges = graph
    digests = [blocks.digest(weights) for weights in feed.states]
    for end, expected in enumerate(feed.states):
        for start in (None, *range(end)):
            for way in ways(edges, start, end):
                weights = zeros(expected.layout) if start is None else _copy(feed.states[start])
                replay(feed.log, Plan(way), weights)
                assert blocks.digest(weights) == digests[end] == way[-1].manifest.digest
                assert same_weights(weights, expected), _keys(way)


@pytest.mark.soak
@settings(max_examples=repeats(40, soak=1000), deadline=None)
@given(graph=graphs(), data=st.data())
def test_a_plan_is_found_wherever_a_way_is_left(graph: tuple[Feed, list[Edge]], data: st.DataObject) -> None:
    """Some edges cannot be used. A plan is found if there is a way, and none from its start has fewer bytes."""
    feed, edges = graph
    head = len(feed.states) - 1
    target, names = feed.log.read(head), [edge.key for edge in edges]
    for avoid in (*({name} for name in names), data.draw(st.sets(st.sampled_from(names), min_size=2, max_size=4))):
        left = [edge for edge in edges if edge.key not in avoid]
        for start in (None, *range(head)):
            from_start, from_nothing = list(ways(left, start, head)), list(ways(left, None, head))
            if not from_start and not from_nothing:
                with pytest.raises(NotFoundError):
                    plan(feed.log, target, start=start, avoid=avoid)
                continue
            found = plan(feed.log, target, start=start, avoid=avoid)
            assert _keys(found.edges) in [_keys(way) for way in (*from_start, *from_nothing)]
            assert found.nbytes <= min((sum(edge.nbytes for edge in way) for way in from_start), default=found.nbytes)


def _keys(way: Sequence[Edge]) -> list[str]:
    return [edge.key for edge in way]


def _copy(weights: Weights) -> Weights:
    return Weights(weights.layout, tuple(bits.copy() for bits in weights.arrays))
