"""Anchors that a publisher adds: exact while training goes on, and harmless where they fail."""

import logging

import pytest
from support import LONG_S
from support.feeds import HARD, Gate, Outage, begun, holds, nth, publish, require_steps

from deltasync.feed.log import Log
from deltasync.feed.plan import plan
from deltasync.format import keys
from deltasync.state import load
from deltasync.store.memory import MemoryStore
from deltasync.store.protocol import Store
from deltasync.trainer import events
from deltasync.trainer import versions as anchors

pytestmark = pytest.mark.usefixtures("no_pauses")


def late_anchors(store: Store) -> list[int]:
    return Log(store).anchors()


def test_an_anchor_is_exact_although_the_shadow_moves_on() -> None:
    """It is stopped before it reads the first element; five versions later it goes on."""
    gate = Gate("list", keys.PAYLOADS)
    store, to = begun(gate)
    publish(to, 1, anchor=True).wait(LONG_S)
    gate.await_operation()
    for number in (2, 3, 1, 0, 4):
        publish(to, number).wait(LONG_S)
    assert late_anchors(store) == []
    gate.open()
    to.close()
    log = Log(store)
    manifest = log.read(1)
    way = plan(log, manifest)
    assert [(edge.start, edge.manifest.kind) for edge in way.edges] == [(None, "anchor")]
    assert way.edges[0].key == keys.anchor_key(1)
    # Nothing else is left to read it from.
    alone = MemoryStore()
    for key in (
        keys.version_key(1),
        keys.anchor_key(1),
        *(keys.payload_key(p.sha256) for p in way.edges[0].manifest.payloads),
    ):
        alone.put(key, store.get(key))
    assert holds(load(Log(alone), manifest), nth(1))


def test_an_anchor_of_other_weights_is_not_added(caplog: pytest.LogCaptureFixture) -> None:
    """A bit flips in the memory of the shadow before the anchor reads it: no replica may start from that."""
    gate = Gate("list", keys.PAYLOADS)
    store, to = begun(gate)
    publish(to, 1, anchor=True).wait(LONG_S)
    gate.await_operation()
    assert to._pipeline is not None
    next(bits for bits in to._pipeline.shadow.weights.arrays if len(bits))[-1] ^= 1
    gate.open()
    to.close()
    assert "shadow.digest" in caplog.text
    assert late_anchors(store) == []
    require_steps(store, {0: 0, 1: 1})


def test_an_anchor_that_fails_costs_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage(HARD, lambda operation: operation.key.startswith(keys.ANCHORS))
    store, to = begun(outage)
    publish(to, 1, anchor=True).wait(LONG_S)
    publish(to, 2).wait(LONG_S)
    to.close()
    assert "the anchor was not written" in caplog.text
    outage.is_over = True
    assert late_anchors(store) == []
    require_steps(store, {0: 0, 1: 1, 2: 2})


def test_a_long_anchor_reports_progress(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchors, "SHARD_ELEMENTS", 512)
    monkeypatch.setattr(events, "PROGRESS_S", 0.0)
    caplog.set_level(logging.INFO)
    store, to = begun()
    publish(to, 1, anchor=True).wait(LONG_S)
    to.close()
    lines = [record.message for record in caplog.records if "elements are put" in record.message]
    for version, count in ((0, len(Log(store).read(0).payloads)), (1, 2)):
        found = [line for line in lines if f"the anchor of version {version}:" in line]
        assert len(found) >= count - 1 > 0, lines
