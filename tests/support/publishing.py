"""What the tests of the publisher share: states by number, stores that stop at a given operation, exact checks."""

import threading
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np

from deltasync import blocks
from deltasync.feed.log import Log
from deltasync.feed.replay import load
from deltasync.feed.verify import verify
from deltasync.format.digest import StateDigest
from deltasync.format.manifest import Manifest
from deltasync.format.weights import Weights
from deltasync.store.memory import MemoryStore
from deltasync.store.protocol import Store
from deltasync.testing.faulty import Fault, FaultyStore, Operation, never
from deltasync.trainer.anchoring import AnchorPolicy
from deltasync.trainer.events import PublishEvent
from deltasync.trainer.publisher import FeedPublisher, PublisherOptions

from .helpers import State, changed, state

NEVER = AnchorPolicy(bytes_ratio=None, versions=None)
LONG_S = 60.0
"""A test that waits for so long has failed."""
HARD = Fault("refuse", transient=False)


def nth(number: int) -> State:
    """The weights of a step. Neighbours differ in few bits, some of them in the same ones."""
    return changed(state(), seed=number, share=0.03) if number else state()


def publisher(store: Store, **options: Any) -> FeedPublisher:
    """Without anchors but the first, unless asked for."""
    return FeedPublisher(store, PublisherOptions(**{"anchors": NEVER, "retry_s": 5.0, **options}))


def publish(to: FeedPublisher, number: int, **options: Any) -> Any:
    return to.publish(Weights.of(nth(number)), step=number, **options)


def begun(plan: Any = None, **options: Any) -> tuple[FaultyStore, FeedPublisher]:
    """A feed whose version 0 is step 0; faults begin afterwards."""
    store = FaultyStore(MemoryStore())
    to = publisher(store, **options)
    publish(to, 0).wait(LONG_S)
    assert to.wait(LONG_S)
    store._plan = never if plan is None else plan
    return store, to


def holds(weights: Weights, wanted: State) -> bool:
    known = Weights.of(wanted)
    pairs = zip(weights.arrays, known.arrays, strict=True)
    return weights.layout == known.layout and all(np.array_equal(a, b) for a, b in pairs)


def require_steps(store: Store, steps: Mapping[int, int], make: Callable[[int], State] = nth) -> list[Manifest]:
    """The feed has these versions and no other, each with the weights of its step; `verify --deep` finds nothing.

    A deep verification has replayed every version and compared it with its digest, so the digest is compared here. The
    newest version is also loaded and compared bit by bit.
    """
    log, manifests = Log(store), []
    found = verify(store, deep=True)
    assert found.is_clean, (found.damages, found.lost)
    assert set(found.restorable) == set(steps)
    for version, step in steps.items():
        manifests.append(log.read(version))
        assert manifests[-1].step == step
        assert manifests[-1].digest == _digest(make, step), f"version {version} is not step {step}"
    if steps:
        assert holds(load(log, manifests[-1]), make(step)), f"version {version} is not step {step}"
    return manifests


@cache
def _digest(make: Callable[[int], State], step: int) -> StateDigest:
    return blocks.digest(Weights.of(make(step)))


class Gate:
    """A plan of faults that stops the first operation of one kind until the gate is opened."""

    def __init__(self, verb: str, prefix: str) -> None:
        self._verb, self._prefix = verb, prefix
        self._reached, self._open = threading.Event(), threading.Event()

    def __call__(self, operation: Operation) -> None:
        if operation.verb == self._verb and operation.key.startswith(self._prefix) and not self._reached.is_set():
            self._reached.set()
            assert self._open.wait(LONG_S)

    def await_operation(self) -> None:
        assert self._reached.wait(LONG_S), "nothing reached the gate"

    def open(self) -> None:
        self._open.set()


class Outage:
    """A plan of faults for operations that `hits` names, until `is_over`."""

    def __init__(self, fault: Fault, hits: Callable[[Operation], bool] = lambda operation: True) -> None:
        self.is_over = False
        self._fault, self._hits = fault, hits

    def __call__(self, operation: Operation) -> Fault | None:
        return None if self.is_over or not self._hits(operation) else self._fault


class Notes(list[PublishEvent]):
    """An observer that keeps the events that it gets."""

    def __call__(self, event: PublishEvent) -> None:
        self.append(event)

    @property
    def versions(self) -> list[int]:
        return [event.version for event in self]
