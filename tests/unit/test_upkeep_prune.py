import time
from dataclasses import dataclass, replace

import pytest
from support.feeds import NOW_UNIX_S, Feed, SpyStore, flip, paper, same_weights, store_of

from deltasync.errors import CorruptError, InvalidInputError
from deltasync.feed.log import LIVE_S, Log
from deltasync.feed.upload import Upload
from deltasync.format import keys
from deltasync.format.companions import write_files
from deltasync.format.manifest import Manifest
from deltasync.format.sealed import FloorRecord, Heartbeat
from deltasync.state import load
from deltasync.store.protocol import Data
from deltasync.upkeep.prune import ORPHAN_S, Pruning, Retention, plan_prune, prune
from deltasync.upkeep.verify import verify

# --- the floor --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """`anchors`: versions that have one (0 is a version of its own, or a base); `floor`: the expected one."""

    head: int
    anchors: tuple[int, ...]
    keep_anchors: int
    keep_versions: int
    floor: int
    before: int = 0
    base: bool = False


CASES = {
    "one version": Case(0, (0,), 1, 1, 0),
    "one anchor": Case(9, (0,), 1, 1, 0),
    "the newest anchor": Case(9, (0, 4, 8), 1, 1, 8),
    "two anchors": Case(9, (0, 4, 8), 2, 1, 4),
    "three anchors": Case(9, (0, 4, 8), 3, 1, 0),
    "more anchors than there are": Case(9, (0, 4, 8), 7, 1, 0),
    "two versions": Case(9, (0, 4, 8), 1, 2, 8),
    "three versions need an older anchor": Case(9, (0, 4, 8), 1, 3, 4),
    "six versions": Case(9, (0, 4, 8), 1, 6, 4),
    "seven versions": Case(9, (0, 4, 8), 1, 7, 0),
    "more versions than there are": Case(9, (0, 4, 8), 1, 100, 0),
    "both, the older wins": Case(9, (0, 4, 8), 2, 2, 4),
    "an anchor at the head": Case(9, (0, 9), 1, 1, 9),
    "an anchor at the head and two versions": Case(9, (0, 9), 1, 2, 0),
    "a base counts": Case(9, (0, 4, 8), 3, 1, 0, base=True),
    "a base alone": Case(9, (0,), 1, 1, 0, base=True),
    "the floor stays": Case(9, (0, 4, 8), 1, 7, 4, before=4),
    "the floor rises": Case(9, (0, 4, 8), 1, 1, 8, before=4),
    "anchors below the floor do not count": Case(9, (0, 4, 8), 2, 1, 4, before=4),
    "nothing fits above the floor": Case(9, (0, 4, 8), 3, 1, 4, before=4),
}


def filled(*manifests: Manifest, late: tuple[Manifest, ...] = ()) -> SpyStore:
    """A store with something of the right size for every payload: prune looks at sizes, not inside."""
    store = store_of(*manifests, late=late)
    for manifest in (*manifests, *late):
        for ref in manifest.payloads:
            store.put(keys.payload_key(ref.sha256), bytes(ref.nbytes))
    return store


def store_for(case: Case) -> SpyStore:
    first = paper("base", 0) if case.base else paper("anchor", 0, 100)
    chain = [paper("delta", v, 10) for v in range(1, case.head + 1)]
    store = filled(first, *chain, late=tuple(paper("anchor", v, 100) for v in case.anchors if v))
    if case.before:
        earlier = plan_prune(store, Retention(anchors=sum(v >= case.before for v in case.anchors), versions=1))
        assert earlier.floor == case.before
        prune(store, earlier)
    return store


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_floor(case: Case) -> None:
    store = store_for(case)
    found = plan_prune(store, Retention(anchors=case.keep_anchors, versions=case.keep_versions))
    assert found.floor == case.floor


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_what_is_kept_can_be_restored_and_nothing_else_stays(case: Case) -> None:
    store = store_for(case)
    found = plan_prune(store, Retention(anchors=case.keep_anchors, versions=case.keep_versions))
    prune(store, found)
    checked = verify(store)
    assert checked.is_clean
    assert checked.restorable == tuple(range(found.floor, case.head + 1))
    assert checked.pruned == tuple(range(found.floor))
    assert Log(store).versions() == list(range(case.head + 1)), "manifests of versions stay"
    assert Log(store).anchors() == [v for v in case.anchors if v and v >= found.floor]
    kept = len(range(found.floor + 1, case.head + 1)) + len([v for v in case.anchors if v >= found.floor])
    assert len(list(store.list(keys.PAYLOADS))) == kept - (case.base and found.floor == 0)


