"""A follower and a torch target: every move ends bit-exact, by the cheapest way, and failures end by themselves."""

import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from feeds import Feed, flip
from helpers import changed, state, write_sharded
from replicas import LONG_S, Moves, TorchTarget, fetched, follower, following

from deltasync import anchors, blocks, retrying
from deltasync.errors import CorruptError, FormatError, InvalidInputError, MismatchError, NotFoundError, StoreError
from deltasync.following import loop
from deltasync.following.gathering import Gathered
from deltasync.following.target import Staged
from deltasync.format import keys
from deltasync.format.manifest import BaseRef
from deltasync.format.weights import Weights
from deltasync.log.planning import plan
from deltasync.prune import plan_prune, prune
from deltasync.replay import zeros
from deltasync.store.memory import MemoryStore
from deltasync.testing.faulty import Fault, FaultyStore, Operation


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "_BACKOFF_FIRST_S", 0.001)
    monkeypatch.setattr(retrying, "_BACKOFF_MOST_S", 0.002)
    for name in ("_POLL_FIRST_S", "_POLL_MOST_S", "_OUTAGE_MOST_S"):
        monkeypatch.setattr(loop, name, 0.002)


def target_for(feed: Feed) -> TorchTarget:
    return TorchTarget(feed.states[0].layout)


def small_step(feed: Feed) -> Weights:
    """The newest state with a few elements changed."""
    old = feed.states[-1]
    tensors = {t.name: a for t, a in zip(old.layout.tensors, old.arrays, strict=True)}
    arrays = changed(tensors, seed=len(feed.states), share=0.002)
    return Weights(old.layout, tuple(arrays[t.name] for t in old.layout.tensors))


def long_feed(versions: int, store: Any = None) -> Feed:
    """An anchor and small deltas."""
    feed = Feed(store)
    feed.anchor(state())
    for _ in range(versions - 1):
        feed.delta(small_step(feed))
    return feed


# Ways


def test_version_after_version() -> None:
    feed = long_feed(1)
    target = target_for(feed)
    replica = follower(feed.store)
    for version in range(6):
        moved = replica.advance(target)
        assert moved is not None
        assert (moved.version, moved.from_version) == (version, None if version == 0 else version - 1)
        assert moved.nbytes == feed.log.read(version).nbytes
        assert moved.changed == feed.log.read(version).changed
        assert target.holds(feed.states[version])
        assert replica.advance(target) is None
        feed.delta(small_step(feed))
    assert target.shown == [0, 1, 2, 3, 4, 5]
    assert target.whole == [True] + 5 * [False]


def test_one_version_takes_few_requests() -> None:
    feed = long_feed(2)
    store = FaultyStore(feed.store)
    target, replica = target_for(feed), follower(store)
    replica.advance(target)
    before = len(store.operations)
    replica.advance(target)
    assert [op.verb for op in store.operations[before:]] == ["get"], "one small request tells that nothing is new"
    feed.delta()
    before = len(store.operations)
    replica.advance(target)
    assert [op.verb for op in store.operations[before:]] == ["get", "get", "get_range"]


def prune_to(feed: Feed, *, versions: int) -> None:
    prune(feed.store, plan_prune(feed.store, keep_anchors=1, keep_versions=versions))


def skips(feed: Feed) -> None:
    for start in range(0, len(feed.states) - 16, 16):
        feed.skip(start, start + 16)


def pruned(feed: Feed) -> None:
    feed.late_anchor(150)
    prune_to(feed, versions=40)
    assert feed.log.floor() == 150


def late_anchor(feed: Feed) -> None:
    feed.late_anchor(150)


SLEPT: dict[str, tuple[Callable[[Feed], None], set[str]]] = {
    "only deltas": (lambda feed: None, {"delta"}),
    "skips": (skips, {"delta", "skip"}),
    "an anchor that costs less": (late_anchor, {"anchor", "delta"}),
    "a pruned chain": (pruned, {"anchor", "delta"}),
}


@pytest.fixture(scope="module")
def two_hundred() -> Feed:
    return long_feed(201)


@pytest.mark.parametrize(("more", "kinds"), SLEPT.values(), ids=SLEPT.keys())
@pytest.mark.parametrize("start", [0, None], ids=["slept", "late joiner"])
def test_two_hundred_versions_at_once(
    start: int | None, more: Callable[[Feed], None], kinds: set[str], two_hundred: Feed
) -> None:
    """The cheapest way, with all of its bytes, and one commit."""
    feed = Feed(MemoryStore())
    for item in two_hundred.store.list():
        feed.store.put(item.key, two_hundred.store.get(item.key))
    feed.states, feed.head = list(two_hundred.states), two_hundred.head
    store = FaultyStore(feed.store)
    target, replica = target_for(feed), follower(store)
    if start is not None:
        replica.advance(target, to=start)
    more(feed)
    expected = plan(feed.log, feed.log.require_head(), start=start)
    before = len(fetched(store))
    moved = replica.advance(target)
    assert moved is not None
    assert moved.nbytes == expected.nbytes
    assert list(moved.edges) == [edge.manifest.kind for edge in expected.edges]
    assert set(moved.edges) - {"anchor"} == kinds - {"anchor"}
    assert ("anchor" in moved.edges) == (start is None or "anchor" in kinds)
    assert len(set(fetched(store)[before:])) == expected.requests
    assert target.shown == ([] if start is None else [start]) + [200]
    assert target.holds(feed.states[200])


