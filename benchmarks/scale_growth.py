"""How costs grow with model size, density, versions, replicas and ranks: CPU time, requests and bytes, measured."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

import numpy as np

from benchmarks.data.synthetic import Shape
from benchmarks.growth import CountingStore, exponent
from benchmarks.report import Cell, Row, say
from benchmarks.scale_rates import make_states, module_of
from benchmarks.sections import Section, at_most
from benchmarks.states import States
from deltasync import AnchorPolicy, Follower
from deltasync.blocks import encode_changes
from deltasync.feed.upload import Upload
from deltasync.format.weights import Bits, Weights
from deltasync.state import State
from deltasync.store.protocol import Store
from deltasync.torch import ModuleTarget
from deltasync.trainer.capture import WeightsSource, capture
from deltasync.trainer.group import Group, Message
from deltasync.trainer.publisher import FeedPublisher, PublisherOptions
from deltasync.trainer.shards import Box, Shards, ShardWeights, chunk
from deltasync.trainer.versions import Metadata, VersionWriter
from deltasync.upkeep.verify import verify

LINEAR = 1.1
INDEPENDENT = 0.1


@dataclass(frozen=True, slots=True)
class GrowthPlan:
    """Sizes in ascending order. One of them varies at a time; the others are small."""

    shapes: tuple[Shape, ...]
    densities: tuple[float, ...]
    versions: tuple[int, ...]
    replicas: tuple[int, ...]
    ranks: tuple[int, ...]
    repeats: int


@dataclass(frozen=True, slots=True)
class Costs:
    """What the trainer, and all replicas together, took for the same versions of a model of so many elements."""

    elements: int
    trainer_cpu_s: float
    trainer_requests: int
    trainer_bytes: int
    replicas_cpu_s: float = 0.0
    replicas_requests: int = 0
    replicas_bytes: int = 0


def run(plan: GrowthPlan) -> Section:
    """Vary one size at a time, and fit exponents."""
    section = Section()
    rows: list[Row] = []
    cases: dict[str, dict[float, Costs]] = {}
    for shape in plan.shapes:
        costs = _publish_and_follow(shape, 0.01, repeats=plan.repeats)
        cases.setdefault("model size", {})[costs.elements] = costs
    for density in plan.densities:
        cases.setdefault("density", {})[density] = _publish_and_follow(plan.shapes[1], density, repeats=plan.repeats)
    for versions in plan.versions:
        costs = _publish_and_follow(plan.shapes[0], 0.01, versions=versions)
        cases.setdefault("versions", {})[versions] = costs
    for replicas in plan.replicas:
        costs = _publish_and_follow(plan.shapes[0], 0.01, replicas=replicas, repeats=4 * plan.repeats)
        cases.setdefault("replicas", {})[replicas] = costs
    states = make_states(plan.shapes[1], 0.01)
    for ranks in plan.ranks:
        cases.setdefault("ranks", {})[ranks] = _publish_in_ranks(states, ranks, repeats=plan.repeats)
    for dimension, found in cases.items():
        sizes = ", ".join(f"{size:g}" for size in found)
        for side in ("trainer", "replicas") if dimension != "ranks" else ("trainer",):
            row: dict[str, Cell] = {"grows with": dimension, "sizes": sizes, "of": side}
            most = INDEPENDENT if (dimension, side) == ("replicas", "trainer") else LINEAR
            for cost in ("cpu_s", "requests", "bytes"):
                values = {size: float(getattr(costs, f"{side}_{cost}")) for size, costs in found.items()}
                growth = exponent(values)
                name = {"cpu_s": "CPU time", "requests": "requests", "bytes": "bytes"}[cost]
                row[f"{name}, smallest"] = next(iter(values.values()))
                row[f"{name}, largest"] = list(values.values())[-1]
                row[f"{name}, exponent"] = growth
                claim = f"growth with {dimension}: {name} of {'the trainer' if side == 'trainer' else 'replicas'}"
                section.targets.append(at_most(f"{claim}, exponent", growth, most))
            rows.append(row)
    section.tables["growth: exponents, fitted to measurements"] = rows
    return section


def _publish_and_follow(
    shape: Shape, density: float, *, versions: int = 1, replicas: int = 1, repeats: int = 1
) -> Costs:
    """Publish versions, then let replicas follow them one by one; the first version of both is not counted.

    Of several repeats the fastest counts.
    """
    say(f"growth: {shape.layers} layers of {shape.hidden}, {density:.1%}, {versions} versions, {replicas} replicas")
    states = make_states(shape, density)
    store = CountingStore()
    publisher = FeedPublisher(store, PublisherOptions(anchors=AnchorPolicy(bytes_ratio=None)))
    publisher.publish(WeightsSource(states.old)).wait()
    followers = [
        Follower(store, ModuleTarget(module_of(states.old)), beat_s=None, scrub_s=None) for _ in range(replicas)
    ]
    for follower in followers:
        follower.advance()
    flip = [states.new, states.old]
    best: Costs | None = None
    for _ in range(repeats + 1):
        trainer_s = replicas_s = 0.0
        trainer = replica = 0
        put_bytes = got_bytes = 0
        for _ in range(versions):
            store.reset()
            cpu_s = time.process_time()
            publisher.publish(WeightsSource(flip[0])).wait()
            trainer_s += time.process_time() - cpu_s
            trainer += store.requests.total()
            put_bytes += store.put_bytes
            flip.reverse()
            store.reset()
            cpu_s = time.process_time()
            for follower in followers:
                follower.advance()
            replicas_s += time.process_time() - cpu_s
            replica += store.requests.total()
            got_bytes += store.got_bytes
        if best is not None:
            trainer_s, replicas_s = min(best.trainer_cpu_s, trainer_s), min(best.replicas_cpu_s, replicas_s)
        best = Costs(states.old.layout.elements, trainer_s, trainer, put_bytes, replicas_s, replica, got_bytes)
    for follower in followers:
        follower.close()
    publisher.close()
    assert best is not None
    return best


class _Seat(Group):
    """One of several ranks in threads, which send messages through `queues`."""

    def __init__(self, queues: "dict[tuple[int, int], SimpleQueue[Message]]", rank: int, size: int) -> None:
        super().__init__(rank, size, timeout_s=60.0)
        self._queues = queues

    def fork(self) -> Group:
        raise NotImplementedError("these ranks write no anchors")

    def share(self, bits: Bits) -> None:
        raise NotImplementedError("these ranks begin a feed")

    def close(self) -> None:
        """There is nothing to release."""

    def _send(self, rank: int, message: Message) -> None:
        self._queues[self.rank, rank].put(message)

    def _receive(self, rank: int, timeout_s: float) -> Message:
        return self._queues[rank, self.rank].get(timeout=timeout_s)


def _publish_in_ranks(states: States, ranks: int, *, repeats: int) -> Costs:
    """One version of a model that is sharded by rows over ranks: CPU time, requests and bytes of all together."""
    say(f"growth: {ranks} ranks")
    best: Costs | None = None
    for _ in range(repeats):
        store = CountingStore()
        queues = {(a, b): SimpleQueue[Message]() for a in range(ranks) for b in range(ranks)}
        costs: list[Costs] = []
        errors: list[BaseException] = []

        seats = [_Seat(queues, rank, ranks) for rank in range(ranks)]
        acts = [partial(_rank, store, states.old, states.new, seat, ranks, costs) for seat in seats]
        threads = [threading.Thread(target=_caught, args=(act, errors)) for act in acts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        found = verify(store, deep=True)
        if found.damages or found.restorable != (0, 1):
            raise ValueError("the ranks made a feed that is damaged")
        if best is None or costs[0].trainer_cpu_s < best.trainer_cpu_s:
            best = costs[0]
    assert best is not None
    return best


def _caught(act: Callable[[], None], errors: list[BaseException]) -> None:
    try:
        act()
    except BaseException as error:  # noqa: BLE001 - raised by the main thread
        errors.append(error)


def _rank(store: Store, old: Weights, new: Weights, seat: _Seat, ranks: int, costs: list[Costs]) -> None:
    """An anchor, which is not counted, and a delta, by one rank."""
    assert isinstance(store, CountingStore)
    upload = Upload(store, retry_s=1.0)
    if seat.rank == 0:
        upload.open()
    boxes = []
    for spec in old.layout.tensors:
        spans = list(Box.whole(spec.shape).spans)
        spans[0] = chunk(spans[0], seat.rank, ranks)
        boxes.append(Box(spec.shape, tuple(spans)))
    shards = Shards(old.layout, boxes)
    versions = VersionWriter(upload=upload, layout=old.layout, shards=shards, group=seat)

    def local(weights: Weights) -> tuple[np.ndarray, ...]:
        """The rows of this rank."""
        parts = []
        for array, spec, box in zip(weights.arrays, old.layout.tensors, boxes, strict=True):
            rows = array.reshape(spec.shape)
            found = [rows[start : start + count] for start, count in box.spans[0]] or [rows[:0]]
            parts.append(np.concatenate(found).reshape(-1))
        return tuple(parts)

    mine = ShardWeights(shards.local, local(old), shards)
    shadow = State(mine)
    made = versions.anchor(mine, None, Metadata()).manifest
    shadow.apply([], made)
    arrays = local(new)

    with seat.decision("the start", None) as start:
        if start.parts is not None:
            store.reset()
            start.result = time.process_time()
    captured = capture(Weights(shards.local, mine.arrays), Weights(shards.local, arrays))
    changes = partial(encode_changes, mine, captured)
    versions.delta(changes, made, Metadata(), changed=sum(len(each.values) for each in captured) if captured else 0)

    with seat.decision("the end", None) as end:
        if end.parts is not None:
            cpu_s = time.process_time() - start.result
            costs.append(Costs(old.layout.elements, cpu_s, store.requests.total(), store.put_bytes))