@pytest.mark.parametrize(("keep_anchors", "keep_versions"), [(0, 1), (1, 0), (-1, 1), (0, 0)])
def test_something_is_always_kept(keep_anchors: int, keep_versions: int) -> None:
    with pytest.raises(InvalidInputError):
        plan_prune(SpyStore(), Retention(anchors=keep_anchors, versions=keep_versions))


def test_an_empty_feed() -> None:
    store = SpyStore()
    found = plan_prune(store, Retention(anchors=1, versions=1))
    assert found == Pruning(floor=0, keys=(), payload_bytes=0, orphans=0, held_by=())
    prune(store, found)
    assert list(store.list()) == []


@pytest.mark.parametrize("how", ["gone", "cut"])
def test_an_anchor_whose_payloads_are_not_whole_does_not_count(how: str) -> None:
    """Else the older one, which is whole, would be deleted."""
    feed = Feed.of(6)
    key = feed.payload_keys(feed.late_anchor(4))[0]
    if how == "gone":
        feed.store.delete(key)
    else:
        feed.store.put(key, feed.store.get(key)[:-1])
    found = plan_prune(feed.store, Retention(anchors=1, versions=1))
    assert found.floor == 0
    prune(feed.store, found)
    assert same_weights(load(feed.log, feed.log.read(5)), feed.states[5])


def test_a_version_that_needs_what_would_be_deleted() -> None:
    """The delta behind the kept anchor is gone; only a skip from before it leads on. It is not given up in silence."""
    feed = skipping()
    feed.store.delete(feed.payload_keys(feed.log.read(9))[0])
    assert same_weights(load(feed.log, feed.log.read(9)), feed.states[9])
    with pytest.raises(CorruptError) as caught:
        plan_prune(feed.store, Retention(anchors=1, versions=1))
    assert (caught.value.rule, caught.value.key) == ("prune.damaged", keys.version_key(9))
    assert plan_prune(feed.store, Retention(anchors=2, versions=1)).floor == 4


# --- what goes --------------------------------------------------------------------------------------------------------


def skipping() -> Feed:
    """Ten versions, anchors at 0, 4 and 8, skips 0-2, 2-6, 4-6, 5-9."""
    feed = Feed.of(10)
    for version in (4, 8):
        feed.late_anchor(version)
    for start, end in ((0, 2), (2, 6), (4, 6), (5, 9)):
        feed.skip(start, end)
    return feed


def test_real_weights_after_a_prune() -> None:
    feed = skipping()
    found = plan_prune(feed.store, Retention(anchors=2, versions=1))
    prune(feed.store, found)
    for version in range(4, 10):
        assert same_weights(load(feed.log, feed.log.read(version)), feed.states[version])
    assert feed.log.skips() == [(4, 6), (5, 9)]
    assert verify(feed.store, deep=True).is_clean


def test_planning_deletes_nothing_and_lists_everything() -> None:
    feed = skipping()
    before = {info.key: info.nbytes for info in feed.store.list()}
    found = plan_prune(feed.store, Retention(anchors=2, versions=1))
    assert {info.key: info.nbytes for info in feed.store.list()} == before
    prune(feed.store, found)
    after = {info.key for info in feed.store.list()}
    assert set(found.keys) == before.keys() - after
    assert after - before.keys() == {keys.FLOOR}
    assert found.payload_bytes == sum(n for k, n in before.items() if k in found.keys and k.startswith(keys.PAYLOADS))
    assert found.to_json() == {
        "floor": 4,
        "keys": list(found.keys),
        "payload_bytes": found.payload_bytes,
        "orphans": 0,
        "held_by": [],
        "versions": list(found.versions),
        "young_orphans": 0,
        "young_orphan_bytes": 0,
        "pinned": [],
    }
    assert found.versions == (0, 1, 2, 3)


