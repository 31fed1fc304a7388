"""The transfer called as TRL calls it; examples/trl_wordle runs it inside TRL's trainer."""

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import LONG_S

import deltasync.trl as module
from deltasync.errors import InvalidInputError, MismatchError, StoreError
from deltasync.feed.log import Log
from deltasync.format import keys
from deltasync.format.sealed import Heartbeat
from deltasync.state import load
from deltasync.store.memory import MemoryStore
from deltasync.store.protocol import Data, ObjectInfo
from deltasync.torch.tensors import TorchWeights
from deltasync.trainer.publisher import PublisherOptions
from deltasync.trl import DeltasyncTransfer, wait_for_replicas

FAR_AWAY_S = 1 << 62


class WatchedStore(MemoryStore):
    """Calls `on_look` before every read of heartbeats; `is_full` takes no version but the first.

    Nothing is committed while `may_commit` is not set.
    """

    def __init__(self) -> None:
        super().__init__()
        self.on_look: Callable[[], None] = lambda: None
        self.is_full = False
        self.has_refused = threading.Event()
        self.may_commit = threading.Event()
        self.may_commit.set()

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectInfo]:
        if prefix == keys.REPLICAS:
            self.on_look()
        return super().list(prefix, after=after)

    def create(self, key: str, data: Data) -> bool:
        if keys.parse_version_key(key) is not None:
            assert self.may_commit.wait(LONG_S)
        if self.is_full and keys.parse_version_key(key) not in (None, 0):
            self.has_refused.set()
            raise StoreError("the disk is full", transient=False)
        return super().create(key, data)

    def beat(self, version: int | None, replica: str = "replica") -> None:
        Log(self).beat(Heartbeat(replica, version, FAR_AWAY_S))


class Worker:
    """TRL's rollout worker, as far as a transfer sees it."""

    def __init__(self) -> None:
        self.labels: list[int] = []
        self._told = threading.Condition()

    def update_model_version(self, model_version: int) -> None:
        with self._told:
            self.labels.append(model_version)
            self._told.notify_all()

    def wait_for(self, label: int) -> None:
        with self._told:
            assert self._told.wait_for(lambda: label in self.labels, LONG_S), self.labels


class Trainer:
    """TRL's trainer, as far as a transfer sees it: the order of calls is that of `_sync_weight_merged`."""

    def __init__(self, transfer: DeltasyncTransfer, worker: Worker | None = None) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(64, 8).bfloat16()
        self.transfer = transfer
        self.rollout_worker = Worker() if worker is None else worker
        self.state = SimpleNamespace(global_step=0)
        self.model_version = 0
        transfer.init_weight_transfer()

    def sync(self) -> None:
        self.transfer.pause()
        self.transfer.send_weights((name, p.detach()) for name, p in self.model.named_parameters())
        self.transfer.resume()
        self.model_version += 1
        self.rollout_worker.update_model_version(self.model_version)

    def step(self) -> None:
        """One step of training, and what follows."""
        with torch.no_grad():
            self.model.weight[self.state.global_step % 8] += 0.25
        self.state.global_step += 1
        self.sync()


