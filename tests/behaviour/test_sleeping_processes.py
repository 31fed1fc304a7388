"""A pruner or a publisher that sleeps for days at any point loses no committed version. All clocks are simulated."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
from support import LONG_S
from support.feeds import Feed, SpyStore, publish, publisher, put_anchor
from support.helpers import state

from deltasync.blocks import encode_changes
from deltasync.errors import StoreError
from deltasync.feed.log import Log
from deltasync.feed.upload import Upload
from deltasync.format import keys
from deltasync.format.manifest import Manifest, PayloadRef
from deltasync.format.weights import Weights
from deltasync.store.probe import probe_clock
from deltasync.store.protocol import Data, ObjectInfo
from deltasync.trainer import versions
from deltasync.trainer.capture import capture
from deltasync.trainer.versions import Metadata, VersionWriter
from deltasync.upkeep.prune import ORPHAN_S, Retention, plan_prune, prune
from deltasync.upkeep.verify import verify

DAY_S = 86_400.0
START_S = 1_700_000_000.0


class SleepyStore(SpyStore):
    """A store with a clock of its own. `on[verb, key]` is called once, before or after that operation."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = START_S
        self._clock = lambda: self.now_s
        self.before: dict[tuple[str, str], Callable[[], None]] = {}
        self.after: dict[tuple[str, str], Callable[[], None]] = {}

    def clock(self) -> float:
        return self.now_s

    def put(self, key: str, data: Data) -> None:
        self._meet(self.before, "put", key)
        super().put(key, data)
        self._meet(self.after, "put", key)

    def create(self, key: str, data: Data) -> bool:
        self._meet(self.before, "create", key)
        created = super().create(key, data)
        self._meet(self.after, "create", key)
        return created

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectInfo]:
        self._meet(self.before, "list", prefix)
        listed = [*super().list(prefix, after=after)]
        self._meet(self.after, "list", prefix)
        return iter(listed)

    def _meet(self, hooks: dict[tuple[str, str], Callable[[], None]], verb: str, key: str) -> None:
        for (wanted, prefix), hook in list(hooks.items()):
            if wanted == verb and key.startswith(prefix):
                del hooks[wanted, prefix]
                hook()


def run_prune(store: SleepyStore) -> None:
    """Only orphans go."""
    prune(store, plan_prune(store, Retention(anchors=9, versions=1), clock=store.clock), clock=store.clock)


def sleep(store: SleepyStore, days: float, *, then: Callable[[], object] = lambda: None) -> Callable[[], None]:
    def run() -> None:
        store.now_s += days * DAY_S
        then()

    return run


def require_whole(store: SleepyStore, versions: int) -> None:
    found = verify(store, deep=True)
    assert found.damages == ()
    assert found.restorable == tuple(range(versions))


# --- the pruner sleeps ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", [keys.VERSIONS, keys.ANCHORS, keys.SKIPS, keys.PAYLOADS])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_pruner_that_sleeps_while_it_plans(prefix: str, when: str) -> None:
    """A version is committed while it sleeps, after it has read the manifests."""
    store = SleepyStore()
    feed = Feed.of(3, store)
    hooks = store.before if when == "before" else store.after

    def commit_and_sleep() -> None:
        feed.delta()
        store.now_s += 1.5 * DAY_S

    hooks["list", prefix] = commit_and_sleep
    plan = plan_prune(store, Retention(anchors=9, versions=1), clock=store.clock)
    assert not hooks, "it slept"
    assert plan.orphans == 0
    prune(store, plan, clock=store.clock)
    require_whole(store, 4)


def orphaned(store: SleepyStore) -> tuple[Feed, Callable[[], Manifest]]:
    """A feed, and the anchor that a publisher that died left behind two days ago: a function that commits it."""
    feed = Feed.of(3, store)
    put_anchor(feed.upload, feed.states[2], 2)
    store.now_s += 2 * DAY_S
    return feed, lambda: feed.late_anchor(2)


def test_orphans_go_after_a_day_by_the_clock_of_the_store() -> None:
    store = SleepyStore()
    orphaned(store)
    run_prune(store)
    assert verify(store).orphans == 0
    require_whole(store, 3)