def test_a_chain_that_was_pruned_away(caplog: pytest.LogCaptureFixture) -> None:
    """Its manifests are still there: one look at the first payload tells that it is gone."""
    feed = long_feed(12)
    target, replica = target_for(feed), follower(feed.store)
    replica.advance(target, to=8)
    feed.late_anchor(10)
    prune_to(feed, versions=2)
    moved = replica.advance(target)
    expected = plan(feed.log, feed.log.require_head())
    assert moved is not None
    assert (moved.nbytes, moved.edges) == (expected.nbytes, ("anchor", "delta"))
    assert target.holds(feed.states[11])
    assert replica.status().counts.rerouted == 1
    assert keys.version_key(9) in caplog.text


def test_back_and_forth() -> None:
    feed = Feed.of(6)
    feed.late_anchor(3)
    target, replica = target_for(feed), follower(feed.store)
    for version in (5, 2, 2, 4, 0, 5, 3, 1):
        before = target.version
        moved = replica.advance(target, to=version)
        assert (moved is None) == (before == version)
        assert target.version == version
        assert target.holds(feed.states[version])


def test_a_base(tmp_path: Path) -> None:
    write_sharded(tmp_path / "base", state())
    feed = Feed()
    feed.base(state(), BaseRef("nobody/has-this"))
    feed.delta()
    target = target_for(feed)
    with pytest.raises(NotFoundError, match="nobody/has-this"):
        follower(feed.store).advance(target)
    moved = follower(feed.store, base=tmp_path / "base").advance(target)
    assert moved is not None
    assert moved.edges == ("base", "delta")
    assert moved.nbytes == feed.log.read(1).nbytes
    assert target.holds(feed.states[1])


def test_an_anchor_over_a_mirror_gives_only_what_differs() -> None:
    feed = long_feed(3)
    replica, target = follower(feed.store), target_for(feed)
    replica.advance(target, to=2)
    moved = replica.advance(target, to=0)
    assert moved is not None
    differing = sum(int((a != b).sum()) for a, b in zip(feed.states[0].arrays, feed.states[2].arrays, strict=True))
    assert moved.edges == ("anchor",)
    assert moved.changed == differing > 0
    assert target.holds(feed.states[0])


def test_many_changes_become_all_weights() -> None:
    feed = Feed.of(2)
    replica, target = follower(feed.store), target_for(feed)
    replica.advance(target)
    rng = np.random.default_rng(5)
    arrays = tuple(a ^ rng.integers(0, 2, a.shape, a.dtype) for a in feed.states[-1].arrays)
    feed.delta(Weights(feed.states[-1].layout, arrays))
    moved = replica.advance(target)
    assert moved is not None
    assert moved.changed is None
    assert target.holds(feed.states[2])


def test_a_torn_gathering_stays_lost() -> None:
    gathered = Gathered(3, elements=100)
    assert gathered.changes == ()
    with pytest.raises(KeyError), gathered.tearing():
        raise KeyError
    assert gathered.changes is None
    with gathered.tearing():
        pass
    assert gathered.changes is None


# Restarts


def test_a_mirror_file_goes_on_where_it_was(tmp_path: Path) -> None:
    feed = long_feed(4)
    with follower(feed.store, mirror=tmp_path / "mirror") as first:
        first.advance(target_for(feed))
    feed.delta()
    store, target = FaultyStore(feed.store), target_for(feed)
    with follower(store, mirror=tmp_path / "mirror") as second:
        moved = second.advance(target)
        assert moved is not None
        assert (moved.edges, moved.changed) == (("delta",), None)
        assert len(fetched(store)) == 1
        assert target.holds(feed.states[4])
        assert second.status().counts.rebuilt == 0


