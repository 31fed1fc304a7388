"""Retention that runs repeatedly: what it keeps, what it reads, and that a feed stays bounded."""

import time
from pathlib import Path
from typing import Any

import pytest
from support.feeds import Feed, SpyStore, paper
from support.replicas import TorchTarget, follower

from deltasync.errors import InvalidInputError
from deltasync.feed.log import Log
from deltasync.feed.pins import pin
from deltasync.format import keys
from deltasync.format.sealed import FeedRecord, Heartbeat
from deltasync.store.memory import MemoryStore
from deltasync.trainer.publisher import PublisherOptions
from deltasync.upkeep.prune import ORPHAN_S, Pruner, Retention, plan_prune, prune
from deltasync.upkeep.verify import verify


@pytest.mark.parametrize(
    "fields",
    [
        {"anchors": 0},
        {"versions": 0},
        {"anchors": 1.5},
        {"versions": True},
        {"age_s": -1},
        {"age_s": "1 d"},
        {"age_s": float("nan")},
        {"every_s": 0},
    ],
)
def test_bad_retention(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError) as caught:
        Retention(**fields)
    assert next(iter(fields)) in caught.value.message


def test_a_publisher_wants_a_retention() -> None:
    with pytest.raises(InvalidInputError, match="retention must be of type Retention"):
        PublisherOptions(retention=100)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("age_s", "floor"), [(None, 8), (0.0, 8), (15.0, 8), (25.0, 8), (45.0, 4), (75.0, 4), (500.0, 0)]
)
def test_versions_by_age(age_s: float | None, floor: int) -> None:
    """Version v was committed 10 * (11 - v) seconds ago, by the store's clock."""
    feed = Feed.of(12)
    for version in (4, 8):
        feed.late_anchor(version)
    assert isinstance(feed.store, SpyStore)
    now = time.time()
    for version in range(12):
        feed.store.age(keys.version_key(version), now - 10 * (11 - version))
    retention = Retention(anchors=1, versions=1, age_s=age_s)
    assert plan_prune(feed.store, retention, clock=lambda: now).floor == floor


# --- a long feed ------------------------------------------------------------------------------------------------------


class Clocked(SpyStore):
    """A store with a clock that a test sets; counts what is read."""

    now_unix_s = 1_700_000_000.0
    reads = 0

    def __init__(self) -> None:
        super().__init__()
        self._clock = lambda: self.now_unix_s

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        self.reads += 1
        return super().get_range(key, offset, length)


def commit(store: MemoryStore, version: int, *, anchor_every: int = 20) -> None:
    """A version with a payload of 10 bytes, and now and then an anchor of 100."""
    made = [(keys.version_key(version), paper("delta" if version else "anchor", version, 10 if version else 100))]
    if version and version % anchor_every == 0:
        made.append((keys.anchor_key(version), paper("anchor", version, 100)))
    for key, manifest in made:
        for ref in manifest.payloads:
            store.put(keys.payload_key(ref.sha256), bytes(ref.nbytes))
        store.create(key, manifest.to_bytes())