def test_the_floor_first_then_manifests_then_payloads() -> None:
    feed = skipping()
    found = plan_prune(feed.store, Retention(anchors=1, versions=1))
    assert isinstance(feed.store, SpyStore)
    feed.store.took()
    prune(feed.store, found)
    calls = [call for call in feed.store.took() if call[0] != "get"]
    assert calls == [("put", keys.FLOOR), ("list", keys.PINS), *(("delete", key) for key in found.keys)]
    kinds = ["payload" if key.startswith(keys.PAYLOADS) else "manifest" for key in found.keys]
    assert kinds == sorted(kinds)
    assert kinds[0] == "manifest"
    assert not any(key.startswith(keys.VERSIONS) for key in found.keys)


@pytest.mark.parametrize("after", range(12))
def test_an_interrupted_prune_can_be_repeated(after: int) -> None:
    class Stops(SpyStore):
        left: int | None = None

        def delete(self, key: str) -> None:
            if self.left == 0:
                raise KeyboardInterrupt
            if self.left is not None:
                self.left -= 1
            super().delete(key)

    store = Stops()
    feed = Feed.of(6, store)
    feed.late_anchor(4)
    feed.skip(0, 2)
    store.left = after
    found = plan_prune(store, Retention(anchors=1, versions=1))
    try:
        prune(store, found)
    except KeyboardInterrupt:
        assert verify(store).is_clean
    store.left = None
    prune(store, plan_prune(store, Retention(anchors=1, versions=1)))
    assert verify(store, deep=True).restorable == (4, 5)
    assert plan_prune(store, Retention(anchors=1, versions=1)).keys == ()


def test_twice_is_once() -> None:
    feed = skipping()
    prune(feed.store, plan_prune(feed.store, Retention(anchors=1, versions=1)))
    before = {info.key for info in feed.store.list()}
    again = plan_prune(feed.store, Retention(anchors=1, versions=1))
    assert again.keys == ()
    prune(feed.store, again)
    assert {info.key for info in feed.store.list()} == before


def test_an_older_plan_does_not_lower_the_floor() -> None:
    feed = skipping()
    older = plan_prune(feed.store, Retention(anchors=2, versions=1))
    prune(feed.store, plan_prune(feed.store, Retention(anchors=1, versions=1)))
    prune(feed.store, older)
    assert feed.log.floor() == 8


def test_a_publisher_at_work() -> None:
    """What is published between the plan and its execution is not touched."""
    feed = skipping()
    found = plan_prune(feed.store, Retention(anchors=1, versions=1))
    feed.delta()
    feed.late_anchor(10)
    feed.delta(feed.states[-1])
    prune(feed.store, found)
    checked = verify(feed.store, deep=True)
    assert checked.is_clean
    assert checked.restorable == (8, 9, 10, 11)


def test_weights_that_come_back_are_not_shared_with_what_goes() -> None:
    """Version 6 has the weights of version 0 again: its anchor has shards of its own."""
    feed = Feed.of(6)
    feed.delta(feed.states[0])
    feed.late_anchor(6)
    prune(feed.store, plan_prune(feed.store, Retention(anchors=1, versions=1)))
    assert same_weights(load(feed.log, feed.log.read(6)), feed.states[0])


def test_files_beside_the_weights_stay() -> None:
    """They are shared by versions, and a publisher that is at work may be about to name them again."""
    feed = Feed.of(6)
    old, new = (feed.upload.put(write_files({"config.json": text})) for text in (b"1", b"2"))
    for version in range(6):
        manifest = feed.log.read(version)
        feed.store.put(keys.version_key(version), replace(manifest, files=old if version < 3 else new).to_bytes())
    feed.late_anchor(5)
    prune(feed.store, plan_prune(feed.store, Retention(anchors=1, versions=1)))
    for ref in (old, new):
        assert feed.store.get(keys.payload_key(ref.sha256))
    assert verify(feed.store, deep=True).is_clean


def test_a_late_publisher_finds_its_version_taken() -> None:
    """The manifests of pruned versions are the fence."""
    feed = skipping()
    prune(feed.store, plan_prune(feed.store, Retention(anchors=1, versions=1)))
    assert feed.store.create(keys.version_key(1), b"") is False
    assert Upload(feed.store).open() == feed.head


# --- replicas ---------------------------------------------------------------------------------------------------------


def put_beat(feed: Feed, beat: Heartbeat) -> None:
    """A heartbeat that the store got at the time that it names."""
    feed.log.beat(beat)
    assert isinstance(feed.store, SpyStore)
    feed.store.age(keys.replica_key(beat.replica), beat.unix_s)


