"""A publisher that dies or gets an error at any operation: what was committed stays, and others go on."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
from known import (
    UnfencedStore,
    add_skip,
    copy_of,
    head_of,
    manifests,
    nth,
    objects,
    publish,
    require_clean,
    require_exact,
    require_versions,
    require_whole,
    widened,
)
from support.helpers import State

from deltasync.errors import ConflictError, StoreError
from deltasync.format import keys
from deltasync.store.memory import MemoryStore
from deltasync.store.protocol import Store
from deltasync.testing.faulty import Crash, Fault, FaultyStore, at, at_random
from deltasync.trainer import versions as anchors
from deltasync.upkeep.prune import ORPHAN_S, Retention, plan_prune, prune


@dataclass(frozen=True, slots=True)
class Publication:
    """Versions that are there before (all but the first are deltas), and the one that is being published."""

    before: int
    make: Callable[[int], State] = nth
    options: dict[str, Any] = field(default_factory=dict)
    starts_with_base: bool = False

    def prepared(self, kind: type[MemoryStore] = MemoryStore) -> MemoryStore:
        store = kind()
        for n in range(self.before):
            publish(store, n, base=self.starts_with_base and n == 0)
        return store

    def run(self, store: Store) -> None:
        publish(store, self.before, self.make, **self.options)

    @property
    def states(self) -> dict[int, State]:
        return {n: nth(n) for n in range(self.before)}


PUBLICATIONS = {
    "first anchor": Publication(0),
    "base": Publication(0, options={"base": True}),
    "delta": Publication(2),
    "delta on a base": Publication(1, starts_with_base=True),
    "delta and late anchor": Publication(2, options={"anchor": True}),
    "another layout": Publication(2, widened, {"anchor": True}),
}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _several_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchors, "SHARD_ELEMENTS", 1)


def operations_of(run: Callable[[Store], object], store: Store) -> int:
    counting = FaultyStore(store)
    run(counting)
    return len(counting.operations)


@pytest.mark.parametrize("kind", ["crash_before", "crash_after"])
@pytest.mark.parametrize("case", PUBLICATIONS.values(), ids=PUBLICATIONS.keys())
def test_crash_at_every_operation(case: Publication, kind: Any) -> None:
    prepared = case.prepared()
    count = operations_of(case.run, copy_of(prepared))
    assert count > 8
    for k in range(1, count + 1):
        store, states = copy_of(prepared), case.states
        dying = FaultyStore(store, at(k, Fault(kind)))
        with pytest.raises(Crash):
            case.run(dying)
        commit = keys.version_key(case.before)
        is_committed = any(
            op.key == commit and op.verb == "create" and (op.number < k or kind == "crash_after")
            for op in dying.operations
        )
        if is_committed:
            states[case.before] = case.make(case.before)
        require_versions(store, states)
        found = manifests(store)
        # Another process publishes the same weights once more, and then goes on.
        for n in (case.before, case.before + 1):
            states[head_of(store) + 1] = case.make(n)
            publish(store, n, case.make, anchor=case.make is widened)
        require_whole(store, states)
        assert found.items() <= manifests(store).items()


FAULTS = {
    "refused": Fault("refuse"),
    "refused for good": Fault("refuse", transient=False),
    "answer lost": Fault("lose"),
}


@pytest.mark.parametrize(
    ("publication", "name"),
    [*product(PUBLICATIONS, ["refused", "answer lost"]), ("delta and late anchor", "refused for good")],
)
def test_error_at_every_operation(publication: str, name: str) -> None:
    case, fault = PUBLICATIONS[publication], FAULTS[name]
    prepared = case.prepared()
    for k in range(1, operations_of(case.run, copy_of(prepared)) + 1):
        store, states = copy_of(prepared), case.states
        try:
            case.run(FaultyStore(store, at(k, fault)))
        except StoreError:
            is_committed = head_of(store) == case.before
            # Of all errors only one of the late anchor can come after the commit.
            assert not is_committed or case is PUBLICATIONS["delta and late anchor"]
        else:
            is_committed = True
        if is_committed:
            states[case.before] = case.make(case.before)
        require_versions(store, states)
        found = manifests(store)
        states[head_of(store) + 1] = case.make(case.before + 1)
        publish(store, case.before + 1, case.make, anchor=case.make is widened)
        require_whole(store, states)
        assert found.items() <= manifests(store).items()


def test_lost_answer_of_the_commit_is_no_error() -> None:
    case = PUBLICATIONS["delta"]
    store = case.prepared()
    commit = keys.version_key(case.before)
    case.run(FaultyStore(store, lambda op: Fault("lose") if (op.verb, op.key) == ("create", commit) else None))
    require_whole(store, {**case.states, case.before: nth(case.before)})


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_error_at_every_operation_under_a_lease(fault: Fault) -> None:
    """The lease does not keep the next attempt out. Only the commit itself can fail and have happened."""
    case = PUBLICATIONS["delta"]
    prepared = case.prepared(UnfencedStore)
    for k in range(1, operations_of(case.run, copy_of(prepared, UnfencedStore)) + 1):
        store, states = copy_of(prepared, UnfencedStore), case.states
        faulty = FaultyStore(store, at(k, fault))
        try:
            case.run(faulty)
        except StoreError:
            is_committed = head_of(store) == case.before
            assert not is_committed or faulty.operations[k - 1].key == keys.version_key(case.before)
        else:
            is_committed = True
        if is_committed:
            states[case.before] = nth(case.before)
        require_versions(store, states)
        states[head_of(store) + 1] = nth(case.before + 1)
        if faulty.operations[k - 1].key == keys.LEASE:
            # The lease itself could not be taken or given back: it runs out.
            store.delete(keys.LEASE)
        publish(store, case.before + 1)
        require_whole(store, states)


SOAK = [Fault("refuse"), Fault("refuse", transient=False), Fault("lose"), Fault("cut"), Fault("delay", delay_s=3.0)]


@pytest.mark.parametrize("seed", range(4))
def test_many_faults(seed: int) -> None:
    store, states, slept = MemoryStore(), dict[int, State](), list[float]()
    for n in range(6):
        for attempt in range(300):
            head = head_of(store)
            plan = at_random(0.15, SOAK, seed=10_000 * seed + 1000 * n + attempt)
            try:
                publish(FaultyStore(store, plan, sleep=slept.append), n, anchor=n % 3 == 2)
            except (StoreError, ConflictError):
                failed = True
            else:
                failed = False
            states |= {version: nth(n) for version in range(head + 1, head_of(store) + 1)}
            if not failed:
                break
        else:
            pytest.fail("300 attempts, and none went through")
    require_whole(store, states)
    assert slept


def feed_to_prune() -> tuple[MemoryStore, dict[int, State]]:
    store = MemoryStore()
    states = {n: nth(n) for n in range(7)}
    for n in states:
        publish(store, n, anchor=n in (1, 4))
    for start, end in ((0, 3), (1, 5), (4, 6)):
        add_skip(store, start, end, states)
    return store, states


def do_prune(store: Store) -> None:
    prune(store, plan_prune(store, Retention(anchors=1, versions=3)))


def do_prune_later(store: MemoryStore) -> None:
    """Two days later, by the clock of the store as well."""
    later_s = time.time() + 2 * ORPHAN_S
    store._clock = lambda: later_s
    prune(store, plan_prune(store, Retention(anchors=1, versions=3), clock=lambda: later_s))


@pytest.mark.parametrize("kind", ["crash_before", "crash_after"])
def test_prune_interrupted_at_every_operation(kind: Any) -> None:
    full, states = feed_to_prune()
    pruned = copy_of(full)
    count = operations_of(do_prune, pruned)
    kept = {version: states[version] for version in range(4, 7)}
    assert set(require_clean(pruned).restorable) == set(kept)
    for k in range(1, count + 1):
        store = copy_of(full)
        with pytest.raises((Crash, StoreError)):
            do_prune(FaultyStore(store, at(k, Fault(kind))))
        restorable = require_clean(store).restorable
        assert kept.keys() <= set(restorable)
        require_exact(store, states, restorable)
        # Without its manifest a payload is an orphan: it is deleted once it is old.
        do_prune_later(store)
        assert objects(store, "") == objects(pruned, "")
    require_exact(pruned, kept)
