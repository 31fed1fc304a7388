"""What others watch: one trace for each version, metrics, and the listener that serves them beside the status."""

import json
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

import opentelemetry.trace
import prometheus_client
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from prometheus_client.parser import text_string_to_metric_families
from support import LONG_S
from support.feeds import SpyStore, nth, publish, publisher
from support.replicas import TorchTarget, ask, follower

from deltasync.errors import InvalidInputError, StoreError
from deltasync.feed.log import Log
from deltasync.format import keys
from deltasync.format.weights import Weights
from deltasync.observe import VersionTracer, exposition, listening, registered, trace_id
from deltasync.replica.events import Advance, Seconds, Status, follower_metrics


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


Samples = dict[tuple[str, str], float]


def samples(text: bytes) -> Samples:
    """Values by name and phase."""
    families = text_string_to_metric_families(text.decode())
    return {(s.name, s.labels.get("phase", "")): s.value for family in families for s in family.samples}


def test_the_registry_of_the_process() -> None:
    status = Status("r", 3, 5, 2, 3, None, False, True, None, None)
    forget = registered(follower_metrics(lambda: status))
    try:
        assert prometheus_client.REGISTRY.get_sample_value("deltasync_version") == 3
    finally:
        forget()
    assert prometheus_client.REGISTRY.get_sample_value("deltasync_version") is None


def test_without_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    status = Status("r", None, None, None, None, None, False, False, None, None)
    with pytest.raises(InvalidInputError, match="prometheus-client") as caught:
        exposition(follower_metrics(lambda: status))
    assert caught.value.hint == "pip install 'deltasync[metrics]'"
    with pytest.raises(ImportError):
        registered(follower_metrics(lambda: status))
    assert follower_metrics(lambda: status)


LISTENED = Status("r", 3, 5, 2, 3, None, False, True, None, None)


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_routes_of_a_listener(host: str) -> None:
    if ":" in host and not has_ipv6():
        pytest.skip("this host has no IPv6")
    metrics = exposition(follower_metrics(lambda: LISTENED))
    with listening(lambda: LISTENED, host, 0, token="t", metrics=metrics) as url:
        address = url.removeprefix("http://")
        code, content = ask(address, "GET", "/status", "t")
        assert (code, json.loads(content)["version"]) == (200, 3)
        assert ask(address, "GET", "/status")[0] == ask(address, "GET", "/status", "other")[0] == 401
        assert ask(address, "POST", "/status")[0] == 401
        assert ask(address, "POST", "/status", "t")[0] == ask(address, "GET", "/", "t")[0] == 404
        assert samples(ask(address, "GET", "/metrics")[1])["deltasync_version", ""] == 3
        assert ask(address, "GET", "/healthz")[0] == ask(address, "GET", "/readyz")[0] == 200
        assert ask(address, "POST", "/healthz", "t")[0] == ask(address, "POST", "/readyz", "t")[0] == 404
    with pytest.raises(OSError):
        ask(address, "GET", "/status", "t")


def test_a_listener_without_a_token_and_without_metrics() -> None:
    with listening(lambda: LISTENED, "127.0.0.1", 0) as url:
        address = url.removeprefix("http://")
        assert ask(address, "GET", "/status")[0] == 200
        code, content = ask(address, "GET", "/metrics")
        assert (code, b"deltasync[metrics]" in content) == (404, True)


def test_the_status_is_not_for_pages_of_other_hosts() -> None:
    """A page can have its own name lead to 127.0.0.1: a browser then lets it read the answers. It has no token."""
    with listening(lambda: LISTENED, "127.0.0.1", 0) as url:
        address = url.removeprefix("http://")
        assert ask(address, "GET", "/status", host="page.example")[0] == 403
        assert ask(address, "GET", "/status", host="localhost:9090")[0] == 200
        assert ask(address, "GET", "/healthz", host="page.example")[0] == 200
    with listening(lambda: LISTENED, "127.0.0.1", 0, token="t") as url:
        assert ask(url.removeprefix("http://"), "GET", "/status", "t", host="page.example")[0] == 200


def test_a_listener_says_whether_it_is_ready() -> None:
    """Why it is not ready may name the store: only those with the token learn it."""
    reasons: list[str | None] = ["s3://secret is away"]
    with listening(
        lambda: LISTENED, "127.0.0.1", 0, token="t", why_not_ready=lambda: reasons[-1], details=lambda: {"exec": 5}
    ) as url:
        address = url.removeprefix("http://")
        code, content = ask(address, "GET", "/readyz")
        assert (code, json.loads(content)) == (503, {"ready": False, "version": 3})
        found = json.loads(ask(address, "GET", "/status", "t")[1])
        assert (found["not_ready"], found["exec"], found["version"]) == ("s3://secret is away", 5, 3)
        assert ask(address, "GET", "/healthz")[0] == 200, "the process is well: a restart would not help"
        reasons.append(None)
        code, content = ask(address, "GET", "/readyz")
        assert (code, json.loads(content)) == (200, {"ready": True, "version": 3})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_an_address_that_others_can_reach_needs_a_token(host: str) -> None:
    with pytest.raises(InvalidInputError, match="there is no token") as caught, listening(lambda: LISTENED, host, 0):
        pass
    assert "DELTASYNC_TOKEN" in (caught.value.hint or "")


def test_an_address_that_others_can_reach_with_a_token() -> None:
    with listening(lambda: LISTENED, "0.0.0.0", 0, token="t") as url:
        address = f"127.0.0.1:{url.rpartition(':')[2]}"
        assert ask(address, "GET", "/status")[0] == 401
        assert ask(address, "GET", "/status", "t")[0] == 200
