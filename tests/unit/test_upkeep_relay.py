"""A copy of a feed in another store: complete, resumable, and never of another run."""

from typing import Any

import numpy as np
import pytest
from support.feeds import Feed, NoFenceStore, SpyStore, flip, same_weights
from support.helpers import state

from deltasync.errors import ConflictError, CorruptError, DeltasyncError, InvalidInputError, NotFoundError
from deltasync.feed.log import Log
from deltasync.feed.pins import pin
from deltasync.feed.upload import LATE_S
from deltasync.format import keys
from deltasync.format.companions import write_files
from deltasync.format.sealed import Heartbeat
from deltasync.format.weights import Weights
from deltasync.state import load
from deltasync.store.memory import MemoryStore
from deltasync.store.patient import WrapperStore
from deltasync.store.protocol import Data, Store
from deltasync.testing.faulty import Crash, Fault, FaultyStore, at
from deltasync.upkeep.compact import Compactor, compact
from deltasync.upkeep.prune import Retention, plan_prune, prune
from deltasync.upkeep.relay import Relay, Relayed, relay
from deltasync.upkeep.verify import Verification, verify


def require_copy(feed: Feed, copy: Store) -> Verification:
    """The copy is clean, has every manifest of a version byte for byte, and the bits of what it can restore."""
    checked = verify(copy, deep=True)
    assert checked.is_clean, (checked.damages, checked.lost)
    assert not checked.unchecked
    for item in feed.store.list(keys.VERSIONS):
        assert copy.get(item.key) == feed.store.get(item.key)
    log = Log(copy)
    for version in checked.restorable:
        assert same_weights(load(log, log.read(version)), feed.states[version])
    return checked


def anchored(versions: int = 12, anchors: tuple[int, ...] = (4, 8)) -> Feed:
    feed = Feed.of(versions)
    for version in anchors:
        feed.late_anchor(version)
    return feed


@pytest.mark.parametrize("kind", [MemoryStore, NoFenceStore])
def test_every_version(kind: type[MemoryStore]) -> None:
    feed, copy = anchored(), kind()
    (sent,) = relay(feed.store, copy, every=True, skips=True)
    assert require_copy(feed, copy).restorable == verify(feed.store, deep=True).restorable
    sizes = {item.key: item.nbytes for item in feed.store.list(keys.PAYLOADS)}
    assert sum(part.payload_bytes for part in sent) == sum(sizes.values())
    assert {item.key: item.nbytes for item in copy.list(keys.PAYLOADS)} == sizes
    assert relay(feed.store, copy, every=True) == ((),), "nothing is sent twice"
    feed.delta()
    assert [(part.kind, part.version) for part in relay(feed.store, copy)[0]] == [("delta", 12)]
    require_copy(feed, copy)


def test_a_new_destination_begins_with_the_cheapest_plan() -> None:
    feed, copy = anchored(), MemoryStore()
    (sent,) = relay(feed.store, copy)
    assert [(part.kind, part.version, part.left_out) for part in sent] == [
        ("anchor", 8, 8),
        ("delta", 9, 0),
        ("delta", 10, 0),
        ("delta", 11, 0),
    ]
    assert require_copy(feed, copy).restorable == (8, 9, 10, 11)
    assert Log(copy).floor() == 8


def test_far_behind_it_gets_skips_and_the_newest_anchor() -> None:
    feed, copy = anchored(9, ()), MemoryStore()
    relay(feed.store, copy)
    for _ in range(31):
        feed.delta()
    compact(feed.store)
    (sent,) = relay(feed.store, copy)
    assert ("skip", 32) in [(part.kind, part.version) for part in sent]
    assert sum(part.payload_bytes for part in sent) < sum(m.nbytes for m in feed.log.read_many(range(9, 40)))
    assert 39 in require_copy(feed, copy).restorable
    assert Log(copy).floor() == max(part.version for part in sent if part.left_out)
    feed.late_anchor(36)
    assert relay(feed.store, copy, anchors=False) == ((),)
    assert [(part.kind, part.version) for part in relay(feed.store, copy)[0]] == [("anchor", 36)]
    require_copy(feed, copy)


