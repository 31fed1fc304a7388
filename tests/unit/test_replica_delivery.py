"""From the mirror to the target: what is handed over, and scrubs that compare, prove and repair."""

import numpy as np
import pytest
from support.feeds import Feed
from support.replicas import (
    Moves,
    follower,
    following,
    long_feed,
    target_for,
    wait_until,
)

from deltasync.errors import InvalidInputError
from deltasync.format.weights import Weights


@pytest.mark.parametrize("repair", [True, False])
def test_scrub(repair: bool, caplog: pytest.LogCaptureFixture) -> None:
    feed = long_feed(2)
    target = target_for(feed)
    replica = follower(feed.store, target)
    with pytest.raises(InvalidInputError, match="nothing to compare with yet"):
        replica.scrub()
    replica.advance()
    assert replica.scrub() == []
    target.state["packed"][0, :2] += 1
    target.state["counter"] += 1
    found = replica.scrub(repair=repair)
    assert [(damage.tensor, damage.elements) for damage in found] == [("counter", 1), ("packed", 2)]
    assert target.holds(feed.states[1]) == repair
    assert "2 elements of 'packed' differ" in caplog.text
    counts = replica.status().counts
    elements = feed.states[1].layout.elements
    assert (counts.scrubbed, counts.damaged, counts.repaired) == (2 * elements, 3, 3 if repair else 0)
    assert target.version == 1


def test_scrub_does_not_repair_from_a_mirror_that_is_damaged() -> None:
    feed = long_feed(2)
    target = target_for(feed)
    replica = follower(feed.store, target)
    replica.advance()
    weights = replica._mirror.weights
    assert weights is not None
    weights.arrays[weights.layout.ordinals["packed"]][0] ^= 1
    assert replica.scrub() == []
    assert target.holds(feed.states[1])
    assert replica.status().counts.rebuilt == 1
    # Single tensors are compared with an unchecked mirror: it is checked before a repair.
    weights.arrays[weights.layout.ordinals["packed"]][0] ^= 1
    assert replica._delivery.scrub(repair=True, tensors=range(7))
    assert target.holds(feed.states[1])
    assert replica.status().counts.rebuilt == 2


@pytest.mark.parametrize("is_background", [False, True], ids=["asked for", "in the background"])
def test_scrub_proves_the_mirror(is_background: bool) -> None:
    """A bit of the mirror that flips before a delta is decoded reaches the target, and only a digest shows it."""
    feed, moves = Feed.of(2), Moves()
    target = target_for(feed)
    replica = follower(feed.store, target, observer=moves, scrub_s=0.01 if is_background else None)
    replica.advance(to=0)
    weights = replica._mirror.weights
    assert weights is not None
    ordinal = weights.layout.ordinals["embed"]
    place = int(np.flatnonzero(feed.states[0].arrays[ordinal] != feed.states[1].arrays[ordinal])[0])
    weights.arrays[ordinal][place] ^= 2
    replica.advance()
    assert not target.holds(feed.states[1])
    if is_background:
        with following(replica):
            wait_until(lambda: replica.status().counts.rebuilt == 1)
            wait_until(lambda: target.whole == [True, False, True])
    else:
        replica.scrub()
    assert replica.status().counts.rebuilt == 1
    assert target.holds(feed.states[1])


def test_a_scrub_proves_the_live_version() -> None:
    feed = long_feed(2)
    target = target_for(feed)
    replica = follower(feed.store, target)
    replica.advance()
    assert replica.status().proved_version is None, "what was written was not read back"
    target.state["packed"][0, 0] ^= 1
    replica.scrub()
    assert replica.status().proved_version is None, "what was repaired was not read back"
    replica.scrub()
    assert replica.status().proved_version == 1


def test_a_scrub_that_does_not_see_all_memory_proves_nothing() -> None:
    feed = long_feed(2)
    target = target_for(feed)
    replica = follower(feed.store, target)
    target.unseen_elements = 7
    replica.advance()
    assert replica.scrub() == []
    status = replica.status()
    assert (status.proved_version, status.unseen_elements) == (None, 7)


def test_an_anchor_over_a_mirror_gives_only_what_differs() -> None:
    feed = long_feed(3)
    target = target_for(feed)
    replica = follower(feed.store, target)
    replica.advance(to=2)
    moved = replica.advance(to=0)
    assert moved is not None
    differing = sum(int((a != b).sum()) for a, b in zip(feed.states[0].arrays, feed.states[2].arrays, strict=True))
    assert moved.edges == ("anchor",)
    assert moved.changed == differing > 0
    assert target.holds(feed.states[0])


def test_many_changes_become_all_weights() -> None:
    feed = Feed.of(2)
    target = target_for(feed)
    replica = follower(feed.store, target)
    replica.advance()
    rng = np.random.default_rng(5)
    arrays = tuple(a ^ rng.integers(0, 2, a.shape, a.dtype) for a in feed.states[-1].arrays)
    feed.delta(Weights(feed.states[-1].layout, arrays))
    moved = replica.advance()
    assert moved is not None
    assert moved.changed is None
    assert target.holds(feed.states[2])