BEATS: dict[str, tuple[list[Heartbeat], tuple[str, ...], int]] = {
    # heartbeats, those that hold something, the oldest version whose deltas stay
    "none": ([], (), 8),
    "up to date": ([Heartbeat("a", 9, NOW_UNIX_S)], (), 8),
    "at the floor": ([Heartbeat("a", 8, NOW_UNIX_S)], (), 8),
    "just behind": ([Heartbeat("a", 7, NOW_UNIX_S)], ("a",), 7),
    "far behind": ([Heartbeat("a", 1, NOW_UNIX_S)], ("a",), 1),
    "two": ([Heartbeat("b", 3, NOW_UNIX_S), Heartbeat("a", 5, NOW_UNIX_S)], ("a", "b"), 3),
    "gone": ([Heartbeat("a", 1, NOW_UNIX_S - LIVE_S - 1)], (), 8),
    "almost gone": ([Heartbeat("a", 1, NOW_UNIX_S - LIVE_S + 1)], ("a",), 1),
    "a clock ahead": ([Heartbeat("a", 1, NOW_UNIX_S + LIVE_S - 1)], ("a",), 1),
    "a clock far ahead": ([Heartbeat("a", 1, NOW_UNIX_S + 10**6)], (), 8),
    "without a version": ([Heartbeat("a", None, NOW_UNIX_S)], (), 8),
}


@pytest.mark.parametrize(("beats", "held_by", "oldest"), BEATS.values(), ids=BEATS.keys())
def test_live_replicas_keep_the_deltas_that_they_need(
    beats: list[Heartbeat], held_by: tuple[str, ...], oldest: int
) -> None:
    feed = skipping()
    for beat in beats:
        put_beat(feed, beat)
    found = plan_prune(feed.store, Retention(anchors=1, versions=1), clock=lambda: float(NOW_UNIX_S))
    assert (found.floor, found.held_by) == (8, held_by)
    prune(feed.store, found)
    there = {info.key for info in feed.store.list()}
    for version in range(1, 10):
        kept = set(feed.payload_keys(feed.log.read(version))) <= there
        assert kept == (version > oldest)
    assert feed.log.skips() == [pair for pair in ((0, 2), (2, 6), (4, 6), (5, 9)) if pair[0] >= oldest]
    assert feed.log.anchors() == [8], "a replica that has weights needs no anchor"
    assert verify(feed.store, deep=True).is_clean


def test_a_replica_that_caught_up_lets_go() -> None:
    feed = skipping()
    clock = lambda: float(NOW_UNIX_S)  # noqa: E731
    put_beat(feed, Heartbeat("a", 1, NOW_UNIX_S))
    prune(feed.store, plan_prune(feed.store, Retention(anchors=1, versions=1), clock=clock))
    put_beat(feed, Heartbeat("a", 9, NOW_UNIX_S))
    found = plan_prune(feed.store, Retention(anchors=1, versions=1), clock=clock)
    assert found.keys
    prune(feed.store, found)
    assert len(list(feed.store.list(keys.PAYLOADS))) == 2


# --- orphans ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("age_s", "goes"), [(0, False), (ORPHAN_S - 60, False), (ORPHAN_S + 60, True)])
def test_orphans_get_a_day(age_s: float, goes: bool) -> None:
    feed = Feed.of(3)
    ref = feed.upload.put(b"left behind")
    feed.store.put("payloads/readme.txt", b"not ours")
    assert isinstance(feed.store, SpyStore)
    feed.store.age(keys.payload_key(ref.sha256), time.time() - age_s)
    found = plan_prune(feed.store, Retention(anchors=1, versions=1))
    assert found.orphans == int(goes)
    assert found.keys == ((keys.payload_key(ref.sha256),) if goes else ())
    assert found.payload_bytes == (len(b"left behind") if goes else 0)
    prune(feed.store, found)
    assert feed.store.get("payloads/readme.txt")
    assert verify(feed.store, deep=True).orphans == int(not goes)


