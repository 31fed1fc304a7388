"""What a late replica fetches with skips and without, on 200 real versions of SmolLM2-135M.

    python -m benchmarks.late [--quick]

The feed is made once (`benchmarks.data.smol_feed`): 201 policy-gradient steps, some seconds each. `deltasync compact`
writes the skips into copies of it, one copy for each choice of levels. A replica then advances to the head through a
store that counts requests and bytes, and its weights are compared with the trainer's by SHA-256. The other tables
explain the ratios: what one difference over n versions costs, and what other levels would give.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.bits import ELEMENT_TYPES
from benchmarks.data.smol_feed import FeedPlan, RealFeed, real_feed
from benchmarks.entropy import conditional_entropy
from benchmarks.publish_real import hash_of
from benchmarks.report import Row, say
from benchmarks.sections import Section, Target, at_least, at_most, run_sections
from benchmarks.states import copy_of
from deltasync import blocks
from deltasync.feed.log import Log
from deltasync.feed.plan import Edge, Plan, cheapest, collect
from deltasync.feed.route import Route
from deltasync.format.layout import Layout
from deltasync.format.weights import Weights, zeros
from deltasync.state import Applied, State, load
from deltasync.store.local import LocalStore
from deltasync.store.patient import WrapperStore
from deltasync.store.protocol import ObjectInfo, Store
from deltasync.upkeep.compact import LEVELS

Levels = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LatePlan:
    """A feed, how late replicas are with the target for each, and the levels to compare with the default ones."""

    feed: FeedPlan
    targets: dict[int, float]
    others: tuple[Levels, ...]


FULL = LatePlan(
    feed=FeedPlan(versions=200),
    targets={32: 1 / 4, 128: 1 / 8},
    others=((8, 64), (2, 8, 32, 128), (2, 4, 8, 16, 32, 64, 128)),
)
QUICK = LatePlan(feed=FeedPlan(versions=16, layers=2), targets={8: 1.0}, others=((2, 8),))


@dataclass(slots=True)
class Traffic:
    """Requests and bytes of a reader, by the first part of the key: versions, anchors, skips, payloads."""

    requests: dict[str, int] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)

    def add(self, key: str, nbytes: int) -> None:
        room = key.partition("/")[0]
        self.requests[room] = self.requests.get(room, 0) + 1
        self.nbytes[room] = self.nbytes.get(room, 0) + nbytes


class CountingStore(WrapperStore):
    """Counts what is read. A listing of up to 1,000 keys is one request."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.traffic = Traffic()

    def get(self, key: str) -> bytes:
        data = super().get(key)
        self.traffic.add(key, len(data))
        return data

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        data = super().get_range(key, offset, length)
        self.traffic.add(key, len(data))
        return data

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectInfo]:
        self.traffic.add(prefix, 0)
        return super().list(prefix, after=after)


def run(late: LatePlan) -> Section:
    """Make the feeds, then measure replicas, windows, levels and ways."""
    feed = real_feed(late.feed)
    head = late.feed.versions
    for levels in (LEVELS, *late.others):
        _compact(feed, levels)
    distances = [2**n for n in range(head.bit_length()) if 2**n <= max(late.targets)]
    say("rebuilding the states that differences are made of")
    states = _states(feed, [head, *(head - distance for distance in distances)])
    rows, targets = _replicas(feed, late, head)
    edges = {levels: _edges(_path(feed, levels), head) for levels in (LEVELS, *late.others)}
    ways, exact = _ways(feed, edges, states[head].layout, head)
    return Section(
        tables={
            f"a replica that advances to version {head}, skips of {_text(LEVELS)}": rows,
            "the same for every head: payload bytes with skips / without": _windows(edges[LEVELS], late, head),
            f"one difference that leads to version {head}": _differences(feed, states, distances, head),
            "other levels: payload bytes with skips / without, median of all heads": _levels(edges, late, head),
            f"ways to version {head}": ways,
        },
        targets=[
            *targets,
            at_least(f"ways to version {head} with the trainer's bits, of {len(ways)}", exact, len(ways)),
        ],
    )


def _path(feed: RealFeed, levels: Levels) -> Path:
    """Of a copy of the feed with skips of these levels."""
    return feed.path.with_name(f"levels-{'-'.join(map(str, levels))}")


