"""Long feeds: requests and CPU time of the commands on feeds of up to 100,000 versions with 200 replicas.

    python -m benchmarks.longfeeds [--quick]

The manifests are real and sealed, the payloads are as small as their manifests say, and the store is in memory: the
requests are those that any store would get, and the CPU time is that of deltasync. The same is done before and after
the feed is pruned to 2 anchors and 100 versions. Requests that must not grow with the number of versions have a target.
"""

import argparse
import io
import math
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass

from benchmarks.growth import CountingStore, exponent
from benchmarks.report import Cell, Row, say
from benchmarks.sections import Section, at_most, run_sections
from deltasync.cli import feeds
from deltasync.cli.output import Output
from deltasync.cli.watch import status
from deltasync.feed.log import Head, Log, manifest_key
from deltasync.feed.plan import plan
from deltasync.feed.upload import Upload
from deltasync.format import keys
from deltasync.format.manifest import Kind
from deltasync.format.sealed import Heartbeat, Pin, sealed
from deltasync.upkeep.prune import Pruner, Retention, plan_prune
from deltasync.upkeep.verify import verify
from tests.support.feeds import paper

RETENTION = Retention(anchors=2, versions=100)
DELTA_BYTES = 40
ANCHOR_VERSIONS = 150
LEVELS = (4, 16, 64)
DOUBLE = 2.0
"""Requests of the longest feed over those of one with a tenth of its versions, at most: a search is logarithmic."""
LINEAR = 1.1
"""The exponent that the costs of everything else may grow with."""


@dataclass(frozen=True, slots=True)
class Plan:
    versions: tuple[int, ...]
    replicas: int
    pins: int


@dataclass(frozen=True, slots=True)
class Work:
    """One thing to do with a feed. `is_bounded`: its requests do not grow with the number of versions."""

    name: str
    prepare: Callable[[CountingStore], Callable[[], object]]
    """Returns what is measured."""
    is_bounded: bool = False


