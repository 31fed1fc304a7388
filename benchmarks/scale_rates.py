"""The rates of this machine for the model of `deltasync.estimate`, and how far the model is from runs over a link."""

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from statistics import median

import numpy as np
import torch

from benchmarks.data import synthetic
from benchmarks.data.synthetic import Shape
from benchmarks.overlap import LinkStore
from benchmarks.report import Row, say
from benchmarks.sections import Section, at_most
from benchmarks.states import States, is_equal, states_of
from deltasync import AnchorPolicy, Follower, set_threads
from deltasync.estimate import Change, Deployment, Link, Pass, Rates, estimate
from deltasync.feed.log import Log
from deltasync.feed.route import Route
from deltasync.feed.upload import Upload
from deltasync.format.weights import Weights
from deltasync.parallel import threads
from deltasync.state import State
from deltasync.store.memory import MemoryStore
from deltasync.torch import ModuleTarget
from deltasync.trainer.capture import WeightsSource
from deltasync.trainer.publisher import FeedPublisher, PublisherOptions
from deltasync.trainer.versions import put_anchor

ROUND_TRIP_S = 0.1
PASSES = ("capture", "encode", "decode", "stage", "pause")


@dataclass(frozen=True, slots=True)
class RatesPlan:
    """What is measured. The model is checked with other shapes and densities than those that its rates come from."""

    shapes: tuple[Shape, ...]
    densities: tuple[float, ...]
    check_shapes: tuple[Shape, ...]
    check_densities: tuple[float, ...]
    links: tuple[Link, ...]
    repeats: int


@dataclass(frozen=True, slots=True)
class Moved:
    """One version from a step to a torch module: seconds by phase, and until it was live. `put` includes the commit."""

    capture: float
    encode: float
    put: float
    plan: float
    fetch: float
    decode: float
    stage: float
    pause: float
    total: float
    cpu: float


class Pipeline:
    """A publisher and a follower with a torch module, in one process, over one store. Versions go to and fro."""

    def __init__(self, states: States, store: LinkStore) -> None:
        self.store = store
        self._flip = [states.new, states.old]
        self._states = states
        self._module = module_of(states.old)
        self._publisher = FeedPublisher(store, PublisherOptions(anchors=AnchorPolicy(bytes_ratio=None)))
        self._publisher.publish(WeightsSource(states.old)).wait()
        self._follower = Follower(store, ModuleTarget(self._module), beat_s=None, scrub_s=None)
        self._follower.advance()
        self.move()
        manifest = Log(store).read(1)
        self.change = Change(
            elements=manifest.elements,
            weight_bytes=states.old.layout.nbytes,
            changed=manifest.changed or 0,
            delta_bytes=manifest.nbytes,
            anchor_bytes=Log(store).read(0).nbytes,
        )

    def move(self) -> Moved:
        """Publish the other state, and follow."""
        weights = self._flip[0]
        self._flip.reverse()
        cpu_s, since = time.process_time(), time.perf_counter()
        publication = self._publisher.publish(WeightsSource(weights))
        publication.wait()
        advance = self._follower.advance()
        total_s = time.perf_counter() - since
        event = publication.stats
        assert event is not None
        assert advance is not None
        s = advance.seconds
        put_s, cpu_s = event.put_s + event.commit_s, time.process_time() - cpu_s
        return Moved(
            event.held_s, event.encode_s, put_s, s.plan, s.fetch, s.decode, s.stage, s.pause, total=total_s, cpu=cpu_s
        )

    def require_exact(self) -> None:
        """ValueError unless the module has the bits that were published last."""
        arrays = tuple(
            parameter.detach().view(torch.int16).numpy().view(np.uint16).reshape(-1)
            for _, parameter in sorted(self._module.named_parameters())
        )
        layout = self._states.old.layout
        if not is_equal(Weights(layout, arrays), self._flip[1]):
            raise ValueError("the module has other bits than the version")

    def close(self) -> None:
        self._follower.close()
        self._publisher.close()


def module_of(weights: Weights) -> torch.nn.Module:
    """A module whose parameters are copies of bf16 weights, under their names."""
    root = torch.nn.Module()
    for spec, bits in zip(weights.layout.tensors, weights.arrays, strict=True):
        *path, name = spec.name.split(".")
        module = root
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, torch.nn.Module())
            module = module.get_submodule(part)
        tensor = torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16).reshape(spec.shape)
        module.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    return root


def make_states(shape: Shape, density: float) -> States:
    """Two states of a synthetic model between which about `density` of the weights differ."""
    return states_of(synthetic.bf16_pair(density, shape=shape))


@contextmanager
def pipeline(shape: Shape, density: float) -> Iterator[Pipeline]:
    """A pipeline with versions that change about `density`, without a link."""
    found = Pipeline(make_states(shape, density), LinkStore(MemoryStore()))
    try:
        yield found
        found.require_exact()
    finally:
        found.close()