def test_a_pruner_that_sleeps_between_its_plan_and_its_deletions() -> None:
    store = SleepyStore()
    _, commit = orphaned(store)
    plan = plan_prune(store, Retention(anchors=1, versions=1), clock=store.clock)
    assert plan.orphans > 0
    commit()
    store.now_s += 2 * DAY_S
    assert set(prune(store, plan, clock=store.clock)) == set(plan.keys[-plan.orphans :])
    require_whole(store, 3)


def test_a_pruner_that_sleeps_between_a_look_and_its_deletion() -> None:
    store = SleepyStore()
    feed, commit = orphaned(store)
    plan = plan_prune(store, Retention(anchors=1, versions=1), clock=store.clock)
    store.after["list", plan.keys[-1]] = sleep(store, 2, then=commit)
    kept = prune(store, plan, clock=store.clock)
    assert plan.keys[-1] in kept
    require_whole(store, 3)
    assert feed.log.anchors() == [2]


@pytest.mark.parametrize("ahead_s", [ORPHAN_S + 60, 10 * DAY_S])
def test_a_pruner_whose_clock_is_ahead(ahead_s: float) -> None:
    """The age of an orphan is by the clock of the store."""
    store = SleepyStore()
    feed = Feed.of(3, store)
    refs, _ = put_anchor(feed.upload, feed.states[2], 2)
    plan = plan_prune(store, Retention(anchors=1, versions=1), clock=lambda: store.now_s + ahead_s)
    prune(store, plan, clock=lambda: store.now_s + ahead_s)
    assert {item.key for item in store.list(keys.PAYLOADS)} >= {keys.payload_key(ref.sha256) for ref in refs}


# --- the publisher sleeps ---------------------------------------------------------------------------------------------


class Trainer:
    """Writes an anchor and deltas through `VersionWriter`, with the clock of the store."""

    def __init__(self, store: SleepyStore) -> None:
        self.weights = Weights.of(state())
        self.upload = Upload(store, clock=store.clock)
        self.upload.open()
        self.versions = VersionWriter(upload=self.upload, layout=self.weights.layout)
        self.head: Manifest | None = None

    def first(self, files: PayloadRef | None = None) -> None:
        self.head = self.versions.anchor(self.weights, None, Metadata(files=files)).manifest

    def delta(self) -> None:
        arrays = [array.copy() for array in self.weights.arrays]
        for array in arrays:
            array.reshape(-1)[:1] ^= array.dtype.type(1)
        new = Weights(self.weights.layout, tuple(arrays))
        assert self.head is not None
        blocks = partial(encode_changes, self.weights, capture(self.weights, new))
        self.head = self.versions.delta(blocks, self.head, Metadata()).manifest
        self.weights = new

    def late_anchor(self) -> None:
        assert self.head is not None
        self.versions.add_anchor(self.head, self.weights)


SLEEPS: dict[str, tuple[str, str, str]] = {
    "after a put": ("after", "put", keys.PAYLOADS),
    "before the commit": ("before", "create", ""),
    "after the commit": ("after", "create", ""),
}


@pytest.mark.parametrize("write", ["delta", "late_anchor"])
@pytest.mark.parametrize(("when", "verb", "prefix"), SLEEPS.values(), ids=SLEEPS.keys())
def test_a_publisher_that_sleeps_while_a_pruner_runs(when: str, verb: str, prefix: str, write: str) -> None:
    store = SleepyStore()
    trainer = Trainer(store)
    trainer.first()
    trainer.delta()
    hooks = store.before if when == "before" else store.after
    hooks[verb, prefix] = sleep(store, 2, then=lambda: run_prune(store))
    getattr(trainer, write)()
    assert not hooks, "it slept"
    require_whole(store, 3 if write == "delta" else 2)
    run_prune(store)
    require_whole(store, 3 if write == "delta" else 2)