def test_several_destinations_and_relays_of_copies() -> None:
    feed, near, far, further = anchored(), MemoryStore(), MemoryStore(), MemoryStore()
    sent = relay(feed.store, near, far)
    assert len(sent) == 2
    assert [p.payload_bytes for p in sent[0]] == [p.payload_bytes for p in sent[1]]
    for _ in range(3):
        feed.delta()
    relay(feed.store, near)
    relay(near, further, every=True)
    for copy in (near, further):
        assert require_copy(feed, copy).restorable[-1] == 14
    assert verify(far).head == 11


def test_files_beside_the_weights_are_sent_once() -> None:
    feed, copy = Feed(), SpyStore()
    ref = feed.upload.put(write_files({"config.json": b"{}"}))
    new = feed.new
    feed.new = lambda *args, **fields: new(*args, **{"files": ref, **fields})  # type: ignore[method-assign]
    feed.anchor(state())
    for _ in range(3):
        feed.delta()
    relay(feed.store, copy, every=True)
    assert [key for verb, key in copy.took() if verb == "put"].count(keys.payload_key(ref.sha256)) == 1
    require_copy(feed, copy)


# --- interruptions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["crash_before", "crash_after", "lose"])
def test_interrupted_at_every_operation(kind: Any, no_pauses: None) -> None:
    """At the destination, with a jump over versions. At every moment what a reader finds can be restored."""
    feed = anchored(8, (2,))
    first = MemoryStore()
    relay(feed.store, first, anchors=False)
    for _ in range(9):
        feed.delta()
    compact(feed.store)
    counting = FaultyStore(_copied(first))
    (sent,) = relay(feed.store, counting)
    assert any(part.left_out for part in sent)
    for k in range(1, len(counting.operations) + 1):
        copy = _copied(first)
        try:
            relay(feed.store, FaultyStore(copy, at(k, Fault(kind))), retry_s=1.0)
        except (Crash, DeltasyncError):
            head = Log(copy).require_head()
            assert same_weights(load(Log(copy), head), feed.states[head.version])
            follows = Log(copy).head(after=7)
            if follows is not None:
                assert same_weights(load(Log(copy), follows), feed.states[follows.version])
        relay(feed.store, copy)
        assert require_copy(feed, copy).head == 16


def _copied(store: MemoryStore) -> MemoryStore:
    copy = MemoryStore()
    for item in store.list():
        copy.put(item.key, store.get(item.key))
    return copy


def _contents(store: Store) -> dict[str, bytes]:
    return {item.key: store.get(item.key) for item in store.list() if not item.key.startswith(keys.PROBES)}


def test_payloads_of_an_interrupted_anchor_are_not_sent_again() -> None:
    feed, copy = anchored(6, (3,)), MemoryStore()
    part = feed.log.anchor(3)
    assert part is not None
    data = feed.store.get(feed.payload_keys(part)[0])
    copy.put(feed.payload_keys(part)[0], data)
    (sent,) = relay(feed.store, copy)
    assert (sent[0].kind, sent[0].payload_bytes) == ("anchor", part.nbytes - len(data))
    require_copy(feed, copy)


def test_a_relay_that_sleeps_between_payload_and_manifest_puts_again() -> None:
    feed, copy = anchored(3, ()), SpyStore()
    now = [1_700_000_000.0]

    class Sleepy(SpyStore):
        def get(self, key: str) -> bytes:
            if key == keys.version_key(0):
                now[0] += LATE_S + 1
            return super().get(key)

    source = Sleepy()
    for item in feed.store.list():
        source.put(item.key, feed.store.get(item.key))
    list(Relay(source, copy, clock=lambda: now[0]).advance())
    require_copy(feed, copy)


def test_the_source_prunes_what_was_to_be_sent() -> None:
    feed, copy = anchored(12, (8,)), MemoryStore()
    to = Relay(feed.store, copy)
    list(to.advance())
    for _ in range(20):
        feed.delta()
    feed.late_anchor(30)
    prune(feed.store, plan_prune(feed.store, Retention(anchors=1, versions=1)))
    sent = list(to.advance())
    assert (sent[0].kind, sent[0].version, sent[0].left_out) == ("anchor", 30, 18)
    checked = require_copy(feed, copy)
    assert {30, 31} <= set(checked.restorable)
    prune(copy, plan_prune(copy, Retention(anchors=1, versions=1)))
    assert require_copy(feed, copy).restorable == (30, 31)


