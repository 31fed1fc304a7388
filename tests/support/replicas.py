"""What the tests of replicas share: torch targets of any layout, exact comparisons, plain followers."""

import http.client
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from deltasync.format import keys
from deltasync.format.layout import Layout
from deltasync.format.weights import Weights
from deltasync.replica import loop
from deltasync.replica.events import Advance
from deltasync.replica.follower import Follower
from deltasync.replica.target import Staged, Target
from deltasync.store import patient
from deltasync.store.protocol import Store
from deltasync.testing.faulty import FaultyStore
from deltasync.torch.module import ModuleTarget
from deltasync.torch.tensors import _NAMES, host_bits

from . import LONG_S
from .feeds import Feed
from .helpers import changed, state

TORCH_TYPES = {name: dtype for dtype, name in _NAMES.items()}


def torch_state(layout: Layout) -> dict[str, torch.Tensor]:
    """Zeros."""
    return {spec.name: torch.zeros(spec.shape, dtype=TORCH_TYPES[spec.dtype.name]) for spec in layout.tensors}


class TorchTarget(ModuleTarget):
    """A state dict as target. `shown` has every version that was live; `fails` may raise in place of a commit."""

    def __init__(self, layout: Layout, **options: Any) -> None:
        self.state = torch_state(layout)
        self.shown: list[int] = []
        self.whole: list[bool] = []
        self.fails: Callable[[Staged], None] = lambda staged: None
        super().__init__(self.state, **options)

    def commit(self, staged: Staged) -> float:
        self.fails(staged)
        pause_s = super().commit(staged)
        self.shown.append(staged.version)
        self.whole.append(staged.changes is None)
        return pause_s

    def holds(self, weights: Weights) -> bool:
        """Whether all bits are those."""
        pairs = zip(weights.layout.tensors, weights.arrays, strict=True)
        return all(np.array_equal(host_bits(self.state[spec.name], spec.dtype), array) for spec, array in pairs)


def follower(store: Store, target: Target, **options: Any) -> Follower:
    """Without heartbeats, unless asked for."""
    return Follower(store, target, **{"beat_s": None, **options})


def fetched(store: FaultyStore) -> list[str]:
    """The SHA-256 of every payload that was read from, once for each read."""
    found = [keys.parse_payload_key(operation.key) for operation in store.operations]
    return [sha256 for sha256 in found if sha256 is not None]


class Moves(list[Advance]):
    """An observer that keeps every advance, and can be waited on."""

    def __init__(self) -> None:
        super().__init__()
        self._grown = threading.Condition()

    def __call__(self, moved: Advance) -> None:
        with self._grown:
            self.append(moved)
            self._grown.notify_all()

    def await_version(self, version: int) -> None:
        """Until that version was live."""
        with self._grown:
            found = self._grown.wait_for(lambda: any(moved.version == version for moved in self), LONG_S)
        assert found, f"version {version} never came, only {[moved.version for moved in self]}"

    def await_next(self, count: int, version: int) -> None:
        """Until that version was live, after the first `count` advances."""
        with self._grown:
            found = self._grown.wait_for(lambda: any(moved.version == version for moved in self[count:]), LONG_S)
        assert found, f"version {version} never came, only {[moved.version for moved in self]}"


@contextmanager
def following(replica: Follower) -> Iterator[list[BaseException]]:
    """`follow` in a thread, which has ended at the end of the block; what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            replica.follow()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield raised
    finally:
        replica.stop()
        thread.join(LONG_S)
        assert not thread.is_alive(), "it does not stop"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the pauses between two attempts short."""
    monkeypatch.setattr(patient, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(patient, "LONGEST_PAUSE_S", 0.002)
    for name in ("_POLL_FIRST_S", "_POLL_MOST_S", "_OUTAGE_MOST_S"):
        monkeypatch.setattr(loop, name, 0.002)


def target_for(feed: Feed) -> TorchTarget:
    return TorchTarget(feed.states[0].layout)


def small_step(feed: Feed) -> Weights:
    """The newest state with a few elements changed."""
    old = feed.states[-1]
    tensors = {t.name: a for t, a in zip(old.layout.tensors, old.arrays, strict=True)}
    arrays = changed(tensors, seed=len(feed.states), share=0.002)
    return Weights(old.layout, tuple(arrays[t.name] for t in old.layout.tensors))


def long_feed(versions: int, store: Any = None) -> Feed:
    """An anchor and small deltas."""
    feed = Feed(store)
    feed.anchor(state())
    for _ in range(versions - 1):
        feed.delta(small_step(feed))
    return feed


def wait_until(is_so: Callable[[], bool]) -> None:
    """Poll until the condition holds."""
    deadline_s = time.monotonic() + LONG_S
    while not is_so():
        assert time.monotonic() < deadline_s, "it never came true"
        time.sleep(0.005)


def ask(
    address: str, method: str, path: str, token: str | None = None, *, host: str | None = None
) -> tuple[int, bytes]:
    """The status code and the content that a listener answers with."""
    connection = http.client.HTTPConnection(address, timeout=LONG_S)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        connection.request(method, path, headers=headers if host is None else {**headers, "Host": host})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()
