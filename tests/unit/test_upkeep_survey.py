"""A survey of a long feed leaves out old versions, and comes to the same result."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from support.feeds import NOW_UNIX_S, Feed, SpyStore, paper

from deltasync.feed.log import manifest_key
from deltasync.format import keys
from deltasync.format.digest import StateDigest
from deltasync.format.manifest import Manifest
from deltasync.format.sealed import Heartbeat, Pin
from deltasync.store.patient import WrapperStore
from deltasync.store.protocol import ObjectInfo
from deltasync.upkeep import survey
from deltasync.upkeep.compact import compact
from deltasync.upkeep.prune import ORPHAN_S, Pruner, Pruning, Retention, plan_prune, prune
from deltasync.upkeep.verify import verify


def committed(store: SpyStore, *manifests: Manifest, late: bool = False) -> None:
    """Payloads first, then manifests, a second later each, as a publisher commits them."""
    for manifest in manifests:
        for ref in manifest.payloads:
            store.put(keys.payload_key(ref.sha256), bytes(ref.nbytes))
            store.age(keys.payload_key(ref.sha256), NOW_UNIX_S + 10 * manifest.version)
        key = keys.anchor_key(manifest.version) if late else manifest_key(manifest)
        store.put(key, manifest.to_bytes())
        store.age(key, NOW_UNIX_S + 10 * manifest.version + 1)
    store.took()


def long_feed(versions: int, *, anchors: int = 10) -> SpyStore:
    """An anchor for every tenth version, and a skip that ends there."""
    store = SpyStore()
    committed(store, paper("anchor", 0, 100))
    for version in range(1, versions):
        committed(store, paper("delta", version, 10))
        if version % anchors == 0:
            committed(store, paper("anchor", version, 100), late=True)
            committed(store, paper("skip", version, 30, start=version - anchors))
    return store


def read_versions(store: SpyStore) -> set[str]:
    return {key for verb, key in store.took() if verb == "get" and key.startswith(keys.VERSIONS)}


def both_ways(
    store: SpyStore, retention: Retention, monkeypatch: pytest.MonkeyPatch, *, clock: Callable[[], float]
) -> tuple[Pruning, Pruning, set[str]]:
    """The plan with the newest five versions read first, that with all, and the versions that the first one read."""
    monkeypatch.setattr(survey, "_FIRST_READ", 5)
    store.took()
    some = plan_prune(store, retention, clock=clock)
    read = read_versions(store)
    monkeypatch.setattr(survey, "_FIRST_READ", 10**6)
    return some, plan_prune(store, retention, clock=clock), read


def later() -> float:
    """Two days after the last commit: everything that is not named is an orphan."""
    return NOW_UNIX_S + 10_000 + 2 * ORPHAN_S


@pytest.mark.parametrize("pin", [None, 3, 30, 87])
@pytest.mark.parametrize("behind", [None, 12, 85])
@pytest.mark.parametrize("orphans", [0, 1])
@pytest.mark.parametrize("pruned", [False, True])
def test_old_versions_that_are_not_read_make_no_difference(
    pin: int | None, behind: int | None, orphans: int, pruned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = long_feed(100)
    if pin is not None:
        store.put(keys.pin_key("best"), Pin("best", pin, paper("anchor", pin).digest.hex, "", NOW_UNIX_S).to_bytes())
    if behind is not None:
        store.put(keys.replica_key("late"), Heartbeat("late", behind, NOW_UNIX_S).to_bytes())
        store.age(keys.replica_key("late"), later())
    retention = Retention(anchors=2, versions=5)
    if pruned:
        prune(store, plan_prune(store, retention, clock=later), clock=later)
        committed(store, *(paper("delta", v, 10) for v in range(100, 121)))
    for number in range(orphans):
        key = keys.payload_key(f"{number:064x}")
        store.put(key, b"orphan")
        store.age(key, NOW_UNIX_S)
    some, whole, read = both_ways(store, retention, monkeypatch, clock=later)
    assert some == replace(whole, versions=some.versions)
    assert whole.keys or pruned
    if pruned and pin is None and behind is None and not orphans:
        assert len(read) < 80, "versions of which nothing is stored are not read"
        assert some.versions == whole.versions


def test_what_an_interrupted_prune_has_left_is_no_orphan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A payload of an old version is deleted as such, also if nothing around it makes the version look stored."""
    store = long_feed(100)
    key = keys.payload_key(paper("delta", 3, 10).refs[0].sha256)
    left = store.get(key)
    retention = Retention(anchors=2, versions=5)
    prune(store, plan_prune(store, retention, clock=later), clock=later)
    committed(store, *(paper("delta", version, 10) for version in range(100, 121)))
    store.put(key, left)
    store.age(key, NOW_UNIX_S)
    some, whole, _ = both_ways(store, retention, monkeypatch, clock=later)
    assert whole.orphans == 0
    assert some == whole