def measure(plan: RatesPlan) -> tuple[Rates, list[Row]]:
    """The rates of this machine, and the measurements that they come from."""
    points: list[tuple[Change, Moved]] = []
    rows: list[Row] = []
    one_s = all_s = pub_trips = adv_trips = 0.0
    anchor_encode = anchor_decode = 0.0
    largest = plan.shapes[-1]
    for shape, density in itertools.product(plan.shapes, plan.densities):
        say(f"rates: {shape.layers} layers, {density:.1%} changed")
        with pipeline(shape, density) as pipe:
            best = _best([pipe.move() for _ in range(plan.repeats)])
            points.append((pipe.change, best))
            rows.append(
                {
                    "M elements": pipe.change.elements / 1e6,
                    "changed %": 100 * pipe.change.density,
                    **{f"{name} ms": 1000 * getattr(best, name) for name in PASSES},
                    "put ms": 1000 * best.put,
                    "plan ms": 1000 * best.plan,
                    "total ms": 1000 * best.total,
                }
            )
            if shape is largest and density == plan.densities[-1]:
                all_s = best.total
                cores = threads()
                set_threads(1)
                one_s = _best([pipe.move() for _ in range(plan.repeats)]).total
                set_threads(cores)
                pipe.store.round_trip_s = ROUND_TRIP_S
                late = _best([pipe.move() for _ in range(3)])
                pub_trips = (late.put + late.encode - best.put - best.encode) / ROUND_TRIP_S
                adv_trips = (late.total - best.total) / ROUND_TRIP_S - pub_trips
                pipe.store.round_trip_s = 0.0
                anchor_encode, anchor_decode = _anchor_rates(pipe, plan.repeats)
    fitted = {name: fit([(c.weight_bytes, c.changed, getattr(m, name)) for c, m in points]) for name in PASSES}
    rates = Rates(
        cores=threads(),
        doubling=one_s / all_s,
        **fitted,
        anchor_encode_bytes_per_s=anchor_encode,
        anchor_decode_bytes_per_s=anchor_decode,
        # One round trip of each is that of the payloads.
        commit_round_trips=max(0, round(pub_trips) - 1),
        plan_round_trips=max(0, round(adv_trips) - 1),
    )
    return rates, rows


def _best(moves: Sequence[Moved]) -> Moved:
    """The fastest of each phase: other load on the machine makes some of them slower."""
    return Moved(*(min(getattr(move, each.name) for move in moves) for each in fields(Moved)))


def _anchor_rates(pipe: Pipeline, repeats: int) -> tuple[float, float]:
    """Bytes of weights a second that become an anchor, and that a new replica rebuilds from one."""
    weights = pipe._states.old
    encode_s, decode_s = [], []
    base = Log(pipe.store).read(0)
    for _ in range(repeats):
        since = time.perf_counter()
        put_anchor(Upload(MemoryStore()), weights, 0)
        encode_s.append(time.perf_counter() - since)
        since = time.perf_counter()
        State().advance(Route(Log(pipe.store), base))
        decode_s.append(time.perf_counter() - since)
    return weights.layout.nbytes / min(encode_s), weights.layout.nbytes / min(decode_s)


def fit(points: Sequence[tuple[int, int, float]]) -> Pass:
    """The time of a pass from (bytes of weights, changes, seconds), without negative parts; relative errors count."""
    seconds = np.array([s for _, _, s in points])
    columns = np.array([[1.0, nbytes, changed] for nbytes, changed, _ in points]) / seconds[:, None]
    # Scaled, because bytes are many and seconds are few.
    scale = columns.max(axis=0)
    best, least = np.zeros(3), math.inf
    for chosen in (list(c) for n in (1, 2, 3) for c in itertools.combinations(range(3), n)):
        found, *_ = np.linalg.lstsq(columns[:, chosen] / scale[chosen], np.ones(len(points)), rcond=None)
        error = float(np.square(columns[:, chosen] / scale[chosen] @ found - 1).sum())
        if np.all(found >= 0) and error < least - 1e-12:
            best, least = np.zeros(3), error
            best[chosen] = found / scale[chosen]
    fixed_s, per_byte, per_change = (float(value) for value in best)
    return Pass(fixed_s, 1 / per_byte if per_byte else math.inf, 1 / per_change if per_change else math.inf)


def rate_rows(rates: Rates) -> list[Row]:
    """The rates as rows: a pass has three numbers, which are absent where they are infinite."""
    rows: list[Row] = []
    for name, rate in asdict(rates).items():
        if isinstance(rate, dict):
            rows.append({"rate": name, **{k: None if math.isinf(v) else v for k, v in rate.items()}, "value": None})
        else:
            rows.append({"rate": name, "fixed_s": None, "bytes_per_s": None, "changes_per_s": None, "value": rate})
    return rows


def check(plan: RatesPlan, rates: Rates) -> Section:
    """Compare the model with runs over links, of shapes and densities that its rates were not measured with."""
    rows: list[Row] = []
    errors: list[float] = []
    for shape, density in itertools.product(plan.check_shapes, plan.check_densities):
        with pipeline(shape, density) as pipe:
            for link in plan.links:
                say(f"model: {shape.layers} layers, {density:.1%} changed, {link.bits_per_s / 1e6:,.0f} Mbit/s")
                pipe.store.bytes_per_s, pipe.store.round_trip_s = link.bits_per_s / 8, link.round_trip_s
                measured = _best([pipe.move() for _ in range(3)])
                pipe.store.bytes_per_s, pipe.store.round_trip_s = math.inf, 0.0
                phases = estimate(pipe.change, Deployment(uplink=link, downlink=link, cores=rates.cores), rates).phases
                # The follower is called once the version is committed: it does not wait for a poll.
                model_s = phases.total - phases.poll
                errors.append(abs(model_s / measured.total - 1))
                rows.append(
                    {
                        "M elements": pipe.change.elements / 1e6,
                        "changed %": 100 * pipe.change.density,
                        "MB": pipe.change.delta_bytes / 1e6,
                        "link Mbit/s": link.bits_per_s / 1e6,
                        "round trip ms": 1000 * link.round_trip_s,
                        "measured s": measured.total,
                        "model s": model_s,
                        "model / measured": model_s / measured.total,
                        "held, model / measured": phases.capture / measured.capture,
                    }
                )
    return Section(
        {"model: from step to live over a link, without the wait for a poll": rows},
        [
            at_most("model: median error of the seconds from step to live", median(errors), 0.15),
            at_most("model: largest error", max(errors), 0.35),
        ],
    )
