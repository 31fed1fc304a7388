"""A replica that dies, or whose store fails, anywhere: it ends at the head, and never shows a mixture."""

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support import LONG_S
from support.feeds import Feed, Gate, same_weights
from support.replicas import Moves, TorchTarget, fetched, follower, following

from deltasync import blocks
from deltasync.checkpoint import open_checkpoint
from deltasync.format import keys
from deltasync.replica import follower as follower_module
from deltasync.replica import loop, mirror
from deltasync.replica.folder import FolderTarget
from deltasync.replica.follower import Follower
from deltasync.store import patient
from deltasync.store.protocol import Store
from deltasync.testing.faulty import Crash, Fault, FaultyStore, Operation, at, at_random
from deltasync.trainer import versions as anchors


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchors, "SHARD_ELEMENTS", 1)
    monkeypatch.setattr(follower_module, "_PATIENCE_S", 0.01)
    for name in ("FIRST_PAUSE_S", "LONGEST_PAUSE_S"):
        monkeypatch.setattr(patient, name, 0.001)
    for name in ("_POLL_FIRST_S", "_POLL_MOST_S", "_OUTAGE_MOST_S"):
        monkeypatch.setattr(loop, name, 0.001)


@pytest.fixture(scope="module")
def feed() -> Feed:
    """All kinds of edges: an anchor in shards, deltas, a skip, a late anchor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(anchors, "SHARD_ELEMENTS", 1)
        feed = Feed.of(7)
        feed.skip(1, 4)
        feed.late_anchor(5)
    assert len(feed.log.read(0).payloads) > 3
    return feed


class Replica:
    """A follower with a mirror in a file and a folder as target; `die` lets go of both as the end of a process does."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.target = FolderTarget(folder / "model")
        self.follower: Follower = follower(store, self.target, mirror=folder / "mirror", replica="one", beat_s=0.0)

    def live(self) -> None:
        """The head in several moves: from nothing, by a skip and deltas, back, and on by an anchor."""
        for version in (1, 4, 2, None):
            self.follower.advance(to=version)

    def die(self) -> None:
        self.follower._resources.close()


def require_whole(feed: Feed, folder: Path) -> None:
    """What the folder shows, if anything, is one version."""
    link = folder / "model"
    if not link.is_symlink():
        return
    target = FolderTarget(link)
    target.open()
    version = target.version
    target.close()
    assert version is not None
    assert same_weights(open_checkpoint(link).weights, feed.states[version])


def require_recovery(feed: Feed, folder: Path, store: Store | None = None) -> None:
    """Another process goes on, and ends at the head."""
    require_whole(feed, folder)
    again = Replica(feed.store if store is None else store, folder)
    again.follower.advance()
    assert again.target.version == 6
    assert same_weights(open_checkpoint(folder / "model").weights, feed.states[6])
    assert again.follower.scrub() == []
    again.die()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", ["crash_before", "crash_after"])
def test_a_replica_dies_at_every_operation(kind: Any, feed: Feed, tmp_path: Path) -> None:
    counting = FaultyStore(feed.store)
    whole = Replica(counting, tmp_path)
    whole.live()
    whole.die()
    count = len(counting.operations)
    assert count > 40
    for number in range(1, count + 1):
        folder = tmp_path / str(number)
        folder.mkdir()
        replica = Replica(FaultyStore(feed.store, at(number, Fault(kind))), folder)
        with pytest.raises(Crash):
            replica.live()
        replica.die()
        require_recovery(feed, folder)