@pytest.mark.parametrize("fails_at", [1, 2])
def test_a_second_put_that_fails_after_the_commit(fails_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next publication finds out that the version was committed, although not all of it was encoded again."""
    monkeypatch.setattr(versions, "DELTA_BYTES_LEAST", 1)
    monkeypatch.setattr(versions, "INDEX_SHARE", 0)
    monkeypatch.setattr(versions, "PUTS_MOST", 2)
    store = SleepyStore()
    to = publisher(store, wait=True, retry_s=0.0)
    to._upload.clock = store.clock
    publish(to, 0).wait(LONG_S)

    def refuse(left: int) -> None:
        if left == 1:
            raise StoreError("no", transient=False)
        store.before["put", keys.PAYLOADS] = lambda: refuse(left - 1)

    store.after["create", keys.VERSIONS] = sleep(store, 2, then=lambda: refuse(fails_at + 1))
    with pytest.raises(StoreError, match="no"):
        publish(to, 1).wait(LONG_S)
    publish(to, 2).wait(LONG_S)
    to.close()
    assert [Log(store).read(number).step for number in Log(store).versions()] == [0, 1, 2]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("write", ["first", "late_anchor"])
def test_a_publisher_that_sleeps_in_the_listing_of_an_anchor(write: str, when: str) -> None:
    """It notices before it creates the manifest, so that its death right after that does no harm."""
    store = SleepyStore()
    trainer = Trainer(store)
    if write == "late_anchor":
        trainer.first()
        trainer.delta()
    hooks = store.before if when == "before" else store.after
    store.after["put", keys.PAYLOADS] = lambda: hooks.update(
        {("list", keys.PAYLOADS): sleep(store, 2, then=lambda: run_prune(store))}
    )
    was_whole: list[bool] = []
    store.after["create", ""] = lambda: was_whole.append(verify(store, deep=True).damages == ())
    getattr(trainer, write)()
    assert store.now_s > START_S, "it slept"
    assert was_whole == [True]


@pytest.mark.parametrize(("when", "verb", "prefix"), SLEEPS.values(), ids=SLEEPS.keys())
def test_a_first_version_and_its_files_that_take_days(when: str, verb: str, prefix: str) -> None:
    store = SleepyStore()
    trainer = Trainer(store)
    files = trainer.versions.put_files({"config.json": b"{}"})
    hooks = store.before if when == "before" else store.after
    hooks[verb, prefix] = sleep(store, 2, then=lambda: run_prune(store))
    trainer.first(files)
    require_whole(store, 1)


def test_files_that_were_put_days_before_their_version() -> None:
    store = SleepyStore()
    trainer = Trainer(store)
    files = trainer.versions.put_files({"config.json": b"{}"})
    store.now_s += 2 * DAY_S
    run_prune(store)
    trainer.first(files)
    require_whole(store, 1)


def test_a_quick_commit_asks_for_nothing_more() -> None:
    store = SleepyStore()
    trainer = Trainer(store)
    trainer.first()
    store.took()
    trainer.delta()
    assert [verb for verb, _ in store.took()] == ["put", "create"]


def test_the_clock_of_a_store() -> None:
    store = SleepyStore()
    store.now_s = 12345.5
    assert probe_clock(store) == 12345.5
    assert list(store.list()) == [], "the probe is gone"


@pytest.mark.parametrize(("age_s", "is_put_again"), [(60, False), (3000, False), (4000, True)])
@pytest.mark.parametrize("skew_s", [-DAY_S, 0.0, DAY_S])
def test_shards_are_resumed_by_the_clock_of_the_store(age_s: float, skew_s: float, is_put_again: bool) -> None:
    """A publisher whose clock is wrong does not rely on a shard that is about to go."""
    store = SleepyStore()
    upload = Upload(store, clock=lambda: store.now_s + skew_s)
    weights = Weights.of({"a": np.arange(100, dtype=np.float32)})
    put_anchor(upload, weights, 0)
    store.now_s += age_s
    store.took()
    put_anchor(upload, weights, 0)
    puts = [key for verb, key in store.took() if verb == "put" and key.startswith(keys.PAYLOADS)]
    assert bool(puts) == is_put_again
