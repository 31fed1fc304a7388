"""Publishers and followers in other processes than their own: refused at once in a fork, and never pickled."""

import copy
import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import LONG_S
from support.feeds import NEVER, Gate

from deltasync.errors import InvalidInputError
from deltasync.feed.log import Log
from deltasync.parallel import ProcessBound
from deltasync.replica.follower import Follower
from deltasync.store.local import LocalStore
from deltasync.testing.faulty import FaultyStore
from deltasync.torch import ModuleTarget, Publisher, ShardedPublisher
from deltasync.trainer.publisher import PublisherOptions

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")

WEIGHTS = {"w": torch.zeros(4)}
OPTIONS = PublisherOptions(anchors=NEVER)

USES: dict[str, tuple[Callable[[Path], ProcessBound], Callable[[Any], object]]] = {
    "publish": (lambda feed: Publisher(feed, options=OPTIONS), lambda p: p.publish(WEIGHTS)),
    "publisher wait": (lambda feed: Publisher(feed, options=OPTIONS), lambda p: p.wait(LONG_S)),
    "sharded publish": (lambda feed: ShardedPublisher(feed, options=OPTIONS), lambda p: p.publish(WEIGHTS)),
    "sharded wait": (lambda feed: ShardedPublisher(feed, options=OPTIONS), lambda p: p.wait(LONG_S)),
} | {
    name: (lambda feed: Follower(feed, ModuleTarget(WEIGHTS)), use)
    for name, use in {
        "advance": lambda f: f.advance(),
        "follow": lambda f: f.follow(),
        "start": lambda f: f.start(),
        "wait_live": lambda f: f.wait_live(),
        "pin": lambda f: f.pin(0),
        "scrub": lambda f: f.scrub(),
        "status": lambda f: f.status(),
        "pause": lambda f: f.pause(),
        "resume": lambda f: f.resume(),
        "nudge": lambda f: f.nudge(),
        "stop": lambda f: f.stop(),
    }.items()
}


def in_fork(act: Callable[[], bool]) -> bool:
    """What `act` returns in a forked child, which is killed if it hangs."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(int(LONG_S))
        try:
            os._exit(0 if act() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize(("create", "use"), USES.values(), ids=USES)
def test_use_in_a_fork_is_refused(
    tmp_path: Path, create: Callable[[Path], ProcessBound], use: Callable[[Any], object]
) -> None:
    thing: Any = create(tmp_path / "feed")

    def is_refused() -> bool:
        try:
            use(thing)
        except InvalidInputError as error:
            name = type(thing).__name__
            thing.close()
            return f"process {os.getppid()}" in str(error) and f"create a {name} in the child" in str(error)
        return False

    assert in_fork(is_refused)
    thing.close()


def test_a_fork_in_the_middle_of_a_publication_does_no_harm(tmp_path: Path) -> None:
    """The child is refused although its copies of the locks are held; the parent goes on."""
    gate = Gate("put", "payloads/")
    store = FaultyStore(LocalStore(tmp_path), gate)
    with Publisher(store, options=OPTIONS) as publisher:
        first = publisher.publish(WEIGHTS, step=0)
        gate.await_operation()

        def is_refused() -> bool:
            try:
                publisher.publish(WEIGHTS, step=1)
            except InvalidInputError:
                publisher.close()
                return True
            return False

        assert in_fork(is_refused)
        gate.open()
        assert first.wait(LONG_S).version == 0
        assert publisher.publish(WEIGHTS, step=1).wait(LONG_S).version == 1


def test_a_fork_does_not_end_the_heartbeats_of_its_parent(tmp_path: Path) -> None:
    with Publisher(tmp_path, options=OPTIONS) as publisher:
        publisher.publish(WEIGHTS, step=0).wait(LONG_S)
    with Follower(tmp_path, ModuleTarget({"w": torch.ones(4)}), replica="r") as follower:
        follower.advance()
        assert in_fork(lambda: follower.close() is None)
        assert [beat.replica for beat in Log(LocalStore(tmp_path)).heartbeats()] == ["r"]


@pytest.mark.parametrize("act", [pickle.dumps, copy.copy, copy.deepcopy])
@pytest.mark.parametrize("use", ["publish", "sharded publish", "advance"])
def test_they_are_neither_pickled_nor_copied(tmp_path: Path, act: Callable[[object], object], use: str) -> None:
    thing: Any = USES[use][0](tmp_path / "feed")
    name = type(thing).__name__
    with pytest.raises(TypeError, match=f"cannot pickle or copy a {name}: .* URL of the feed, and create a {name}"):
        act(thing)
    thing.close()
