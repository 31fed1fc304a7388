"""A replica that looks after every operation on the store sees whole versions only, and never goes back."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from known import add_skip, copy_of, head_of, holds, nth, publish, require_whole, widened
from safetensors.numpy import load_file
from support.feeds import WatchedStore, replay
from support.helpers import State, same_bits

from deltasync.errors import NotFoundError
from deltasync.feed.log import Log
from deltasync.feed.plan import plan
from deltasync.format.weights import Weights
from deltasync.state import load
from deltasync.store.memory import MemoryStore
from deltasync.store.protocol import Store
from deltasync.testing.faulty import Crash, Fault, FaultyStore, at
from deltasync.trainer import versions as anchors
from deltasync.upkeep.prune import Retention, plan_prune, prune
from deltasync.upkeep.restore import restore
from deltasync.upkeep.verify import verify


class Replica:
    """Holds the newest version, moved on from the one before where there is a way, and compares every bit."""

    def __init__(self, states: dict[int, State]) -> None:
        self.states = states
        self.seen: list[int] = []
        self.looks = 0
        self._weights: Weights | None = None

    def look(self, store: Store) -> None:
        self.looks += 1
        log = Log(store)
        found = log.head()
        if found is None:
            assert not self.seen, "a head that was there is gone"
            return
        assert not self.seen or found.version >= self.seen[-1], "the head went back"
        assert holds(load(log, found), self.states[found.version])
        self._follow(log, found.version)
        self.seen.append(found.version)

    def _follow(self, log: Log, version: int) -> None:
        target = log.read(version)
        if self._weights is None or not self.seen or target.kind != "delta":
            self._weights = load(log, target)
            return
        way = plan(log, target, start=self.seen[-1])
        if way.edges:
            replay(log, way, self._weights)
        assert holds(self._weights, self.states[version])


@pytest.mark.usefixtures("one_thread")
def test_a_replica_sees_whole_versions_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchors, "SHARD_ELEMENTS", 1)
    states: dict[int, State] = {}
    replica = Replica(states)
    store = MemoryStore()
    watched = WatchedStore(store, replica.look)
    makes: list[Callable[[int], State]] = [nth, nth, nth, nth, widened, widened, widened]
    for n, make in enumerate(makes):
        states[n] = make(n)
        publish(watched, n, make, anchor=n in (2, 4))
    add_skip(watched, 0, 3, states)
    add_skip(watched, 4, 6, states)
    prune(watched, plan_prune(watched, Retention(anchors=1, versions=2)))
    assert sorted(set(replica.seen)) == list(range(7))
    assert replica.looks > 50
    assert holds(load(Log(store), Log(store).require_head()), widened(6))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", ["crash_before", "crash_after"])
def test_a_replica_beside_a_publisher_that_keeps_dying(kind: str) -> None:
    states: dict[int, State] = {}
    replica, store = Replica(states), MemoryStore()
    for k in range(1, 34):
        version = head_of(store) + 1
        states[version] = nth(version)
        fault = Fault("crash_before" if kind == "crash_before" else "crash_after")
        watched = WatchedStore(FaultyStore(store, at(k, fault)), lambda _: replica.look(store))
        with suppress(Crash):
            publish(watched, version, anchor=k % 5 == 0)
    require_whole(store, {v: states[v] for v in range(head_of(store) + 1)})
    assert len(set(replica.seen)) > 5


class Interrupted:
    """A store that lets something else happen right before its operation number `number`."""

    def __init__(self, store: Store, number: int, interrupt: Callable[[Store], None]) -> None:
        self.done = 0
        self._store = store
        self._number = number
        self._interrupt = interrupt

    def __getattr__(self, name: str) -> object:
        found = getattr(self._store, name)
        if name not in ("put", "create", "get", "get_range", "list", "delete"):
            return found

        def counted(*args: object, **options: object) -> object:
            self.done += 1
            if self.done == self._number:
                self._interrupt(self._store)
            return found(*args, **options)

        return counted


def prepared() -> tuple[MemoryStore, dict[int, State]]:
    store, states = MemoryStore(), {n: nth(n) for n in range(6)}
    for n in range(5):
        publish(store, n, anchor=n in (1, 3))
    add_skip(store, 0, 3, states)
    return store, states


def do_prune(store: Store) -> None:
    prune(store, plan_prune(store, Retention(anchors=1, versions=2)))


def do_publish(store: Store) -> None:
    publish(store, 5, anchor=True)


INTERRUPTS = {"prune": do_prune, "publish": do_publish}


def each_moment(run: Callable[[Store], None], interrupt: Callable[[Store], None]) -> int:
    """Run once for each of its operations, on a fresh feed, with the interruption right before it; their number."""
    full, _ = prepared()
    k = 0
    while True:
        k += 1
        store = copy_of(full)
        interrupted = Interrupted(store, k, interrupt)
        run(interrupted)  # type: ignore[arg-type]
        if interrupted.done < k:
            return k - 1


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("interrupt", INTERRUPTS.values(), ids=INTERRUPTS.keys())
def test_verify_beside_others_finds_nothing(interrupt: Callable[[Store], None]) -> None:
    def run(store: Store) -> None:
        found = verify(store, deep=True)
        assert found.is_clean, (found.damages, found.lost)

    assert each_moment(run, interrupt) > 20


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("interrupt", INTERRUPTS.values(), ids=INTERRUPTS.keys())
def test_restore_beside_others_is_exact(interrupt: Callable[[Store], None], tmp_path: Path) -> None:
    _, states = prepared()
    made: list[Path] = []

    def run(store: Store) -> None:
        made.append(tmp_path / str(len(made)))
        version = restore(store, made[-1]).version
        assert version in (4, 5)
        assert same_bits(load_file(made[-1] / "model.safetensors"), states[version])

    assert each_moment(run, interrupt) > 10


@pytest.mark.usefixtures("one_thread")
def test_restore_of_a_version_while_it_is_pruned() -> None:
    """Exact, or not found: never other bits, and never the news that something is corrupt."""
    _, states = prepared()
    outcomes = set()

    def run(store: Store) -> None:
        log = Log(store)
        try:
            assert holds(load(log, log.read(2)), states[2])
            outcomes.add("exact")
        except NotFoundError:
            outcomes.add("gone")

    each_moment(run, do_prune)
    assert outcomes == {"exact", "gone"}


@pytest.mark.usefixtures("one_thread")
def test_publish_beside_prune() -> None:
    _, states = prepared()

    def run(store: Store) -> None:
        publish(store, 5)
        found = verify(store, deep=True)
        assert found.is_clean, (found.damages, found.lost)
        assert holds(load(Log(store), Log(store).read(5)), states[5])

    assert each_moment(run, do_prune) > 20


@pytest.mark.usefixtures("one_thread")
def test_prune_beside_publish() -> None:
    _, states = prepared()

    def run(store: Store) -> None:
        do_prune(store)
        found = verify(store, deep=True)
        assert found.is_clean, (found.damages, found.lost)
        for version in range(3, head_of(store) + 1):
            assert holds(load(Log(store), Log(store).read(version)), states[version])

    assert each_moment(run, do_publish) > 20
