"""From a step to live weights over a slow link: deltasync beside what others do, in real processes.

    python -m benchmarks.wan [--quick] [--only qwen3|smollm2]

Two hosts in network namespaces, with a link of 50 ms round trip and 100 Mbit/s or 1 Gbit/s between them. The trainer
and a SeaweedFS server with S3 are on one side, the replicas on the other, so that every replica reads over the link. A
replica is a process with live weights of its own; all processes share the cores, the memory bandwidth and the link.
deltasync runs as users run it: a `Publisher`, and a `Follower` with a `ModuleTarget`, which polls the store. In the
other ways the trainer sends each replica a message when the objects are there. After each step all live weights of all
replicas are compared with those of the trainer, bit by bit.

Needs root, iproute2 and util-linux. A full run writes `benchmarks/results/wan.json`.
"""

import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.data import smol
from benchmarks.data.files import write_pair
from benchmarks.data.synthetic import QWEN3_0_6B, Shape, bf16_pair
from benchmarks.report import Row, say
from benchmarks.sections import Section, Target, at_least, at_most, run_sections
from benchmarks.wan_link import Link, Traffic, linked
from benchmarks.wan_ways import ARC_V3, GAPS, OURS, WAYS, XOR
from tests.support.hosts import Host, hosts

ROUND_TRIP_S = 0.05
RATES = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9}
SLOW, FAST = RATES
DENSITY = 0.01
LEARNING_RATE = 3e-6
GAP_S = (0.5, 2.0)
"""Seconds between two steps, at random: what a replica polls must not depend on when the last step was."""

