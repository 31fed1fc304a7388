"""Skips that a compactor writes: which ones, that they lead to the right bits, and that nothing can disturb them."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.feeds import Feed, NoFenceStore, SpyStore, flip, replay, same_weights
from support.helpers import changed, state

from deltasync import compact, verify
from deltasync.errors import CorruptError, InvalidInputError, NotFoundError, StoreError
from deltasync.feed.log import Log
from deltasync.feed.plan import plan
from deltasync.feed.upload import LATE_S
from deltasync.format import keys
from deltasync.format.weights import Weights, zeros
from deltasync.past import Past
from deltasync.store.memory import MemoryStore
from deltasync.store.protocol import Data, Store
from deltasync.testing.faulty import Crash, Fault, FaultyStore, at
from deltasync.upkeep.compact import Compactor
from deltasync.upkeep.prune import ORPHAN_S, Retention, plan_prune, prune

LEVELS = (2, 4)


def skips(store: Store) -> list[tuple[int, int]]:
    return sorted(Log(store).skips())


def expected(head: int, levels: tuple[int, ...] = LEVELS, first: int = 0) -> list[tuple[int, int]]:
    return sorted((a, a + n) for n in levels for a in range(-(-first // n) * n, head - n + 1, n))


def require_right(feed: Feed) -> None:
    """From every version to every later one, the cheapest plan gives the right bits; a deep verification is clean."""
    for start, end in itertools.combinations(range(len(feed.states)), 2):
        weights = Weights(feed.states[start].layout, tuple(a.copy() for a in feed.states[start].arrays))
        found = plan(feed.log, feed.log.read(end), start=start)
        if found.edges[0].start is None:
            weights = zeros(feed.states[end].layout)
        replay(feed.log, found, weights)
        assert same_weights(weights, feed.states[end]), (start, end)
    assert verify(feed.store, deep=True).is_clean


@pytest.mark.parametrize("levels", [(2, 4), (4, 16), (3,), (2, 4, 8)])
@pytest.mark.parametrize("versions", [1, 2, 4, 5, 17])
def test_every_window_gets_its_skip(versions: int, levels: tuple[int, ...]) -> None:
    feed = Feed.of(versions)
    committed = compact(feed.store, levels=levels)
    assert sorted((m.parent or 0, m.version) for m in committed) == expected(versions - 1, levels) == skips(feed.store)
    require_right(feed)
    assert compact(feed.store, levels=levels) == ()


def test_a_skip_has_the_bytes_of_the_difference_of_two_states() -> None:
    feed, twin = Feed.of(9), Feed.of(9)
    for skip in compact(feed.store, levels=(4, 8)):
        wanted = twin.skip(skip.parent or 0, skip.version)
        assert skip.payloads == wanted.payloads
        assert (skip.changed, skip.digest, skip.parent_digest) == (wanted.changed, wanted.digest, wanted.parent_digest)


def test_changes_that_are_taken_back_are_not_in_a_skip() -> None:
    feed = Feed()
    feed.anchor(state())
    for number in (1, 2, 3, 0):
        feed.delta(Weights.of(changed(state(), seed=number) if number else state()))
    (skip,) = compact(feed.store, levels=(4,))
    assert (skip.changed, skip.payloads, skip.digest) == (0, (), skip.parent_digest)
    require_right(feed)


@settings(max_examples=30, deadline=None)
@given(
    steps=st.lists(
        st.sampled_from(["delta", "ranks", "same", "back", "late anchor", "anchor", "layout"]), min_size=2, max_size=12
    ),
    levels=st.sampled_from([(2,), (2, 4), (3, 6), (2, 4, 8)]),
    seed=st.integers(0, 99),
)
def test_every_way_to_a_version_gives_its_bits(steps: list[str], levels: tuple[int, ...], seed: int) -> None:
    feed = Feed()
    tensors = state()
    feed.anchor(changed(tensors, seed=seed))
    for number, step in enumerate(steps, 1):
        match step:
            case "ranks":
                feed.delta(ranks=3)
            case "same":
                feed.delta(feed.states[-1])
            case "back" if feed.states[0].layout == feed.states[-1].layout:
                feed.delta(feed.states[0])
            case "late anchor":
                feed.late_anchor(feed.delta().version)
            case "anchor":
                feed.anchor(feed.next_state())
            case "layout":
                feed.anchor({**changed(tensors, seed=number), f"more.{number}": np.full((4, 3), number, np.float32)})
            case _:
                feed.delta()
    compact(feed.store, levels=levels)
    require_right(feed)


def test_it_goes_on_with_the_versions_that_come() -> None:
    feed = Feed.of(3)
    compactor = Compactor(feed.store, levels=LEVELS)
    assert [m.version for m in compactor.advance()] == [2]
    for _ in range(6):
        feed.delta()
        list(compactor.advance())
    assert skips(feed.store) == expected(8)
    require_right(feed)


def test_it_fetches_every_version_once() -> None:
    feed = Feed.of(17)
    store = feed.store
    assert isinstance(store, SpyStore)
    fetched: list[str] = []
    real = store.get_range
    store.get_range = lambda key, *range: fetched.append(key) or real(key, *range)  # type: ignore[func-returns-value]
    compact(store, levels=(4, 16))
    payloads = [key for key in fetched if key.startswith(keys.PAYLOADS)]
    assert len(payloads) <= 17 + 3


def operations() -> int:
    store = FaultyStore(MemoryStore())
    feed = Feed.of(6, store)
    before = len(store.operations)
    compact(feed.store, levels=LEVELS)
    return len(store.operations) - before


@pytest.mark.parametrize("kind", ["crash_before", "crash_after", "refuse", "lose"])
def test_it_can_stop_at_any_operation_and_start_again(kind: str) -> None:
    for number in range(1, operations() + 1):
        inner = MemoryStore()
        Feed.of(6, inner)
        store = FaultyStore(inner, at(number, Fault(kind)))  # type: ignore[arg-type]
        compactor = Compactor(store, levels=LEVELS, retry_s=0.0)
        try:
            list(compactor.advance())
        except (Crash, StoreError):
            assert verify(inner, deep=True).is_clean
            if kind.startswith("crash"):
                compactor = Compactor(inner, levels=LEVELS)
        list(compactor.advance())
        assert skips(inner) == expected(5), number
        assert verify(inner, deep=True).is_clean


def test_several_compactors_write_the_same_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = Feed.of(9)
    compact(feed.store, levels=LEVELS)
    before = {item.key: feed.store.get(item.key) for item in feed.store.list()}
    with monkeypatch.context() as patch:
        # The other compactor has listed the skips before there was one.
        patch.setattr(Log, "skips", lambda log, *, start=0: [])
        assert len(compact(feed.store, levels=LEVELS)) == len(expected(8))
    assert {item.key: feed.store.get(item.key) for item in feed.store.list()} == before


def test_a_store_without_create_if_absent_needs_no_lease() -> None:
    feed = Feed.of(5, NoFenceStore())
    compact(feed.store, levels=LEVELS)
    assert skips(feed.store) == expected(4)
    require_right(feed)


def test_what_was_pruned_gets_no_skip() -> None:
    feed = Feed.of(9)
    feed.late_anchor(5)
    prune(feed.store, plan_prune(feed.store, Retention(anchors=1, versions=1)))
    compact(feed.store, levels=LEVELS)
    assert skips(feed.store) == expected(8, first=5)
    assert verify(feed.store, deep=True).is_clean


def test_prune_removes_skips_below_the_floor_with_their_payloads() -> None:
    feed = Feed.of(9)
    compact(feed.store, levels=LEVELS)
    feed.late_anchor(8)
    prune(feed.store, plan_prune(feed.store, Retention(anchors=1, versions=1)))
    assert skips(feed.store) == []
    assert verify(feed.store, deep=True).is_clean
    assert compact(feed.store, levels=LEVELS) == ()


def test_a_damaged_delta_is_passed_by_an_anchor_after_it() -> None:
    feed = Feed.of(9)
    feed.late_anchor(4)
    flip(feed.store, feed.payload_keys(feed.log.read(3))[0])
    compact(feed.store, levels=LEVELS)
    assert skips(feed.store) == [(0, 2), *expected(8, first=4)]


def test_it_goes_on_where_the_versions_before_it_were_pruned() -> None:
    feed = Feed.of(2)
    compactor = Compactor(feed.store, levels=LEVELS)
    list(compactor.advance())
    for _ in range(8):
        feed.delta()
    list(itertools.islice(compactor.advance(), 1))
    feed.late_anchor(7)
    prune(feed.store, plan_prune(feed.store, Retention(anchors=1, versions=1)))
    list(compactor.advance())
    assert skips(feed.store) == []
    feed.delta()
    feed.delta()
    feed.delta()
    list(compactor.advance())
    assert (8, 10) in skips(feed.store)
    assert (8, 12) in skips(feed.store)
    assert verify(feed.store, deep=True).is_clean


def test_wrong_weights_write_no_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = Feed.of(5)
    compactor = Compactor(feed.store, levels=(4,))
    # A past that forgets what is replaced.
    monkeypatch.setattr(Past, "keep", lambda past, before: None)
    with pytest.raises(CorruptError) as caught:
        list(compactor.advance())
    assert caught.value.rule == "skip.digest"
    assert skips(feed.store) == []


class SleepyStore(SpyStore):
    """A store whose clock jumps by days before a skip is created or after its payload is put. A pruner works then."""

    now_s = 1_700_000_000.0

    def __init__(self) -> None:
        super().__init__()
        self._clock = lambda: self.now_s
        self.sleeps_at = ""

    def put(self, key: str, data: Data) -> None:
        super().put(key, data)
        if key.startswith(keys.PAYLOADS):
            self._sleep("put")

    def create(self, key: str, data: Data) -> bool:
        if key.startswith(keys.SKIPS):
            self._sleep("create")
        return super().create(key, data)

    def _sleep(self, verb: str) -> None:
        if self.sleeps_at == verb:
            self.sleeps_at = ""
            self.now_s += 2 * ORPHAN_S
            pruning = plan_prune(self, Retention(anchors=1, versions=100), clock=lambda: self.now_s)
            assert pruning.orphans
            prune(self, pruning, clock=lambda: self.now_s)


@pytest.mark.parametrize("verb", ["put", "create"])
def test_a_compactor_that_sleeps_for_days_puts_the_payload_again(verb: str) -> None:
    store = SleepyStore()
    feed = Feed.of(3, store)
    assert 2 * ORPHAN_S > LATE_S
    store.sleeps_at = verb
    list(Compactor(store, levels=(2,), clock=lambda: store.now_s).advance())
    assert skips(store) == [(0, 2)]
    require_right(feed)


@pytest.mark.parametrize("levels", [(), (1,), (0, 4), (4, 6), (4, 4), (8, 4)])
def test_levels_that_do_not_nest_are_refused(levels: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInputError, match="levels must"):
        compact("memory://compact-levels", levels=levels)


def test_a_feed_without_versions_is_refused() -> None:
    with pytest.raises(NotFoundError):
        compact(MemoryStore())
