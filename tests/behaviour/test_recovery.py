"""The steps of docs/operations.md after a disaster, taken as they are written there."""

from pathlib import Path

import pytest
from support import LONG_S
from support.feeds import Feed, flip, holds, nth, publish, publisher
from support.replicas import TorchTarget, follower

from deltasync.errors import CorruptError
from deltasync.feed.log import Log, manifest_key
from deltasync.feed.pins import pin
from deltasync.format import keys
from deltasync.format.weights import Weights
from deltasync.state import load
from deltasync.store.local import LocalStore
from deltasync.store.memory import MemoryStore
from deltasync.store.protocol import Store
from deltasync.upkeep.compact import compact
from deltasync.upkeep.prune import Retention, plan_prune, prune
from deltasync.upkeep.relay import relay
from deltasync.upkeep.verify import verify

LAYOUT = Weights.of(nth(0)).layout


def trained(store: Store, steps: range) -> None:
    """A trainer on a host without any file of an earlier one."""
    trainer = publisher(store)
    for number in steps:
        publish(trainer, number, anchor=number % 4 == 0).wait(LONG_S)
    trainer.close()


def require_newest(store: Store, version: int, step: int) -> None:
    checked = verify(store, deep=True)
    assert checked.is_clean, (checked.damages, checked.lost)
    head = Log(store).require_head()
    assert (head.version, head.step) == (version, step)
    assert holds(load(Log(store), head), nth(step))


def test_the_store_of_the_source_is_lost(tmp_path: Path) -> None:
    """Replicas go on with the copy from where they are, and so does training."""
    source, copy = LocalStore(tmp_path / "source"), LocalStore(tmp_path / "copy")
    trained(source, range(6))
    target = TorchTarget(LAYOUT)
    mirror = tmp_path / "mirror"
    with follower(source, target, mirror=mirror) as replica:
        replica.advance()
    relay(source, copy, every=True)
    (tmp_path / "source").rename(tmp_path / "lost")
    with follower(copy, target, mirror=mirror) as replica:
        assert replica.advance() is None or target.version == 5
        trained(copy, range(6, 9))
        moved = replica.advance()
        assert moved is not None
        assert (moved.from_version, moved.version) == (5, 8), "by changes alone"
        assert target.holds(Weights.of(nth(8)))
    require_newest(copy, 8, 8)
    # The copy is the source from now on: it can be relayed to a new backup.
    backup = MemoryStore()
    relay(copy, backup, every=True)
    require_newest(backup, 8, 8)


def test_the_newest_versions_of_the_source_are_damaged() -> None:
    source, copy = MemoryStore(), MemoryStore()
    trained(source, range(8))
    relay(source, copy, every=True)
    log = Log(source)
    damaged = [keys.payload_key(log.read(7).payloads[0].sha256), manifest_key(log.read(7))]
    gone = keys.payload_key(log.read(6).payloads[0].sha256)
    for key in damaged:
        flip(source, key)
    source.delete(gone)
    checked = verify(source, deep=True)
    assert not checked.is_clean
    with pytest.raises(CorruptError, match="nothing was deleted"):
        plan_prune(source, Retention(anchors=1, versions=1))
    for key in (*damaged, gone):
        source.put(key, copy.get(key))
    require_newest(source, 7, 7)


def test_the_host_of_the_trainer_is_lost() -> None:
    source = MemoryStore()
    trained(source, range(3))
    trained(source, range(3, 6))
    require_newest(source, 5, 5)


def test_wrong_weights_were_published() -> None:
    """Replicas stay at a version that is pinned until the good weights are the next version."""
    source = MemoryStore()
    trained(source, range(4))
    pin(source, 2, name="best")
    target = TorchTarget(LAYOUT)
    with follower(source, target) as replica:
        replica.advance()
        replica.pin("best")
        replica.advance()
        assert target.version == 2
        assert target.holds(Weights.of(nth(2)))
        trained(source, range(9, 10))
        assert replica.advance() is None
        replica.pin(None)
        replica.advance()
        assert target.version == 4
        assert target.holds(Weights.of(nth(9)))


def test_lost_versions_end_with_the_next_anchor() -> None:
    """The trainer still has its weights. Replicas pass over what is lost, and `prune` can give it up."""
    source, target = MemoryStore(), TorchTarget(LAYOUT)
    trainer = publisher(source)
    for number in range(3):
        publish(trainer, number).wait(LONG_S)
    source.delete(keys.payload_key(Log(source).read(2).payloads[0].sha256))
    assert verify(source).lost == (2,)
    publish(trainer, 3, anchor=True).wait(LONG_S)
    trainer.close()
    assert verify(source, deep=True).lost == (2,)
    with follower(source, target) as replica:
        replica.advance(to=1)
        replica.advance()
        assert target.holds(Weights.of(nth(3)))
    prune(source, plan_prune(source, Retention(anchors=1, versions=1)))
    require_newest(source, 3, 3)


@pytest.mark.parametrize("kind", ["anchor", "skip"])
def test_a_damaged_anchor_or_skip_is_deleted(kind: str) -> None:
    """`prune` refuses to run while it cannot read one. Without it, nothing is lost."""
    feed = Feed.of(9)
    if kind == "anchor":
        feed.late_anchor(6)
        key = keys.anchor_key(6)
    else:
        key = manifest_key(compact(feed.store)[0])
    flip(feed.store, key)
    with pytest.raises(CorruptError, match="nothing was deleted") as caught:
        plan_prune(feed.store, Retention(anchors=1, versions=1))
    assert (caught.value.rule, caught.value.key) == ("prune.damaged", key)
    feed.store.delete(key)
    prune(feed.store, plan_prune(feed.store, Retention(anchors=1, versions=1)))
    checked = verify(feed.store, deep=True)
    assert checked.is_clean
    assert checked.restorable[-1] == 8


def test_a_replica_with_other_bits_begins_again_at_an_anchor(tmp_path: Path) -> None:
    """Its mirror was damaged while it was down, as by a disk."""
    source, target, mirror = MemoryStore(), TorchTarget(LAYOUT), tmp_path / "mirror"
    trained(source, range(3))
    with follower(source, target, mirror=mirror) as replica:
        replica.advance()
    (weights,) = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 4096]
    data = bytearray(weights.read_bytes())
    data[-100] ^= 1
    weights.write_bytes(data)
    trained(source, range(3, 5))
    restarted = TorchTarget(LAYOUT)
    with follower(source, restarted, mirror=mirror) as replica:
        replica.advance()
        assert restarted.version == 4
        assert restarted.holds(Weights.of(nth(4)))
