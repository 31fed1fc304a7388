import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.feeds import Feed, SpyStore, paper, store_of
from support.helpers import resealed

from deltasync.errors import CorruptError, DeltasyncError, FormatError, NotFoundError
from deltasync.feed.log import LIVE_S, Log, is_live, require_follows
from deltasync.format import keys
from deltasync.format.digest import StateDigest
from deltasync.format.manifest import Manifest
from deltasync.format.sealed import FloorRecord, Heartbeat
from deltasync.store.memory import MemoryStore
from deltasync.store.protocol import ObjectInfo


def chain(length: int) -> list[Manifest]:
    return [paper("anchor", 0, 1000), *(paper("delta", v, 10) for v in range(1, length))]


@pytest.mark.parametrize("after", [None, 0, 5])
def test_an_empty_feed_has_no_head(after: int | None) -> None:
    assert Log(MemoryStore()).head(after=after) is None


@pytest.mark.parametrize(
    ("length", "after", "found"),
    [(1, None, 0), (5, None, 4), (5, 0, 4), (5, 3, 4), (5, 4, None), (5, 9, None)],
)
def test_head(length: int, after: int | None, found: int | None) -> None:
    head = Log(store_of(*chain(length))).head(after=after)
    assert (None if head is None else head.version) == found


@pytest.mark.parametrize("hidden", range(1, 8))
def test_what_the_listing_missed_is_found(hidden: int) -> None:
    """Even all but the first version: each leads to the next."""
    store = store_of(*chain(8))
    store.hidden = lambda key: (v := keys.parse_version_key(key)) is not None and v >= 8 - hidden
    head = Log(store).head()
    assert head is not None
    assert head.version == 7


class LongStore(MemoryStore):
    """A feed of many versions: their manifests are made when they are read. `missing` has none."""

    def __init__(self, versions: int, missing: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self.versions = versions
        self.missing = missing
        self.looked: list[str] = []
        self.listed = 0

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        self.looked.append(key)
        version = keys.parse_version_key(key)
        if version is None or version >= self.versions or version in self.missing:
            raise NotFoundError(f"{key} is not there", key=key)
        return paper("delta" if version else "anchor", version).to_bytes()[offset : offset + length]

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectInfo]:
        first = 0 if after is None else (keys.parse_version_key(after) or 0) + 1
        for version in range(first, self.versions):
            if version not in self.missing:
                self.listed += 1
                yield ObjectInfo(keys.version_key(version), 600, 0.0)