def test_a_damaged_mirror_file_is_rebuilt(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    feed, path = Feed.of(3), tmp_path / "mirror"
    with follower(feed.store, mirror=path) as first:
        first.advance(target_for(feed))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    target = target_for(feed)
    with follower(feed.store, mirror=path) as second:
        second.advance(target)
        assert second.status().counts.rebuilt == 1
    assert target.holds(feed.states[2])
    assert "built anew" in caplog.text


def test_an_interrupted_anchor_fetches_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchors, "SHARD_ELEMENTS", 1)
    feed = Feed.of(1)
    refs = feed.log.read(0).payloads
    assert len(refs) > 3

    def last_is_away(operation: Operation) -> Fault | None:
        return Fault("refuse") if operation.key == keys.payload_key(refs[-1].sha256) else None

    monkeypatch.setattr("deltasync.following.follower._PATIENCE_S", 0.0)
    for is_same_process in (True, False):
        path = tmp_path / f"mirror-{is_same_process}"
        with follower(FaultyStore(feed.store, last_is_away), mirror=path) as replica:
            with pytest.raises(StoreError):
                replica.advance(target_for(feed))
            if is_same_process:
                store = FaultyStore(feed.store)
                replica._mover._log.store = replica._mover._reader._log.store = store
                target = target_for(feed)
                moved = replica.advance(target)
        if not is_same_process:
            store, target = FaultyStore(feed.store), target_for(feed)
            with follower(store, mirror=path) as replica:
                moved = replica.advance(target)
                assert replica.status().counts.rebuilt == 0
        assert moved is not None
        assert moved.nbytes == refs[-1].nbytes
        # The first one is asked for the layout, and only for that.
        assert Counter(fetched(store)) == {refs[0].sha256: 1, refs[-1].sha256: 1}
        assert target.holds(feed.states[0])


def test_what_was_noted_as_applied_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchors, "SHARD_ELEMENTS", 1)
    monkeypatch.setattr("deltasync.following.follower._PATIENCE_S", 0.0)
    feed, path, target = Feed.of(1), tmp_path / "mirror", None
    away = keys.payload_key(feed.log.read(0).payloads[-1].sha256)
    store = FaultyStore(feed.store, lambda op: Fault("refuse") if op.key == away else None)
    with follower(store, mirror=path) as replica, pytest.raises(StoreError):
        replica.advance(target_for(feed))
    data = bytearray(path.read_bytes())
    data[-3000:-2900] = bytes(100)
    path.write_bytes(data)
    target = target_for(feed)
    with follower(feed.store, mirror=path) as replica:
        replica.advance(target)
        assert replica.status().counts.rebuilt == 1
    assert target.holds(feed.states[0])


def test_two_followers_on_one_mirror_file(tmp_path: Path) -> None:
    feed, path = Feed.of(1), tmp_path / "mirror"
    with follower(feed.store, mirror=path) as first, follower(feed.store, mirror=path) as second:
        first.advance(target_for(feed))
        with pytest.raises(InvalidInputError, match="another process"):
            second.advance(target_for(feed))


@pytest.mark.parametrize("is_honest", [True, False])
def test_what_a_target_says_of_itself_is_proved(is_honest: bool, tmp_path: Path) -> None:
    """A target may outlive its follower. If it has what it says, it gets changes; else all weights."""
    feed, path = long_feed(2), tmp_path / "mirror"
    target = target_for(feed)
    with follower(feed.store, mirror=path) as first:
        first.advance(target)
    if not is_honest:
        target.state["packed"][0, 0] ^= 1
    feed.delta(small_step(feed))
    with follower(feed.store, mirror=path) as second:
        second.advance(target)
    assert target.whole == [True, not is_honest]
    assert target.holds(feed.states[2])


# Damage


def test_a_payload_that_comes_damaged_once_is_fetched_again() -> None:
    feed = long_feed(3)
    broken = keys.payload_key(feed.log.read(2).payloads[0].sha256)
    seen: list[Operation] = []

    def once(operation: Operation) -> Fault | None:
        if operation.key == broken and not seen:
            seen.append(operation)
            return Fault("flip")
        return None

    replica, target = follower(FaultyStore(feed.store, once)), target_for(feed)
    replica.advance(target)
    counts = replica.status().counts
    assert (counts.refetched, counts.rerouted, counts.rebuilt) == (1, 0, 0)
    assert target.holds(feed.states[2])


def lose(feed: Feed, key: str) -> None:
    feed.store.delete(key)


def damage(feed: Feed, key: str) -> None:
    flip(feed.store, key)


@pytest.mark.parametrize("spoil", [damage, lose])
@pytest.mark.parametrize("start", [0, None], ids=["behind", "new"])
def test_another_way_around_a_payload_of_no_use(
    start: int | None, spoil: Callable[[Feed, str], None], caplog: pytest.LogCaptureFixture
) -> None:
    feed = long_feed(6)
    feed.late_anchor(4)
    replica, target = follower(feed.store), target_for(feed)
    if start is not None:
        replica.advance(target, to=start)
    first = plan(feed.log, feed.log.require_head(), start=start)
    bad = first.edges[0 if start is None else 2]
    spoil(feed, feed.payload_keys(bad.manifest)[0])
    moved = replica.advance(target)
    assert moved is not None
    assert target.holds(feed.states[5])
    assert replica.status().counts.rerouted == 1
    assert bad.key in caplog.text
    assert replica.status().counts.refetched == (1 if spoil is damage else 0)


def test_no_way_left_keeps_what_is_live() -> None:
    feed = long_feed(3)
    replica, target = follower(feed.store), target_for(feed)
    replica.advance(target, to=1)
    feed.store.delete(feed.payload_keys(feed.log.read(2))[0])
    with pytest.raises(NotFoundError):
        replica.advance(target)
    assert target.version == 1
    assert target.holds(feed.states[1])
    feed.delta(small_step(feed))
    feed.late_anchor(3)
    replica.advance(target)
    assert target.holds(feed.states[3])