def _compact(feed: RealFeed, levels: Levels) -> None:
    """Write the skips of these levels into a copy of the feed, by the command."""
    path = _path(feed, levels)
    if not path.exists():
        # Objects are replaced as a whole and never written to, so the copy can share them.
        shutil.copytree(feed.path, path, copy_function=os.link)
    say(f"compacting with levels {_text(levels)}")
    command = [sys.executable, "-m", "deltasync", "compact", str(path), "--levels", ",".join(map(str, levels))]
    subprocess.run([*command, "--quiet"], check=True, stdout=subprocess.DEVNULL)


def _states(feed: RealFeed, versions: Sequence[int]) -> dict[int, Weights]:
    """The weights of some versions, by the anchor and all deltas, each compared with the trainer's."""
    log, edges = Log(LocalStore(feed.path)), _edges(feed.path, max(versions))
    states: dict[int, Weights] = {}
    held: int | None = None
    for version in sorted(versions):
        weights = load(log, log.read(version)) if held is None else copy_of(states[held])
        if held is not None:
            chosen = _cheapest(edges, held, version)
            State(weights, scratch=True).follow(Route(log, log.read(version)), chosen)
        if _hash(weights) != feed.hashes[version]:
            raise ValueError(f"version {version} is not what the trainer had")
        states[version], held = weights, version
    return states


def _hash(weights: Weights) -> str:
    return hash_of(zip((spec.name for spec in weights.layout.tensors), weights.arrays, strict=True))


def _replicas(feed: RealFeed, late: LatePlan, head: int) -> tuple[list[Row], list[Target]]:
    """Replicas that are late, with skips and without: what they fetch, and whether they end with the right bits."""
    anchor_bytes = Log(LocalStore(feed.path)).read(0).nbytes
    rows: list[Row] = []
    targets = []
    for distance, limit in late.targets.items():
        say(f"a replica that is {distance} versions late")
        without, plain = _advance(feed, feed.path, head - distance, head)
        row, skipped = _advance(feed, _path(feed, LEVELS), head - distance, head)
        for name, one, traffic in (("deltas", without, plain), ("skips", row, skipped)):
            payload_bytes, all_bytes = traffic.nbytes["payloads"], sum(traffic.nbytes.values())
            rows.append(
                {
                    "versions late": distance,
                    "by": name,
                    **one,
                    "payload MB": payload_bytes / 1e6,
                    "/ deltas": payload_bytes / plain.nbytes["payloads"],
                    "manifest MB": (all_bytes - payload_bytes) / 1e6,
                    "requests": sum(traffic.requests.values()),
                    "for payloads": traffic.requests["payloads"],
                    "an anchor MB": anchor_bytes / 1e6,
                    "/ anchor": payload_bytes / anchor_bytes,
                }
            )
        ratio = skipped.nbytes["payloads"] / plain.nbytes["payloads"]
        targets.append(at_most(f"{distance} versions late: payload bytes with skips / without", ratio, limit))
    return rows, targets


def _advance(feed: RealFeed, path: Path, start: int, head: int) -> tuple[Row, Traffic]:
    store = CountingStore(LocalStore(path))
    log = Log(store)
    mirror, applied = State(), Applied()
    mirror.advance(Route(log, log.read(start)))
    store.traffic = Traffic()
    mirror.advance(Route(log, log.read(head)), applied)
    if mirror.weights is None:
        raise ValueError(f"the replica has no version {head}")
    return {"edges": len(applied.edges), "exact": _hash(mirror.weights) == feed.hashes[head]}, store.traffic


def _edges(path: Path, head: int) -> list[Edge]:
    log = Log(LocalStore(path))
    return collect(log, log.read(head), [], start=None, avoid=(), thorough=True)


def _ratio(edges: Sequence[Edge], start: int, end: int) -> tuple[float, int]:
    """The bytes of the cheapest plan with skips over those without, and its edges."""
    with_skips = _cheapest(edges, start, end)
    without = _cheapest([edge for edge in edges if edge.manifest.kind != "skip"], start, end)
    return with_skips.nbytes / without.nbytes, len(with_skips.edges)


def _cheapest(edges: Sequence[Edge], start: int | None, end: int) -> Plan:
    path = cheapest(edges, start=start, end=end)
    if path is None:
        raise ValueError(f"nothing leads from version {start} to version {end}")
    return Plan(path)