def test_a_payload_in_progress_does_not_make_old_versions_read(monkeypatch: pytest.MonkeyPatch) -> None:
    store = long_feed(100)
    retention = Retention(anchors=1, versions=5)
    prune(store, plan_prune(store, retention, clock=later), clock=later)
    key = keys.payload_key("ab" * 32)
    store.put(key, b"in progress")
    store.age(key, later() - 60)
    some, whole, read = both_ways(store, retention, monkeypatch, clock=later)
    assert some == whole
    assert some.young_orphans == 1
    assert len(read) < 40


def test_a_pruner_that_has_left_out_old_versions_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    store = long_feed(100)
    retention = Retention(anchors=1, versions=5)
    prune(store, plan_prune(store, retention, clock=later), clock=later)
    monkeypatch.setattr(survey, "_FIRST_READ", 5)
    pruner = Pruner(store, retention, clock=later)
    pruner.run()
    committed(store, *(paper("delta", v, 10) for v in range(100, 111)))
    committed(store, paper("anchor", 105, 100), late=True)
    pruning, stay = pruner.run()
    assert (pruning.floor, stay) == (105, ())
    assert keys.anchor_key(90) in pruning.keys
    found = verify(store)
    assert found.is_clean
    assert found.restorable == tuple(range(105, 111))


def test_a_pinned_base_is_read_although_nothing_of_it_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    store = SpyStore()
    committed(store, paper("base", 0), *(paper("delta", v, 10) for v in range(1, 60)))
    committed(store, paper("anchor", 50, 100), late=True)
    store.put(keys.pin_key("start"), Pin("start", 0, paper("base", 0).digest.hex, "", NOW_UNIX_S).to_bytes())
    retention = Retention(anchors=1, versions=5)
    prune(store, plan_prune(store, retention, clock=later), clock=later)
    some, whole, _ = both_ways(store, retention, monkeypatch, clock=later)
    assert some == whole
    assert some.pinned == ("start",)


@pytest.mark.parametrize("bridge", ["a skip", "deltas without changes"])
def test_a_base_that_stored_changes_lead_from_is_read(bridge: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the copy of a feed: version 30 is built on version 0, and nothing of the versions up to 20 is stored."""
    store, same = SpyStore(), StateDigest(0, 0)
    none: dict[str, Any] = {"payloads": (), "changed": 0, "parent_digest": same, "digest": same}
    committed(store, paper("base", 0))
    for version in range(1, 21):
        manifest = paper("delta", version, 10, **({} if bridge == "a skip" else none))
        store.put(manifest_key(manifest), manifest.to_bytes())
    if bridge == "a skip":
        committed(store, paper("skip", 20, 30, start=0))
    committed(store, paper("delta", 21, 10, **({} if bridge == "a skip" else {"parent_digest": same})))
    committed(store, *(paper("delta", v, 10) for v in range(22, 60)))
    committed(store, paper("anchor", 50, 100), late=True)
    store.put(keys.pin_key("best"), Pin("best", 30, paper("anchor", 30).digest.hex, "", NOW_UNIX_S).to_bytes())
    some, whole, _ = both_ways(store, Retention(anchors=1, versions=5), monkeypatch, clock=later)
    assert some == whole
    assert some.pinned == ("best",)


class OlderListing(WrapperStore):
    """A store whose newest version was committed after the versions were listed, and before the skips were."""

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectInfo]:
        items = [*super().list(prefix, after=after)]
        return iter(items[:-1] if prefix == keys.VERSIONS else items)


def test_a_skip_to_a_version_that_is_committed_meanwhile_is_no_damage() -> None:
    feed = Feed.of(5)
    feed.late_anchor(3)
    compact(feed.store, levels=(2,))
    pruning = plan_prune(OlderListing(feed.store), Retention(anchors=1, versions=1))
    assert pruning.floor == 3
    assert not any(key.startswith(keys.VERSIONS) for key in pruning.keys)
