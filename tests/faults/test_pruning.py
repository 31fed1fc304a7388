"""Prune on feeds of every shape: what is kept stays exact, with a writer at the same time, and with wrong records."""

import os
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from known import (
    add_skip,
    copy_of,
    head_of,
    holds,
    nth,
    objects,
    publish,
    require_clean,
    require_exact,
    widened,
)
from support.feeds import replay
from support.helpers import State, write_sharded

from deltasync.errors import StoreError
from deltasync.feed.log import LIVE_S, Log
from deltasync.feed.pins import pin
from deltasync.feed.plan import plan
from deltasync.format import keys
from deltasync.format.sealed import FloorRecord, Heartbeat
from deltasync.format.weights import Weights
from deltasync.store.local import LocalStore
from deltasync.store.memory import MemoryStore
from deltasync.store.patient import WrapperStore
from deltasync.store.protocol import Store
from deltasync.testing.faulty import Crash, Fault, FaultyStore, at
from deltasync.trainer.checkpoint import publish as publish_checkpoint
from deltasync.upkeep.prune import Pruner, Retention, plan_prune, prune

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Grown:
    """A feed of random shape, and what is in it."""

    store: MemoryStore
    states: dict[int, State]
    starts: list[int]
    live: dict[str, int]
    make: Callable[[int], State]


