"""Behind the trainer's back: what waits, what is taken along, what is tried again, and what is never lost."""

import logging
import threading
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
from support import LONG_S
from support.feeds import HARD, Gate, Notes, Outage, begun, holds, nth, publish, publisher, require_steps
from support.helpers import State

from deltasync.errors import ConflictError, InvalidInputError, StoreError
from deltasync.feed.log import Log
from deltasync.format import keys
from deltasync.format.manifest import BaseRef
from deltasync.format.weights import Weights
from deltasync.state import State as HeldState
from deltasync.state import load
from deltasync.store.memory import MemoryStore
from deltasync.store.patient import PatientStore
from deltasync.store.protocol import Data
from deltasync.testing.faulty import Fault, FaultyStore, Operation, at, at_random, never
from deltasync.trainer.capture import WeightsSource, capture
from deltasync.trainer.schedule import AnchorPolicy
from deltasync.trainer.versions import VersionWriter

pytestmark = pytest.mark.usefixtures("no_pauses")


# Steps that come while step 1 is in flight. Number 0 takes all of it back, number 1 changes nothing.
COMING = {"one": [2], "several": [2, 3, 4], "back again": [2, 0], "the same": [1], "away and the same": [3, 1]}


class Found(WeightsSource):
    """Weights whose changes `find` finds."""

    def __init__(self, weights: State, find: Callable[[HeldState], Any]) -> None:
        super().__init__(Weights.of(weights))
        self._find = find

    def changes(self, shadow: HeldState) -> Any:
        return self._find(shadow)


@pytest.mark.parametrize("coming", COMING.values(), ids=COMING.keys())
def test_a_publication_that_is_overtaken_becomes_part_of_the_next(coming: list[int]) -> None:
    gate, notes = Gate("put", keys.PAYLOADS), Notes()
    store, to = begun(gate, observer=notes)
    first = publish(to, 1)
    gate.await_operation()
    others = [publish(to, number) for number in coming]
    assert first.version is None
    assert first.stats is None
    gate.open()
    to.close()
    manifests = require_steps(store, {0: 0, 1: 1, 2: coming[-1]})
    assert first.wait(LONG_S) == manifests[1]
    for publication in others:
        assert publication.wait(LONG_S) == manifests[2]
        assert publication.version == 2
        assert publication.stats.coalesced == len(coming) - 1
    assert notes.versions == [0, 1, 2]
    assert manifests[2].payloads == () if coming[-1] == 1 else manifests[2].changed
    assert notes[2].held_s == others[-1].stats.held_s


@pytest.mark.parametrize("wait", [False, True])
def test_with_wait_the_next_capture_comes_after_the_commit(wait: bool) -> None:
    gate = Gate("create", keys.VERSIONS)
    store, to = begun(gate, wait=wait)
    seen = []

    def find(shadow: Any) -> Any:
        seen.append(shadow.version)
        gate.open()
        return capture(shadow.weights, Weights.of(nth(2)))

    publish(to, 1)
    gate.await_operation()
    if wait:
        # It is captured only once step 1 is committed, and nothing else opens the gate.
        threading.Timer(0.05, gate.open).start()
    second = to.publish(Found(nth(2), find), step=2)
    to.close()
    assert seen == [1 if wait else 0]
    assert second.version == 2
    require_steps(store, {0: 0, 1: 1, 2: 2})


def test_the_trainer_never_waits_for_the_store() -> None:
    """After the first publication no operation runs in the trainer's thread."""
    threads = set()

    def note(operation: Operation) -> None:
        threads.add(threading.current_thread())

    store, to = begun(note)
    for number in range(1, 6):
        publish(to, number)
    to.close()
    assert threads
    assert threading.main_thread() not in threads
    assert holds(load(Log(store), Log(store).require_head()), nth(5))


def operations_of_a_delta() -> range:
    store, to = begun()
    before = len(store.operations)
    publish(to, 1).wait(LONG_S)
    to.close()
    assert len(store.operations) - before >= 2
    return range(before + 1, len(store.operations) + 1)


