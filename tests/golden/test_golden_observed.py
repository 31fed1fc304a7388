"""What others watch: metrics, log lines, spans, keys of trackers, fields of events and of the status."""

import logging
import re
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

import opentelemetry.trace
import pytest
from golden import check_json, fixed_tensors, options
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from support import LONG_S
from support.replicas import wait_until

from deltasync import Advance, Follower, PublisherMetrics, PublishEvent, Retention
from deltasync.replica.events import follower_metrics
from deltasync.replica.folder import HookStatus
from deltasync.store.memory import MemoryStore
from deltasync.torch import ModuleTarget, Publisher
from deltasync.trackers import event_metrics
from deltasync.upkeep.compact import Compactor
from deltasync.upkeep.metrics import upkeep_metrics
from deltasync.upkeep.relay import Relay
from deltasync.upkeep.stats import Upkeep


class Spans(SpanExporter):
    def __init__(self) -> None:
        self.found: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.found.extend(spans)
        return SpanExportResult.SUCCESS

    def attributes(self) -> dict[str, list[str]]:
        """By the names of spans, those that any of them has."""
        names = sorted({span.name for span in self.found})
        spans = [(span.name, span.attributes or {}) for span in self.found]
        return {name: sorted({a for of, given in spans if of == name for a in given}) for name in names}


def shape(value: Any) -> Any:
    """The names of fields, and the types of their values."""
    if isinstance(value, dict):
        return {name: shape(inner) for name, inner in value.items()}
    return type(value).__name__


def line(record: logging.LogRecord) -> str:
    """A log line without its numbers."""
    return f"{record.levelname.lower()}: " + re.sub(r"\d+(?:\.\d+)?(?:e-\d+)?", "N", record.getMessage())


def test_what_is_observed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "deltasync")
    spans, provider = Spans(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    monkeypatch.setattr(opentelemetry.trace, "get_tracer_provider", lambda: provider)
    store, copy, registry = MemoryStore("golden"), MemoryStore(), CollectorRegistry()
    events: list[PublishEvent] = []
    moves: list[Advance] = []
    metrics = PublisherMetrics(registry=registry, then=events.append)
    with Publisher(store, options=options(observer=events.append)) as publisher:
        publisher.publish(fixed_tensors(0), step=0).wait(LONG_S)
    given = options(observer=metrics, retention=Retention(anchors=1, versions=100, every_s=0.01), skips=(2,))
    with Publisher(store, options=given) as publisher:
        for step in range(1, 3):
            publisher.publish(fixed_tensors(step), step=step, anchor=step == 2).wait(LONG_S)
        for name in ("deltasync_pruner_runs_total", "deltasync_compactor_skips_total"):
            wait_until(lambda name=name: bool(registry.get_sample_value(name)))
    scraped = scrape(registry)
    other = CollectorRegistry()
    relay, compactor = Relay(store, copy, every=True, heartbeats=True), Compactor(copy, levels=(2,))
    assert list(relay.advance())
    assert list(compactor.advance())
    other.register(upkeep_metrics("compactor", {(): compactor.upkeep}))  # type: ignore[arg-type]
    other.register(upkeep_metrics("relay", {(relay.destination,): relay.upkeep}))  # type: ignore[arg-type]
    target = ModuleTarget(fixed_tensors())
    with Follower(store, target, replica="r", observer=moves.append, beat_s=3600) as replica:
        replica.advance(to=1)
        replica.advance()
        replica.scrub()
        other.register(follower_metrics(replica.status, lambda: HookStatus(version=2)))
        status = replica.status()
        scraped = {**scraped, **scrape(other)}
    assert [event.version for event in events if event.kind == "delta"] == [1, 2]
    by_kind = {("first" if event.version == 0 else event.kind): event for event in events}
    check_json(
        "observed.json",
        {
            "metrics": scraped,
            "spans": spans.attributes(),
            "trackers": {
                "first": sorted(event_metrics(by_kind["first"])),
                "delta": sorted(event_metrics(by_kind["delta"])),
                "anchor": sorted(event_metrics(by_kind["anchor"])),
                "advance": sorted(event_metrics(moves[0])),
            },
            "PublishEvent": shape(asdict(by_kind["delta"])),
            "Advance": shape(asdict(moves[1])),
            "Upkeep": [field.name for field in fields(Upkeep)],
            "upkeep of a relay": work_of(relay.upkeep),
            "upkeep of a compactor": work_of(compactor.upkeep),
            "Status": shape(asdict(status)),
            "log": sorted({line(record) for record in caplog.records if record.name.startswith("deltasync")}),
            "text of a PublishEvent": without_numbers(str(by_kind["delta"])),
            "text of an Advance": without_numbers(str(moves[1])),
        },
    )


def work_of(upkeep: Upkeep) -> dict[str, Any]:
    return {name: shape(getattr(upkeep, name)) for name in ("counts", "seconds", "figures")}


def without_numbers(text: str) -> str:
    return re.sub(r"\d+(?:\.\d+)?", "N", text)


def scrape(registry: CollectorRegistry) -> dict[str, Any]:
    """Names, types, help and labels of all metrics, and the values of labels that are not a place."""
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        labels: dict[str, set[str]] = {}
        for sample in family.samples:
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add("<url>" if "://" in value else value)
        found[family.name] = {
            "type": family.type,
            "help": family.documentation,
            "labels": {name: sorted(values) for name, values in labels.items()},
            "has samples": bool(family.samples),
        }
    return found
