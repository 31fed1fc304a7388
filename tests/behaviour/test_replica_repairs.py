"""What a follower repairs by itself: interrupted mirrors, damaged payloads, targets that fail."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.feeds import Feed, flip
from support.helpers import changed, state
from support.replicas import fetched, follower, long_feed, quick, small_step, target_for

from deltasync import blocks
from deltasync.errors import CorruptError, InvalidInputError, NotFoundError, StoreError
from deltasync.feed.plan import plan
from deltasync.format import keys
from deltasync.format.weights import Weights
from deltasync.replica.target import Staged
from deltasync.testing.faulty import Fault, FaultyStore, Operation
from deltasync.trainer import versions as anchors

__all__ = ["quick"]


# Restarts


def test_a_mirror_file_goes_on_where_it_was(tmp_path: Path) -> None:
    feed = long_feed(4)
    with follower(feed.store, target_for(feed), mirror=tmp_path / "mirror") as first:
        first.advance()
    feed.delta()
    store, target = FaultyStore(feed.store), target_for(feed)
    with follower(store, target, mirror=tmp_path / "mirror") as second:
        moved = second.advance()
        assert moved is not None
        assert (moved.edges, moved.changed) == (("delta",), None)
        assert len(fetched(store)) == 1
        assert target.holds(feed.states[4])
        assert second.status().counts.rebuilt == 0


def test_a_damaged_mirror_file_is_rebuilt(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    feed, path = Feed.of(3), tmp_path / "mirror"
    with follower(feed.store, target_for(feed), mirror=path) as first:
        first.advance()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    target = target_for(feed)
    with follower(feed.store, target, mirror=path) as second:
        second.advance()
        assert second.status().counts.rebuilt == 1
    assert target.holds(feed.states[2])
    assert "rebuilding it" in caplog.text


def test_an_interrupted_anchor_fetches_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchors, "SHARD_ELEMENTS", 1)
    feed = Feed.of(1)
    refs = feed.log.read(0).payloads
    assert len(refs) > 3

    def last_is_away(operation: Operation) -> Fault | None:
        return Fault("refuse") if operation.key == keys.payload_key(refs[-1].sha256) else None

    monkeypatch.setattr("deltasync.replica.follower._PATIENCE_S", 0.0)
    for is_same_process in (True, False):
        path = tmp_path / f"mirror-{is_same_process}"
        target = target_for(feed)
        with follower(FaultyStore(feed.store, last_is_away), target, mirror=path) as replica:
            with pytest.raises(StoreError):
                replica.advance()
            if is_same_process:
                store = FaultyStore(feed.store)
                replica._delivery._log.store = store
                moved = replica.advance()
        if not is_same_process:
            store, target = FaultyStore(feed.store), target_for(feed)
            with follower(store, target, mirror=path) as replica:
                moved = replica.advance()
                assert replica.status().counts.rebuilt == 0
        assert moved is not None
        assert moved.nbytes == refs[-1].nbytes
        # The first one is asked for the layout, and only for that.
        assert Counter(fetched(store)) == {refs[0].sha256: 1, refs[-1].sha256: 1}
        assert target.holds(feed.states[0])


def test_what_was_noted_as_applied_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchors, "SHARD_ELEMENTS", 1)
    monkeypatch.setattr("deltasync.replica.follower._PATIENCE_S", 0.0)
    feed, path, target = Feed.of(1), tmp_path / "mirror", None
    away = keys.payload_key(feed.log.read(0).payloads[-1].sha256)
    store = FaultyStore(feed.store, lambda op: Fault("refuse") if op.key == away else None)
    with follower(store, target_for(feed), mirror=path) as replica, pytest.raises(StoreError):
        replica.advance()
    data = bytearray(path.read_bytes())
    data[-3000:-2900] = bytes(100)
    path.write_bytes(data)
    target = target_for(feed)
    with follower(feed.store, target, mirror=path) as replica:
        replica.advance()
        assert replica.status().counts.rebuilt == 1
    assert target.holds(feed.states[0])


def test_two_followers_on_one_mirror_file(tmp_path: Path) -> None:
    feed, path = Feed.of(1), tmp_path / "mirror"
    one, other = target_for(feed), target_for(feed)
    with follower(feed.store, one, mirror=path) as first, follower(feed.store, other, mirror=path) as second:
        first.advance()
        with pytest.raises(InvalidInputError, match="another process"):
            second.advance()


@pytest.mark.parametrize("is_honest", [True, False])
def test_what_a_target_says_of_itself_is_proved(is_honest: bool, tmp_path: Path) -> None:
    """A target may outlive its follower. If it has what it says, it gets changes; else all weights."""
    feed, path = long_feed(2), tmp_path / "mirror"
    target = target_for(feed)
    with follower(feed.store, target, mirror=path) as first:
        first.advance()
    if not is_honest:
        target.state["packed"][0, 0] ^= 1
    feed.delta(small_step(feed))
    with follower(feed.store, target, mirror=path) as second:
        second.advance()
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

    target = target_for(feed)
    replica = follower(FaultyStore(feed.store, once), target)
    replica.advance()
    counts = replica.status().counts
    assert (counts.refetched, counts.rerouted, counts.rebuilt) == (1, 0, 0)
    assert target.holds(feed.states[2])


def lose(feed: Feed, key: str) -> None:
    feed.store.delete(key)


def damage(feed: Feed, key: str) -> None:
    flip(feed.store, key)


@pytest.mark.parametrize("spoil", [damage, lose])
@pytest.mark.parametrize("start", [0, None], ids=["behind", "new"])
def test_another_plan_around_a_payload_that_cannot_be_used(
    start: int | None, spoil: Callable[[Feed, str], None], caplog: pytest.LogCaptureFixture
) -> None:
    feed = long_feed(6)
    feed.late_anchor(4)
    target = target_for(feed)
    replica = follower(feed.store, target)
    if start is not None:
        replica.advance(to=start)
    first = plan(feed.log, feed.log.require_head(), start=start)
    bad = first.edges[0 if start is None else 2]
    spoil(feed, feed.payload_keys(bad.manifest)[0])
    moved = replica.advance()
    assert moved is not None
    assert target.holds(feed.states[5])
    assert replica.status().counts.rerouted == 1
    assert bad.key in caplog.text
    assert replica.status().counts.refetched == (1 if spoil is damage else 0)


def test_without_a_plan_the_live_version_stays() -> None:
    feed = long_feed(3)
    target = target_for(feed)
    replica = follower(feed.store, target)
    replica.advance(to=1)
    feed.store.delete(feed.payload_keys(feed.log.read(2))[0])
    with pytest.raises(NotFoundError):
        replica.advance()
    assert target.version == 1
    assert target.holds(feed.states[1])
    feed.delta(small_step(feed))
    feed.late_anchor(3)
    replica.advance()
    assert target.holds(feed.states[3])


def test_a_mirror_that_lost_a_bit_is_rebuilt(caplog: pytest.LogCaptureFixture) -> None:
    feed = long_feed(2)
    target = target_for(feed)
    replica = follower(feed.store, target)
    replica.advance()
    weights = replica._mirror.weights
    assert weights is not None
    arrays = [array for array in weights.arrays if len(array)]
    for array in arrays:
        array ^= array.dtype.type(1)
    feed.delta()
    replica.advance()
    assert target.holds(feed.states[2])
    assert target.whole == [True, True]
    assert replica.status().counts.rebuilt == 1
    assert "rebuilding them" in caplog.text


def test_a_diverged_mirror_collects_no_changes() -> None:
    """It may have bits of the new version by chance: what differs from them is not what a target lacks."""
    feed = long_feed(2)
    target = target_for(feed)
    replica = follower(feed.store, target)
    replica.advance()
    feed.delta()
    feed.late_anchor(2)
    weights = replica._mirror.weights
    assert weights is not None
    ordinal = weights.layout.ordinals["embed"]
    weights.arrays[ordinal][:] = feed.states[2].arrays[ordinal]
    weights.arrays[ordinal][:200] = np.random.default_rng(1).integers(0, 1 << 16, 200)
    moved = replica.advance()
    assert moved is not None
    assert moved.edges == ("anchor",)
    assert target.holds(feed.states[2])
    assert replica.status().counts.rebuilt == 1


def test_a_skip_that_lies_about_its_start() -> None:
    """It is of version 1, and might well decode against version 0: few elements differ."""
    feed = long_feed(4)
    feed.skip(1, 3, parent=0)
    target = target_for(feed)
    replica = follower(feed.store, target)
    replica.advance(to=0)
    assert plan(feed.log, feed.log.read(3), start=0).edges[0].manifest.kind == "skip"
    moved = replica.advance()
    assert moved is not None
    assert moved.edges == ("delta", "delta", "delta")
    assert target.holds(feed.states[3])
    assert replica.status().counts.rerouted == 1


def test_a_target_that_went_elsewhere_by_itself() -> None:
    feed = long_feed(3)
    target = target_for(feed)
    replica = follower(feed.store, target)
    replica.advance(to=0)
    kept = {name: tensor.clone() for name, tensor in target.state.items()}
    replica.advance(to=1)
    for name, tensor in kept.items():
        target.state[name].copy_(tensor)
    target.version = 0
    replica.advance()
    assert target.whole == [True, False, True]
    assert target.holds(feed.states[2])


@pytest.mark.parametrize(("verb", "prefix"), [("get_range", keys.VERSIONS), ("get_range", keys.PAYLOADS), ("list", "")])
def test_a_read_that_fails_once_is_tried_again(verb: str, prefix: str) -> None:
    feed = long_feed(4)
    failed: list[Operation] = []
    target = target_for(feed)
    replica = follower(FaultyStore(feed.store), target)
    replica.advance(to=0)

    def once(operation: Operation) -> Fault | None:
        # The head is asked for without patience: following polls again anyway.
        is_head = (keys.parse_version_key(operation.key) or 0) >= 3 or operation.key == keys.VERSIONS
        is_wanted = operation.verb == verb and operation.key.startswith(prefix) and not is_head
        if is_wanted and not failed:
            failed.append(operation)
            return Fault("refuse")
        return None

    replica = follower(FaultyStore(feed.store, once), target)
    replica.advance()
    assert failed
    assert target.holds(feed.states[3])


def test_a_delta_that_does_not_add_up_leaves_the_mirror_alone() -> None:
    """Its bytes are as they should be, but made against other bits: it is avoided, and the mirror stays."""
    feed = long_feed(2)
    encoded = blocks.encode_delta(Weights.of(state(seed=9)), Weights.of(changed(state(seed=9))))
    ref = feed.put_change(1, 2, encoded)
    leads_to = sum((block.digest for block in encoded), feed.log.read(1).digest)
    count = sum(block.changed for block in encoded)
    feed._commit(feed.new("delta", feed.states[1], leads_to, payloads=(ref,), changed=count), feed.states[1])
    target = target_for(feed)
    replica = follower(feed.store, target)
    replica.advance(to=1)
    with pytest.raises(CorruptError, match="does not fit") as caught:
        replica.advance()
    assert caught.value.key == keys.version_key(2)
    assert (target.version, replica.status().mirror) == (1, 1)
    counts = replica.status().counts
    assert (counts.rerouted, counts.rebuilt) == (1, 0)
    feed.anchor(small_step(feed))
    replica.advance()
    assert target.holds(feed.states[3])


# Targets that fail


@pytest.mark.parametrize("stage", [True, False], ids=["before the first write", "after it"])
def test_a_commit_that_fails_is_repaired_from_the_mirror(stage: bool) -> None:
    feed = long_feed(2)
    store = FaultyStore(feed.store)
    target = target_for(feed)
    replica = follower(store, target)
    replica.advance()

    def fail(staged: Staged) -> None:
        if not stage:
            target.version = None
            target.state["packed"][:] = 3
        raise RuntimeError("out of memory")

    target.fails = fail
    feed.delta(small_step(feed))
    with pytest.raises(RuntimeError, match="out of memory"):
        replica.advance()
    assert replica.status().version == (1 if stage else None)
    target.fails = lambda staged: None
    before = len(store.operations)
    moved = replica.advance()
    assert moved is not None
    assert (moved.version, moved.changed, moved.nbytes) == (2, None, 0)
    assert [op.verb for op in store.operations[before:]] == ["get_range"], "the mirror has it"
    assert target.holds(feed.states[2])