def test_a_mirror_that_lost_a_bit_is_rebuilt(caplog: pytest.LogCaptureFixture) -> None:
    feed = long_feed(2)
    replica, target = follower(feed.store), target_for(feed)
    replica.advance(target)
    mirror = replica._mover.mirror
    assert mirror is not None
    arrays = [array for array in mirror.weights.arrays if len(array)]
    for array in arrays:
        array ^= array.dtype.type(1)
    feed.delta()
    replica.advance(target)
    assert target.holds(feed.states[2])
    assert target.whole == [True, True]
    assert replica.status().counts.rebuilt == 1
    assert "built anew" in caplog.text


def test_a_diverged_mirror_does_not_tell_what_changed() -> None:
    """It may have bits of the new version by chance: what differs from them is not what a target lacks."""
    feed = long_feed(2)
    replica, target = follower(feed.store), target_for(feed)
    replica.advance(target)
    feed.delta()
    feed.late_anchor(2)
    mirror = replica._mover.mirror
    assert mirror is not None
    ordinal = mirror.weights.layout.ordinals["embed"]
    mirror.weights.arrays[ordinal][:] = feed.states[2].arrays[ordinal]
    mirror.weights.arrays[ordinal][:200] = np.random.default_rng(1).integers(0, 1 << 16, 200)
    moved = replica.advance(target)
    assert moved is not None
    assert moved.edges == ("anchor",)
    assert target.holds(feed.states[2])
    assert replica.status().counts.rebuilt == 1


def test_a_skip_that_lies_about_its_start() -> None:
    """It is of version 1, and might well decode against version 0: few elements differ."""
    feed = long_feed(4)
    feed.skip(1, 3, parent=0)
    replica, target = follower(feed.store), target_for(feed)
    replica.advance(target, to=0)
    assert plan(feed.log, feed.log.read(3), start=0).edges[0].manifest.kind == "skip"
    moved = replica.advance(target)
    assert moved is not None
    assert moved.edges == ("delta", "delta", "delta")
    assert target.holds(feed.states[3])
    assert replica.status().counts.rerouted == 1


def test_a_target_that_went_elsewhere_by_itself() -> None:
    feed = long_feed(3)
    replica, target = follower(feed.store), target_for(feed)
    replica.advance(target, to=0)
    kept = {name: tensor.clone() for name, tensor in target.state.items()}
    replica.advance(target, to=1)
    for name, tensor in kept.items():
        target.state[name].copy_(tensor)
    target._version = 0
    replica.advance(target)
    assert target.whole == [True, False, True]
    assert target.holds(feed.states[2])


@pytest.mark.parametrize("verb", ["get", "get_range", "list"])
def test_a_read_that_fails_once_is_tried_again(verb: str) -> None:
    feed = long_feed(4)
    failed: list[Operation] = []
    replica, target = follower(FaultyStore(feed.store)), target_for(feed)
    replica.advance(target, to=0)

    def once(operation: Operation) -> Fault | None:
        # The head is asked for without patience: whoever follows asks again anyway.
        is_head = operation.key in (keys.version_key(3), keys.version_key(4)) or operation.key == keys.VERSIONS
        if operation.verb == verb and not is_head and not failed:
            failed.append(operation)
            return Fault("refuse")
        return None

    replica = follower(FaultyStore(feed.store, once))
    replica.advance(target)
    assert failed
    assert target.holds(feed.states[3])


def test_a_delta_that_does_not_add_up_is_not_the_mirrors_fault() -> None:
    """Its bytes are as they should be, but made against other bits: it is avoided, and the mirror stays."""
    feed = long_feed(2)
    told = blocks.encode_delta(Weights.of(state(seed=9)), Weights.of(changed(state(seed=9))))
    ref = feed.put_change(1, 2, told)
    leads_to = sum((block.digest for block in told), feed.log.read(1).digest)
    count = sum(block.changed for block in told)
    feed._commit(feed.new("delta", feed.states[1], leads_to, payloads=(ref,), changed=count), feed.states[1])
    replica, target = follower(feed.store), target_for(feed)
    replica.advance(target, to=1)
    with pytest.raises(CorruptError, match="does not fit") as caught:
        replica.advance(target)
    assert caught.value.key == keys.version_key(2)
    assert (target.version, replica.status().mirror) == (1, 1)
    counts = replica.status().counts
    assert (counts.rerouted, counts.rebuilt) == (1, 0)
    feed.anchor(small_step(feed))
    replica.advance(target)
    assert target.holds(feed.states[3])


# Targets that fail


