"""Skips and prunes beside the publications: nothing waits for them, and nothing depends on them."""

import logging
import threading
import time
from contextlib import suppress
from typing import Any

import pytest
from support import LONG_S
from support.feeds import Gate, Outage, begun, publish, publisher, require_steps

from deltasync.errors import InvalidInputError, StoreError
from deltasync.feed.log import Log
from deltasync.feed.plan import plan
from deltasync.format import keys
from deltasync.store.memory import MemoryStore
from deltasync.store.protocol import Data, Store
from deltasync.testing.faulty import Crash, Fault, FaultyStore, Operation, at
from deltasync.trainer.publisher import FeedPublisher, PublisherOptions
from deltasync.trainer.schedule import AnchorPolicy
from deltasync.upkeep.compact import Compactor
from deltasync.upkeep.prune import Retention
from deltasync.upkeep.verify import verify

LEVELS = (2, 4)
STEPS = {number: number for number in range(10)}
SKIPS = {(0, 2), (2, 4), (4, 6), (6, 8), (0, 4), (4, 8)}

pytestmark = pytest.mark.usefixtures("no_pauses")


def skips_of(store: Store) -> set[tuple[int, int]]:
    return set(Log(store).skips())


def await_skips(store: Store, wanted: set[tuple[int, int]] = SKIPS) -> None:
    until_s = time.monotonic() + LONG_S
    while skips_of(store) != wanted:
        assert time.monotonic() < until_s, f"there are only {skips_of(store)}"
        time.sleep(0.01)


def publish_all(to: FeedPublisher, first: int = 1) -> None:
    for number in range(first, len(STEPS)):
        publish(to, number).wait(LONG_S)


def test_skips_lead_to_the_same_bits() -> None:
    store, to = begun(skips=LEVELS)
    publish_all(to)
    await_skips(store)
    to.close()
    require_steps(store, STEPS)
    log = Log(store)
    edges = plan(log, log.read(9), start=0).edges
    assert [(edge.start, edge.end) for edge in edges] == [(0, 4), (4, 8), (8, 9)]
    assert {edge.manifest.timeline for edge in edges[:2]} == {None}, "the steps are those of the version, not of a skip"


def test_none_are_written_unless_asked_for() -> None:
    store, to = begun()
    publish_all(to)
    to.close()
    assert skips_of(store) == set()


def test_publications_go_on_while_a_skip_is_written() -> None:
    gate = Gate("create", keys.SKIPS)
    store, to = begun(gate, skips=LEVELS)
    publish_all(to)
    gate.await_operation()
    assert skips_of(store) == set()
    gate.open()
    await_skips(store)
    to.close()
    require_steps(store, STEPS)


def test_a_publisher_that_is_closed_finishes_the_skip_in_progress_and_no_other() -> None:
    gate = Gate("create", keys.SKIPS)
    store, to = begun(gate, skips=LEVELS)
    publish_all(to)
    gate.await_operation()
    assert to._pipeline is not None
    assert to._pipeline._skips is not None
    # As `close` begins; it then waits for the thread that the gate holds.
    to._pipeline._skips._stop.set()
    gate.open()
    to.close()
    assert skips_of(store) == {(0, 2)}
    assert not [operation for operation in store.operations[-1:] if operation.key.startswith(keys.PAYLOADS)]
    again = publisher(store, skips=LEVELS)
    publish(again, 10).wait(LONG_S)
    await_skips(store, SKIPS | {(8, 10)})
    again.close()
    require_steps(store, {**STEPS, 10: 10})


def is_of_a_skip(operation: Operation) -> bool:
    return operation.key.startswith(keys.SKIPS)