def grow(rng: random.Random) -> Grown:
    store, make = MemoryStore(), nth
    states: dict[int, State] = {}
    starts = [0]
    for n in range(rng.randint(4, 11)):
        options = {"base": True} if n == 0 and rng.random() < 0.3 else {"anchor": rng.random() < 0.3}
        if n > 0 and make is nth and rng.random() < 0.1:
            make, options = widened, {"anchor": True}
        if n > 0 and options.get("anchor"):
            starts.append(n)
        states[n] = make(n)
        publish(store, n, make, **options)
    for start in states:
        end = start + rng.randint(2, 5)
        if rng.random() < 0.4 and end in states and states[start].keys() == states[end].keys():
            add_skip(store, start, end, states)
    live: dict[str, int] = {}
    for name in ("r1", "r2", "r3"):
        version, age_s = rng.choice(list(states)), rng.choice([1, LIVE_S // 2, 2 * LIVE_S, 10**6])
        Log(store).beat(Heartbeat(name, version, int(time.time()) - age_s))
        if age_s < LIVE_S:
            live[name] = version
    return Grown(store, states, starts, live, make)


def require_way_on(grown: Grown, version: int, floor: int) -> None:
    """A replica at `version` reaches the head, by deltas alone where the layout stays the same."""
    log = Log(grown.store)
    head = log.require_head()
    if version == head.version or grown.states[version].keys() != grown.states[head.version].keys():
        return
    chosen = plan(log, head, start=version)
    weights = Weights.of({name: array.copy() for name, array in grown.states[version].items()})
    for edge in chosen.edges:
        assert edge.start is not None or edge.end >= floor
    replay(log, chosen, weights)
    assert holds(weights, grown.states[head.version])
    for manifest in log.read_many(range(version + 1, head.version + 1)):
        if manifest.kind == "delta":
            for ref in manifest.payloads:
                assert grown.store.get(keys.payload_key(ref.sha256)), "a delta that a live replica may be fetching"


@pytest.mark.parametrize("seed", range(40))
def test_what_is_kept_stays_exact(seed: int) -> None:
    rng = random.Random(seed)
    grown = grow(rng)
    keep_anchors, keep_versions = rng.randint(1, 3), rng.randint(1, 6)
    found = plan_prune(grown.store, Retention(anchors=keep_anchors, versions=keep_versions))
    before = objects(grown.store, "")
    if rng.random() < 0.5:
        # A publisher commits between the plan and the deletion.
        n = head_of(grown.store) + 1
        grown.states[n] = grown.make(n)
        publish(grown.store, n, grown.make, anchor=rng.random() < 0.5)
    prune(grown.store, found)
    head = max(grown.states)
    assert found.floor <= max(0, head - keep_versions + 1)
    assert sum(start >= found.floor for start in grown.starts) >= min(keep_anchors, len(grown.starts))
    require_clean(grown.store)
    require_exact(grown.store, grown.states, range(found.floor, head + 1))
    for name, version in grown.live.items():
        require_way_on(grown, version, found.floor)
        assert (name in found.held_by) == (version < found.floor)
    gone = before.keys() - objects(grown.store, "").keys()
    assert gone == set(found.keys)
    assert not any(keys.parse_version_key(key) is not None for key in gone), "the fence stays"


@pytest.mark.parametrize("kind", ["crash_before", "crash_after"])
@pytest.mark.parametrize("seed", range(3))
def test_interrupted_after_each_delete(seed: int, kind: str) -> None:
    grown = grow(random.Random(seed + 100))
    found = plan_prune(grown.store, Retention(anchors=1, versions=2))
    fault = Fault("crash_before" if kind == "crash_before" else "crash_after")
    done = copy_of(grown.store)
    prune(done, found)
    for k in range(1, len(found.keys) + 3):
        store = copy_of(grown.store)
        try:
            prune(FaultyStore(store, at(k, fault)), found)
        except Crash:
            require_clean(store)
            require_exact(store, grown.states, range(found.floor, max(grown.states) + 1))
        prune(store, found)
        assert objects(store, "") == objects(done, "")


@pytest.mark.parametrize("recorded", [1, 5, 6, 7, 9, 10**6])
def test_a_floor_that_lies_deletes_nothing_that_is_kept(recorded: int) -> None:
    """One altered byte makes another number of it: that must not decide what goes."""
    store, states = MemoryStore(), {n: nth(n) for n in range(8)}
    for n in states:
        publish(store, n, anchor=n in (3, 6))
    store.put(keys.FLOOR, FloorRecord(recorded).to_bytes())
    prune(store, plan_prune(store, Retention(anchors=2, versions=5)))
    require_exact(store, states, range(3, 8))


@pytest.mark.parametrize("moment", [0, 1, 2, None])
def test_an_orphan_that_is_committed_between_plan_and_delete(moment: int | None, tmp_path: Path) -> None:
    """A publisher that comes back after days puts the same objects that a prune is about to remove."""
    store = LocalStore(tmp_path / "feed")
    publish(store, 0)
    restarted = tmp_path / "checkpoint"
    write_sharded(restarted, nth(1))
    (restarted / "notes.txt").write_text("a file that version 0 does not have")

    def publish_again(target: Store) -> None:
        publish_checkpoint(target, restarted, step=1)

    leave_orphans(store, publish_again)
    for path in (tmp_path / "feed" / "payloads").iterdir():
        os.utime(path, (0, 0))
    found = plan_prune(store, Retention(anchors=1, versions=1))
    assert found.orphans == len(found.keys) == 2, "the delta and the files"

    class Interrupted(WrapperStore):
        deletions = 0

        def delete(self, key: str) -> None:
            super().delete(key)
            self.deletions += 1
            if self.deletions == moment:
                publish_again(store)

    if moment == 0:
        publish_again(store)
    prune(Interrupted(store), found)
    restorable = (0,) if moment is None else (0, 1)
    checked = require_clean(store)
    assert checked.restorable == restorable
    assert checked.orphans == 0
    require_exact(store, {n: nth(n) for n in restorable})


def leave_orphans(store: Store, publish_into: Callable[[Store], None]) -> None:
    """What a publisher leaves behind that dies right before it commits."""
    commit = keys.version_key(head_of(store) + 1)
    dying = FaultyStore(store, lambda op: Fault("crash_before") if (op.verb, op.key) == ("create", commit) else None)
    with pytest.raises(Crash):
        publish_into(dying)


@pytest.mark.parametrize("kind", ["crash_before", "crash_after", "refuse", "lose"])
def test_retention_interrupted_at_every_operation(kind: Any) -> None:
    """With a pin below the floor and a live replica behind it. The result is that of a run that was not interrupted,
    whether the pruner that remembers goes on or another one."""
    full, states = MemoryStore(), {n: nth(n) for n in range(9)}
    for n in states:
        publish(full, n, anchor=n in (2, 4, 7))
    for start, end in ((0, 3), (4, 6)):
        add_skip(full, start, end, states)
    Log(full).beat(Heartbeat("behind", 5, int(time.time())))
    pin(full, 3, name="best")
    retention = Retention(anchors=1, versions=2)
    done = copy_of(full)
    counting = FaultyStore(done)
    Pruner(counting, retention).run()
    assert set(require_clean(done).restorable) == {0, 3, 7, 8}, "by the skip, which is less than two deltas"
    for k in range(1, len(counting.operations) + 1):
        for is_restarted in (True,) if kind.startswith("crash") else (False, True):
            store = copy_of(full)
            pruner = Pruner(FaultyStore(store, at(k, Fault(kind))), retention)
            with suppress(Crash, StoreError):
                pruner.run()
            found = require_clean(store)
            assert {3, 7, 8} <= set(found.restorable)
            require_exact(store, states, found.restorable)
            (Pruner(store, retention) if is_restarted else pruner).run()
            left = objects(store, "").keys() - objects(done, "").keys()
            # What lost its manifest is an orphan, and goes after a day.
            assert all(keys.parse_payload_key(key) is not None or key.startswith(keys.PROBES) for key in left)
            assert objects(done, "").items() <= objects(store, "").items()
            require_exact(store, states, {3, 7, 8})