@pytest.mark.parametrize("stage", [True, False], ids=["before the first write", "after it"])
def test_a_commit_that_fails_is_made_good_from_the_mirror(stage: bool) -> None:
    feed = long_feed(2)
    store = FaultyStore(feed.store)
    replica, target = follower(store), target_for(feed)
    replica.advance(target)

    def fail(staged: Staged) -> None:
        if not stage:
            target._version = None
            target.state["packed"][:] = 3
        raise RuntimeError("out of memory")

    target.fails = fail
    feed.delta(small_step(feed))
    with pytest.raises(RuntimeError, match="out of memory"):
        replica.advance(target)
    assert replica.status().version == (1 if stage else None)
    target.fails = lambda staged: None
    before = len(store.operations)
    moved = replica.advance(target)
    assert moved is not None
    assert (moved.version, moved.changed, moved.nbytes) == (2, None, 0)
    assert [op.verb for op in store.operations[before:]] == ["get"], "the mirror has it"
    assert target.holds(feed.states[2])


# Bad input


def other(**tensors: np.ndarray) -> Weights:
    return Weights.of({**state(), **tensors})


OTHERS = {
    "a tensor more": (other(zz=np.zeros(3, np.float32)), "'zz'"),
    "another type": (other(packed=np.zeros((9, 3), np.int8)), "'packed'"),
    "another shape": (other(packed=np.zeros((3, 9), np.uint8)), "'packed'"),
    "a tensor less": (Weights.of({n: a for n, a in state().items() if n != "embed"}), "'embed'"),
}


@pytest.mark.parametrize(("weights", "named"), OTHERS.values(), ids=OTHERS.keys())
def test_a_feed_of_another_model(weights: Weights, named: str, tmp_path: Path) -> None:
    feed = Feed()
    feed.anchor(weights)
    store = FaultyStore(feed.store)
    target = TorchTarget(Weights.of(state()).layout)
    with follower(store, mirror=tmp_path / "mirror") as replica:
        with pytest.raises(MismatchError, match=named):
            replica.advance(target)
        assert target.version is None
        assert target.holds(zeros(Weights.of(state()).layout))
        assert replica.status().mirror is None
        assert not (tmp_path / "mirror").exists()
        assert len(fetched(store)) == 1, "the layout is enough to refuse"
        with following(replica, target) as raised:
            wait_until(lambda: bool(raised))
        assert isinstance(raised[0], MismatchError)


def test_another_model_behind_a_mirror_that_is_there_already(tmp_path: Path) -> None:
    """Nothing is fetched then, and still nothing is touched."""
    feed = Feed.of(2)
    with follower(feed.store, mirror=tmp_path / "mirror") as first:
        first.advance(target_for(feed))
    staged: list[Staged] = []

    class Wider(TorchTarget):
        def stage(self, found: Staged) -> None:
            staged.append(found)

    with follower(feed.store, mirror=tmp_path / "mirror") as second, pytest.raises(MismatchError, match="'zz'"):
        second.advance(Wider(other(zz=np.zeros(3, np.float32)).layout))
    assert not staged


def test_a_layout_that_changes_on_the_way() -> None:
    feed = Feed.of(2)
    target, replica = target_for(feed), follower(feed.store)
    replica.advance(target)
    feed.anchor(other(zz=np.zeros(3, np.float32)))
    with pytest.raises(MismatchError, match="'zz'"):
        replica.advance(target)
    assert target.version == 1
    assert replica.status().mirror == 1
    assert target.holds(feed.states[1])
    wider = TorchTarget(feed.states[2].layout)
    replica.advance(wider)
    assert wider.holds(feed.states[2])
    assert replica.advance(target, to=1) is not None
    assert target.holds(feed.states[1])


@pytest.mark.parametrize("ask", [lambda r, t: r.advance(t, to=9), lambda r, t: r.pin(9)], ids=["advance", "pin"])
def test_an_unknown_version(ask: Callable[[Any, Any], object]) -> None:
    feed = Feed.of(4)
    feed.late_anchor(3)
    prune_to(feed, versions=1)
    target, replica = target_for(feed), follower(feed.store)
    with pytest.raises(NotFoundError, match=r"version 9 .* has 3 to 3") as caught:
        ask(replica, target)
    assert caught.value.version == 9
    assert caught.value.hint is not None
    assert target.version is None


def test_an_empty_feed() -> None:
    with pytest.raises(NotFoundError, match="no version"):
        follower(MemoryStore()).advance(target_for(Feed.of(1)))


def test_a_closed_follower() -> None:
    feed = Feed.of(1)
    replica = follower(feed.store)
    replica.close()
    replica.close()
    with pytest.raises(InvalidInputError, match="closed"):
        replica.advance(target_for(feed))
    with pytest.raises(InvalidInputError, match="replica id"):
        follower(feed.store, replica="a/b", beat_s=1.0)


# Following


def wait_until(is_so: Callable[[], bool]) -> None:
    """Polls, as what it waits for tells nobody."""
    done = threading.Event()
    for _ in range(int(LONG_S / 0.005)):
        if is_so():
            return
        done.wait(0.005)
    pytest.fail("it never came true")