OTHERS_KEPT = 2
"""How many of the other ways run with several replicas: those that were the quickest with one."""

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Plan:
    """How large a run is. `is_real`: train SmolLM2-135M; otherwise its section has synthetic weights, too."""

    shape: Shape
    is_real: bool
    repeats: int
    replicas: tuple[int, ...]
    gap_s: tuple[float, float] = GAP_S


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the trainer, until it was live at the last replica."""

    live_s: float
    held_s: float
    pause_s: float
    payload_bytes: int
    traffic: Traffic
    is_exact: bool
    phases: dict[str, float]


@dataclass(frozen=True, slots=True)
class Run:
    """Some steps of one way over one link to so many replicas."""

    way: str
    rate: str
    replicas: int
    steps: list[Step]

    def median(self, of: Callable[[Step], float]) -> float:
        return statistics.median(of(step) for step in self.steps)

    @property
    def live_s(self) -> float:
        return self.median(lambda step: step.live_s)

    @property
    def held_s(self) -> float:
        return self.median(lambda step: step.held_s)

    @property
    def pause_s(self) -> float:
        return self.median(lambda step: step.pause_s)

    @property
    def link_bytes(self) -> float:
        """In both directions."""
        return self.median(lambda step: step.traffic.down_bytes + step.traffic.up_bytes)

    @property
    def needed_s(self) -> float:
        """What the bytes towards the replicas need on the link: their time at its rate, and one way of it."""
        return self.median(lambda step: 8 * step.traffic.down_bytes / RATES[self.rate]) + ROUND_TRIP_S / 2

    def row(self) -> Row:
        return {
            "way": self.way,
            "link": self.rate,
            "replicas": self.replicas,
            "step to live s": self.live_s,
            "of what the bytes need": self.live_s / self.needed_s,
            "MB on the link": self.link_bytes / 1e6,
            "trainer held s": self.held_s,
            "pause ms": 1000 * self.pause_s,
            "steps": len(self.steps),
            "exact": all(step.is_exact for step in self.steps),
        }

    def phases(self) -> Row:
        """Where the time went, in medians. What runs at the same time is counted in each phase."""
        names = self.steps[0].phases
        medians = {name: statistics.median(step.phases[name] for step in self.steps) for name in names}
        return {"way": self.way, "link": self.rate, **medians}


class Program:
    """A program on a host that takes orders and answers each of them."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self._name = name
        self._process = process

    def answer(self) -> dict[str, Any]:
        """The next answer."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the {self._name} has ended: its error is above")
        fields: dict[str, Any] = json.loads(line)
        return fields

    def order(self, do: str, **fields: Any) -> None:
        """Give an order, whose answer is to be read."""
        assert self._process.stdin is not None
        print(json.dumps({"do": do, **fields}), file=self._process.stdin, flush=True)

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        """Give an order and wait for its answer."""
        self.order(do, **fields)
        return self.answer()


@contextmanager
def program(name: str, host: Host, *arguments: str | Path, environment: Mapping[str, str]) -> Iterator[Program]:
    """A program of `wan_nodes` that is gone at the end of the block. Answers once it is ready."""
    # `nsenter` starts in the home of the host.
    inside = ["env", "-C", ROOT, sys.executable, "-m", "benchmarks.wan_nodes", *arguments]
    process = subprocess.Popen(
        host.command(*inside),
        env={**host.environment, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield Program(name, process)
            assert process.stdin is not None
            process.stdin.close()
            process.wait(timeout=300)
        finally:
            process.kill()


@dataclass(slots=True)
class Bench:
    """Two hosts with a store, a trainer and replicas that have the states of one model."""

    link: Link
    url: str
    trainer: Program
    replicas: list[Program]
    replica_address: str
    states: Sequence[Path]
    gap_s: tuple[float, float]
    random: Random = field(default_factory=lambda: Random(0))
    runs: list[Run] = field(default_factory=list)

    def run(self, way: str, rate: str, *, replicas: int, repeats: int) -> Run:
        """Some steps in one way. They go through all states, and then back through them."""
        self.link.set_rate(RATES[rate])
        url = f"{self.url}/{len(self.runs)}"
        chosen = self.replicas[:replicas]
        if way == OURS:
            self.trainer.ask("open", way=way, url=url, replicas=[])
        for one in chosen:
            one.order("open", way=way, url=url)
        opened = [one.answer() for one in chosen]
        if way != OURS:
            ports = [(self.replica_address, each["port"]) for each in opened]
            self.trainer.ask("open", way=way, url=url, replicas=ports)
        there = [*range(len(self.states)), *range(len(self.states) - 2, 0, -1)]
        pairs = itertools.islice(itertools.pairwise(itertools.cycle(there)), repeats)
        run = Run(way, rate, replicas, [self._step(chosen, old, new) for old, new in pairs])
        self.trainer.ask("close")
        for one in chosen:
            one.ask("close")
        self.runs.append(run)
        say(f"wan: {json.dumps(run.row())}")
        say(f"wan: {json.dumps(run.phases())}")
        return run

    def _step(self, replicas: Sequence[Program], old: int, new: int) -> Step:
        time.sleep(self.random.uniform(*self.gap_s))
        before = self.link.traffic()
        stepped = self.trainer.ask("step", old=old, new=new)
        for one in replicas:
            one.order("live")
        moves = [one.answer() for one in replicas]
        traffic = self.link.traffic() - before
        finished = self.trainer.ask("finish")
        # One after the other: each reads all weights of the expected state.
        checks = [one.ask("check", expected=str(self.states[new])) for one in replicas]
        last = max(moves, key=lambda move: float(move["live_s"]))
        return Step(
            live_s=last["live_s"] - stepped["begun_s"],
            held_s=stepped["held_s"],
            pause_s=max(move["pause_s"] for move in moves),
            payload_bytes=finished["payload_bytes"],
            traffic=traffic,
            is_exact=all(check["is_exact"] for check in checks),
            phases={f"{step} s": s for step, s in (finished["trainer"] | last["replica"]).items()},
        )


@contextmanager
def bench(states: Sequence[Path], *, replicas: int, gap_s: tuple[float, float]) -> Iterator[Bench]:
    """Two hosts, the link, and all programs, each with the states of a model."""
    with ExitStack() as up:
        here = up.enter_context(hosts("trainer", "replica"))
        trainer_host, replica_host = here["trainer"], here["replica"]
        link = up.enter_context(linked(trainer_host, replica_host, round_trip_s=ROUND_TRIP_S))
        quiet = {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore::UserWarning"}
        # On the disk, where there is room for files of all weights: a host keeps its home in memory.
        on_disk = {**quiet, "TMPDIR": tempfile.gettempdir()}
        store = up.enter_context(program("store", trainer_host, "store", environment=on_disk)).answer()
        near, far = (
            {**quiet, **store["environment"], "AWS_ENDPOINT_URL": f"http://{address}:{store['port']}"}
            for address in ("127.0.0.1", trainer_host.address)
        )
        trainer = up.enter_context(program("trainer", trainer_host, "trainer", *states, environment=near))
        programs = [
            up.enter_context(
                program(f"replica {n}", replica_host, "replica", states[0], f"replica-{n}", environment=far)
            )
            for n in range(replicas)
        ]
        for one in (trainer, *programs):
            one.answer()
        yield Bench(
            link=link,
            url=f"s3://{store['bucket']}",
            trainer=trainer,
            replicas=programs,
            replica_address=replica_host.address,
            states=states,
            gap_s=gap_s,
        )


def qwen3(plan: Plan) -> Section:
    """All ways with one replica, on the shape of Qwen3-0.6B."""
    with tempfile.TemporaryDirectory(prefix="deltasync-bench-") as folder:
        states = synthetic_states(plan.shape, Path(folder))
        with bench(states, replicas=1, gap_s=plan.gap_s) as made:
            for rate in RATES:
                _changes(made, rate, plan)
            for rate in reversed(RATES):
                _full(made, rate)
    return Section(_tables(f"Qwen3-0.6B shape, {DENSITY:.0%} changed", made.runs), _targets(made.runs))


def smollm2(plan: Plan) -> Section:
    """All ways with one replica; deltasync and the quickest others with several."""
    with tempfile.TemporaryDirectory(prefix="deltasync-bench-") as folder:
        states = real_states() if plan.is_real else synthetic_states(plan.shape, Path(folder))
        with bench(states, replicas=max(plan.replicas), gap_s=plan.gap_s) as made:
            for rate in RATES:
                alone = _changes(made, rate, plan)
                kept = sorted((run.live_s, run.way) for run in alone if run.way != OURS)[:OTHERS_KEPT]
                for replicas in plan.replicas:
                    for way in (OURS, *(way for _, way in kept)) if replicas > 1 else ():
                        made.run(way, rate, replicas=replicas, repeats=plan.repeats)
                _full(made, rate)
    return Section(_tables(f"SmolLM2-135M, real steps at {LEARNING_RATE:g}", made.runs), [_exactness(made.runs)])


def _changes(made: Bench, rate: str, plan: Plan) -> list[Run]:
    """deltasync and all ways of others that send what changed, with one replica."""
    others = [way.name for way in WAYS if not way.name.startswith("full")]
    return [made.run(way, rate, replicas=1, repeats=plan.repeats) for way in (OURS, *others)]


def _full(made: Bench, rate: str) -> None:
    """All weights take minutes over the slow link: once is enough for them."""
    for way in WAYS:
        if way.name.startswith("full"):
            made.run(way.name, rate, replicas=1, repeats=1)


def synthetic_states(shape: Shape, folder: Path) -> list[Path]:
    say("wan: making synthetic weights")
    old, new = write_pair(bf16_pair(DENSITY, shape=shape), folder)
    return [old / "model.safetensors", new / "model.safetensors"]


def real_states() -> list[Path]:
    folder = smol.generate(log=say)
    return [smol.state_path(folder, LEARNING_RATE, number) for number in range(smol.Plan().pairs + 1)]


def _tables(title: str, runs: Sequence[Run]) -> dict[str, list[Row]]:
    names = list(dict.fromkeys(name for run in runs for name in run.steps[0].phases))
    phases = [run.phases() for run in runs if run.replicas == 1]
    return {
        f"over a link, {title}": [run.row() for run in runs],
        f"phases of a step, {title}": [{**dict.fromkeys(("way", "link", *names)), **row} for row in phases],
    }


def _targets(runs: Sequence[Run]) -> list[Target]:
    """The claims of the project about the slow link, and what the fast one allows."""
    by_way = {run.way: run for run in runs if run.rate == SLOW}
    ours, fast = by_way.pop(OURS), next(run for run in runs if run.way == OURS and run.rate == FAST)
    return [
        *(
            at_least(f"{SLOW}: bytes on the link, {way} / deltasync", by_way[way].link_bytes / ours.link_bytes, limit)
            for way, limit in ((GAPS, 4.0), (XOR, 3.0), (ARC_V3, 1.6))
        ),
        at_most(f"{SLOW}: step to live / best other way", ours.live_s / min(r.live_s for r in by_way.values()), 0.35),
        at_most(f"{SLOW}: step to live / what the bytes need", ours.live_s / ours.needed_s, 1.3),
        at_most(f"{FAST}: step to live / what the bytes need", fast.live_s / fast.needed_s, 2.0),
        at_most(f"{SLOW}: trainer held / best other way", ours.held_s / min(r.held_s for r in by_way.values()), 0.2),
        at_most(f"{SLOW}: pause / best other way", ours.pause_s / min(r.pause_s for r in by_way.values()), 0.2),
        _exactness(runs),
    ]


def _exactness(runs: Sequence[Run]) -> Target:
    steps = [step for run in runs for step in run.steps]
    claim = f"steps after which all replicas have the trainer's bits, of {len(steps)}"
    return at_least(claim, sum(step.is_exact for step in steps), len(steps))


FULL = Plan(shape=QWEN3_0_6B, is_real=True, repeats=3, replicas=(1, 4, 16))
TINY = Shape(layers=1, hidden=256, intermediate=512, heads=4, kv_heads=2, head=64, vocabulary=8192)
QUICK = Plan(shape=TINY, is_real=False, repeats=1, replicas=(1, 2), gap_s=(0.0, 0.2))
SECTIONS: dict[str, Callable[[Plan], Section]] = {"qwen3": qwen3, "smollm2": smollm2}


if __name__ == "__main__":
    run_sections(
        "wan", "Measure the way from a step to live weights over a slow link.", SECTIONS, full=FULL, quick=QUICK
    )