class Countdown:
    """Lets a function of the replica's work `left` times, and then dies before it or after it."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: Any, name: str, left: int, *, is_after: bool) -> None:
        self.calls = 0
        inner = getattr(owner, name)

        def counted(*args: Any) -> Any:
            self.calls += 1
            if self.calls == left and not is_after:
                raise Crash(name)
            result = inner(*args)
            if self.calls == left:
                raise Crash(name)
            return result

        patch.setattr(owner, name, counted)


PLACES = {
    "blocks of an anchor": (blocks, "restore_block"),
    "writes to the mirror": (blocks, "overwrite"),
    "notes beside it": (mirror.MappedState, "_note"),
    "files of the folder": (FolderTarget, "stage"),
    "switches": (FolderTarget, "commit"),
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("owner", "name"), PLACES.values(), ids=PLACES.keys())
def test_a_replica_dies_between_its_own_writes(
    owner: Any, name: str, is_after: bool, feed: Feed, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        counting = Countdown(patch, owner, name, -1, is_after=False)
        whole = Replica(feed.store, tmp_path)
        whole.live()
        whole.die()
    assert counting.calls >= 4
    for number in range(1, counting.calls + 1):
        folder = tmp_path / str(number)
        folder.mkdir()
        replica = Replica(feed.store, folder)
        with pytest.MonkeyPatch.context() as patch:
            Countdown(patch, owner, name, number, is_after=is_after)
            with pytest.raises(Crash):
                replica.live()
        replica.die()
        require_recovery(feed, folder)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("is_transient", [True, False], ids=["for a moment", "for good"])
@pytest.mark.parametrize("kind", ["refuse", "lose", "flip"])
def test_an_error_at_every_operation(kind: Any, is_transient: bool, feed: Feed, tmp_path: Path) -> None:
    """The move succeeds, or fails and leaves the target whole, and the next one succeeds."""
    counting = FaultyStore(feed.store)
    whole = Replica(counting, tmp_path)
    whole.live()
    whole.die()
    for number in range(1, len(counting.operations) + 1):
        folder = tmp_path / str(number)
        folder.mkdir()
        replica = Replica(FaultyStore(feed.store, at(number, Fault(kind, transient=is_transient))), folder)
        with suppress(*ERRORS):
            replica.live()
        require_shown(replica, feed)
        replica.follower.advance()
        assert replica.target.version == 6
        require_shown(replica, feed)
        replica.die()


ERRORS = (follower_module.DeltasyncError,)


def require_shown(replica: Replica, feed: Feed) -> None:
    version = replica.target.version
    if version is not None:
        assert same_weights(open_checkpoint(replica.target._path).weights, feed.states[version])


FAULTS = {
    "errors": [Fault("refuse"), Fault("cut"), Fault("lose")],
    "errors and flipped bits": [Fault("refuse"), Fault("lose"), Fault("flip")],
    "errors and delays": [Fault("refuse"), Fault("delay", delay_s=0.002)],
}


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS.keys())
@pytest.mark.parametrize("seed", range(4))
def test_one_operation_in_five_fails(seed: int, faults: list[Fault]) -> None:
    feed, moves = Feed.of(1), Moves()
    store = FaultyStore(feed.store, at_random(0.2, faults, seed=seed))
    target = TorchTarget(feed.states[0].layout)
    replica = follower(store, target, observer=moves, beat_s=0.0)
    with following(replica) as raised:
        for version in range(1, 15):
            feed.delta()
            if version % 5 == 0:
                feed.late_anchor(version)
            if version % 4 == 0:
                moves.await_version(version)
        moves.await_version(14)
    assert not raised
    assert target.holds(feed.states[14])
    assert target.shown == sorted(target.shown)


def test_a_store_that_stalls_holds_up_nothing_else() -> None:
    feed, moves = Feed.of(2), Moves()
    target = TorchTarget(feed.states[0].layout)
    gate = Gate("get_range", feed.payload_keys(feed.log.read(1))[0])
    replica = follower(FaultyStore(feed.store, gate), target, observer=moves)
    replica.advance(to=0)
    with following(replica) as raised:
        gate.await_operation()
        status = replica.status()
        assert (status.version, status.head, status.is_following) == (0, 1, True)
        replica.pause()
        replica.nudge()
        assert target.holds(feed.states[0])
        gate.open()
        moves.await_version(1)
    assert not raised
    assert target.holds(feed.states[1])


def test_a_store_that_dies_in_the_middle_of_an_anchor(feed: Feed) -> None:
    """It comes back, and only what is missing is fetched."""
    refs = feed.log.read(0).payloads
    is_dead, is_back = threading.Event(), threading.Event()

    def dies(operation: Operation) -> Fault | None:
        if operation.key == keys.payload_key(refs[3].sha256):
            is_dead.set()
        return Fault("refuse") if is_dead.is_set() and not is_back.is_set() else None

    moves, store = Moves(), FaultyStore(feed.store, dies)
    target = TorchTarget(feed.states[0].layout)
    replica = follower(store, target, observer=moves)
    replica.pin(0)
    with following(replica) as raised:
        assert is_dead.wait(LONG_S)
        count = len(store.operations)
        while len(store.operations) < count + 30:
            is_back.wait(0.001)
        assert target.version is None
        done = set(replica._mirror._written)
        before = len(fetched(store))
        is_back.set()
        moves.await_version(0)
    assert not raised
    # The first one may be asked for the layout once more.
    assert not (set(fetched(store)[before:]) & done) - {refs[0].sha256}
    assert target.holds(feed.states[0])