def test_a_feed_with_a_version_every_10_s_stays_bounded() -> None:
    """Two hours of it, pruned every minute, with a live replica, one that died, a pin, and orphans."""
    store = Clocked()
    store.put(keys.FEED, FeedRecord("feed", 1).to_bytes())
    retention = Retention(anchors=2, versions=30, age_s=300.0)
    pruner = Pruner(store, retention, clock=lambda: store.now_unix_s)
    sizes, reads, known = [], [], []
    for version in range(720):
        store.now_unix_s += 10
        commit(store, version)
        log = Log(store)
        log.beat(Heartbeat("live", max(0, version - 1), int(store.now_unix_s)))
        if version < 30:
            log.beat(Heartbeat("dead", version // 2, int(store.now_unix_s)))
        if version == 50:
            pin(store, 47, name="best", clock=lambda: store.now_unix_s)
        if version % 6 == 5:
            store.reads = 0
            pruner.run()
            reads.append(store.reads)
            sizes.append(sum(item.nbytes for item in store.list(keys.PAYLOADS)))
            known.append(len(pruner._known._manifests))
    head, kept = 719, retention.versions + 2 * 20
    settled = sizes[len(sizes) // 2 :]
    # Two anchors and one more below the floor of the second, the versions since, and what the pin needs.
    assert max(settled) <= 3 * 100 + kept * 10 + (100 + 10 * 7)
    assert max(settled) - min(settled) <= 100 + 20 * 10, "it does not grow"
    assert max(reads[1:]) <= 6 + 2 + 10, "new manifests, and a few records"
    assert max(known[60:]) <= kept + 30
    checked = verify(store)
    assert checked.is_clean
    assert {47, *range(head - retention.versions + 1, head + 1)} <= set(checked.restorable)
    fresh = plan_prune(store, retention, clock=lambda: store.now_unix_s)
    again, _ = Pruner(store, retention, clock=lambda: store.now_unix_s).run()
    assert (again.keys, again.floor) == (fresh.keys, fresh.floor)


def test_what_is_remembered_leads_to_the_same_plan() -> None:
    """At every version, a pruner that has run since the first one plans what one that starts now plans."""
    store = Clocked()
    retention = Retention(anchors=1, versions=5)
    pruner = Pruner(store, retention, clock=lambda: store.now_unix_s)
    for version in range(90):
        store.now_unix_s += 10
        commit(store, version, anchor_every=8)
        if version == 20:
            pin(store, 18, clock=lambda: store.now_unix_s)
        wanted = plan_prune(store, retention, clock=lambda: store.now_unix_s)
        found, _ = pruner.run()
        assert (found.keys, found.floor, found.pinned, found.orphans) == (
            wanted.keys,
            wanted.floor,
            wanted.pinned,
            wanted.orphans,
        )
    assert pruner._known.first > 50


def test_a_feed_that_was_replaced_is_read_anew() -> None:
    """Rolled back and published on: what was remembered of the old versions must not make the new ones orphans."""
    feed = Feed.of(12)
    store = feed.store
    assert isinstance(store, SpyStore)
    for version in (4, 8):
        feed.late_anchor(version)
    later_s = time.time() + 3 * ORPHAN_S
    store._clock = lambda: later_s
    pruner = Pruner(store, Retention(anchors=1, versions=1), clock=lambda: later_s)
    for _ in range(2):
        pruner.run()
    assert (feed.log.floor(), pruner._known.first) == (8, 8)
    for version in range(6, 12):
        store.delete(keys.version_key(version))
    store.delete(keys.anchor_key(8))
    del feed.states[6:]
    feed.head = feed.log.read(5)
    feed.anchor(feed.states[0])
    for _ in range(7):
        feed.delta()
    for item in list(store.list(keys.PAYLOADS)):
        store.age(item.key, later_s - 2 * ORPHAN_S)
    pruner.run()
    checked = verify(store, deep=True)
    assert checked.is_clean
    assert checked.restorable == tuple(range(6, 14))


def test_a_replica_back_from_the_dead_takes_an_anchor(tmp_path: Path) -> None:
    feed = Feed.of(6)
    target = TorchTarget(feed.states[0].layout)
    with follower(feed.store, target, mirror=tmp_path / "mirror") as replica:
        replica.advance(to=3)
    for _ in range(20):
        feed.delta()
    feed.late_anchor(20)
    prune(feed.store, plan_prune(feed.store, Retention(anchors=1, versions=1)))
    with follower(feed.store, target, mirror=tmp_path / "mirror") as replica:
        moved = replica.advance()
    assert moved is not None
    assert (moved.version, moved.edges[0]) == (25, "anchor")
    assert target.holds(feed.states[25])


# --- beside a publisher -----------------------------------------------------------------------------------------------