@pytest.mark.parametrize("is_transient", [True, False], ids=["for a while", "for good"])
def test_skips_that_fail_are_reported_and_written_later(is_transient: bool, caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage(Fault("refuse", transient=is_transient), is_of_a_skip)
    store, to = begun(outage, skips=LEVELS, retry_s=0.01)
    with caplog.at_level(logging.WARNING):
        for number in range(1, 5):
            publish(to, number).wait(LONG_S)
        until_s = time.monotonic() + LONG_S
        while "no skip was written" not in caplog.text:
            assert time.monotonic() < until_s
            time.sleep(0.01)
    assert skips_of(store._store) == set()
    outage.is_over = True
    publish_all(to, first=5)
    await_skips(store)
    to.close()
    require_steps(store, STEPS)


def test_an_error_that_nobody_expected_is_reported(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(compactor: Compactor) -> None:
        raise ZeroDivisionError("a mistake in this program")

    monkeypatch.setattr(Compactor, "advance", fail)
    store, to = begun(skips=LEVELS)
    publish_all(to)
    to.close()
    require_steps(store, STEPS)
    assert "no skip was written, the next versions get one: a mistake in this program" in caplog.text
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("kind", ["crash_before", "crash_after"])
def test_a_trainer_that_writes_skips_dies_at_every_operation(kind: Any) -> None:
    """What is left behind is whole, and the next one writes what is missing."""
    counting = FaultyStore(MemoryStore())
    train(counting, range(3), {(0, 2)})
    assert any(is_of_a_skip(operation) and operation.verb == "create" for operation in counting.operations)
    for number in range(1, len(counting.operations) + 1):
        store = MemoryStore()
        with suppress(Crash):
            train(FaultyStore(store, at(number, Fault(kind))), range(3), {(0, 2)})
        require_steps(store, {version: version for version in Log(store).versions()})
        train(store, range(len(list(Log(store).versions())), 5), {(0, 2), (2, 4), (0, 4)})
        require_steps(store, {step: step for step in range(5)})


def train(store: Store, steps: range, skips: set[tuple[int, int]]) -> None:
    """Publish these steps, and wait for the skips up to the last of them."""
    to = publisher(store, skips=LEVELS)
    try:
        for step in steps:
            publish(to, step).wait(LONG_S)
        await_skips(store, skips)
    finally:
        to.close()


@pytest.mark.parametrize("levels", [(1,), (4, 6), (4, 4), (0,), "24", 4, (2.0,), [True]])
def test_levels_are_checked(levels: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"^skips must start with 2 or more"):
        PublisherOptions(skips=levels)


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_publisher_prunes_its_feed() -> None:
    store = MemoryStore()
    options = {"anchors": AnchorPolicy(bytes_ratio=None, versions=5), "wait": True}
    to = publisher(store, retention=Retention(anchors=1, versions=5, every_s=0.02), **options)
    for number in range(30):
        publish(to, number).wait(LONG_S)
        wait_for(lambda n=number: n < 12 or Log(store).floor() >= n - 12)
    to.close()
    assert verify(store, deep=True).is_clean
    assert len(list(store.list(keys.PAYLOADS))) < 25


@pytest.mark.parametrize("verb", ["delete", "put", "list"])
def test_a_prune_that_fails_does_not_fail_training(verb: str, caplog: pytest.LogCaptureFixture) -> None:
    """The credentials of the trainer may not allow it to delete: that is reported once, and nothing else happens."""

    class Forbidden(MemoryStore):
        is_broken = True

        def delete(self, key: str) -> None:
            if verb == "delete" and key.startswith((keys.PAYLOADS, keys.ANCHORS)):
                raise StoreError("access denied", transient=False, hint="ask")
            super().delete(key)

        def put(self, key: str, data: Data) -> None:
            if verb == "put" and key == keys.FLOOR:
                raise StoreError("access denied", transient=False, hint="ask")
            super().put(key, data)

        def list(self, prefix: str = "", *, after: str | None = None) -> Any:
            if verb == "list" and prefix == keys.PINS and self.is_broken:
                raise OSError("what no store raises")
            return super().list(prefix, after=after)

    store = Forbidden()
    to = publisher(store, retention=Retention(anchors=1, versions=1, every_s=0.01), wait=True)
    with caplog.at_level(logging.ERROR, "deltasync"):
        for number in range(3):
            publish(to, number, anchor=number == 2).wait(LONG_S)
        wait_for(lambda: any("cannot prune" in record.message for record in caplog.records))
        time.sleep(0.1)
        publish(to, 3).wait(LONG_S)
        to.close()
    store.is_broken = False
    reported = [record for record in caplog.records if "cannot prune" in record.message]
    assert 1 <= len(reported) <= 2
    require_steps(store, dict(enumerate(range(4))))


def test_closing_does_not_wait_for_the_next_run() -> None:
    to = publisher(MemoryStore(), retention=Retention(every_s=3600.0))
    publish(to, 0).wait(LONG_S)
    closing = threading.Thread(target=to.close)
    closing.start()
    closing.join(LONG_S)
    assert not closing.is_alive()
