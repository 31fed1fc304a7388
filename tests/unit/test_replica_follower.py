"""A follower and a torch target: every advance is bit-exact and takes the cheapest plan; bad input is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.feeds import Feed
from support.helpers import state, write_sharded
from support.replicas import (
    TorchTarget,
    fetched,
    follower,
    following,
    long_feed,
    quick,
    small_step,
    target_for,
    wait_until,
)

from deltasync.errors import InvalidInputError, MismatchError, NotFoundError
from deltasync.feed.plan import plan
from deltasync.format import keys
from deltasync.format.manifest import BaseRef
from deltasync.format.weights import Weights, zeros
from deltasync.replica.target import Staged
from deltasync.store.memory import MemoryStore
from deltasync.testing.faulty import FaultyStore
from deltasync.upkeep.prune import Retention, plan_prune, prune

__all__ = ["quick"]


# Plans


def test_version_after_version() -> None:
    feed = long_feed(1)
    target = target_for(feed)
    replica = follower(feed.store, target)
    for version in range(6):
        moved = replica.advance()
        assert moved is not None
        assert (moved.version, moved.from_version) == (version, None if version == 0 else version - 1)
        assert moved.nbytes == feed.log.read(version).nbytes
        assert moved.changed == feed.log.read(version).changed
        assert target.holds(feed.states[version])
        assert replica.advance() is None
        feed.delta(small_step(feed))
    assert target.shown == [0, 1, 2, 3, 4, 5]
    assert target.whole == [True] + 5 * [False]


def test_one_version_takes_few_requests() -> None:
    feed = long_feed(2)
    store = FaultyStore(feed.store)
    target = target_for(feed)
    replica = follower(store, target)
    replica.advance()
    before = len(store.operations)
    replica.advance()
    assert [op.verb for op in store.operations[before:]] == ["get_range"], "one small request shows that nothing is new"
    feed.delta()
    before = len(store.operations)
    replica.advance()
    assert [op.verb for op in store.operations[before:]] == ["get_range"] * 3


def prune_to(feed: Feed, *, versions: int) -> None:
    prune(feed.store, plan_prune(feed.store, Retention(anchors=1, versions=versions)))


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
    """The cheapest plan, with all of its bytes, and one commit."""
    feed = Feed(MemoryStore())
    for item in two_hundred.store.list():
        feed.store.put(item.key, two_hundred.store.get(item.key))
    feed.states, feed.head = list(two_hundred.states), two_hundred.head
    store = FaultyStore(feed.store)
    target = target_for(feed)
    replica = follower(store, target)
    if start is not None:
        replica.advance(to=start)
    more(feed)
    expected = plan(feed.log, feed.log.require_head(), start=start)
    before = len(fetched(store))
    moved = replica.advance()
    assert moved is not None
    assert moved.nbytes == expected.nbytes
    assert list(moved.edges) == [edge.manifest.kind for edge in expected.edges]
    assert set(moved.edges) - {"anchor"} == kinds - {"anchor"}
    assert ("anchor" in moved.edges) == (start is None or "anchor" in kinds)
    payloads = {ref.sha256 for edge in expected.edges for ref in edge.manifest.payloads}
    assert set(fetched(store)[before:]) == payloads
    assert target.shown == ([] if start is None else [start]) + [200]
    assert target.holds(feed.states[200])


def test_a_chain_that_was_pruned_away(caplog: pytest.LogCaptureFixture) -> None:
    """Its manifests are still there: one read of the first payload shows that it was pruned."""
    feed = long_feed(12)
    target = target_for(feed)
    replica = follower(feed.store, target)
    replica.advance(to=8)
    feed.late_anchor(10)
    prune_to(feed, versions=2)
    moved = replica.advance()
    expected = plan(feed.log, feed.log.require_head())
    assert moved is not None
    assert (moved.nbytes, moved.edges) == (expected.nbytes, ("anchor", "delta"))
    assert target.holds(feed.states[11])
    assert replica.status().counts.rerouted == 1
    assert keys.version_key(9) in caplog.text


def test_back_and_forth() -> None:
    feed = Feed.of(6)
    feed.late_anchor(3)
    target = target_for(feed)
    replica = follower(feed.store, target)
    for version in (5, 2, 2, 4, 0, 5, 3, 1):
        before = target.version
        moved = replica.advance(to=version)
        assert (moved is None) == (before == version)
        assert target.version == version
        assert target.holds(feed.states[version])


def test_a_base(tmp_path: Path) -> None:
    write_sharded(tmp_path / "base", state())
    feed = Feed()
    feed.base(state(), BaseRef("no-such/model"))
    feed.delta()
    target = target_for(feed)
    with pytest.raises(NotFoundError, match="no-such/model"):
        follower(feed.store, target).advance()
    moved = follower(feed.store, target, base=tmp_path / "base").advance()
    assert moved is not None
    assert moved.edges == ("base", "delta")
    assert moved.nbytes == feed.log.read(1).nbytes
    assert target.holds(feed.states[1])


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
    with follower(store, target, mirror=tmp_path / "mirror") as replica:
        with pytest.raises(MismatchError, match=named):
            replica.advance()
        assert target.version is None
        assert target.holds(zeros(Weights.of(state()).layout))
        assert replica.status().mirror is None
        assert not (tmp_path / "mirror").exists()
        assert len(fetched(store)) == 1, "the layout is enough to refuse"
        with following(replica) as raised:
            wait_until(lambda: bool(raised))
        assert isinstance(raised[0], MismatchError)


def test_another_model_behind_a_mirror_that_is_there_already(tmp_path: Path) -> None:
    """Nothing is fetched then, and still nothing is touched."""
    feed = Feed.of(2)
    with follower(feed.store, target_for(feed), mirror=tmp_path / "mirror") as first:
        first.advance()
    staged: list[Staged] = []

    class Wider(TorchTarget):
        def stage(self, found: Staged) -> None:
            staged.append(found)

    wider = Wider(other(zz=np.zeros(3, np.float32)).layout)
    with (
        follower(feed.store, wider, mirror=tmp_path / "mirror") as second,
        pytest.raises(MismatchError, match="'zz'"),
    ):
        second.advance()
    assert not staged


def test_a_layout_that_changes_between_versions() -> None:
    feed = Feed.of(2)
    target = target_for(feed)
    replica = follower(feed.store, target)
    replica.advance()
    feed.anchor(other(zz=np.zeros(3, np.float32)))
    with pytest.raises(MismatchError, match="'zz'"):
        replica.advance()
    assert target.version == 1
    assert replica.status().mirror == 1
    assert target.holds(feed.states[1])
    wider = TorchTarget(feed.states[2].layout)
    follower(feed.store, wider).advance()
    assert wider.holds(feed.states[2])
    assert target.holds(feed.states[1])


@pytest.mark.parametrize("ask", [lambda r: r.advance(to=9), lambda r: r.pin(9)], ids=["advance", "pin"])
def test_an_unknown_version(ask: Callable[[Any], object]) -> None:
    feed = Feed.of(4)
    feed.late_anchor(3)
    prune_to(feed, versions=1)
    target = target_for(feed)
    replica = follower(feed.store, target)
    with pytest.raises(NotFoundError, match=r"version 9 .* has 3 to 3") as caught:
        ask(replica)
    assert caught.value.version == 9
    assert caught.value.hint is not None
    assert target.version is None


def test_an_empty_feed() -> None:
    with pytest.raises(NotFoundError, match="no version"):
        follower(MemoryStore(), target_for(Feed.of(1))).advance()


def test_a_closed_follower() -> None:
    feed = Feed.of(1)
    replica = follower(feed.store, target_for(feed))
    replica.close()
    replica.close()
    with pytest.raises(InvalidInputError, match="closed"):
        replica.advance()
    with pytest.raises(InvalidInputError, match="replica id"):
        follower(feed.store, target_for(feed), replica="a/b", beat_s=1.0)


# Status


def test_an_error_on_demand_is_in_the_status_until_the_next_success() -> None:
    feed = long_feed(2)
    target = target_for(feed)
    replica = follower(feed.store, target)
    replica.advance(to=0)
    with pytest.raises(NotFoundError) as raised:
        replica.advance(to=99)
    assert replica.error is raised.value
    assert replica.status().error == f"NotFoundError: {raised.value}"
    assert replica.advance() is not None
    assert replica.status().error is None
    target.fails = refuse
    feed.delta(small_step(feed))
    with pytest.raises(MismatchError):
        replica.advance()
    assert replica.status().error == "MismatchError: another model"
    target.fails = lambda staged: None
    replica.advance(to=1)
    assert replica.status().error is None


def refuse(staged: Staged) -> None:
    raise MismatchError("another model")


def test_staleness_counts_from_the_poll_that_found_the_version_to_be_the_one_to_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    feed = long_feed(3)
    target = target_for(feed)
    replica = follower(feed.store, target)
    now_s = 100.0
    monkeypatch.setattr("deltasync.replica.follower.time.monotonic", lambda: now_s)
    assert replica.status().stale_s is None
    # A version that is asked for by its number may be any one.
    replica.advance(to=0)
    assert replica.status().stale_s is None
    replica.advance()
    now_s = 107.0
    assert replica.status().stale_s == 7.0
    # Nothing new is news, too.
    replica.advance()
    assert replica.status().stale_s == 0.0
    feed.delta(small_step(feed))
    target.fails = refuse
    now_s = 110.0
    with pytest.raises(MismatchError):
        replica.advance()
    assert replica.status().stale_s == 3.0
    target.fails = lambda staged: None
    replica.pin(1)
    replica.advance()
    assert (replica.status().version, replica.status().stale_s) == (1, 0.0)


def test_the_target_of_the_documentation() -> None:
    """It follows, gets versions by changes, and repairs."""
    page = (Path(__file__).parents[2] / "docs" / "replicas.md").read_text(encoding="utf-8")
    code = page.partition("## Your own target")[2].partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {}
    exec(code, names)
    feed, target = long_feed(3), names["ArraysTarget"]()
    with follower(feed.store, target) as replica:
        for version in (0, 1, 2):
            replica.advance(to=version)
            assert target.version == version
            pairs = zip(feed.states[version].layout.tensors, feed.states[version].arrays, strict=True)
            assert all(np.array_equal(target.live[spec.name], array) for spec, array in pairs)
        target.live["packed"][0] ^= 1
        assert [damage.tensor for damage in replica.scrub()] == ["packed"]
        assert replica.scrub() == []