@pytest.mark.parametrize("length", [1, 999, 1000, 1001, 1002, 2000, 2001, 4096, 100_000, 1_000_000])
def test_the_head_of_a_long_feed_takes_few_requests(length: int) -> None:
    store = LongStore(length)
    assert Log(store).require_head().version == length - 1
    assert len(store.looked) <= 3 + 2 * max(0, (length // 1000).bit_length())
    assert store.listed <= 1000


@given(length=st.integers(1, 20_000), missing=st.frozensets(st.integers(0, 20_000)), data=st.data())
@settings(max_examples=60, deadline=None)
def test_missing_manifests_do_not_hide_the_head(length: int, missing: frozenset[int], data: st.DataObject) -> None:
    """Not even those that the search looks at."""
    probe = LongStore(length)
    Log(probe).head()
    looked = [v for key in probe.looked if (v := keys.parse_version_key(key)) is not None and v < length - 1]
    more = data.draw(st.frozensets(st.sampled_from(looked))) if looked else frozenset()
    assert Log(LongStore(length, (missing | more) - {length - 1})).require_head().version == length - 1


def test_nothing_new_is_one_request() -> None:
    store = store_of(*chain(5))
    assert Log(store).head(after=4) is None
    assert store.took() == [("get", keys.version_key(5))]
    assert Log(store).head(after=2) is not None
    assert store.took() == [("get", keys.version_key(v)) for v in (3, 4, 5)]


def test_the_head_of_a_feed_with_strays() -> None:
    store = store_of(*chain(3))
    for key in ("versions/7.json", "versions/00000000000000000009.json.old", "versions/99999999999999999999.json"):
        store.put(key, b"not ours")
    assert Log(store).require_head().version == 2
    assert Log(store).versions() == [0, 1, 2]


def test_require_head_of_an_empty_feed_says_so() -> None:
    with pytest.raises(NotFoundError, match="no version in memory://") as caught:
        Log(MemoryStore()).require_head()
    assert caught.value.hint


def test_read_many_in_the_order_asked_for() -> None:
    log = Log(store_of(*chain(40)))
    for versions in (range(40), range(39, -1, -1), [3, 3, 1], []):
        assert [m.version for m in log.read_many(versions)] == list(versions)


def rewritten(store: SpyStore, version: int, **fields: object) -> None:
    key = keys.version_key(version)
    store.put(key, resealed(store.get(key), fields))


def placed(store: SpyStore, manifest: Manifest) -> None:
    store.put(keys.version_key(2), manifest.to_bytes())


BAD: dict[str, tuple[Callable[[SpyStore], object], type[DeltasyncError], str | None]] = {
    "missing": (lambda s: s.delete(keys.version_key(2)), NotFoundError, None),
    "not JSON": (lambda s: s.put(keys.version_key(2), b"\0"), CorruptError, "manifest.json"),
    "empty": (lambda s: s.put(keys.version_key(2), b""), CorruptError, "manifest.json"),
    "a later format": (lambda s: rewritten(s, 2, format="deltasync/9"), FormatError, "manifest.format"),
    "another version": (lambda s: placed(s, paper("delta", 3)), CorruptError, "manifest.key"),
    "a skip": (lambda s: placed(s, paper("skip", 2, start=0)), CorruptError, "manifest.key"),
}


@pytest.mark.parametrize(("damage", "error", "rule"), BAD.values(), ids=BAD.keys())
def test_errors_name_key_and_version(
    damage: Callable[[SpyStore], object], error: type[DeltasyncError], rule: str | None
) -> None:
    store = store_of(*chain(5))
    damage(store)
    log = Log(store)
    for call in (lambda: log.read(2), lambda: list(log.read_many(range(5)))):
        with pytest.raises(error) as caught:
            call()
        assert type(caught.value) is error
        assert caught.value.rule == rule
        assert caught.value.version == 2
        if error is not NotFoundError:
            assert caught.value.key == keys.version_key(2)
            assert keys.version_key(2) in caught.value.message


ANCHOR = paper("anchor", 2, 1000)
WITH_PARENT = replace(ANCHOR, parent=1, parent_digest=StateDigest(1, 1))
PLACES: list[tuple[Manifest, str, bool]] = [
    (ANCHOR, keys.version_key(2), True),
    (ANCHOR, keys.anchor_key(2), True),
    (ANCHOR, keys.anchor_key(3), False),
    (ANCHOR, keys.version_key(1), False),
    (WITH_PARENT, keys.version_key(2), True),
    (WITH_PARENT, keys.anchor_key(2), False),
    (paper("delta", 2), keys.anchor_key(2), False),
    (paper("delta", 2), keys.version_key(2), True),
    (paper("base", 0), keys.version_key(0), True),
    (paper("base", 0), keys.anchor_key(0), False),
    (paper("skip", 5, start=2), keys.skip_key(2, 5), True),
    (paper("skip", 5, start=2), keys.skip_key(1, 5), False),
    (paper("skip", 5, start=2), keys.skip_key(2, 6), False),
    (paper("delta", 5), keys.skip_key(3, 5), False),
]


@pytest.mark.parametrize(("manifest", "key", "fits"), PLACES, ids=[f"{m.kind} at {k}" for m, k, _ in PLACES])
def test_a_manifest_in_the_wrong_place(manifest: Manifest, key: str, fits: bool) -> None:
    store = MemoryStore()
    store.put(key, manifest.to_bytes())
    log = Log(store)
    version, anchor, skip = keys.parse_version_key(key), keys.parse_anchor_key(key), keys.parse_skip_key(key)

    def read() -> Manifest | None:
        if version is not None:
            return log.read(version)
        return log.anchor(anchor) if anchor is not None else log.skip(*(skip or (0, 0)))

    if fits:
        assert read() == manifest
        return
    with pytest.raises(CorruptError) as caught:
        read()
    assert (caught.value.rule, caught.value.key) == ("manifest.key", key)


LINKS: dict[str, tuple[Manifest, bool]] = {
    "follows": (paper("delta", 3), True),
    "another parent digest": (paper("delta", 3, parent_digest=StateDigest(9, 9)), False),
    "another layout": (paper("delta", 3, layout_sha256="cd" * 32), False),
    "an anchor without parent": (paper("anchor", 3, 9, digest=StateDigest(7, 7)), True),
    "an anchor of another layout": (
        paper("anchor", 3, 9, layout_sha256="cd" * 32, parent=2, parent_digest=StateDigest(2, 2)),
        True,
    ),
    "an anchor from another digest": (paper("anchor", 3, 9, parent=2, parent_digest=StateDigest(9, 9)), False),
}


@pytest.mark.parametrize(("manifest", "follows"), LINKS.values(), ids=LINKS.keys())
def test_a_chain_is_linked_by_digests(manifest: Manifest, follows: bool) -> None:
    first, second, third = chain(3)
    require_follows(first, second)
    require_follows(second, third)
    if follows:
        require_follows(third, manifest)
        return
    with pytest.raises(CorruptError) as caught:
        require_follows(third, manifest)
    assert (caught.value.rule, caught.value.version, caught.value.key) == ("chain.link", 3, keys.version_key(3))


def test_what_is_listed() -> None:
    store = store_of(*chain(4), paper("skip", 3, start=0), late=[paper("anchor", 2, 5)])
    for key in ("anchors/x.json", "skips/00000000000000000001-00000000000000000002.json", "payloads/x", "replicas/-"):
        store.put(key, b"stray")
    log = Log(store)
    assert (log.versions(), log.anchors(), log.skips()) == ([0, 1, 2, 3], [2], [(0, 3)])
    assert [log.anchors(start=start) for start in (1, 2, 3)] == [[2], [2], []]
    assert log.anchor(1) is None
    assert log.skip(1, 3) is None
    assert log.heartbeats() == []


def test_floor_and_heartbeats() -> None:
    store = MemoryStore(clock=lambda: 77.9)
    log = Log(store)
    assert log.floor() == 0
    store.put(keys.FLOOR, FloorRecord(7).to_bytes())
    assert log.floor() == 7
    beats = [Heartbeat("a", 3, 100), Heartbeat("b.c-1", None, 50, {"host": "x"})]
    for beat in [replace(beats[0], version=1), *beats]:
        log.beat(beat)
    assert log.heartbeats() == [replace(beat, unix_s=77) for beat in beats], "the time is that of the store"


def test_a_heartbeat_that_goes_between_listing_and_reading() -> None:
    store = SpyStore()
    log = Log(store)
    log.beat(Heartbeat("a", 3, 100))
    store.hidden = lambda key: bool(store.delete(key))
    assert log.heartbeats() == []


JUNK: dict[str, tuple[bytes, str]] = {
    "not JSON": (b"{", "heartbeat.json"),
    "nothing": (b"", "heartbeat.json"),
    "of another replica": (Heartbeat("another", 3, 100).to_bytes(), "heartbeat.key"),
    "of no id": (resealed(Heartbeat("bad", 3, 100).to_bytes(), {"replica": "../x"}), "key.replica"),
    "altered": (Heartbeat("bad", 3, 100).to_bytes().replace(b"100", b"101"), "heartbeat.sha256"),
    "of a later format": (resealed(Heartbeat("bad", 3, 100).to_bytes(), {"format": "deltasync/9"}), "heartbeat.format"),
    "a negative version": (resealed(Heartbeat("bad", 3, 100).to_bytes(), {"version": -1}), "heartbeat.field"),
}


@pytest.mark.parametrize(("data", "rule"), JUNK.values(), ids=JUNK.keys())
def test_a_junk_heartbeat_is_passed_over_and_reported_once(
    data: bytes, rule: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    log = Log(store)
    log.beat(Heartbeat("good", 3, 100))
    store.put(keys.replica_key("bad"), data)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert [beat.replica for beat in log.heartbeats()] == ["good"]
    (record,) = caplog.records
    assert keys.replica_key("bad") in record.getMessage()
    assert f"[{rule}]" in record.getMessage()


@pytest.mark.parametrize(
    ("age_s", "live"), [(0, True), (LIVE_S - 1, True), (LIVE_S, False), (-LIVE_S + 1, True), (-LIVE_S, False)]
)
def test_a_heartbeat_is_live_for_a_while(age_s: float, live: bool) -> None:
    """One from the future is not live without end."""
    store = MemoryStore(clock=lambda: 10_000.0)
    Log(store).beat(Heartbeat("a", 3, 2**62))
    (beat,) = Log(store).heartbeats()
    assert is_live(beat, 10_000.0 + age_s) == live


def test_heartbeats_are_compared_with_the_feed() -> None:
    feed = Feed.of(3)
    digest = feed.log.read(1).digest.hex
    beats = [
        Heartbeat("equal", 1, 0, {"digest": digest}),
        Heartbeat("different", 2, 0, {"digest": digest}),
        Heartbeat("silent about it", 1, 0),
        Heartbeat("above the head", 3, 0, {"digest": digest}),
        Heartbeat("far above the head", 2**60, 0),
        Heartbeat("without a version", None, 0),
    ]
    assert feed.log.compare(beats) == [True, False, None, False, False, None]
    feed.store.put(keys.version_key(1), b"{")
    assert feed.log.compare(beats[:1]) == [None]


def test_a_real_feed() -> None:
    feed = Feed.of(4)
    assert [m.version for m in feed.log.read_many(range(1, 4))] == [1, 2, 3]
    record = feed.log.feed()
    assert record is not None
    assert Log(MemoryStore()).feed() is None
