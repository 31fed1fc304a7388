"""The metrics of a publisher."""

from typing import Any

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from support import LONG_S
from support.feeds import SpyStore, publish, publisher
from support.replicas import wait_until

from deltasync.errors import InvalidInputError, StoreError
from deltasync.trainer.events import PublisherMetrics, PublishEvent


def has_sample(registry: CollectorRegistry, name: str) -> bool:
    return bool(registry.get_sample_value(name))


def families(text: str) -> list[Metric]:
    return list(text_string_to_metric_families(text))


def value(text: str, name: str, **labels: str) -> float:
    (found,) = [s.value for f in families(text) for s in f.samples if s.name == name and s.labels == labels]
    return found


def event(version: int, **fields: Any) -> PublishEvent:
    known = {"kind": "delta", "step": None, "elements": 10, "changed": 1, "payload_bytes": 5, "held_s": 0.5}
    known |= {"encode_s": 0.25, "put_s": 0.125, "commit_s": 1.0, "coalesced": 0, "retries": 0}
    return PublishEvent(version=version, **{**known, **fields})  # type: ignore[arg-type]


def test_an_anchor_that_is_added_later_is_not_the_newest_version() -> None:
    registry, seen = CollectorRegistry(), []
    metrics = PublisherMetrics(registry=registry, then=seen.append)
    metrics(event(7, coalesced=2, retries=3, step=70))
    metrics(event(5, kind="anchor", changed=None, payload_bytes=100))
    text = generate_latest(registry).decode()
    assert value(text, "deltasync_publisher_version") == 7
    assert value(text, "deltasync_publisher_step") == 70
    assert value(text, "deltasync_publisher_coalesced_total") == 2
    assert value(text, "deltasync_publisher_retries_total") == 3
    assert value(text, "deltasync_publisher_phase_seconds_total", phase="held") == 1.0
    assert [e.version for e in seen] == [7, 5]


def test_failed_publications_are_counted() -> None:
    registry = CollectorRegistry()

    class Away(SpyStore):
        def create(self, key: str, data: Any) -> bool:
            if key.startswith("versions/"):
                raise StoreError("away", transient=False)
            return super().create(key, data)

    trainer = publisher(Away(), observer=PublisherMetrics(registry=registry), retry_s=0.01)
    with pytest.raises(StoreError):
        publish(trainer, 0).wait(LONG_S)
    trainer.close()
    assert value(generate_latest(registry).decode(), "deltasync_publisher_failures_total") == 1


def test_a_publisher_that_writes_skips_has_the_metrics_of_a_compactor() -> None:
    registry = CollectorRegistry()
    trainer = publisher(SpyStore(), observer=PublisherMetrics(registry=registry), skips=(2,))
    for number in range(3):
        publish(trainer, number).wait(LONG_S)
    wait_until(lambda: has_sample(registry, "deltasync_compactor_skips_total"))
    trainer.close()


def test_two_publishers_need_two_registries() -> None:
    registry = CollectorRegistry()
    first = PublisherMetrics(registry=registry)
    with pytest.raises(InvalidInputError, match="another publisher"):
        PublisherMetrics(registry=registry)
    first.close()
    PublisherMetrics(registry=registry)


def test_without_prometheus_client_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    with pytest.raises(InvalidInputError, match="prometheus-client"):
        PublisherMetrics()
    assert prometheus_client is not None