def test_a_slow_pruner_does_not_lower_the_floor_that_a_relay_has_raised() -> None:
    feed = anchored()

    class Slow(MemoryStore):
        """Between the pruner's look at the floor and its write, the relay leaves versions out."""

        has_waited = False

        def put(self, key: str, data: Data) -> None:
            if key == keys.FLOOR and not self.has_waited:
                self.has_waited = True
                for _ in range(31):
                    feed.delta()
                compact(feed.store)
                relay(feed.store, self)
            super().put(key, data)

    copy = Slow()
    relay(feed.store, copy, every=True)
    prune(copy, plan_prune(copy, Retention(anchors=1, versions=1)))
    assert Log(copy).floor_of(keys.FLOOR) == 8
    assert Log(copy).floor() == Log(copy).floor_of(keys.COPY) > 8
    checked = require_copy(feed, copy)
    assert checked.restorable[-1] == 42
    assert set(checked.pruned) == set(range(43)) - set(checked.restorable)


def test_a_damaged_payload_is_not_copied() -> None:
    feed, copy = anchored(12, (8,)), MemoryStore()
    flip(feed.store, feed.payload_keys(feed.log.read(10))[0])
    with pytest.raises(CorruptError):
        relay(feed.store, copy)
    checked = verify(copy, deep=True)
    assert (checked.is_clean, checked.head) == (True, 9)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_feed_of_another_run_is_refused_before_anything_is_written() -> None:
    feed, other, empty = anchored(), anchored(), SpyStore()
    assert isinstance(other.store, SpyStore)
    other.store.took()
    with pytest.raises(InvalidInputError) as caught:
        relay(feed.store, empty, other.store)
    assert caught.value.rule == "relay.feed"
    for store in (empty, other.store):
        assert not [call for call in store.took() if call[0] in ("put", "create", "delete")]


def test_a_copy_of_a_fork_is_refused() -> None:
    feed, copy = anchored(12, ()), MemoryStore()
    relay(feed.store, copy, every=True)
    for version in (10, 11):
        feed.store.delete(keys.version_key(version))
    del feed.states[10:]
    feed.head = feed.log.read(9)
    feed.delta(feed.states[0])
    feed.delta(feed.states[3])
    before = _contents(copy)
    with pytest.raises(ConflictError):
        relay(feed.store, copy)
    assert _contents(copy) == before


@pytest.mark.parametrize(
    ("source", "destinations", "error"),
    [
        (MemoryStore(), [MemoryStore()], NotFoundError),
        (MemoryStore(), [], InvalidInputError),
        (7, [MemoryStore()], InvalidInputError),
    ],
)
def test_bad_input(source: Any, destinations: list[Any], error: type[DeltasyncError]) -> None:
    with pytest.raises(error):
        relay(source, *destinations)


