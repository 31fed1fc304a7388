"""Metrics of compactors, pruners and relays: what they count, and whether they say that they fail."""

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.feeds import Feed

from deltasync.errors import InvalidInputError, StoreError
from deltasync.feed.pins import pin
from deltasync.format import keys
from deltasync.format.sealed import Heartbeat
from deltasync.observe import Collector, exposition
from deltasync.store.memory import MemoryStore
from deltasync.store.protocol import Data, Store
from deltasync.testing.faulty import Fault, FaultyStore, at
from deltasync.upkeep.compact import Compactor
from deltasync.upkeep.prune import Pruner, Retention
from deltasync.upkeep.relay import Relay, Relayed
from deltasync.upkeep.stats import PHASES, MaintenanceStats, upkeep_metrics

Samples = dict[tuple[str, ...], float]


def samples(collector: Collector) -> Samples:
    """Values by name without its prefix, and the values of their labels but that of the destination."""
    families = text_string_to_metric_families(exposition(collector)().decode())
    return {
        (s.name.removeprefix("deltasync_"), *(v for k, v in s.labels.items() if k != "destination")): s.value
        for family in families
        for s in family.samples
    }


class Moody(MemoryStore):
    """Fails for good while `fails_at` begins a key that is put."""

    fails_at: str | None = None
    tries = 0

    def put(self, key: str, data: Data) -> None:
        self._check(key)
        super().put(key, data)

    def create(self, key: str, data: Data) -> bool:
        self._check(key)
        return super().create(key, data)

    def _check(self, key: str) -> None:
        if self.fails_at is not None and key.startswith(self.fails_at):
            self.tries += 1
            raise StoreError("access denied", transient=self.tries == 1, hint="ask")


def grown(versions: int, store: MemoryStore | None = None) -> Feed:
    feed = Feed.of(versions) if store is None else Feed.of(versions, store)
    feed.late_anchor(versions - 2)
    return feed


def test_a_compactor() -> None:
    feed = Feed.of(10, Moody())
    assert isinstance(feed.store, Moody)
    compactor = Compactor(feed.store, levels=(4, 8), retry_s=1.0)
    collector = upkeep_metrics("compactor", {(): compactor.upkeep})
    before = samples(collector)
    assert ("compactor_version",) not in before
    assert before["compactor_skips_total",] == before["compactor_failing",] == 0
    assert compactor.upkeep.why_not_ready() == "it has not succeeded yet"
    feed.store.fails_at = keys.SKIPS
    with pytest.raises(StoreError):
        list(compactor.advance())
    failed = samples(collector)
    assert (failed["compactor_failing",], failed["compactor_failures_total",]) == (1, 1)
    assert failed["compactor_retries_total",] == 1
    assert "access denied" in (compactor.upkeep.why_not_ready() or "")
    feed.store.fails_at = None
    written = list(compactor.advance())
    found = samples(collector)
    assert (found["compactor_failing",], compactor.upkeep.why_not_ready()) == (0, None)
    assert found["compactor_skips_total",] == len(written) == 3
    assert found["compactor_payload_bytes_total",] == sum(skip.nbytes for skip in written)
    assert (found["compactor_version",], found["compactor_head",]) == (8, 9)
    assert found["compactor_last_success_timestamp_seconds",] > 0
    assert all(found["compactor_phase_seconds_total", phase] > 0 for phase in PHASES["compactor"])


def test_a_pruner() -> None:
    feed = grown(12, Moody())
    assert isinstance(feed.store, Moody)
    pin(feed.store, 3, name="best")
    feed.log.beat(Heartbeat("late", 5, 2**40, {}))
    pruner = Pruner(feed.store, Retention(anchors=1, versions=1))
    collector = upkeep_metrics("pruner", {(): pruner.upkeep})
    feed.store.fails_at = keys.FLOOR
    with pytest.raises(StoreError):
        pruner.run()
    failed = samples(collector)
    assert (failed["pruner_failures_total",], failed["pruner_runs_total",], failed["pruner_failing",]) == (1, 0, 1)
    assert ("pruner_stored_bytes",) not in failed
    feed.store.fails_at = None
    pruning, stay = pruner.run()
    found = samples(collector)
    assert not stay
    assert (found["pruner_runs_total",], found["pruner_failing",]) == (1, 0)
    assert found["pruner_deleted_objects_total",] == len(pruning.keys) > 0
    assert found["pruner_deleted_bytes_total",] == pruning.payload_bytes > 0
    assert found["pruner_stored_bytes",] == sum(item.nbytes for item in feed.store.list(keys.PAYLOADS))
    assert (found["pruner_version",], found["pruner_head",]) == (10, 11)
    assert (found["pruner_held_replicas",], found["pruner_held_pins",]) == (1, 1)
    pruner.run()
    again = samples(collector)
    assert again["pruner_deleted_bytes_total",] == pruning.payload_bytes, "nothing is counted twice"
    assert again["pruner_runs_total",] == 2


def test_a_run_that_is_stopped_counts_what_it_deleted() -> None:
    feed = grown(12)
    pruner = Pruner(feed.store, Retention(anchors=1, versions=1))
    asked: list[int] = []
    before = sum(item.nbytes for item in feed.store.list(keys.PAYLOADS))
    pruner.run(is_stopping=lambda: asked.append(1) or len(asked) > 3)  # type: ignore[func-returns-value]
    found = samples(upkeep_metrics("pruner", {(): pruner.upkeep}))
    stored = sum(item.nbytes for item in feed.store.list(keys.PAYLOADS))
    assert found["pruner_deleted_objects_total",] == 3
    assert found["pruner_deleted_bytes_total",] == before - stored > 0
    assert found["pruner_stored_bytes",] == stored


