"""A trainer that dies, or whose store fails, at any operation: what was committed stays, and the next one goes on."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support import LONG_S
from support.feeds import nth, publish, publisher, require_steps
from support.helpers import write_sharded

from deltasync.errors import StoreError
from deltasync.feed.log import Log
from deltasync.format.manifest import BaseRef
from deltasync.store import patient
from deltasync.store.memory import MemoryStore
from deltasync.store.protocol import Store
from deltasync.testing.faulty import Crash, Fault, FaultyStore, at
from deltasync.trainer import versions as anchors

STEPS = 4


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patient, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(anchors, "SHARD_ELEMENTS", 1000)
    # A delta has several payloads.
    monkeypatch.setattr(anchors, "DELTA_BYTES_LEAST", 1)
    monkeypatch.setattr(anchors, "INDEX_SHARE", 0)


def train(store: Store, first: int, last: int, **options: Any) -> None:
    """Publish these steps one after the other, one of them with an anchor; the first error ends it."""
    to = publisher(store, wait=True, **options)
    try:
        for step in range(first, last):
            publish(to, step, anchor=step == 2).wait(LONG_S)
    finally:
        to.close()


def steps_of(store: Store) -> dict[int, int]:
    log = Log(store)
    found = {version: log.read(version).step for version in log.versions()}
    return {version: step for version, step in found.items() if step is not None}


STARTS = {"anchor": False, "base": True}


@pytest.mark.parametrize("has_base", STARTS.values(), ids=STARTS.keys())
@pytest.mark.parametrize("is_mapped", [False, True], ids=["memory", "mapped"])
@pytest.mark.parametrize("kind", ["crash_before", "crash_after"])
def test_a_trainer_dies_at_every_operation(kind: Any, is_mapped: bool, has_base: bool, tmp_path: Path) -> None:
    write_sharded(tmp_path / "base", nth(0))
    options: dict[str, Any] = {"base": BaseRef(str(tmp_path / "base")) if has_base else None}
    counting = FaultyStore(MemoryStore())
    train(counting, 0, STEPS, **options)
    count = len(counting.operations)
    assert count > 15
    for number in range(1, count + 1):
        if is_mapped:
            options["shadow_path"] = tmp_path / f"shadow-{number}"
        store = MemoryStore()
        with suppress(Crash):
            train(FaultyStore(store, at(number, Fault(kind))), 0, STEPS, **options)
        died_with = steps_of(store)
        assert list(died_with.values()) == list(range(len(died_with)))
        # It restarts from a checkpoint of its own, one step behind what it has published.
        again = max(len(died_with) - 1, 0)
        train(store, again, STEPS + 1, **options)
        expected = [*range(len(died_with)), *range(again, STEPS + 1)]
        require_steps(store, dict(enumerate(expected)))


@pytest.mark.parametrize("kind", ["refuse", "lose"])
@pytest.mark.parametrize("is_transient", [True, False], ids=["for a moment", "for good"])
def test_an_error_at_every_operation(kind: Any, is_transient: bool) -> None:
    """The trainer goes on after each error, as a loop would that only logs it."""
    counting = FaultyStore(MemoryStore())
    train(counting, 0, STEPS)
    for number in range(1, len(counting.operations) + 1):
        inner = MemoryStore()
        store = FaultyStore(inner, at(number, Fault(kind, transient=is_transient)))
        to = publisher(store, wait=True)
        failed, step, is_last = 0, -1, False
        # The last step begins after the fault, which comes late if the anchor's operations do.
        while not is_last:
            step, is_last = step + 1, step >= STEPS and len(store.operations) >= number
            try:
                publish(to, step, anchor=step == 2).wait(LONG_S)
            except StoreError:
                failed += 1
        to.close()
        assert failed <= (0 if is_transient else 1)
        steps = steps_of(inner)
        assert list(steps.values())[-1] == step
        require_steps(inner, steps)
