"""Spans of a version: one trace from the capture to every replica."""

import time
from collections.abc import Sequence
from typing import Any

import opentelemetry.trace
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from support import LONG_S
from support.feeds import SpyStore, nth, publish, publisher
from support.replicas import TorchTarget, follower

from deltasync.errors import StoreError
from deltasync.feed.log import Log
from deltasync.format import keys
from deltasync.format.weights import Weights
from deltasync.observe import VersionTracer, trace_id
from deltasync.replica.events import Advance, Seconds


class Notes(SpanExporter):
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.spans.extend(spans)
        return SpanExportResult.SUCCESS

    def of(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> Notes:
    """What is exported by a provider that is there for one test: a process can set its own only once."""
    exporter, provider = Notes(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(opentelemetry.trace, "get_tracer_provider", lambda: provider)
    return exporter


def run(store: SpyStore) -> None:
    """Two versions, and two replicas that take them."""
    trainer = publisher(store)
    for number in range(2):
        publish(trainer, number).wait(LONG_S)
    trainer.close()
    for name in ("one", "two"):
        with follower(store, TorchTarget(Weights.of(nth(0)).layout), replica=name) as replica:
            replica.advance(to=0)
            replica.advance()


def test_one_trace_follows_a_version(notes: Notes) -> None:
    store = SpyStore()
    run(store)
    feed = Log(store).feed_id()
    assert feed is not None
    for version in (0, 1):
        spans = [s for s in notes.spans if s.context.trace_id == trace_id(feed, version)]  # type: ignore[union-attr]
        outer = [s for s in spans if s.name in ("deltasync.publish", "deltasync.move")]
        assert [s.name for s in outer] == ["deltasync.publish", "deltasync.move", "deltasync.move"]
        assert {dict(s.attributes or {})["deltasync.version"] for s in outer} == {version}
        assert [dict(s.attributes or {}).get("deltasync.replica") for s in outer] == [None, "one", "two"]
        # All have one parent, which trainer and replicas know without having met.
        assert len({s.parent.span_id for s in outer if s.parent is not None}) == 1
        for name, phases in (
            ("publish", {"encode", "put", "commit"}),
            ("move", {"plan", "fetch", "decode", "stage", "commit"}),
        ):
            for span in (s for s in outer if s.name == f"deltasync.{name}"):
                inside = [s for s in spans if s.parent is not None and s.parent.span_id == span.context.span_id]  # type: ignore[union-attr]
                assert {s.name for s in inside} == {f"deltasync.{name}.{phase}" for phase in phases}
                for s in inside:
                    assert (span.start_time or 0) <= (s.start_time or 0) <= (s.end_time or 0) <= (span.end_time or 0)
    assert trace_id(feed, 0) != trace_id(feed, 1) != trace_id("another", 1)


def test_without_a_provider_nothing_is_read_or_recorded() -> None:
    def read() -> str:
        raise AssertionError("the feed's record must not be read")

    VersionTracer(read).record("move", Advance(None, 1, (), 0, None, Seconds(fetch=1.0)), end_unix_s=time.time())


def test_a_record_that_cannot_be_read_costs_the_trace_and_nothing_else(notes: Notes) -> None:
    class Unreadable(SpyStore):
        is_away = False

        def get_range(self, key: str, offset: int, length: int) -> bytes:
            if self.is_away and key == keys.FEED:
                raise StoreError("away", transient=True)
            return super().get_range(key, offset, length)

    store = Unreadable()
    run(store)
    store.is_away = True
    before = len(notes.of("deltasync.move"))
    with follower(store, TorchTarget(Weights.of(nth(0)).layout)) as replica:
        moved: Any = replica.advance()
        assert moved.version == 1
        assert len(notes.of("deltasync.move")) == before
        store.is_away = False
        replica.advance(to=0)
    assert len(notes.of("deltasync.move")) == before + 1
