"""Two writers on one feed: each version has one winner, the loser gets an error, and no version is overwritten."""

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from known import (
    Author,
    UnfencedStore,
    add_skip,
    copy_of,
    manifests,
    nth,
    objects,
    publish,
    require_clean,
    require_exact,
    require_whole,
)
from racer import Tally, content, race
from support import LONG_S, processes
from support.helpers import State

from deltasync.errors import ConflictError, StoreError
from deltasync.feed.log import Log
from deltasync.feed.upload import Upload
from deltasync.format import keys
from deltasync.format.sealed import LeaseRecord
from deltasync.store.fencing import LEASE_S, LeasedStore
from deltasync.store.local import LocalStore
from deltasync.store.memory import MemoryStore
from deltasync.store.protocol import Data, Store
from deltasync.testing.faulty import FaultyStore, Operation
from deltasync.upkeep.prune import Retention, plan_prune, prune

TOTAL = 200
FOLDER = Path(__file__).parent


def require_fair(store: Store, tallies: list[Tally]) -> None:
    """Every version has the one winner that believes so, with its weights; the feed is whole."""
    won = [version for tally in tallies for version in tally.won]
    assert sorted(won) == list(range(1, TOTAL)), "each version has exactly one winner"
    assert sum(tally.conflicts for tally in tallies) > 0, "they never met"
    expected: dict[int, State] = {0: nth(0)}
    for tally in tallies:
        assert {Log(store).read(version).writer for version in tally.won} <= {tally.writer}
        expected |= {version: content(version, tally.number) for version in tally.won}
    found = require_clean(store)
    assert found.restorable == tuple(range(TOTAL))
    require_exact(store, expected, [1, TOTAL // 3, TOTAL // 2, TOTAL - 1])


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("stops", [False, True], ids=["loser goes on", "loser stops"])
@pytest.mark.parametrize("kind", ["memory", "file"])
def test_two_threads_race(kind: str, stops: bool, tmp_path: Path) -> None:
    shared = MemoryStore()
    stores: list[Store] = [shared, shared] if kind == "memory" else [LocalStore(tmp_path), LocalStore(tmp_path)]
    publish(stores[0], 0)
    barrier = threading.Barrier(2)

    def run(number: int) -> Tally:
        barrier.wait(LONG_S)
        return race(stores[number], number, total=TOTAL, stops=stops)

    with ThreadPoolExecutor(2) as pool:
        tallies = list(pool.map(run, range(2)))
    require_fair(stores[0], tallies)
    if stops:
        assert sorted(tally.conflicts for tally in tallies) == [0, 1]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("policy", ["go on", "stop"])
def test_two_processes_race(policy: str, tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    publish(store, 0)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parent)}
    with ExitStack() as ended:
        racers = []
        for number in range(2):
            command = [sys.executable, FOLDER / "racer.py", store.url, str(number), str(TOTAL), policy]
            racers.append(ended.enter_context(processes.running(command, env=environment, **pipes)))
        for racer in racers:
            assert racer.stdout is not None
            assert racer.stdout.readline() == "ready\n"
        with ThreadPoolExecutor(2) as pool:
            outputs = list(pool.map(lambda racer: racer.communicate("go\n", timeout=LONG_S)[0], racers))
    require_fair(store, [Tally(**json.loads(text)) for text in outputs])


def test_whole_publications_race() -> None:
    store = MemoryStore()
    publish(store, 0)
    expected: dict[int, State] = {0: nth(0)}
    barrier = threading.Barrier(2)

    def run(number: int) -> int:
        conflicts = 0
        for i in range(8):
            barrier.wait(timeout=LONG_S)
            n = 1 + 8 * number + i
            while True:
                try:
                    version = publish(store, n).version
                except ConflictError:
                    conflicts += 1
                else:
                    assert version not in expected
                    expected[version] = nth(n)
                    break
        return conflicts

    with ThreadPoolExecutor(2) as pool:
        assert sum(pool.map(run, range(2))) > 0
    assert len(expected) == 17
    require_whole(store, expected)


class Overtaken(FaultyStore):
    """Another writer commits right before operation `number`."""

    def __init__(self, store: Store, number: int, overtake: Callable[[], object]) -> None:
        def plan(operation: Operation) -> None:
            if operation.number == number:
                overtake()

        super().__init__(store, plan)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("before", [0, 2], ids=["new feed", "delta"])
def test_overtaken_at_every_operation(before: int) -> None:
    prepared = MemoryStore()
    for n in range(before):
        publish(prepared, n)
    counting = FaultyStore(copy_of(prepared))
    publish(counting, before)
    outcomes = set()
    for k in range(1, len(counting.operations) + 1):
        store = copy_of(prepared)
        states = {n: nth(n) for n in range(before)}
        states[before] = nth(70)
        overtaken = Overtaken(store, k, lambda store=store: publish(store, 70))
        try:
            states[publish(overtaken, before).version] = nth(before)
            outcomes.add("on top")
        except ConflictError as error:
            outcomes.add(f"conflict at {error.key}")
        require_whole(store, states)
    assert outcomes == {"on top", f"conflict at {keys.version_key(before)}"}


@pytest.mark.parametrize("same", [True, False], ids=["the same weights", "other weights"])
def test_a_stale_writer_changes_nothing(same: bool) -> None:
    store = MemoryStore()
    states = {n: nth(n) for n in range(9)}
    for n in range(3):
        publish(store, n)
    stale = Author(store)
    for n in range(3, 9):
        publish(store, n, anchor=n == 6)
    add_skip(store, 3, 7, states)
    prune(store, plan_prune(store, Retention(anchors=1, versions=2)))
    before = objects(store, "")
    for _ in range(2):
        with pytest.raises(ConflictError, match="committed by writer"):
            stale.commit(nth(3) if same else nth(50))
    after = objects(store, "")
    assert before.items() <= after.items()
    added = [key for key in after if key not in before]
    assert len(added) == 1
    assert keys.parse_payload_key(added[0]) is not None, "a payload that no manifest names, and nothing else"
    assert require_clean(store).restorable == (6, 7, 8)
    require_exact(store, states, (6, 7, 8))
    # What it left behind goes like any other orphan.
    publish(store, 9)
    require_exact(store, {9: nth(9)})


def test_a_commit_may_be_repeated() -> None:
    store = MemoryStore()
    publish(store, 0)
    author = Author(store)
    manifest = author.commit(nth(1))
    author.upload.commit(manifest)
    before = manifests(store)
    with pytest.raises(ConflictError) as caught:
        author.upload.commit(publish(copy_of_first(store), 2))
    assert manifests(store) == before
    assert author.upload.id in str(caught.value)


def copy_of_first(store: Store) -> MemoryStore:
    copy = copy_of(store)
    copy.delete(keys.version_key(1))
    return copy


class LyingStore(MemoryStore):
    """Takes the condition of a create, and ignores it."""

    def create(self, key: str, data: Data) -> bool:
        self.put(key, data)
        return True


UNFENCED: list[type[MemoryStore]] = [LyingStore, UnfencedStore]


@pytest.mark.parametrize("kind", UNFENCED)
def test_a_store_that_cannot_fence_is_leased(kind: type[MemoryStore], caplog: pytest.LogCaptureFixture) -> None:
    store = kind()
    first, second = Upload(store), Upload(store)
    with caplog.at_level(logging.WARNING):
        first.open()
    warned = any("ignores create-if-absent" in record.message for record in caplog.records)
    assert warned == (kind is LyingStore), "a loud warning for a store that claims what it cannot do"
    with pytest.raises(ConflictError, match="holds the lease") as caught:
        second.open()
    assert first.id in str(caught.value)
    first.close()
    second.open()
    second.close()
    assert objects(store, keys.LEASE) == {}
    for n in range(4):
        publish(store, n)
    require_whole(store, {n: nth(n) for n in range(4)})


@pytest.mark.parametrize("kind", UNFENCED)
def test_fencing_can_be_required(kind: type[MemoryStore]) -> None:
    store = kind()
    with pytest.raises(StoreError, match="create-if-absent") as caught:
        publish(store, 0, require_fencing=True)
    assert not caught.value.transient
    assert objects(store, "") == {}
    publish(MemoryStore(), 0, require_fencing=True)


def test_a_writer_that_lost_its_lease_commits_nothing() -> None:
    store = UnfencedStore()
    publish(store, 0)
    slow = Author(store)
    store.put(keys.LEASE, LeaseRecord(slow.upload.id, 1).to_bytes())
    publish(store, 1)
    other = Upload(store)
    other.open()
    before = manifests(store)
    with pytest.raises(ConflictError, match="holds the lease"):
        slow.commit(nth(2))
    assert manifests(store) == before
    other.close()
    with pytest.raises(ConflictError, match="committed by writer"):
        slow.commit(nth(2))
    assert manifests(store) == before
    require_whole(store, {0: nth(0), 1: nth(1)})


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


def test_a_lease_is_taken_renewed_and_released() -> None:
    store, clock = FaultyStore(UnfencedStore()), Clock()
    ours, theirs = LeasedStore(store, "ours", clock=clock), LeasedStore(store, "theirs", clock=clock)

    def puts() -> int:
        return sum(op.verb == "put" for op in store.operations)

    ours.take()
    ours.take()
    assert puts() == 1, "not renewed while more than half of it is left"
    clock.now_s += LEASE_S / 2 + 1
    ours.take()
    assert puts() == 2
    clock.now_s += LEASE_S - 1
    with pytest.raises(ConflictError, match="writer ours holds the lease") as caught:
        theirs.take()
    assert caught.value.key == keys.LEASE
    theirs.release()
    with pytest.raises(ConflictError):
        theirs.take()
    ours.release()
    ours.release()
    theirs.take()
    with pytest.raises(ConflictError, match="writer theirs holds the lease"):
        ours.take()


def test_a_lease_runs_out() -> None:
    store, clock = UnfencedStore(), Clock()
    dead, ours = LeasedStore(store, "dead", clock=clock), LeasedStore(store, "ours", clock=clock)
    dead.take()
    clock.now_s += LEASE_S + 1
    ours.take()
    with pytest.raises(ConflictError, match="writer ours holds the lease"):
        dead.take()
    dead.release()
    ours.take()


def test_a_lease_that_two_take_at_the_same_moment() -> None:
    store, clock = UnfencedStore(), Clock()
    theirs = LeasedStore(store, "theirs", clock=clock)
    # Theirs has looked before ours writes, and writes right after it.
    overtaken = Overtaken(store, 3, lambda: store.put(keys.LEASE, LeaseRecord("theirs", 2_000_000).to_bytes()))
    with pytest.raises(ConflictError, match="at the same time"):
        LeasedStore(overtaken, "ours", clock=clock).take()
    theirs.take()