def make_feed(versions: int, *, replicas: int, pins: int, has_skips: bool) -> CountingStore:
    """A feed with an anchor for every `ANCHOR_VERSIONS` deltas, which have as many bytes together, and skips."""
    store = CountingStore()

    def put(kind: Kind, end: int, nbytes: int, *, start: int | None = None, key: str | None = None) -> None:
        manifest = paper(kind, end, nbytes, start=start)
        # Without the check of `to_bytes`, which would take most of the time.
        store.put(key or manifest_key(manifest), sealed(manifest.to_json()))
        for ref in manifest.payloads:
            store.put(keys.payload_key(ref.sha256), bytes(nbytes))

    anchor_bytes = DELTA_BYTES * ANCHOR_VERSIONS
    put("anchor", 0, anchor_bytes)
    for version in range(1, versions):
        put("delta", version, DELTA_BYTES)
        if version % ANCHOR_VERSIONS == 0:
            put("anchor", version, anchor_bytes, key=keys.anchor_key(version))
        for level in LEVELS if has_skips else ():
            if version % level == 0:
                put("skip", version, DELTA_BYTES * level // 2, start=version - level)
    head = versions - 1
    now_unix_s = int(time.time())
    for number in range(replicas):
        # Most are at the head, and some are late by a few versions each.
        served = max(0, head - (number % 10 == 0) * number)
        digest = paper("delta", served or 1).digest if served else paper("anchor", 0).digest
        beat = Heartbeat(f"replica-{number:03d}", served, now_unix_s, {"digest": digest.hex, "engine": "bench"})
        store.put(keys.replica_key(beat.replica), beat.to_bytes())
    for number in range(pins):
        version = max(0, head - number * ANCHOR_VERSIONS)
        digest = paper("delta", version).digest if version else paper("anchor", 0).digest
        pin = Pin(f"pin-{number}", version, digest.hex, "", now_unix_s)
        store.put(keys.pin_key(pin.name), pin.to_bytes())
    upload = Upload(store)
    upload.open()
    store.reset()
    return store


def _head(store: CountingStore) -> Callable[[], object]:
    return Log(store).require_head


def _open(store: CountingStore) -> Callable[[], object]:
    return Upload(store).open


def _plan(late: int | None) -> Callable[[CountingStore], Callable[[], object]]:
    """Plan for a new replica, or for one that is late by some versions."""

    def prepare(store: CountingStore) -> Callable[[], object]:
        head = Log(store).require_head()
        return lambda: plan(Log(store), head, start=None if late is None else head.version - late)

    return prepare


def _poll(store: CountingStore) -> Callable[[], object]:
    head = Head(Log(store))
    head.poll()
    return head.poll


def _command(command: Callable[[argparse.Namespace, Output], None]) -> Callable[[CountingStore], Callable[[], object]]:
    def prepare(store: CountingStore) -> Callable[[], object]:
        def run() -> None:
            with redirect_stdout(io.StringIO()):
                command(argparse.Namespace(url=store, all=False), Output(is_json=True))

        return run

    return prepare


def _verify(store: CountingStore) -> Callable[[], object]:
    return lambda: verify(store)


def _prune(store: CountingStore) -> Callable[[], object]:
    return lambda: plan_prune(store, RETENTION)


def _prune_again(store: CountingStore) -> Callable[[], object]:
    """The second run of one that follows: it remembers what the first run has read."""
    pruner = Pruner(store, RETENTION)
    pruner.run()
    return pruner.run


WORKS = (
    Work("poll, nothing new", _poll, is_bounded=True),
    Work("head", _head, is_bounded=True),
    Work("open a writer", _open, is_bounded=True),
    Work("plan, one version late", _plan(1), is_bounded=True),
    Work("plan, 64 versions late", _plan(64), is_bounded=True),
    Work("plan, new replica", _plan(None), is_bounded=True),
    Work("log", _command(feeds.log)),
    Work("status", _command(status)),
    Work("verify", _verify),
    Work("prune, first run", _prune),
    Work("prune, again", _prune_again),
)
"""In this order: the last one prunes the feed."""


def run(plan: Plan) -> Section:
    """Do everything with feeds of several lengths."""
    section = Section()
    for has_skips in (False, True):
        costs: dict[str, dict[int, tuple[int, float, float]]] = {}
        pruned: dict[str, dict[int, tuple[int, float, float]]] = {}
        for versions in plan.versions:
            say(f"long feeds: {versions:,} versions{', with skips' if has_skips else ''}")
            store = make_feed(versions, replicas=plan.replicas, pins=plan.pins, has_skips=has_skips)
            for work in WORKS:
                costs.setdefault(work.name, {})[versions] = _cost(work, store)
            for work in WORKS:
                pruned.setdefault(work.name, {})[versions] = _cost(work, store)
        kind = "with skips" if has_skips else "without skips"
        for title, found in ((f"never pruned, {kind}", costs), (f"pruned, {kind}", pruned)):
            rows = [_row(work.name, found[work.name]) for work in WORKS]
            section.tables[f"long feeds: {title}, {plan.replicas} replicas, {plan.pins} pins"] = rows
            for work, row in zip(WORKS, rows, strict=True):
                requests = [cost[0] for cost in found[work.name].values()]
                if work.is_bounded:
                    claim = f"{title}: {work.name}, requests, longest / next feed"
                    section.targets.append(at_most(claim, requests[-1] / requests[-2], DOUBLE))
                for cost in () if work.is_bounded else ("requests", "CPU time"):
                    growth = row[f"{cost}, exponent"]
                    assert isinstance(growth, float)
                    section.targets.append(at_most(f"{title}: {work.name}, {cost}, exponent", growth, LINEAR))
    return section


def _cost(work: Work, store: CountingStore) -> tuple[int, float, float]:
    """Requests, CPU seconds and seconds."""
    run = work.prepare(store)
    store.list()  # sorted before, so that this is no part of the measurement
    store.reset()
    cpu_s, since = time.process_time(), time.perf_counter()
    run()
    return store.requests.total(), time.process_time() - cpu_s, time.perf_counter() - since


def _row(name: str, found: dict[int, tuple[int, float, float]]) -> Row:
    row: dict[str, Cell] = {"work": name}
    for versions, (requests, _, _) in found.items():
        row[f"requests, {versions:,}"] = requests
    row["requests, exponent"] = exponent({versions: max(1, cost[0]) for versions, cost in found.items()})
    longest = max(found)
    row[f"CPU s, {longest:,}"] = found[longest][1]
    row[f"s, {longest:,}"] = found[longest][2]
    row["CPU time, exponent"] = exponent({versions: cost[1] for versions, cost in found.items()})
    # Most requests go out 16 at once; listings follow each other.
    row[f"at 50 ms, s, {longest:,}"] = math.ceil(found[longest][0] / 16) * 0.05
    return row


SECTIONS = {"longfeeds": run}

if __name__ == "__main__":
    run_sections(
        "longfeeds",
        "Requests and CPU time of commands on long feeds.",
        SECTIONS,
        full=Plan((1_000, 10_000, 100_000), replicas=200, pins=5),
        quick=Plan((300, 1_000), replicas=20, pins=3),
    )