def test_an_orphan_that_is_put_again_after_the_plan_stays() -> None:
    feed = Feed.of(3)
    refs = [feed.upload.put(text) for text in (b"comes back", b"stays away")]
    assert isinstance(feed.store, SpyStore)
    for ref in refs:
        feed.store.age(keys.payload_key(ref.sha256), time.time() - ORPHAN_S - 60)
    found = plan_prune(feed.store, Retention(anchors=1, versions=1))
    assert found.orphans == 2
    feed.store.put(keys.payload_key(refs[0].sha256), b"comes back")
    feed.store.took()
    assert prune(feed.store, found) == (keys.payload_key(refs[0].sha256),)
    deleted = [key for verb, key in feed.store.took() if verb == "delete" and key.startswith(keys.PAYLOADS)]
    assert deleted == [keys.payload_key(refs[1].sha256)]
    assert feed.store.get(keys.payload_key(refs[0].sha256)) == b"comes back"


@pytest.mark.parametrize("version", [3, 5, 10**9])
def test_an_invented_floor_deletes_nothing(version: int) -> None:
    feed = Feed.of(6)
    feed.store.put(keys.FLOOR, FloorRecord(version).to_bytes())
    found = plan_prune(feed.store, Retention(anchors=1, versions=1))
    assert found.keys == ()
    prune(feed.store, found)
    assert same_weights(load(feed.log, feed.log.read(5)), feed.states[5])


def test_a_payload_that_is_named_while_it_is_planned_is_no_orphan() -> None:
    """Manifests are read first and payloads listed last, yet a payload put in between is young."""

    class Committing(SpyStore):
        feed: Feed | None = None

        def list(self, prefix: str = "", *, after: str | None = None):  # type: ignore[no-untyped-def]
            if prefix == keys.PAYLOADS and self.feed is not None:
                feed, self.feed = self.feed, None
                feed.delta()
            return super().list(prefix, after=after)

    store = Committing()
    feed = Feed.of(3, store)
    store.feed = feed
    found = plan_prune(store, Retention(anchors=1, versions=1))
    assert (found.keys, found.orphans) == ((), 0)
    assert len(feed.states) == 4


# --- damage -----------------------------------------------------------------------------------------------------------


def unreadable(store: SpyStore, key: str) -> None:
    store.put(key, b"{")


@pytest.mark.parametrize(
    ("damage", "key"),
    [
        (unreadable, keys.version_key(2)),
        (unreadable, keys.version_key(9)),
        (unreadable, keys.anchor_key(4)),
        (unreadable, keys.skip_key(4, 6)),
        (unreadable, keys.FLOOR),
        (lambda store, key: store.delete(key), keys.version_key(2)),
    ],
)
def test_a_damaged_feed_is_left_alone(damage: object, key: str) -> None:
    feed = skipping()
    assert callable(damage)
    damage(feed.store, key)
    assert isinstance(feed.store, SpyStore)
    feed.store.took()
    with pytest.raises(CorruptError) as caught:
        plan_prune(feed.store, Retention(anchors=1, versions=1))
    assert caught.value.key == key
    assert caught.value.rule == "prune.damaged"
    assert caught.value.hint
    assert not [call for call in feed.store.took() if call[0] in ("put", "create", "delete")]


def test_a_junk_heartbeat_does_not_stop_a_prune() -> None:
    feed = skipping()
    feed.store.put(keys.replica_key("junk"), b"{")
    feed.store.put(keys.replica_key("lying"), Heartbeat("another", 0, NOW_UNIX_S).to_bytes())
    assert plan_prune(feed.store, Retention(anchors=1, versions=1)).held_by == ()


def test_damaged_payloads_do_not_stop_a_prune() -> None:
    feed = skipping()
    flip(feed.store, feed.payload_keys(feed.log.read(2))[0])
    feed.store.delete(feed.payload_keys(feed.log.read(3))[0])
    prune(feed.store, plan_prune(feed.store, Retention(anchors=1, versions=1)))
    assert verify(feed.store, deep=True).is_clean


def test_a_store_that_fails_half_way_is_reported() -> None:
    class Full(SpyStore):
        def put(self, key: str, data: Data) -> None:
            if key == keys.FLOOR:
                raise CorruptError("no")
            super().put(key, data)

    store = Full()
    feed = Feed.of(6, store)
    feed.late_anchor(4)
    before = [info.key for info in store.list()]
    with pytest.raises(CorruptError):
        prune(store, plan_prune(store, Retention(anchors=1, versions=1)))
    assert [info.key for info in store.list()] == before
