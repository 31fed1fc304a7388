"""A follower's state for Prometheus (extra `metrics`). The client is imported when somebody asks for metrics."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from deltasync.errors import InvalidInputError
from deltasync.following.events import Status

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_TOTALS = {
    "moves": "How often the target became a version.",
    "nbytes": "Bytes of the payloads that were fetched for that.",
    "refetched": "Payloads that came damaged and were fetched again.",
    "rerouted": "Edges that turned out to be of no use.",
    "rebuilt": "Mirrors that had other bits than their version.",
    "scrubbed": "Elements that were compared with the mirror.",
    "damaged": "Elements that differed from the mirror.",
    "repaired": "Elements that differed and were overwritten.",
}
_NAMES = {"nbytes": "fetched_bytes", "scrubbed": "scrubbed_elements"}
_NAMES |= {"damaged": "damaged_elements", "repaired": "repaired_elements"}


class FollowerCollector:
    """What a registry asks at each scrape. A number that nobody knows yet is left out."""

    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status

    def collect(self) -> "Iterator[Metric]":
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        status = self._status()
        gauges = (
            ("version", "The version that is live.", status.version),
            ("head", "The newest version of the feed that was seen.", status.head),
            ("lag", "Versions between the two.", status.lag),
            ("following", "1 while the feed is followed.", int(status.is_following)),
            ("failing", "1 while following fails.", int(status.error is not None)),
        )
        for name, about, value in gauges:
            gauge = GaugeMetricFamily(f"deltasync_{name}", about)
            if value is not None:
                gauge.add_metric([], value)
            yield gauge
        seconds = GaugeMetricFamily("deltasync_last_move_seconds", "Time of the last move, by phase.", labels=["phase"])
        for phase, value_s in {} if status.last is None else asdict(status.last.seconds).items():
            seconds.add_metric([phase], value_s)
        yield seconds
        for name, total in asdict(status.counts).items():
            yield CounterMetricFamily(f"deltasync_{_NAMES.get(name, name)}", _TOTALS[name], value=total)


def register(status: Callable[[], Status]) -> Callable[[], None]:
    """Add a follower to the registry of this process, which vLLM serves; call the result to take it out again."""
    from prometheus_client import REGISTRY

    collector = FollowerCollector(status)
    REGISTRY.register(collector)
    return lambda: REGISTRY.unregister(collector)


class Exposition:
    """The metrics of one follower as text, for a server of our own."""

    def __init__(self, status: Callable[[], Status]) -> None:
        try:
            from prometheus_client import CollectorRegistry
        except ImportError as error:
            raise InvalidInputError(
                "metrics need the package prometheus-client", hint="pip install 'deltasync[metrics]'"
            ) from error
        self._registry = CollectorRegistry()
        self._registry.register(FollowerCollector(status))

    @property
    def content_type(self) -> str:
        from prometheus_client import CONTENT_TYPE_LATEST

        return CONTENT_TYPE_LATEST

    def text(self) -> bytes:
        """All metrics, now."""
        from prometheus_client import generate_latest

        return generate_latest(self._registry)
