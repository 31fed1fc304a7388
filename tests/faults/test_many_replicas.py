"""One trainer and eight replicas that know nothing of each other: all end equal, and the trainer never notices."""

import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from support import LONG_S
from support.feeds import NEVER
from support.replicas import Moves, TorchTarget, follower, following, wait_until
from training import Run

from deltasync.feed.log import Log
from deltasync.format.layout import Layout
from deltasync.state import load
from deltasync.store.local import LocalStore
from deltasync.store.memory import MemoryStore
from deltasync.store.protocol import Store
from deltasync.testing.faulty import FaultyStore
from deltasync.torch.publisher import Publisher
from deltasync.torch.tensors import TorchWeights
from deltasync.trainer.publisher import PublisherOptions
from deltasync.trainer.schedule import AnchorPolicy

STEPS = 12


def train(store: Store, folder: Path, *, policy: AnchorPolicy = NEVER) -> Counter[str]:
    """Publish every step of a training run; the trainer's operations on the store, by verb."""
    torch.set_num_threads(1)
    counting, training = FaultyStore(store), Run(folder)
    with Publisher(counting, dtype=torch.bfloat16, options=PublisherOptions(anchors=policy)) as publisher:
        for _ in range(STEPS):
            training.train()
            publisher.publish(training.model, step=training.step).wait(LONG_S)
    return Counter(operation.verb for operation in counting.operations)


def layout_of_run(folder: Path) -> Layout:
    return TorchWeights(Run(folder).model.state_dict(), cast=torch.bfloat16).layout


@pytest.mark.parametrize("is_local", [False, True], ids=["memory", "folder"])
def test_eight_replicas_beside_a_trainer(is_local: bool, tmp_path: Path) -> None:
    alone = train(MemoryStore(), tmp_path)
    store: Store = LocalStore(tmp_path / "feed") if is_local else MemoryStore()
    layout = layout_of_run(tmp_path)
    targets = [TorchTarget(layout) for _ in range(8)]
    moves = [Moves() for _ in targets]
    with ExitStack() as stack:
        replicas = [
            stack.enter_context(follower(store, target, observer=observer, replica=f"replica-{i}", beat_s=0.05))
            for i, (target, observer) in enumerate(zip(targets, moves, strict=True))
        ]
        raised = [stack.enter_context(following(replica)) for replica in replicas]
        beside = train(store, tmp_path)
        head = Log(store).require_head()
        assert head.version == STEPS - 1
        for observer in moves:
            observer.await_version(head.version)
        # A heartbeat is written after the observer is called.
        wait_until(lambda: {beat.replica for beat in Log(store).heartbeats()} == {f"replica-{i}" for i in range(8)})
    assert not any(raised)
    assert beside == alone, "what the trainer does does not depend on who reads"
    wanted = load(Log(store), head)
    for target in targets:
        assert target.version == head.version
        assert target.holds(wanted)
        assert target.shown == sorted(target.shown)
    assert Log(store).heartbeats() == []


def test_replicas_come_and_go_while_versions_are_anchored(tmp_path: Path) -> None:
    """Late ones, short-lived ones, and one that sleeps, on a feed with anchors and skips of the trainer's own."""
    store, layout = MemoryStore(), layout_of_run(tmp_path)
    is_over = threading.Event()
    wrong: list[str] = []

    def visit(seed: int) -> None:
        try:
            while not is_over.wait(0.01 * seed):
                if Log(store).head() is None:
                    continue
                target = TorchTarget(layout)
                with follower(store, target) as replica:
                    replica.advance()
                    version = target.version
                if version is None or not target.holds(load(Log(store), Log(store).read(version))):
                    wrong.append(f"version {version}")
        except BaseException as error:  # noqa: BLE001 - reported below
            wrong.append(repr(error))

    visitors = [threading.Thread(target=visit, args=(seed,)) for seed in (1, 2)]
    sleeper = TorchTarget(layout)
    slept = follower(store, sleeper)
    for visitor in visitors:
        visitor.start()
    try:
        train(store, tmp_path, policy=AnchorPolicy(versions=4))
    finally:
        is_over.set()
        for visitor in visitors:
            visitor.join(LONG_S)
    assert not wrong
    slept.advance(to=0)
    slept.advance()
    assert sleeper.holds(load(Log(store), Log(store).require_head()))