@pytest.fixture
def store() -> WatchedStore:
    return WatchedStore()


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Versions and numbers of replicas that were waited for, without waiting."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(
        module,
        "wait_for_replicas",
        lambda reader, version, *, replicas, timeout_s, live_s: found.append((version, replicas)),
    )
    return found


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for replicas times out as soon as it would sleep."""
    now_s = [time.time()]

    def sleep(seconds: float) -> None:
        now_s[0] += seconds

    waiting = partial(wait_for_replicas, clock=lambda: now_s[0], sleep=sleep)
    monkeypatch.setattr(module, "wait_for_replicas", waiting)


@pytest.fixture(autouse=True)
def quick_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LABEL_POLL_S", 0.005)


@pytest.mark.usefixtures("waited")
def test_every_sync_is_a_version_with_the_weights_and_the_step(store: WatchedStore) -> None:
    transfer = DeltasyncTransfer(store, options=PublisherOptions(wait=True))
    trainer = Trainer(transfer)
    transfer.attach(trainer)
    states = []
    for act in (trainer.sync, trainer.step, trainer.step):
        act()
        states.append({name: p.detach().clone() for name, p in trainer.model.named_parameters()})
    transfer.destroy()
    log = Log(store)
    assert [log.read(v).step for v in log.versions()] == [0, 1, 2]
    for version, state in enumerate(states):
        found, expected = load(log, log.read(version)), TorchWeights(state)
        assert found.layout == expected.layout
        for ordinal, spec in enumerate(found.layout.tensors):
            assert (found.arrays[ordinal] == bits_of(state[spec.name])).all()


def bits_of(tensor: torch.Tensor) -> Any:
    return tensor.detach().reshape(-1).view(torch.int16).numpy().view("u2")


@pytest.mark.parametrize(
    ("max_lag", "replicas", "expected"),
    [
        (0, 0, [0, 1, 2, 3]),
        (1, 0, [0, 1, 2]),
        (3, 0, [0]),
        (4, 0, []),
        (0, 2, [0, 1, 2, 3]),
        (1, 2, [0, 0, 1, 2]),
        (3, 2, [0, 0]),
        (4, 2, [0]),
    ],
)
def test_each_sync_waits_for_the_one_max_lag_before_and_the_first_for_replicas(
    store: WatchedStore, waited: list[tuple[int, int]], max_lag: int, replicas: int, expected: list[int]
) -> None:
    transfer = DeltasyncTransfer(store, max_lag=max_lag, require_replicas=replicas, options=PublisherOptions(wait=True))
    trainer = Trainer(transfer)
    for _ in range(4):
        trainer.step()
    transfer.destroy()
    assert waited == [(version, replicas) for version in expected]
    assert Log(store).require_head().version == 3


@pytest.mark.usefixtures("waited")
def test_no_upload_is_waited_for_before_max_lag_says_so(store: WatchedStore) -> None:
    store.may_commit.clear()
    trainer = Trainer(DeltasyncTransfer(store, max_lag=5, require_replicas=0))
    for _ in range(5):
        trainer.step()
    assert Log(store).head() is None
    store.may_commit.set()
    trainer.transfer.destroy()
    head = Log(store).require_head()
    # The versions that were overtaken are part of the last one.
    assert head.version < 4
    assert (load(Log(store), head).arrays[1] == bits_of(trainer.model.weight)).all()


@pytest.mark.usefixtures("no_patience")
@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_a_replica_that_stays_behind_stops_training(store: WatchedStore, max_lag: int) -> None:
    store.beat(0)
    transfer = DeltasyncTransfer(store, max_lag=max_lag, timeout_s=100, options=PublisherOptions(wait=True))
    trainer = Trainer(transfer)
    for _ in range(max_lag + 1):
        trainer.step()
    with pytest.raises(StoreError, match=r"version 1 was not confirmed .* in 100 s: 'replica' serves version 0"):
        trainer.step()
    transfer.destroy()
    assert Log(store).require_head().version == max_lag + 1


@pytest.mark.usefixtures("no_patience")
def test_without_replicas_the_policy_decides(store: WatchedStore) -> None:
    trainer = Trainer(DeltasyncTransfer(store, max_lag=0, require_replicas=0))
    trainer.step()
    trainer.transfer.destroy()
    # The first sync waits, however much lag is allowed: there is no replica yet to make samples.
    strict = Trainer(DeltasyncTransfer(store, max_lag=9))
    with pytest.raises(StoreError, match="0 live replicas serve a version, at least 1") as caught:
        strict.step()
    assert "deltasync serve" in str(caught.value)
    strict.transfer.destroy()


def test_training_goes_on_as_soon_as_the_replica_has_caught_up(store: WatchedStore) -> None:
    looks = []

    def look() -> None:
        looks.append(Log(store).require_head().version)
        if len(looks) % 3 == 0:
            store.beat(looks[-1])

    store.on_look = look
    trainer = Trainer(DeltasyncTransfer(store, max_lag=0))
    trainer.step()
    trainer.step()
    trainer.transfer.destroy()
    assert looks == [0, 0, 0, 1, 1, 1]


@pytest.mark.usefixtures("waited")
@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_training_stops_when_nothing_arrives_for_max_lag_syncs(store: WatchedStore, max_lag: int) -> None:
    trainer = Trainer(DeltasyncTransfer(store, max_lag=max_lag))
    trainer.step()
    store.is_full = True
    for _ in range(max_lag):
        trainer.step()
    with pytest.raises(StoreError, match="the disk is full") as caught:
        trainer.step()
    assert caught.value.__notes__ == ["the weights of step None were not published, so training stops"]
    assert trainer.model_version == 1 + max_lag
    trainer.transfer.destroy()


@pytest.mark.usefixtures("waited")
def test_what_failed_to_arrive_comes_with_the_next_and_so_does_its_label(store: WatchedStore) -> None:
    transfer = DeltasyncTransfer(store, max_lag=2, options=PublisherOptions(wait=True))
    trainer, worker = attached(transfer)
    trainer.step()
    store.is_full = True
    trainer.step()
    assert store.has_refused.wait(LONG_S)
    store.is_full = False
    for _ in range(3):
        trainer.step()
    store.beat(3)
    worker.wait_for(5)
    assert [transfer.count_of(version) for version in range(-1, 5)] == [0, 1, 3, 4, 5, 5]
    transfer.destroy()
    assert Log(store).versions() == [0, 1, 2, 3]


@pytest.mark.usefixtures("waited")
def test_a_last_publication_that_fails_is_reported_at_the_end(store: WatchedStore) -> None:
    trainer = Trainer(DeltasyncTransfer(store, max_lag=5))
    trainer.step()
    store.is_full = True
    trainer.step()
    with pytest.raises(StoreError, match="the disk is full"):
        trainer.transfer.destroy()
    trainer.transfer.destroy()


@pytest.mark.usefixtures("waited")
def test_other_tensors_than_before_are_refused(store: WatchedStore) -> None:
    trainer = Trainer(DeltasyncTransfer(store))
    trainer.step()
    trainer.model = torch.nn.Linear(64, 9).bfloat16()
    with pytest.raises((InvalidInputError, MismatchError), match="weight"):
        trainer.step()
    trainer.transfer.destroy()
    assert Log(store).require_head().version == 0


@pytest.mark.usefixtures("waited")
def test_a_second_training_goes_on_in_the_same_feed(store: WatchedStore) -> None:
    trainer = Trainer(DeltasyncTransfer(store))
    trainer.step()
    trainer.transfer.destroy()
    trainer.step()
    trainer.transfer.destroy()
    assert Log(store).versions() == [0, 1]


def test_a_store_that_cannot_be_read_is_found_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    store = WatchedStore()

    def refuse(prefix: str = "", *, after: str | None = None) -> Iterator[ObjectInfo]:
        raise StoreError("the credentials are not accepted", transient=False)

    monkeypatch.setattr(store, "list", refuse)
    with pytest.raises(StoreError, match="credentials"):
        DeltasyncTransfer(store).init_weight_transfer()


@pytest.mark.usefixtures("waited")
def test_a_version_becomes_a_label_when_replicas_serve_it(store: WatchedStore) -> None:
    looks = threading.Semaphore(0)
    store.on_look = looks.release
    transfer = DeltasyncTransfer(store, max_lag=2)
    trainer, worker = attached(transfer)
    trainer.step()
    trainer.step()
    store.beat(0, "a")
    store.beat(1, "b")
    worker.wait_for(1)
    for _ in range(4):
        assert looks.acquire(timeout=LONG_S)
    assert worker.labels == [1]
    store.beat(1, "a")
    worker.wait_for(2)
    trainer.step()
    trainer.step()
    store.beat(3, "a")
    store.beat(3, "b")
    worker.wait_for(4)
    transfer.destroy()
    assert worker.labels[:2] == [1, 2]
    assert worker.labels == sorted(worker.labels)


@pytest.mark.usefixtures("waited")
def test_labels_wait_for_the_first_replica_only_if_one_is_required(store: WatchedStore) -> None:
    transfer = DeltasyncTransfer(store, require_replicas=0)
    trainer, worker = attached(transfer)
    trainer.step()
    worker.wait_for(1)
    transfer.destroy()


@pytest.mark.usefixtures("waited")
def test_a_count_that_training_resumes_from_is_a_label_at_once(store: WatchedStore) -> None:
    transfer = DeltasyncTransfer(store)
    trainer, worker = attached(transfer)
    trainer.model_version = 7
    trainer.rollout_worker.update_model_version(7)
    assert worker.labels == [7]
    trainer.step()
    store.beat(0)
    worker.wait_for(8)
    transfer.destroy()


@pytest.mark.usefixtures("waited")
def test_labels_survive_a_store_that_fails_and_end_with_training(store: WatchedStore) -> None:
    failures = iter([True, True])

    def look() -> None:
        if next(failures, False):
            raise StoreError("no answer", transient=True)

    store.on_look = look
    transfer = DeltasyncTransfer(store)
    trainer, worker = attached(transfer)
    store.beat(0)
    trainer.step()
    worker.wait_for(1)
    trainer.step()
    transfer.destroy()
    assert worker.labels == [1]
    assert not [t for t in threading.enumerate() if t.name == "deltasync-labels"]


def attached(transfer: DeltasyncTransfer) -> tuple[Trainer, Worker]:
    worker = Worker()
    trainer = Trainer(transfer, worker)
    transfer.attach(trainer)
    return trainer, worker


@pytest.mark.parametrize(
    ("options", "error"),
    [({"max_lag": -1}, InvalidInputError), ({"require_replicas": -1}, InvalidInputError), ({"lag": 1}, TypeError)],
)
def test_wrong_options_are_found_at_once(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        DeltasyncTransfer(WatchedStore(), **options)
