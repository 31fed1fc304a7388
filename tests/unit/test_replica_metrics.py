"""Metrics as Prometheus reads them."""

import sys
from dataclasses import fields

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.feeds import Feed
from support.replicas import TorchTarget, follower

from deltasync.errors import InvalidInputError
from deltasync.replica.events import Counts, Seconds, Status
from deltasync.replica.metrics import FollowerCollector, exposition, register

Samples = dict[tuple[str, str], float]


def samples(text: bytes) -> Samples:
    """Values by name and phase."""
    families = text_string_to_metric_families(text.decode())
    return {(s.name, s.labels.get("phase", "")): s.value for family in families for s in family.samples}


def test_a_follower_in_numbers() -> None:
    feed = Feed.of(3)
    target = TorchTarget(feed.states[0].layout)
    with follower(feed.store, target) as replica:
        metrics = exposition(replica.status)
        before = samples(metrics())
        first = replica.advance(to=1)
        second = replica.advance()
        feed.delta()
        replica.scrub()
        found = samples(metrics())
    assert first is not None
    assert second is not None
    assert ("deltasync_version", "") not in before
    assert before["deltasync_moves_total", ""] == 0
    assert found["deltasync_version", ""] == found["deltasync_head", ""] == 2
    assert found["deltasync_lag", ""] == 0
    assert found["deltasync_failing", ""] == found["deltasync_following", ""] == 0
    assert found["deltasync_moves_total", ""] == 2
    assert found["deltasync_fetched_bytes_total", ""] == first.nbytes + second.nbytes > 0
    assert found["deltasync_scrubbed_elements_total", ""] == feed.states[0].layout.elements
    for field in fields(Seconds):
        assert found["deltasync_last_move_seconds", field.name] == getattr(second.seconds, field.name)


def test_all_that_is_counted_is_shown() -> None:
    counts = Counts(**{field.name: 10 + i for i, field in enumerate(fields(Counts))})
    status = Status("r", 3, 5, 2, 3, None, False, True, None, "StoreError: away", counts)
    found = samples(exposition(lambda: status)())
    totals = [value for (name, _), value in found.items() if name.endswith("_total")]
    assert sorted(totals) == [10 + i for i in range(len(fields(Counts)))]
    assert found["deltasync_repaired_elements_total", ""] == counts.repaired
    assert found["deltasync_failing", ""] == found["deltasync_following", ""] == 1
    assert found["deltasync_lag", ""] == 2


def test_damage_is_counted() -> None:
    feed = Feed.of(2)
    target = TorchTarget(feed.states[0].layout)
    with follower(feed.store, target) as replica:
        replica.advance()
        target.state["embed"].view(-1)[3] += 1
        replica.scrub()
        found = samples(exposition(replica.status)())
    assert found["deltasync_damaged_elements_total", ""] == found["deltasync_repaired_elements_total", ""] == 1


def test_the_registry_of_the_process() -> None:
    status = Status("r", 3, 5, 2, 3, None, False, True, None, None)
    forget = register(lambda: status)
    try:
        assert prometheus_client.REGISTRY.get_sample_value("deltasync_version") == 3
    finally:
        forget()
    assert prometheus_client.REGISTRY.get_sample_value("deltasync_version") is None


def test_without_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    status = Status("r", None, None, None, None, None, False, False, None, None)
    with pytest.raises(InvalidInputError, match="prometheus-client") as caught:
        exposition(lambda: status)
    assert caught.value.hint == "pip install 'deltasync[metrics]'"
    with pytest.raises(ImportError):
        register(lambda: status)
    assert FollowerCollector(lambda: status)
