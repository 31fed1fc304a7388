"""Spans for OpenTelemetry, in processes that use it: one trace follows a version from its capture to every replica.

The id of the trace is made from the feed's id and the version, so that trainer and replicas agree on it without a
message between them. The API package is not imported here: a process that has not imported it, and chosen a provider,
does not collect spans.
"""

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deltasync.errors import DeltasyncError

FeedId = Callable[[], str | None]
"""Reads the id of the feed from its record."""


def trace_id(feed: str, version: int) -> int:
    """The id of the trace of a version: never 0."""
    return int.from_bytes(_hash(feed, version)[:16]) or 1


class VersionTracer:
    """Records spans for the versions of one feed. In a process without a provider of OpenTelemetry it does nothing.

    Spans of trainer and replicas have a common parent, which is never recorded itself.
    """

    def __init__(self, read_feed: FeedId) -> None:
        self._read_feed = read_feed
        self._feed: str | None = None

    def record(
        self,
        name: str,
        version: int,
        phases: Sequence[tuple[str, float]],
        *,
        end_unix_s: float,
        began_unix_s: float | None = None,
        attributes: Mapping[str, Any],
    ) -> None:
        """Record a span and one for each phase, given as names and seconds: one after another, up to the end.

        `began_unix_s` is earlier than the first phase if something waited before it.
        """
        api = sys.modules.get("opentelemetry.trace")
        if api is None:
            return
        provider = api.get_tracer_provider()
        if isinstance(provider, api.NoOpTracerProvider | api.ProxyTracerProvider) or (feed := self._id()) is None:
            return
        tracer = provider.get_tracer("deltasync")
        known = _hash(feed, version)
        parent = api.SpanContext(
            trace_id=trace_id(feed, version),
            span_id=int.from_bytes(known[16:24]) or 1,
            is_remote=True,
            trace_flags=api.TraceFlags(api.TraceFlags.SAMPLED),
        )
        end_ns, durations_ns = _ns(end_unix_s), [_ns(seconds) for _, seconds in phases]
        start_ns = end_ns - sum(durations_ns)
        outer = tracer.start_span(
            f"deltasync.{name}",
            context=api.set_span_in_context(api.NonRecordingSpan(parent)),
            start_time=start_ns if began_unix_s is None else min(_ns(began_unix_s), start_ns),
            attributes={
                "deltasync.feed": feed,
                "deltasync.version": version,
                **{f"deltasync.{key}": value for key, value in attributes.items() if value is not None},
            },
        )
        inside = api.set_span_in_context(outer)
        for (phase, _), duration_ns in zip(phases, durations_ns, strict=True):
            span = tracer.start_span(f"deltasync.{name}.{phase}", context=inside, start_time=start_ns)
            start_ns += duration_ns
            span.end(end_time=start_ns)
        outer.end(end_time=end_ns)

    def _id(self) -> str | None:
        if self._feed is None:
            try:
                self._feed = self._read_feed()
            except DeltasyncError:
                # The next version tries again: nothing may depend on a trace.
                return None
        return self._feed


def _hash(feed: str, version: int) -> bytes:
    return hashlib.sha256(f"deltasync {feed} {version}".encode()).digest()


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