@pytest.mark.parametrize("kind", ["refuse", "cut", "lose"])
def test_a_transient_error_is_tried_again(kind: Any) -> None:
    for number in operations_of_a_delta():
        store, to = begun(at(number, Fault(kind)))
        publication = publish(to, 1)
        publication.wait(LONG_S)
        to.close()
        # The writer itself finds out that its manifest arrived although the answer got lost.
        is_found = kind == "lose" and is_commit(store.operations[number - 1])
        assert publication.stats.retries == (0 if is_found else 1)
        require_steps(store, {0: 0, 1: 1})


@pytest.mark.parametrize("kind", ["refuse", "cut", "lose"])
def test_what_failed_for_good_is_carried_by_the_next(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    for number in operations_of_a_delta():
        store, to = begun(at(number, Fault(kind, transient=False)))
        head = to.head
        publication = publish(to, 1)
        with pytest.raises(StoreError, match=f"operation {number}"):
            publication.wait(LONG_S)
        assert publication.version is None
        assert publication.stats is None
        assert to.head is head
        following = publish(to, 2)
        following.wait(LONG_S)
        to.close()
        assert "step 1 was not published" in caplog.text
        # A commit whose answer got lost is a version all the same.
        is_committed = kind == "lose" and is_commit(store.operations[number - 1])
        require_steps(store, {0: 0, 1: 1, 2: 2} if is_committed else {0: 0, 1: 2})


def test_retries_end_after_the_time_limit() -> None:
    outage = Outage(Fault("refuse"))
    store, to = begun(outage, retry_s=0.05)
    with pytest.raises(StoreError, match="was refused"):
        publish(to, 1).wait(LONG_S)
    outage.is_over = True
    assert publish(to, 2).wait(LONG_S).version == 1
    to.close()
    require_steps(store, {0: 0, 1: 2})


def test_what_waits_behind_a_failure_is_published() -> None:
    gate = Gate("put", keys.PAYLOADS)
    outage = Outage(HARD, lambda operation: operation.verb == "put")

    def plan(operation: Operation) -> Fault | None:
        gate(operation)
        fault = outage(operation)
        outage.is_over = outage.is_over or fault is not None
        return fault

    store, to = begun(plan)
    first = publish(to, 1)
    gate.await_operation()
    second = publish(to, 2)
    gate.open()
    with pytest.raises(StoreError):
        first.wait(LONG_S)
    assert second.wait(LONG_S).version == 1
    to.close()
    require_steps(store, {0: 0, 1: 2})


def is_commit(operation: Operation) -> bool:
    return operation.key.startswith(keys.VERSIONS)


@pytest.mark.parametrize("steps", [[2], [1], [0], [2, 3]], ids=str)
def test_a_commit_without_an_answer(steps: list[int]) -> None:
    """It was committed, but the store cannot confirm it: the publication fails, and the next one continues from it."""
    outage = Outage(Fault("lose", transient=False), is_commit)
    notes = Notes()
    store, to = begun(outage, observer=notes)
    with pytest.raises(StoreError, match="gave no answer"):
        publish(to, 1).wait(LONG_S)
    assert to.head is not None
    assert to.head.version == 0
    outage.is_over = True
    for version, step in enumerate(steps, 2):
        assert publish(to, step).wait(LONG_S).version == version
    to.close()
    require_steps(store, {0: 0, 1: 1, **dict(enumerate(steps, 2))})
    assert notes.versions == list(range(len(steps) + 2))


def test_a_commit_without_an_answer_while_others_wait() -> None:
    gate, outage = Gate("create", keys.VERSIONS), Outage(Fault("lose", transient=False), is_commit)

    def plan(operation: Operation) -> Fault | None:
        gate(operation)
        return outage(operation)

    store, to = begun(plan)
    first = publish(to, 1)
    gate.await_operation()
    second = publish(to, 2)
    gate.open()
    for publication in (first, second):
        with pytest.raises(StoreError):
            publication.wait(LONG_S)
    outage.is_over = True
    assert publish(to, 3).wait(LONG_S).version == 2
    to.close()
    require_steps(store, {0: 0, 1: 1, 2: 3})


def test_a_commit_that_did_not_happen() -> None:
    outage = Outage(HARD, is_commit)
    store, to = begun(outage)
    for step in (1, 2):
        with pytest.raises(StoreError, match="was refused"):
            publish(to, step).wait(LONG_S)
    outage.is_over = True
    assert publish(to, 3).wait(LONG_S).version == 1
    to.close()
    require_steps(store, {0: 0, 1: 3})


@pytest.mark.parametrize("kind", ["refuse", "lose"])
@pytest.mark.parametrize("has_base", [False, True], ids=["anchor", "base"])
@pytest.mark.parametrize("fails_at", ["payloads and commit", "commit"])
def test_a_first_version_that_fails_and_recovers(kind: Any, has_base: bool, fails_at: str, tmp_path: Any) -> None:
    base = BaseRef(str(tmp_path)) if has_base else None
    prefixes = (keys.VERSIONS, keys.PAYLOADS) if fails_at != "commit" else (keys.VERSIONS,)
    outage = Outage(Fault(kind, transient=False), lambda operation: operation.key.startswith(prefixes))
    outage.is_over = True
    notes, store = Notes(), FaultyStore(MemoryStore(), outage)
    to = publisher(store, base=base, observer=notes)
    to.open(WeightsSource(Weights.of(nth(0))))
    outage.is_over = False
    first = publish(to, 0)
    with pytest.raises(StoreError):
        first.wait(LONG_S)
    with pytest.raises(StoreError):
        publish(to, 1).wait(LONG_S)
    outage.is_over = True
    assert publish(to, 2).wait(LONG_S).version == 1
    to.close()
    assert notes.versions == [0, 1]
    assert [event.kind for event in notes] == ["base" if has_base else "anchor", "delta"]
    assert first.version is None
    if has_base:
        from support.helpers import write_sharded

        write_sharded(tmp_path, nth(0))
    require_steps(store, {0: 0, 1: 2})


def test_another_writer_stops_the_publisher() -> None:
    store, stale = begun()
    gate = Gate("create", keys.VERSIONS)
    fresh = publisher(store)
    assert publish(fresh, 1).wait(LONG_S).version == 1
    # The stale one has two under way when it finds out.
    slow = FaultyStore(store, gate)
    stale._upload.store = PatientStore(slow, 0.0)
    first = publish(stale, 5)
    gate.await_operation()
    second = publish(stale, 6)
    gate.open()
    for publication in (first, second):
        with pytest.raises(ConflictError, match="was committed by writer"):
            publication.wait(LONG_S)
    with pytest.raises(ConflictError, match=r"this publisher has stopped: .* was committed by writer") as caught:
        publish(stale, 7)
    assert "another trainer writes to this feed" in str(caught.value)
    stale.close()
    assert publish(fresh, 2).wait(LONG_S).version == 2
    fresh.close()
    require_steps(store, {0: 0, 1: 1, 2: 2})


def test_a_capture_that_fails_changes_nothing() -> None:
    store, to = begun()

    def find(shadow: Any) -> Any:
        raise RuntimeError("the device is gone")

    with pytest.raises(RuntimeError, match="the device is gone"):
        to.publish(Found(nth(1), find), step=1)
    assert publish(to, 2).wait(LONG_S).version == 1
    to.close()
    require_steps(store, {0: 0, 1: 2})


def test_closing_finishes_what_was_published() -> None:
    gate = Gate("put", keys.PAYLOADS)
    store, to = begun(gate)
    publications = [publish(to, 1)]
    gate.await_operation()
    publications.append(publish(to, 2))
    threading.Timer(0.02, gate.open).start()
    to.close()
    assert [publication.version for publication in publications] == [1, 2]
    to.close()
    with pytest.raises(InvalidInputError, match="this publisher is closed"):
        publish(to, 3)
    with pytest.raises(InvalidInputError, match="this publisher is closed"):
        to.open()
    require_steps(store, {0: 0, 1: 1, 2: 2})


def test_waiting_has_an_end() -> None:
    gate = Gate("put", keys.PAYLOADS)
    _, to = begun(gate)
    publication = publish(to, 1)
    gate.await_operation()
    with pytest.raises(StoreError, match=r"step 1 is not committed after 0\.01 s") as caught:
        publication.wait(0.01)
    assert caught.value.transient
    assert not to.wait(0.01)
    gate.open()
    assert publication.wait(LONG_S).version == 1
    assert to.wait(LONG_S)
    to.close()


def test_events_tell_what_happened(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "deltasync")
    notes = Notes()
    store, to = begun(observer=notes)
    publications = [publish(to, number) for number in (1, 2) if to.wait(LONG_S)]
    to.close()
    manifests = require_steps(store, {0: 0, 1: 1, 2: 2})
    assert [event.kind for event in notes] == ["anchor", "delta", "delta"]
    assert [publication.stats for publication in publications] == notes[1:]
    for event, manifest in zip(notes, manifests, strict=True):
        assert (event.version, event.step) == (manifest.version, manifest.step)
        assert (event.elements, event.changed) == (manifest.elements, manifest.changed)
        assert event.payload_bytes == manifest.nbytes > 0
        assert min(event.held_s, event.put_s, event.commit_s) > 0
        assert event.encode_s > 0 or event.kind == "anchor"
        assert (event.coalesced, event.retries) == (0, 0)
        assert [str(event)] == [r.message for r in caplog.records if r.message.startswith(f"version {event.version} ")]
    assert notes[0].density is None
    different = sum(np.count_nonzero(a != b) for a, b in zip(*map(arrays, (nth(0), nth(1))), strict=True))
    assert notes[1].changed == different
    assert notes[1].density == different / manifests[1].elements


def arrays(tensors: State) -> tuple[np.ndarray, ...]:
    return Weights.of(tensors).arrays


def test_an_observer_that_fails_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    def observer(event: Any) -> None:
        raise RuntimeError("the dashboard is down")

    store, to = begun(observer=observer, anchors=AnchorPolicy(versions=2))
    for number in range(1, 5):
        publish(to, number).wait(LONG_S)
    to.close()
    require_steps(store, {number: number for number in range(5)})
    assert "the dashboard is down" in caplog.text


class FailingNotes(Notes):
    """An observer that fails with each event and each failure that it has noted."""

    def __call__(self, event: Any) -> None:
        super().__call__(event)
        raise RuntimeError(f"no dashboard for version {event.version}")

    def failed(self, error: BaseException) -> None:
        raise SystemExit("no dashboard for failures")


@pytest.mark.parametrize("is_refused", [False, True], ids=["and a version", "and a failure"])
def test_an_observer_that_fails_hides_nothing_else_of_its_job(
    is_refused: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The job after a commit without an answer reports two things: version 1, and what became of its own capture."""
    lost = Outage(Fault("lose", transient=False), is_commit)
    refused = Outage(Fault("refuse", transient=False), lambda operation: operation.verb == "put")
    refused.is_over = True
    notes = FailingNotes()
    store, to = begun(lambda operation: lost(operation) or refused(operation), observer=notes)
    with pytest.raises(StoreError, match="gave no answer"):
        publish(to, 1).wait(LONG_S)
    lost.is_over, refused.is_over = True, not is_refused
    if is_refused:
        with pytest.raises(StoreError):
            publish(to, 2).wait(LONG_S)
    refused.is_over = True
    publish(to, 3).wait(LONG_S)
    to.close()
    require_steps(store, {0: 0, 1: 1, 2: 3})
    assert notes.versions == [0, 1, 2]
    for version in notes.versions:
        assert caplog.text.count(f"failed: RuntimeError('no dashboard for version {version}')") == 1
    assert caplog.text.count("failed: SystemExit('no dashboard for failures')") == 1 + is_refused


@pytest.mark.parametrize("wait", [False, True], ids=["taken along", "one by one"])
@pytest.mark.parametrize("seed", range(4))
def test_errors_at_every_fifth_operation_lose_nothing(seed: int, wait: bool) -> None:
    """Every version has exactly the weights of its step, whatever was taken along, and the last step is there."""
    faults = at_random(0.2, [Fault("refuse"), Fault("cut"), Fault("lose")], seed=seed)
    store = FaultyStore(MemoryStore(), faults)
    to = publisher(store, anchors=AnchorPolicy(versions=5), files={"config.json": b"{}"}, wait=wait)
    publications = [publish(to, number) for number in range(40)]
    to.close()
    assert sum(1 for operation in store.operations if faults(operation) is not None) > (20 if wait else 3)
    steps = {publication.wait(LONG_S).version: publication.wait(LONG_S).step for publication in publications}
    assert list(steps.values())[-1] == 39
    assert not wait or len(steps) == 40
    store._plan = never
    require_steps(store, steps)
    for number, publication in enumerate(publications):
        assert publication.wait(LONG_S).step >= number


class LateCommit(MemoryStore):
    """The `create` of version 1 fails at first and arrives later, and so does the next payload, which is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.delayed: list[tuple[str, bytes]] = []
        self.is_failing = False

    def create(self, key: str, data: Data) -> bool:
        if key == keys.version_key(1) and not self.delayed:
            self.delayed.append((key, bytes(data)))
            raise StoreError("no answer", transient=True)
        return super().create(key, data)

    def put(self, key: str, data: Data) -> None:
        if self.is_failing and key.startswith(keys.PAYLOADS):
            self.is_failing = False
            raise StoreError("refused", transient=True)
        super().put(key, data)


@pytest.mark.parametrize("late", [0, 1], ids=["without changes", "with changes"])
@pytest.mark.parametrize("is_encoded", [False, True], ids=["before it is encoded", "while it is put"])
def test_a_commit_that_arrives_late_is_not_taken_for_a_later_attempt(
    late: int, is_encoded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shadow would advance to weights that the version does not have. `late` is the step of that commit."""
    store = LateCommit()
    to = publisher(store, retry_s=0.0)
    publish(to, 0).wait(LONG_S)
    with pytest.raises(StoreError, match="no answer"):
        publish(to, late).wait(LONG_S)

    def refuse(*_: Any, **__: Any) -> Any:
        raise StoreError("refused", transient=True)

    store.is_failing = is_encoded
    with monkeypatch.context() as patch:
        if not is_encoded:
            patch.setattr(VersionWriter, "delta", refuse)
        with pytest.raises(StoreError, match="refused"):
            publish(to, 2).wait(LONG_S)
    assert store.create(*store.delayed[0])
    with pytest.raises(ConflictError, match="was committed by"):
        publish(to, 3).wait(LONG_S)
    to.close()
    again = publisher(store)
    publish(again, 4).wait(LONG_S)
    again.close()
    require_steps(store, {0: 0, 1: late, 2: 4})


def test_a_version_says_when_it_was_captured_and_what_its_steps_took() -> None:
    """That of the newest capture that it carries. Late anchors have none."""
    gate, notes = Gate("put", keys.PAYLOADS), Notes()
    store, to = begun(gate, observer=notes)
    clock = Clock()
    to._upload.clock = clock
    publish(to, 1)
    gate.await_operation()
    clock.unix_s += 1000
    publish(to, 2)
    clock.unix_s += 1000
    publish(to, 3)
    gate.open()
    assert to.wait(LONG_S)
    publish(to, 4, anchor=True)
    to.close()
    manifests = require_steps(store, {0: 0, 1: 1, 2: 3, 3: 4})
    timelines = [manifest.timeline for manifest in manifests]
    assert [event.timeline for event in notes] == [*timelines, None]
    _, first, second, _ = timelines
    assert first is not None
    assert second is not None
    # The clock stands still during a capture, so that its beginning is before it.
    assert first.captured_unix_ms == pytest.approx(1000 * START_S - first.held_ms, abs=2)
    assert second.captured_unix_ms == pytest.approx(1000 * (START_S + 2000) - second.held_ms, abs=2)
    assert all(value >= 0 for timeline in (first, second) for value in astuple(timeline))


START_S = 1_700_000_000.0


class Clock:
    """A clock that is set by hand."""

    unix_s = START_S

    def __call__(self) -> float:
        return self.unix_s


@pytest.mark.parametrize("base", [None, BaseRef("org/model")])
def test_a_first_version_that_fails_at_first_keeps_the_time_of_its_capture(base: BaseRef | None) -> None:
    outage = Outage(HARD, lambda operation: operation.key.startswith(keys.VERSIONS) and operation.verb == "create")
    store = FaultyStore(MemoryStore())
    to = publisher(store, base=base)
    clock = Clock()
    to._upload.clock = clock
    to.open(WeightsSource(Weights.of(nth(0))))
    store._plan = outage
    with pytest.raises(StoreError):
        publish(to, 0).wait(LONG_S)
    outage.is_over = True
    clock.unix_s += 1000
    publish(to, 1).wait(LONG_S)
    to.close()
    first, second = (Log(store).read(number).timeline for number in (0, 1))
    assert first is not None
    assert second is not None
    assert first.captured_unix_ms <= 1000 * START_S < second.captured_unix_ms
    assert first.put_ms < 1000 * 100, "its own attempt only, by a clock that nobody sets"
