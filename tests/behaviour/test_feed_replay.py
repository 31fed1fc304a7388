"""Every version by every kind of plan, and other plans where an edge is damaged."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from support.feeds import Feed, SpyStore, flip, refused, restored, same_weights
from support.helpers import state

from deltasync.errors import CorruptError, DeltasyncError, NotFoundError
from deltasync.feed.fetch import fetch
from deltasync.format import keys
from deltasync.format.sealed import FloorRecord
from deltasync.state import load
from deltasync.upkeep.prune import Retention, plan_prune, prune


@pytest.fixture(scope="module")
def grown() -> Feed:
    """Anchors, deltas of one and of several payloads, one of nothing, a skip, another layout."""
    feed = Feed.of(3)
    feed.delta(ranks=2)
    feed.delta(feed.states[-1])
    feed.late_anchor(4)
    feed.delta(ranks=3)
    feed.skip(2, 5)
    feed.anchor(state(9) | {"new": np.arange(5, dtype=np.uint16)})
    feed.delta()
    return feed


@pytest.mark.parametrize("version", range(8))
def test_every_version_bit_by_bit(grown: Feed, version: int) -> None:
    assert same_weights(restored(grown, version), grown.states[version])


@pytest.mark.parametrize("threads", [1, 3])
def test_threads(grown: Feed, threads: int) -> None:
    assert same_weights(restored(grown), grown.states[-1])


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_several_payloads_lead_to_one_version(ranks: int) -> None:
    feed = Feed.of(1)
    manifest = feed.delta(ranks=ranks)
    assert len(manifest.payloads) == ranks
    assert same_weights(restored(feed), feed.states[1])
    turned = replace(manifest, payloads=manifest.payloads[::-1])
    assert same_weights(load(feed.log, turned), feed.states[1])


def test_a_delta_of_nothing_has_no_payload() -> None:
    feed = Feed.of(2)
    manifest = feed.delta(feed.states[-1])
    assert (manifest.payloads, manifest.changed) == ((), 0)
    feed.delta()
    assert same_weights(restored(feed, 2), feed.states[2])
    assert same_weights(restored(feed, 3), feed.states[3])


def test_progress_counts_bytes_then_elements(grown: Feed) -> None:
    calls: list[tuple[str, int, int]] = []
    restored(grown, 2, progress=lambda phase, done, total: calls.append((phase, done, total)))
    ends = {phase: (done, total) for phase, done, total in calls}
    assert list(ends) == ["restore", "digest"]
    assert all(done == total for done, total in ends.values())


def test_a_payload_is_fetched_again_once() -> None:
    """A byte that flips on the wire is not damage in the store."""

    class Flipping(SpyStore):
        flips = 0

        def get_range(self, key: str, offset: int, length: int) -> bytes:
            data = super().get_range(key, offset, length)
            if self.flips and key.startswith(keys.PAYLOADS) and length > len(data):
                self.flips -= 1
                data = bytes([data[0] ^ 1]) + data[1:]
            return data

    store = Flipping()
    feed = Feed.of(2, store)
    store.flips = 1
    assert same_weights(restored(feed), feed.states[1])
    store.flips = 2
    assert refused(feed, feed.log.read(0)).rule == "payload.sha256"


EDGES: dict[str, Callable[[Feed], str]] = {
    "newest anchor": lambda f: f.payload_keys(f.late_anchor(3))[0],
    "skip": lambda f: f.payload_keys(f.skip(0, 4))[0],
}


@pytest.mark.parametrize("what", EDGES)
@pytest.mark.parametrize("how", ["flipped", "gone", "cut"])
def test_another_plan_where_an_edge_is_damaged(what: str, how: str, caplog: pytest.LogCaptureFixture) -> None:
    feed = Feed.of(5)
    key = EDGES[what](feed)
    assert isinstance(feed.store, SpyStore)
    feed.store.took()
    restored(feed)
    assert ("get", key) in feed.store.took(), "the plan without damage"
    if how == "flipped":
        flip(feed.store, key)
    elif how == "gone":
        feed.store.delete(key)
    else:
        feed.store.put(key, feed.store.get(key)[:100])
    assert same_weights(restored(feed), feed.states[4])
    assert "trying another plan" in caplog.text


def test_no_warning_in_front_of_the_error_that_says_the_same(caplog: pytest.LogCaptureFixture) -> None:
    """There is one plan only: the damage is raised, and not logged as well."""
    feed = Feed.of(2)
    (key,) = feed.payload_keys(feed.log.read(1))
    flip(feed.store, key)
    with pytest.raises(CorruptError):
        restored(feed)
    assert caplog.text == ""


def test_a_payload_that_arrives_whole_the_second_time(caplog: pytest.LogCaptureFixture) -> None:
    feed = Feed.of(2)
    (key,) = feed.payload_keys(feed.log.read(1))
    whole = feed.store.get(key)
    flip(feed.store, key)

    def repair(refetched: str) -> None:
        assert refetched == key
        feed.store.put(key, whole)

    assert bytes(fetch(feed.store, feed.log.read(1).payloads[0], on_refetch=repair)) == whole
    assert f"{key} arrived with another SHA-256, and was whole when it was fetched again" in caplog.text


def test_a_whole_feed_by_what_is_left() -> None:
    """The first anchor, a delta in the middle and a skip are damaged: the late anchor and another skip do."""
    feed = Feed.of(9)
    for version in (0, 4, 6):
        flip(feed.store, feed.payload_keys(feed.log.read(version))[0])
    flip(feed.store, feed.payload_keys(feed.skip(3, 8))[0])
    feed.skip(2, 7)
    feed.late_anchor(2)
    assert same_weights(restored(feed), feed.states[8])


def test_without_any_plan_the_first_error_is_raised() -> None:
    feed = Feed.of(3)
    feed.late_anchor(2)
    for version in range(3):
        flip(feed.store, feed.payload_keys(feed.log.read(version))[0])
    anchor = feed.log.anchor(2)
    assert anchor is not None
    key = feed.payload_keys(anchor)[0]
    flip(feed.store, key)
    found = refused(feed, feed.log.read(2))
    assert (found.rule, found.key) == ("payload.sha256", key)


def test_a_pruned_version_says_that_it_was_pruned() -> None:
    feed = Feed.of(6)
    feed.late_anchor(3)
    prune(feed.store, plan_prune(feed.store, Retention(anchors=1, versions=1)))
    assert same_weights(restored(feed), feed.states[5])
    for version in range(3):
        found = refused(feed, feed.log.read(version))
        assert isinstance(found, NotFoundError)
        assert found.version == version
        assert "pruned" in found.message
        assert "3" in found.message


def test_damage_is_not_called_pruned() -> None:
    feed = Feed.of(3)
    flip(feed.store, feed.payload_keys(feed.log.read(0))[0])
    feed.store.put(keys.FLOOR, FloorRecord(2).to_bytes())
    assert refused(feed, feed.log.read(1)).rule == "payload.sha256"


def test_a_damaged_version_before_the_target() -> None:
    """The manifest of version 2 is unreadable; a skip leads over it."""
    feed = Feed.of(5)
    feed.skip(1, 3)
    feed.store.put(keys.version_key(2), b"{")
    assert same_weights(restored(feed), feed.states[4])
    assert isinstance(refused_read(feed, 2), CorruptError)


def refused_read(feed: Feed, version: int) -> DeltasyncError:
    with pytest.raises(DeltasyncError) as caught:
        feed.log.read(version)
    return caught.value