def test_a_checkpoint_folder_is_not_a_destination(tmp_path: Any) -> None:
    feed = anchored()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidInputError, match="not empty"):
        relay(feed.store, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


# --- heartbeats -------------------------------------------------------------------------------------------------------


def test_heartbeats_of_the_destination_are_known_at_the_source() -> None:
    feed, copy = anchored(), MemoryStore("eu")
    Log(copy).beat(Heartbeat("replica-0", None, 1))
    relay(feed.store, copy)
    Log(copy).beat(Heartbeat("replica-0", 9, 1, {"engine": "vllm"}))
    now = [__import__("time").time()]
    to = Relay(feed.store, copy, heartbeats=True, clock=lambda: now[0])
    list(to.advance())
    beats = {beat.replica: beat for beat in feed.log.heartbeats()}
    assert {name: beat.version for name, beat in beats.items()} == {"memory-eu.replica-0": 9, "memory-eu.relay": 11}
    pruning = plan_prune(feed.store, Retention(anchors=1, versions=1))
    assert pruning.floor == 8
    copy.delete(keys.replica_key("replica-0"))
    now[0] += 60
    list(to.advance())
    assert [beat.replica for beat in feed.log.heartbeats()] == ["memory-eu.relay"]
    assert pin(copy, 9, name="kept").version == 9


def test_what_was_sent_as_json() -> None:
    sent = Relayed("memory://", "skip", 8, 4, 10, 20, left_out=3)
    assert sent.to_json() == {
        "destination": "memory://",
        "kind": "skip",
        "version": 8,
        "parent": 4,
        "payload_bytes": 10,
        "manifest_bytes": 20,
        "left_out": 3,
    }


# --- a slow link ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("slower", "every", "versions"), [(0.5, False, 40), (10.0, False, 400), (10.0, True, 40)])
def test_a_link_that_is_slower_than_training(slower: float, every: bool, versions: int) -> None:
    """Sending a delta takes `slower` times as long as a step, in which the trainer and a compactor go on.

    Then skips are sent instead of every delta, and the copy stays close to the newest version.
    """
    feed, copy = Feed.of(1), MemoryStore()
    rng = np.random.default_rng(0)

    def step() -> None:
        arrays = [array.copy() for array in feed.states[-1].arrays]
        # The same few elements change repeatedly, as they do in training.
        largest = max(arrays, key=len)
        largest[:200] ^= rng.integers(0, 2, 200).astype(largest.dtype)
        feed.delta(Weights(feed.states[-1].layout, tuple(arrays)))

    relay(feed.store, copy)
    step()
    delta_bytes = feed.log.read(1).nbytes
    compactor = Compactor(feed.store)
    lags: list[int] = []

    class SlowLink(WrapperStore):
        taken = 0.0

        def put(self, key: str, data: Data) -> None:
            super().put(key, data)
            if not key.startswith(keys.PAYLOADS):
                return
            self.taken += len(data) / delta_bytes * slower
            while self.taken >= 1 and len(feed.states) < versions:
                self.taken -= 1
                step()
                list(compactor.advance())
            if len(feed.states) < versions:
                lags.append(len(feed.states) - 1 - Log(copy).require_head().version)

    to = Relay(feed.store, SlowLink(copy), every=every)
    sent = list(to.advance())
    checked = require_copy(feed, copy)
    assert checked.restorable[-1] == len(feed.states) - 1
    assert [part.version for part in sent] == sorted(part.version for part in sent)
    source_bytes = sum(m.nbytes for m in feed.log.read_many(range(1, len(feed.states))))
    sent_bytes = sum(part.payload_bytes for part in sent)
    left_out = sum(part.left_out for part in sent)
    if slower < 1 or every:
        assert (sent_bytes, left_out) == (source_bytes, 0)
        assert checked.restorable == verify(feed.store, deep=True).restorable
    else:
        assert len(feed.states) == versions
        assert sent_bytes < source_bytes / 3
        assert left_out > versions / 2
        assert max(lags) < 150, "without skips it would be nine tenths of all versions"


class Growing(WrapperStore):
    """A source that gets one more version when an object with one of these keys is read."""

    def __init__(self, feed: Feed, names: list[str]) -> None:
        super().__init__(feed.store)
        self._feed, self._names = feed, names

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        if key in self._names:
            self._names = []
            self._feed.delta()
        return super().get_range(key, offset, length)


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("read", ["manifest", "payload"])
def test_a_version_that_comes_while_an_anchor_is_sent_does_not_leave_it_out(read: str, every: bool) -> None:
    """A single run copies both: the newest version and the newest anchor."""
    feed, copy = anchored(4, anchors=()), MemoryStore()
    relay(feed.store, copy, every=every)
    anchor = feed.late_anchor(2)
    names = [keys.anchor_key(2)] if read == "manifest" else feed.payload_keys(anchor)
    (sent,) = relay(Growing(feed, names), copy, every=every)
    assert [(part.kind, part.version) for part in sent] == [("delta", 4), ("anchor", 2)]
    assert Log(copy).anchors() == [2]
    assert require_copy(feed, copy).head == 4


def test_what_a_pruner_of_the_copy_has_deleted_is_not_sent_again() -> None:
    """A relay that goes on all the time, with its own memory of the copy, and a pruner beside it."""
    feed, copy, now_unix_s = anchored(), MemoryStore(), [1e9]
    compact(feed.store, levels=(4,))
    relaying = Relay(feed.store, copy, every=True, skips=True, clock=lambda: now_unix_s[0])
    list(relaying.advance())
    assert Log(copy).anchors() == [4, 8]
    prune(copy, plan_prune(copy, Retention(anchors=1, versions=1)))
    kept = [item.key for item in copy.list()]
    now_unix_s[0] += 60
    assert list(relaying.advance()) == []
    assert [item.key for item in copy.list()] == kept
