"""How much of the transfer is hidden behind coding: publishing, following and joining over a link of a known rate.

The link is simulated: a request takes a round trip and its share of the rate, which all requests share. What is slept
does not depend on the load of the machine. For each piece of work the script measures the time without the link
(`compute`), adds what the bytes need on the link (`link`), and compares the time over the link with both: without any
overlap it is their sum, and with perfect overlap the larger of the two. Both are measured in turns, and the fastest of
several runs counts, because other load on the machine changes them.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.data import synthetic
from benchmarks.data.synthetic import QWEN3_0_6B, SMALL, Shape
from benchmarks.report import Row, say
from benchmarks.sections import Section, at_most, run_sections
from benchmarks.states import States, is_equal, states_of
from deltasync.feed.log import Log
from deltasync.feed.route import Route
from deltasync.state import State
from deltasync.store.memory import MemoryStore
from deltasync.store.protocol import Data, Store, WrapperStore
from deltasync.trainer.capture import WeightsSource
from deltasync.trainer.publisher import FeedPublisher, PublisherOptions
from deltasync.trainer.schedule import AnchorPolicy

ROUND_TRIP_S = 0.02
DENSITY = 0.01


class LinkStore(WrapperStore):
    """A store behind a link. The bytes of all requests share the rate, each way; every request takes a round trip."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.bytes_per_s = float("inf")
        self.round_trip_s = 0.0
        self.created_s = 0.0
        self._lock = threading.Lock()
        self._free_s = 0.0

    def put(self, key: str, data: Data) -> None:
        self._transfer(len(data))
        super().put(key, data)

    def create(self, key: str, data: Data) -> bool:
        self._transfer(len(data))
        is_new = super().create(key, data)
        self.created_s = time.perf_counter()
        return is_new

    def get(self, key: str) -> bytes:
        data = super().get(key)
        self._transfer(len(data))
        return data

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        data = super().get_range(key, offset, length)
        self._transfer(len(data))
        return data

    def _transfer(self, nbytes: int) -> None:
        with self._lock:
            now_s = time.monotonic()
            self._free_s = max(self._free_s, now_s) + nbytes / self.bytes_per_s
            wait_s = self._free_s - now_s + self.round_trip_s
        if wait_s > 0:
            time.sleep(wait_s)


@dataclass(frozen=True, slots=True)
class Plan:
    shape: Shape
    repeats: int


@dataclass(frozen=True, slots=True)
class Work:
    """Something to do over the link; `run` returns the seconds that it took."""

    name: str
    nbytes: int
    run: Callable[[], float]


@contextmanager
def over(store: LinkStore, bytes_per_s: float) -> Iterator[None]:
    """Let requests take the time of a link in the block."""
    store.bytes_per_s, store.round_trip_s = bytes_per_s, ROUND_TRIP_S
    try:
        yield
    finally:
        store.bytes_per_s, store.round_trip_s = float("inf"), 0.0


def run(plan: Plan) -> Section:
    """Measure all kinds of work, with a link that needs as long as the coding: there overlap is worth most."""
    say("overlap: making the weights")
    rate = synthetic.find_learning_rate(DENSITY, "BF16", shape=plan.shape)
    states = states_of(synthetic.make("overlap", "BF16", rate, shape=plan.shape, seed=0, threads=2))
    section = Section()
    rows: list[Row] = []
    for work, store in _works(states):
        say(f"overlap: {work.name}")
        work.run()
        link_s = min(work.run() for _ in range(3))
        computed, linked = [], []
        for _ in range(plan.repeats):
            computed.append(work.run())
            with over(store, work.nbytes / link_s):
                linked.append(work.run())
        compute_s, linked_s = min(computed), min(linked)
        rows.append(
            {
                "work": work.name,
                "MB": work.nbytes / 1e6,
                "compute s": compute_s,
                "link s": link_s,
                "over the link s": linked_s,
                "of the sum": linked_s / (compute_s + link_s),
                "of the longer one": linked_s / max(compute_s, link_s),
            }
        )
        claim = f"{work.name}: time over a link as fast as the coding, of coding and transfer one after the other"
        section.targets.append(at_most(claim, linked_s / (compute_s + link_s), 0.75))
    elements = states.old.layout.elements
    title = (
        f"overlap: {elements / 1e6:.0f} M elements, {DENSITY:.0%} changed, round trips of {1e3 * ROUND_TRIP_S:.0f} ms"
    )
    section.tables[title] = rows
    return section


def _works(states: States) -> Iterator[tuple[Work, LinkStore]]:
    store = LinkStore(MemoryStore())
    options = PublisherOptions(anchors=AnchorPolicy(bytes_ratio=None))
    with _closing(FeedPublisher(store, options)) as publisher:
        publisher.publish(WeightsSource(states.old)).wait()
        flip = [states.new, states.old]
        first = publisher.publish(WeightsSource(flip[0])).wait()

        def publish() -> float:
            """From the end of the capture to the commit."""
            flip.reverse()
            publication = publisher.publish(WeightsSource(flip[0]))
            since = time.perf_counter()
            publication.wait()
            return store.created_s - since

        yield Work("publish a delta", first.nbytes, publish), store
    log = Log(store)
    base, newer = log.read(0), log.read(1)
    mirror = State()
    mirror.advance(Route(log, base))

    def follow() -> float:
        """One delta into a mirror that has the version before it."""
        since = time.perf_counter()
        mirror.advance(Route(log, newer))
        seconds = time.perf_counter() - since
        if mirror.weights is None or not is_equal(mirror.weights, states.new):
            raise ValueError("the mirror has other bits than the version")
        for array, bits in zip(mirror.weights.arrays, states.old.arrays, strict=True):
            array[:] = bits
        mirror.at = base
        return seconds

    yield Work("follow a delta", newer.nbytes, follow), store

    def join() -> float:
        """All weights into a new mirror."""
        since = time.perf_counter()
        State().advance(Route(log, base))
        return time.perf_counter() - since

    yield Work("join at an anchor", base.nbytes, join), store


@contextmanager
def _closing(publisher: FeedPublisher) -> Iterator[FeedPublisher]:
    try:
        yield publisher
    finally:
        publisher.close()


SECTIONS = {"overlap": run}

if __name__ == "__main__":
    run_sections(
        "overlap",
        "time over a link against coding and transfer one after the other",
        SECTIONS,
        full=Plan(QWEN3_0_6B, repeats=5),
        quick=Plan(SMALL, repeats=3),
    )
