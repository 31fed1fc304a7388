"""A feed at a glance: what it shows, what it costs, and what it warns of."""

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.feeds import NOW_UNIX_S, Feed, SpyStore, flip, paper, store_of

import deltasync
from deltasync.errors import NotFoundError
from deltasync.feed.log import Log
from deltasync.format import keys
from deltasync.format.digest import StateDigest
from deltasync.format.sealed import FeedRecord, FloorRecord, Heartbeat
from deltasync.ui import overview as module
from deltasync.ui.overview import DETAIL, LISTING_S, REPLICAS_MAX, SAMPLES, Overview, Watch, stride_of

STEP_S = 10


def beat(store: SpyStore, replica: str, version: int | None, *, at_unix_s: float, **facts: str) -> None:
    """Write a heartbeat, as if at that time."""
    Log(store).beat(Heartbeat(replica, version, int(at_unix_s), facts))
    store.age(keys.replica_key(replica), at_unix_s)


def paper_feed(versions: int, *, replicas: int = 0) -> SpyStore:
    """Manifests, anchors, skips and heartbeats without payloads; version v has the digest (v, v)."""
    made = [
        replace(paper("delta" if v else "anchor", v, 100 + v), created_unix_s=NOW_UNIX_S + STEP_S * v)
        for v in range(versions)
    ]
    skips = [paper("skip", v, 300, start=v - 16) for v in range(16, versions, 16)]
    late = [paper("anchor", v, 5000) for v in range(50, versions, 50)]
    store = store_of(*made, *skips, late=late)
    store.put(keys.FEED, FeedRecord("a" * 32, NOW_UNIX_S).to_bytes())
    for manifest in made:
        for ref in manifest.payloads:
            store.put(keys.payload_key(ref.sha256), b"x" * ref.nbytes)
    for number in range(replicas):
        version = max(0, versions - 1 - number)
        facts = {"digest": StateDigest(version, version).hex, "engine": "folder", "fetch_s": "0.25"}
        beat(store, f"replica-{number}", version, at_unix_s=end_of(versions) - 20, **facts)
    store.took()
    return store


def end_of(versions: int) -> float:
    return NOW_UNIX_S + STEP_S * versions


def watch(store: SpyStore, versions: int) -> Watch:
    return Watch(store, clock=lambda: end_of(versions))


def kinds(found: Overview) -> list[str]:
    return [alert.kind for alert in found.alerts()]