def test_a_run_that_fails_counts_what_it_deleted() -> None:
    feed = grown(12)
    before = _payload_bytes(feed.store)
    deletions = iter(range(100))
    refused = Fault("refuse", transient=False)
    store = FaultyStore(feed.store, lambda op: refused if op.verb == "delete" and next(deletions) == 3 else None)
    pruner = Pruner(store, Retention(anchors=1, versions=1))
    with pytest.raises(StoreError):
        pruner.run()
    failed = samples(upkeep_metrics("pruner", {(): pruner.upkeep}))
    stored = _payload_bytes(feed.store)
    assert failed["pruner_deleted_objects_total",] == 3
    assert failed["pruner_deleted_bytes_total",] == before - stored > 0
    assert (failed["pruner_version",], failed["pruner_runs_total",]) == (10, 0)
    pruning, _ = pruner.run()
    found = samples(upkeep_metrics("pruner", {(): pruner.upkeep}))
    assert found["pruner_deleted_objects_total",] == 3 + len(pruning.keys)


def test_a_relay_that_fails_counts_what_it_sent() -> None:
    """At whatever operation of the destination it fails: the next attempt does not send again what is there."""
    feed, number, is_over = grown(8), 1, False
    while not is_over:
        copy = MemoryStore()
        relay = Relay(feed.store, FaultyStore(copy, at(number, Fault("refuse", transient=False))), retry_s=0.0)
        collector = upkeep_metrics("relay", {(relay.destination,): relay.upkeep})
        sent: list[Relayed] = []
        try:
            for part in relay.advance():
                sent.append(part)
            is_over = True
        except StoreError:
            failed = samples(collector)
            assert failed["relay_payload_bytes_total",] == _payload_bytes(copy), number
            assert failed.get(("relay_version",)) == max((part.version for part in sent), default=None), number
            sent.extend(relay.advance())
        found = samples(collector)
        assert found["relay_payload_bytes_total",] == _payload_bytes(copy)
        assert [(part.kind, part.version) for part in sent] == [("anchor", 6), ("delta", 7)], number
        assert (found["relay_edges_total", "anchor"], found["relay_edges_total", "delta"]) == (1, 1)
        number += 1
    assert number > 20


def _payload_bytes(store: Store) -> int:
    return sum(item.nbytes for item in store.list(keys.PAYLOADS))


def test_a_relay() -> None:
    feed, copy = grown(12, Moody()), MemoryStore()
    assert isinstance(feed.store, Moody)
    relay = Relay(feed.store, copy, heartbeats=True)
    collector = upkeep_metrics("relay", {(relay.destination,): relay.upkeep})
    assert ("relay_lag",) not in samples(collector)
    feed.store.fails_at = keys.REPLICAS
    sent = list(relay.advance())
    found = samples(collector)
    assert found["relay_heartbeat_failures_total",] > 0
    assert found["relay_failures_total",] == found["relay_failing",] == 0, "the copy goes on without them"
    assert (found["relay_version",], found["relay_head",], found["relay_lag",]) == (11, 11, 0)
    for kind in ("anchor", "base", "delta", "skip"):
        assert found["relay_edges_total", kind] == sum(part.kind == kind for part in sent)
    assert found["relay_payload_bytes_total",] == sum(part.payload_bytes for part in sent) > 0
    assert found["relay_manifest_bytes_total",] == sum(part.manifest_bytes for part in sent) > 0
    assert found["relay_coalesced_total",] == sum(part.left_out for part in sent) == 10
    assert all(found["relay_phase_seconds_total", phase] > 0 for phase in PHASES["relay"])


def test_relays_of_one_process_are_told_apart() -> None:
    feed, good, bad = grown(6), MemoryStore(), Moody()
    bad.fails_at = keys.PAYLOADS
    relays = [Relay(feed.store, store, retry_s=0.0) for store in (good, bad)]
    relays[0].destination, relays[1].destination = "s3://good/run", 's3://bad/"quoted"\n'
    list(relays[0].advance())
    with pytest.raises(StoreError):
        list(relays[1].advance())
    text = exposition(upkeep_metrics("relay", {(each.destination,): each.upkeep for each in relays}))().decode()
    found: dict[str, Any] = {
        s.labels["destination"]: s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
        if s.name == "deltasync_relay_failing"
    }
    assert found == {"s3://good/run": 0, 's3://bad/"quoted"\n': 1}


def test_a_caller_that_stops_early_is_no_failure() -> None:
    feed = grown(8)
    relay = Relay(feed.store, MemoryStore(), every=True)
    sending = relay.advance()
    next(sending)
    sending.close()
    assert relay.upkeep.counts.get("failures", 0) == 0
    assert relay.upkeep.error is None


def test_what_another_thread_reads_does_not_change() -> None:
    """`GET /status` goes through the counts while a relay adds the first edge of a kind."""
    upkeep = MaintenanceStats()
    upkeep.count("delta_edges")
    with upkeep.phase("fetch"):
        pass
    reading = [iter(part.items()) for part in (upkeep.counts, upkeep.seconds)]
    upkeep.count("anchor_edges")
    with upkeep.phase("put"):
        pass
    assert [[name for name, _ in part] for part in reading] == [["delta_edges"], ["fetch"]]
    assert set(upkeep.counts) == {"delta_edges", "anchor_edges"}


def test_without_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    collector = upkeep_metrics("pruner", {})
    with pytest.raises(InvalidInputError, match="prometheus-client") as caught:
        exposition(collector)
    assert caught.value.hint == "pip install 'deltasync[metrics]'"