def _windows(edges: Sequence[Edge], late: LatePlan, head: int) -> list[Row]:
    """Where a replica starts and ends decides how many skips fit: the best, the median and the worst of all."""
    rows: list[Row] = []
    for distance in late.targets:
        found = [_ratio(edges, end - distance, end) for end in range(distance, head + 1)]
        ratios, counts = [ratio for ratio, _ in found], [count for _, count in found]
        rows.append(
            {
                "versions late": distance,
                "heads": len(found),
                "best": min(ratios),
                "median": median(ratios),
                "worst": max(ratios),
                "edges, median": median(counts),
                "edges, most": max(counts),
            }
        )
    return rows


def _differences(feed: RealFeed, states: dict[int, Weights], distances: Sequence[int], head: int) -> list[Row]:
    """One change over n versions against its n deltas: a plan of several skips cannot be smaller than that."""
    log = Log(LocalStore(feed.path))
    rows: list[Row] = []
    for distance in distances:
        say(f"the difference over {distance} versions")
        old, new = states[head - distance], states[head]
        coded = blocks.encode_delta(old, new)
        deltas = [log.read(version) for version in range(head - distance + 1, head + 1)]
        changed, nbytes = sum(block.changed for block in coded), sum(len(block.data) for block in coded)
        in_deltas, delta_bytes = sum(m.changed or 0 for m in deltas), sum(m.nbytes for m in deltas)
        pairs = zip(old.arrays, new.arrays, strict=True)
        entropy = conditional_entropy(pairs, ELEMENT_TYPES["BF16"])
        rows.append(
            {
                "versions": distance,
                "deltas MB": delta_bytes / 1e6,
                "changes in them M": in_deltas / 1e6,
                "difference MB": nbytes / 1e6,
                "changes in it M": changed / 1e6,
                "changed %": 100 * changed / new.layout.elements,
                "changes / those of deltas": changed / in_deltas,
                "bits each": 8 * nbytes / changed,
                "bits each in deltas": 8 * delta_bytes / in_deltas,
                "entropy, bits each": entropy.total,
                "bytes / those of deltas": nbytes / delta_bytes,
            }
        )
    return rows


def _levels(edges: dict[Levels, list[Edge]], late: LatePlan, head: int) -> list[Row]:
    rows: list[Row] = []
    for levels, of_levels in edges.items():
        skips = [edge.nbytes for edge in of_levels if edge.manifest.kind == "skip"]
        deltas = [edge.nbytes for edge in of_levels if edge.manifest.kind == "delta"]
        row: dict[str, str | int | float] = {
            "levels": _text(levels),
            "skips": len(skips),
            "skips MB": sum(skips) / 1e6,
            "/ all deltas": sum(skips) / sum(deltas),
        }
        for distance in late.targets:
            found = [_ratio(of_levels, end - distance, end) for end in range(distance, head + 1)]
            row[f"{distance} late"] = median(ratio for ratio, _ in found)
            row[f"{distance} late, edges"] = median(count for _, count in found)
        rows.append(row)
    return rows


def _ways(feed: RealFeed, edges: dict[Levels, list[Edge]], layout: Layout, head: int) -> tuple[list[Row], int]:
    """Different ways to one version, and how many of them end with the trainer's bits and one digest."""
    by_default = edges[LEVELS]
    ways = {
        "the anchor, then all deltas": (LEVELS, [edge for edge in by_default if _length(edge) in (None, 1)]),
        **{
            f"skips of {level} alone": (LEVELS, [edge for edge in by_default if _length(edge) in (None, 1, level)])
            for level in LEVELS
        },
        **{f"skips of {_text(levels)}": (levels, of_levels) for levels, of_levels in edges.items()},
    }
    rows: list[Row] = []
    for name, (levels, usable) in ways.items():
        say(f"a way to version {head}: {name}")
        chosen = _cheapest(usable, None, head)
        weights = zeros(layout)
        log = Log(LocalStore(_path(feed, levels)))
        State(weights, scratch=True).follow(Route(log, log.read(chosen.edges[-1].end)), chosen)
        exact = _hash(weights) == feed.hashes[head]
        rows.append({"way": name, "edges": len(chosen.edges), "digest": blocks.digest(weights).hex, "exact": exact})
    is_one = len({row["digest"] for row in rows}) == 1
    return rows, sum(bool(row["exact"]) for row in rows) if is_one else 0


def _length(edge: Edge) -> int | None:
    return None if edge.start is None else edge.end - edge.start


def _text(levels: Levels) -> str:
    return ", ".join(map(str, levels))


if __name__ == "__main__":
    run_sections("late", "What late replicas fetch.", {"late": run}, full=FULL, quick=QUICK)
