"""Any feed, any moves: a target always has exactly the bits of the version that it says."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import repeats
from support.feeds import Feed
from support.helpers import state
from support.replicas import TorchTarget, follower
from support.strategies import random_change

from deltasync.errors import NotFoundError
from deltasync.format.weights import Weights
from deltasync.upkeep.prune import Retention, plan_prune, prune

ACTIONS = st.one_of(
    st.tuples(st.just("delta"), st.sampled_from([0.0, 0.001, 0.05, 0.5]), st.integers(0, 2**32)),
    st.tuples(st.just("anchor"), st.sampled_from([0.0, 0.05]), st.integers(0, 2**32)),
    st.tuples(st.just("late anchor"), st.floats(0, 1), st.just(0)),
    st.tuples(st.just("skip"), st.floats(0, 1), st.floats(0, 1)),
    st.tuples(st.just("prune"), st.integers(1, 2), st.integers(1, 4)),
    st.tuples(st.just("advance"), st.one_of(st.none(), st.floats(0, 1)), st.just(0)),
    st.tuples(st.just("restart"), st.booleans(), st.just(0)),
)


def grow(feed: Feed, kind: str, share: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    old = feed.states[-1]
    specs = zip(old.layout.tensors, old.arrays, strict=True)
    new = Weights(old.layout, tuple(random_change(rng, t.dtype, a, share, "ulp") for t, a in specs))
    if kind == "delta":
        feed.delta(new)
    else:
        feed.anchor(new)


class Run:
    """A feed, and one replica of it."""

    def __init__(self, path: Path | None) -> None:
        self.feed = Feed()
        self.feed.anchor(state())
        self.path = path
        self.target = TorchTarget(self.feed.states[0].layout)
        self.replica = follower(self.feed.store, self.target, mirror=path)

    def act(self, kind: str, one: float | None, two: float) -> None:
        feed, last = self.feed, len(self.feed.states) - 1
        match kind:
            case "delta" | "anchor":
                assert one is not None
                grow(feed, kind, one, int(two))
            case "late anchor":
                version = int((one or 0) * last)
                if feed.log.read(version).kind == "delta" and version not in feed.log.anchors():
                    feed.late_anchor(version)
            case "skip":
                start, end = sorted((int((one or 0) * last), int(two * last)))
                if end - start >= 2 and (start, end) not in feed.log.skips():
                    feed.skip(start, end)
            case "prune":
                prune(feed.store, plan_prune(feed.store, Retention(anchors=int(one or 1), versions=int(two))))
            case "restart":
                self.replica.close()
                self.target = TorchTarget(feed.states[0].layout) if one else self.target
                self.replica = follower(feed.store, self.target, mirror=self.path)
            case "advance":
                self.advance(None if one is None else int(one * last))

    def advance(self, to: int | None) -> None:
        wanted = len(self.feed.states) - 1 if to is None else to
        before = self.target.version
        try:
            self.replica.advance(to=to)
        except NotFoundError:
            assert wanted < self.feed.log.floor(), "only what was pruned may be out of reach"
            assert self.target.version == before
        else:
            assert self.target.version == wanted
        if self.target.version is not None:
            assert self.target.holds(self.feed.states[self.target.version])


@pytest.mark.parametrize("is_mapped", [False, True], ids=["memory", "mapped"])
@pytest.mark.soak
@settings(max_examples=repeats(60, soak=1000), deadline=None)
@given(actions=st.lists(ACTIONS, max_size=14))
def test_a_target_has_the_bits_of_its_version(actions: list[tuple[str, float | None, float]], is_mapped: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder) / "mirror" if is_mapped else None)
        for action in actions:
            run.act(*action)
        run.advance(None)
        assert run.target.version == len(run.feed.states) - 1
        run.replica.close()