def test_following_from_an_empty_feed_to_its_head() -> None:
    store, moves = MemoryStore(), Moves()
    target = TorchTarget(Weights.of(state()).layout)
    replica = follower(store, observer=moves)
    with following(replica, target) as raised:
        wait_until(lambda: replica.status().error is not None)
        feed = Feed.of(1, store)
        moves.await_version(0)
        wait_until(lambda: replica.status().error is None)
        for version in range(1, 6):
            feed.delta()
            moves.await_version(version)
        assert replica.status().is_following
    assert not raised
    assert target.holds(feed.states[5])
    status = replica.status()
    assert (status.version, status.head, status.lag, status.mirror, status.error) == (5, 5, 0, 5, None)
    assert not status.is_following


def test_the_next_version_is_read_while_the_last_is_committed() -> None:
    feed, moves = long_feed(2), Moves()
    payload = feed.payload_keys(feed.log.read(1))[0]

    def publish(operation: Operation) -> None:
        # Too late for the move that is under way, in time for the look ahead.
        if operation.key == payload and len(feed.states) == 2:
            feed.delta(small_step(feed))

    replica, target = follower(FaultyStore(feed.store, publish), observer=moves), target_for(feed)
    replica.advance(target, to=0)
    target.fails = lambda staged: wait_until(lambda: replica.status().mirror == 2)
    with following(replica, target) as raised:
        moves.await_version(2)
    assert not raised
    assert target.shown == [0, 1, 2]
    assert target.whole == [True, False, False]
    assert target.holds(feed.states[2])


def test_a_nudge_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_POLL_FIRST_S", "_POLL_MOST_S"):
        monkeypatch.setattr(loop, name, 10 * LONG_S)
    feed, moves = long_feed(1), Moves()
    store = FaultyStore(feed.store)
    replica, target = follower(store, observer=moves), target_for(feed)
    with following(replica, target):
        moves.await_version(0)
        # It looks once more, finds nothing, and waits.
        wait_until(lambda: store.operations[-1].key == keys.version_key(1))
        feed.delta(small_step(feed))
        replica.nudge()
        moves.await_version(1)
    assert target.holds(feed.states[1])


@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_mirror_that_is_ahead(is_pinned: bool) -> None:
    """What was read ahead is not fetched twice, and a pin holds all the same."""
    feed = long_feed(3)
    store = FaultyStore(feed.store)
    replica, target = follower(store), target_for(feed)
    replica.advance(target, to=1)
    replica._mover.read_ahead(lambda: feed.log.read(2))
    before = len(fetched(store))
    assert replica.advance(target, to=1) is None
    assert (replica.status().mirror, len(fetched(store))) == (2, before)
    if is_pinned:
        replica.pin(1)
    assert replica.scrub(target) == []
    assert target.version == (1 if is_pinned else 2)
    assert target.holds(feed.states[1 if is_pinned else 2])
    replica.pin(None)
    replica.advance(target)
    assert target.holds(feed.states[2])
    assert target.whole[1:] == [False] * len(target.whole[1:])


def test_pin_pause_resume() -> None:
    feed, moves = long_feed(4), Moves()
    target = target_for(feed)
    replica = follower(feed.store, observer=moves)
    with following(replica, target):
        moves.await_version(3)
        replica.pin(1)
        moves.await_version(1)
        feed.delta(small_step(feed))
        wait_until(lambda: replica.status().head == 4)
        status = replica.status()
        assert (status.version, status.pinned, status.lag) == (1, 1, 3)
        replica.pause()
        replica.pin(None)
        assert replica.status().is_paused
        replica.resume()
        moves.await_version(4)
    assert target.shown == [3, 1, 4]
    assert target.holds(feed.states[4])


def test_follow_goes_on_after_a_target_that_failed(caplog: pytest.LogCaptureFixture) -> None:
    feed, moves = long_feed(2), Moves()
    target = target_for(feed)
    left = [5]

    def fail(staged: Staged) -> None:
        if staged.version == 2 and left[0]:
            left[0] -= 1
            target._version = None
            raise RuntimeError("no memory on the device")

    target.fails = fail
    replica = follower(feed.store, observer=moves)
    with following(replica, target) as raised, caplog.at_level(logging.WARNING):
        moves.await_version(1)
        feed.delta(small_step(feed))
        moves.await_version(2)
    assert not raised
    assert target.holds(feed.states[2])
    assert caplog.text.count("cannot follow") == 1
    assert caplog.text.count("following again") == 1


def test_an_outage_is_told_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltasync.following.follower._PATIENCE_S", 0.0)
    feed, moves = long_feed(2), Moves()
    is_away = threading.Event()
    store = FaultyStore(feed.store, lambda operation: Fault("refuse") if is_away.is_set() else None)
    target, replica = target_for(feed), follower(store, observer=moves)
    with following(replica, target) as raised, caplog.at_level(logging.WARNING):
        moves.await_version(1)
        is_away.set()
        feed.delta(small_step(feed))
        count = len(store.operations)
        wait_until(lambda: len(store.operations) > count + 20)
        assert replica.status().error is not None
        is_away.clear()
        moves.await_version(2)
    assert not raised
    assert caplog.text.count("cannot follow") == 1
    assert replica.status().error is None