def counted(store: SpyStore, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of ranges that are read, and each page of a thousand keys of a listing."""
    reads: list[str] = []
    get_range, listed = store.get_range, store.list

    def counting(key: str, offset: int, length: int) -> bytes:
        reads.append(key)
        return get_range(key, offset, length)

    def paging(prefix: str = "", *, after: str | None = None) -> Any:
        for i, item in enumerate(listed(prefix, after=after)):
            if i % 1000 == 0:
                reads.append(f"list {prefix}")
            yield item

    monkeypatch.setattr(store, "get_range", counting)
    monkeypatch.setattr(store, "list", paging)
    return reads


def test_ten_thousand_versions_and_200_replicas_take_a_bounded_number_of_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = paper_feed(10_000, replicas=200)
    requests = counted(store, monkeypatch)
    now = end_of(10_000)
    watched = Watch(store, clock=lambda: now)
    tracemalloc.start()
    first = watched.refresh()
    kept_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert first.head is not None
    assert first.head.version == 9999
    assert len(first.replicas) == 200
    assert DETAIL + SAMPLES // 2 < len(first.versions) <= DETAIL + SAMPLES
    # Manifests, heartbeats, anchors, the bisection for the head, some tries for an index, and pages of listings.
    assert len(requests) < DETAIL + SAMPLES + 200 + 200 + 40 + 3 + 20
    assert kept_bytes < 16 << 20
    requests.clear()
    now += 6
    again = watched.refresh()
    assert again.versions == first.versions
    # The record of the feed, the next version, the list of replicas: none of the heartbeats is new.
    assert [key for key in requests if "payloads/" not in key] == [
        keys.FEED,
        keys.version_key(10_000),
        "list replicas/",
    ]


@pytest.mark.parametrize("count", [1, DETAIL, DETAIL + 1, DETAIL + SAMPLES + 1, 5000])
def test_what_is_read_later_is_what_is_read_at_once(count: int) -> None:
    store = paper_feed(count)
    watched = watch(store, count)
    watched.refresh()
    for v in range(count, count + 3):
        store.put(keys.version_key(v), paper("delta", v, 100 + v).to_bytes())
    later, fresh = watched.refresh(), watch(store, count).refresh()
    assert [m.version for m in later.versions if m.version % fresh.stride == 0] == [
        m.version for m in fresh.versions if m.version % fresh.stride == 0
    ]
    assert [m.version for m in later.versions] == [m.version for m in fresh.versions]
    assert later.detail_from == max(0, count + 3 - DETAIL)
    assert all(v % fresh.stride == 0 for v in (m.version for m in fresh.versions) if v < fresh.detail_from)


def test_many_new_versions_are_read_as_at_the_start() -> None:
    store = paper_feed(3000)
    for v in range(100, 3000):
        store.delete(keys.version_key(v))
    watched = watch(store, 3000)
    watched.refresh()
    for v in range(100, 3000):
        store.put(keys.version_key(v), paper("delta", v, 100 + v).to_bytes())
    found = watched.refresh()
    assert found.head is not None
    assert found.head.version == 2999
    assert len(found.versions) <= DETAIL + SAMPLES
    assert not [d for d in found.damages if d.version is not None and "payload" not in d.key]


@pytest.mark.parametrize("head", [0, DETAIL, 10_000, 10**9])
def test_samples_are_bounded(head: int) -> None:
    assert len(range(0, max(0, head + 1 - DETAIL), stride_of(head))) <= SAMPLES


def test_the_figures_of_a_feed() -> None:
    store = paper_feed(100, replicas=3)
    found = watch(store, 100).refresh()
    assert found.versions_per_minute == pytest.approx(6.0)
    assert found.interval_s == STEP_S
    assert found.age_s == STEP_S
    assert found.delta_bytes == pytest.approx(sum(100 + v for v in range(1, 100)) / 99)
    assert found.stored_payloads == 100
    assert found.stored_bytes == sum(100 + v for v in range(100))
    assert found.anchors == ((50, 5000),)
    assert len(found.skips) == 6
    lags = {state.id: (state.lag, lag_s, state.has_digest) for state, lag_s in found.replicas}
    assert lags == {"replica-0": (0, 0, True), "replica-1": (1, STEP_S, True), "replica-2": (2, 2 * STEP_S, True)}
    assert kinds(found) == []


def test_pins() -> None:
    """A pin that is damaged is reported until it is repaired or removed. Nothing is read again that did not change."""
    feed = Feed.of(3)
    clock = [0.0]
    watched = Watch(feed.store, clock=lambda: clock[0])
    deltasync.pin(feed.store, 2, name="newest")
    deltasync.pin(feed.store, 1, name="best")
    assert watched.refresh().pins == ((1, "best"), (2, "newest"))
    feed.store.put(keys.pin_key("newest"), b"{}")
    clock[0] += LISTING_S
    found = watched.refresh()
    assert (found.pins, [d.key for d in found.damages]) == (((1, "best"),), [keys.pin_key("newest")])
    feed.store.delete(keys.pin_key("newest"))
    feed.store.took()
    clock[0] += LISTING_S
    found = watched.refresh()
    assert (found.pins, found.damages) == (((1, "best"),), ())
    assert [verb for verb, key in feed.store.took() if key.startswith(keys.PINS)] == ["list"]


def test_all_weights_are_those_of_the_index() -> None:
    feed = Feed.of(3)
    assert Watch(feed.store).refresh().full_bytes == feed.states[0].layout.nbytes


def diverge(store: SpyStore) -> None:
    beat(store, "r", 99, at_unix_s=end_of(100), digest=StateDigest(1, 2).hex)


def serve_another_feed(store: SpyStore) -> None:
    beat(store, "r", 5000, at_unix_s=end_of(100), digest=StateDigest(1, 2).hex)


def lose_payload(store: SpyStore) -> None:
    store.delete(keys.payload_key(paper("delta", 70).payloads[0].sha256))


def cut_payload(store: SpyStore) -> None:
    store.put(keys.payload_key(paper("delta", 70).payloads[0].sha256), b"short")


def break_chain(store: SpyStore) -> None:
    wrong = replace(paper("delta", 60, 160), parent_digest=StateDigest(1, 2), created_unix_s=NOW_UNIX_S + 600)
    store.put(keys.version_key(60), wrong.to_bytes())


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda store: None, []),
        (diverge, ["diverged"]),
        (serve_another_feed, ["diverged"]),
        (lambda store: beat(store, "r", 90, at_unix_s=end_of(100)), ["behind"]),
        (lambda store: beat(store, "r", 91, at_unix_s=end_of(100)), []),
        (lambda store: beat(store, "r", 99, at_unix_s=end_of(100) - 2000), ["silent"]),
        (lambda store: beat(store, "r", 9, at_unix_s=end_of(100) - 100_000), []),
        (lambda store: flip(store, keys.version_key(60)), ["damage"]),
        (lambda store: flip(store, keys.version_key(99)), ["damage"]),
        (lambda store: flip(store, keys.anchor_key(50)), ["damage"]),
        (lambda store: flip(store, keys.FEED), ["damage"]),
        (lambda store: store.delete(keys.version_key(60)), ["damage"]),
        (lose_payload, ["damage"]),
        (cut_payload, ["damage"]),
        (break_chain, ["damage"]),
    ],
)
def test_alerts(change: Callable[[SpyStore], None], wanted: list[str]) -> None:
    store = paper_feed(100)
    change(store)
    assert kinds(watch(store, 100).refresh()) == wanted


def test_many_replicas_do_not_bury_everything_else() -> None:
    store = paper_feed(100)
    for number in range(50):
        beat(store, f"late-{number}", 0, at_unix_s=end_of(100) - 10)
    diverge(store)
    found = watch(store, 100).refresh().alerts()
    assert [alert.kind for alert in found] == ["diverged", "behind", "behind", "behind", "behind"]
    assert found[-1].message == "47 more replicas are behind"


@pytest.mark.parametrize(("silence_s", "wanted"), [(500, []), (700, ["publisher"]), (100_000, ["ended"])])
def test_a_silent_publisher(silence_s: int, wanted: list[str]) -> None:
    store = paper_feed(100)
    assert kinds(Watch(store, clock=lambda: end_of(99) + silence_s).refresh()) == wanted


def test_damage_that_is_put_back_is_no_longer_shown() -> None:
    store, now = paper_feed(100), end_of(100)
    good = store.get(keys.version_key(60))
    flip(store, keys.version_key(60))
    watched = Watch(store, clock=lambda: now)
    assert kinds(watched.refresh()) == ["damage"]
    store.put(keys.version_key(60), good)
    now += module.LISTING_S
    assert kinds(watched.refresh()) == []


def test_what_prune_has_deleted_is_no_damage() -> None:
    store = paper_feed(100)
    lose_payload(store)
    store.put(keys.FLOOR, FloorRecord(70).to_bytes())
    assert kinds(watch(store, 100).refresh()) == []


def test_a_feed_that_grows() -> None:
    feed = Feed.of(2)
    found = Watch(feed.store, clock=lambda: float(NOW_UNIX_S)).refresh()
    grown = replace(found, stored_bytes=21 * (found.full_bytes or 0))
    assert kinds(grown) == ["grows"]
    assert kinds(replace(grown, floor=1)) == []


@pytest.mark.parametrize("has_record", [True, False])
def test_a_feed_that_is_gone_is_not_one_without_news(has_record: bool) -> None:
    store = paper_feed(20)
    if not has_record:
        store.delete(keys.FEED)
    watched = watch(store, 20)
    watched.refresh()
    assert watched.refresh().head is not None
    for item in list(store.list()):
        store.delete(item.key)
    with pytest.raises(NotFoundError, match="is gone"):
        watched.refresh()


def test_another_feed_in_its_place_is_read_from_the_start() -> None:
    store = paper_feed(20)
    watched = watch(store, 20)
    watched.refresh()
    for item in list(store.list()):
        store.delete(item.key)
    store.put(keys.FEED, FeedRecord("b" * 32, NOW_UNIX_S).to_bytes())
    store.put(keys.version_key(0), paper("anchor", 0).to_bytes())
    assert [m.version for m in watched.refresh().versions] == [0]


def test_an_empty_place() -> None:
    found = Watch(SpyStore()).refresh()
    assert (found.head, found.versions, found.replicas) == (None, (), ())
    assert found.to_json()["head"] is None


def test_of_very_many_replicas_the_latest_are_read() -> None:
    store = paper_feed(3)
    for number in range(REPLICAS_MAX + 10):
        beat(store, f"r{number}", 2, at_unix_s=end_of(3) - 10 - number)
    found = watch(store, 3).refresh()
    assert found.older_replicas == 10
    assert {state.id for state, _ in found.replicas} == {f"r{number}" for number in range(REPLICAS_MAX)}