@pytest.mark.parametrize("has_begun", [True, False])
def test_what_trying_again_cannot_help_ends_it(has_begun: bool) -> None:
    feed, moves = long_feed(1), Moves()
    is_refused = threading.Event()
    plan_of = lambda operation: Fault("refuse", transient=False) if is_refused.is_set() else None  # noqa: E731
    replica, target = follower(FaultyStore(feed.store, plan_of), observer=moves), target_for(feed)
    if not has_begun:
        is_refused.set()
    with following(replica, target) as raised:
        if has_begun:
            moves.await_version(0)
            is_refused.set()
        wait_until(lambda: bool(raised))
    assert isinstance(raised[0], StoreError)
    assert replica.status().error is not None


FINAL = {
    "a format that is not known": (FormatError("later"), 2),
    "another model": (MismatchError("other"), 1),
    "a wrong call": (InvalidInputError("taken"), 1),
    "a store that refuses": (StoreError("no", transient=False), 1),
}


@pytest.mark.parametrize(("error", "times"), FINAL.values(), ids=FINAL.keys())
def test_errors_that_end_the_loop(error: Exception, times: int) -> None:
    """A bit that flips on the wire can look like another format: once is not enough."""
    noted: list[Exception | None] = []

    def step() -> bool:
        raise error

    with pytest.raises(type(error)):
        loop.Loop().run(step, noted.append)
    assert noted == times * [error]


def test_errors_that_do_not_end_the_loop() -> None:
    running, noted = loop.Loop(), []
    steps: list[Exception | bool] = [
        True,
        FormatError("a flipped bit"),
        True,
        FormatError("another one"),
        InvalidInputError("the disk is full"),
        CorruptError("damaged"),
        NotFoundError("pruned"),
        StoreError("away", transient=True),
        RuntimeError("out of memory"),
        False,
    ]

    def step() -> bool:
        found = steps.pop(0)
        if not steps:
            running.stop()
        if isinstance(found, Exception):
            raise found
        return found

    running.run(step, noted.append)
    assert [type(error).__name__ for error in noted] == [
        "FormatError",
        "NoneType",
        "FormatError",
        "InvalidInputError",
        "CorruptError",
        "NotFoundError",
        "StoreError",
        "RuntimeError",
        "NoneType",
    ]


def test_only_one_follow() -> None:
    feed, moves = long_feed(1), Moves()
    replica, target = follower(feed.store, observer=moves), target_for(feed)
    with following(replica, target):
        moves.await_version(0)
        with pytest.raises(InvalidInputError, match="follows already"):
            replica.follow(target)


def test_calls_from_several_threads_while_following() -> None:
    """advance, pin and scrub of routes beside `follow`: no mixture, and the end is the head."""
    feed, moves = long_feed(8), Moves()
    replica, target = follower(feed.store, observer=moves), target_for(feed)
    errors: list[BaseException] = []

    def routes(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(15):
                version = int(rng.integers(0, 8))
                match int(rng.integers(0, 4)):
                    case 0:
                        replica.advance(target, to=version)
                    case 1:
                        replica.pin(version if version % 2 else None)
                    case 2:
                        assert replica.scrub(target) == []
                    case _:
                        assert replica.status().counts.damaged == 0
        except BaseException as error:  # noqa: BLE001 - told below
            errors.append(error)

    with following(replica, target) as raised:
        moves.await_version(7)
        threads = [threading.Thread(target=routes, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG_S)
        replica.pin(None)
        feed.delta(small_step(feed))
        moves.await_version(8)
    assert not raised
    assert not errors
    assert target.holds(feed.states[8])


# Scrub


@pytest.mark.parametrize("repair", [True, False])
def test_scrub(repair: bool, caplog: pytest.LogCaptureFixture) -> None:
    feed = long_feed(2)
    replica, target = follower(feed.store), target_for(feed)
    with pytest.raises(InvalidInputError, match="nothing yet"):
        replica.scrub(target)
    replica.advance(target)
    assert replica.scrub(target) == []
    target.state["packed"][0, :2] += 1
    target.state["counter"] += 1
    found = replica.scrub(target, repair=repair)
    assert [(damage.tensor, damage.elements) for damage in found] == [("counter", 1), ("packed", 2)]
    assert target.holds(feed.states[1]) == repair
    assert "2 elements of 'packed' differ" in caplog.text
    counts = replica.status().counts
    elements = feed.states[1].layout.elements
    assert (counts.scrubbed, counts.damaged, counts.repaired) == (2 * elements, 3, 3 if repair else 0)
    assert target.version == 1


def test_scrub_does_not_repair_from_a_mirror_that_is_damaged() -> None:
    feed = long_feed(2)
    replica, target = follower(feed.store), target_for(feed)
    replica.advance(target)
    mirror = replica._mover.mirror
    assert mirror is not None
    mirror.weights.arrays[mirror.weights.layout.ordinals["packed"]][0] ^= 1
    assert replica.scrub(target) == []
    assert target.holds(feed.states[1])
    assert replica.status().counts.rebuilt == 1
    # Some tensors alone are held against a mirror that nobody has looked at before: it is proved before a repair.
    mirror.weights.arrays[mirror.weights.layout.ordinals["packed"]][0] ^= 1
    assert replica._mover.scrub(target, repair=True, tensors=range(7))
    assert target.holds(feed.states[1])
    assert replica.status().counts.rebuilt == 2


@pytest.mark.parametrize("is_background", [False, True], ids=["asked for", "in the background"])
def test_scrub_proves_the_mirror(is_background: bool) -> None:
    """A low bit of the mirror that flips before a delta is decoded: the target gets it, and only a digest can tell."""
    feed, moves = Feed.of(2), Moves()
    replica, target = follower(feed.store, observer=moves, scrub_s=0.01 if is_background else None), target_for(feed)
    replica.advance(target, to=0)
    mirror = replica._mover.mirror
    assert mirror is not None
    ordinal = mirror.weights.layout.ordinals["embed"]
    place = int(np.flatnonzero(feed.states[0].arrays[ordinal] != feed.states[1].arrays[ordinal])[0])
    mirror.weights.arrays[ordinal][place] ^= 2
    replica.advance(target)
    assert not target.holds(feed.states[1])
    if is_background:
        with following(replica, target):
            wait_until(lambda: replica.status().counts.rebuilt == 1)
            wait_until(lambda: target.whole == [True, False, True])
    else:
        replica.scrub(target)
    assert replica.status().counts.rebuilt == 1
    assert target.holds(feed.states[1])


def test_scrub_in_the_background() -> None:
    feed, moves = long_feed(2), Moves()
    replica, target = follower(feed.store, observer=moves, scrub_s=0.01), target_for(feed)
    with following(replica, target):
        moves.await_version(1)
        target.state["packed"][0, 0] ^= 1
        wait_until(lambda: replica.status().counts.repaired == 1)
        elements = feed.states[1].layout.elements
        wait_until(lambda: replica.status().counts.scrubbed > 2 * elements)
    assert target.holds(feed.states[1])


def test_rounds_take_about_as_long_as_they_should() -> None:
    now = [0.0]
    rounds = loop.Rounds(100.0, clock=lambda: now[0])
    elements = [10, 0, 30, 60]
    assert rounds.due(elements) == []
    now[0] = 10.0
    assert rounds.due(elements) == [0]
    now[0] = 30.0
    assert rounds.due(elements) == [1, 2]
    now[0] = 1000.0
    assert rounds.due(elements) == [3, 0, 1, 2], "never more than all of them"
    assert rounds.due([]) == []


# Heartbeats


def test_heartbeats() -> None:
    feed = long_feed(2)
    target = target_for(feed)
    with follower(feed.store, replica="one", beat_s=1000.0) as replica:
        replica.advance(target, to=0)
        (beat,) = feed.log.heartbeats()
        assert (beat.replica, beat.version) == ("one", 0)
        digest = feed.log.read(0).digest.hex
        assert (beat.facts["engine"], beat.facts["digest"]) == ("torch", digest)
        assert {"plan_s", "fetch_s", "decode_s", "stage_s", "commit_s", "pause_s"} <= beat.facts.keys()
        replica.advance(target)
        (beat,) = feed.log.heartbeats()
        assert (beat.version, beat.facts["lag"]) == (1, "0")
        puts = len([call for call in feed.store.took() if call[0] == "put"])
        replica.advance(target)
        assert [call for call in feed.store.took() if call[0] == "put"] == [], puts
    assert feed.log.heartbeats() == [], "who leaves for good keeps nothing back"


def test_a_heartbeat_that_fails_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    feed = long_feed(1)
    store = FaultyStore(feed.store, lambda op: Fault("refuse") if op.key.startswith(keys.REPLICAS) else None)
    target = target_for(feed)
    with follower(store, beat_s=0.0) as replica:
        for version in range(3):
            replica.advance(target)
            assert target.holds(feed.states[version])
            feed.delta(small_step(feed))
    assert caplog.text.count("cannot write the heartbeat") == 1


def test_replicas_have_ids_of_their_own() -> None:
    assert follower(MemoryStore()).replica != follower(MemoryStore()).replica
    assert keys.parse_replica_key(keys.replica_key(follower(MemoryStore()).replica)) is not None


def test_the_event_tells_all() -> None:
    feed, moves = long_feed(3), Moves()
    replica, target = follower(feed.store, observer=moves), target_for(feed)
    replica.advance(target, to=0)
    replica.advance(target)
    (_, second) = moves
    assert second == replace(second, from_version=0, version=2, edges=("delta", "delta"))
    assert second.nbytes == feed.log.read(1).nbytes + feed.log.read(2).nbytes
    assert "version 2 is live, from version 0" in str(second)
