"""How fast each stage is, in gigabytes of model per second, against the read bandwidth of the same minutes."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from benchmarks.codec_plan import THREADS, Plan, model_pair
from benchmarks.codec_stages import DECODE_APPLY, DECODE_INTO, DETECT_ENCODE, TORCH, Stage, groups
from benchmarks.machine import (
    Call,
    Timing,
    bandwidth,
    computing_call,
    computing_name,
    fill_memory,
    read_calls,
    time_rounds,
)
from benchmarks.report import Row, say
from benchmarks.sections import Section, Target, at_least
from deltasync.parallel import set_threads

THREAD_COUNTS = (1, THREADS)


@dataclass(frozen=True, slots=True)
class Speed:
    """One stage on one and on two threads, and what the machine gave in the same rounds.

    `read_one` and `read_two` are reads of plain memory; `machine_gain` is two threads against one when they only
    compute: below 2, other work had a share of the cores.
    """

    stage: Stage
    one: Timing
    two: Timing
    read_one: Timing
    read_two: Timing
    machine_gain: float

    @property
    def gain(self) -> float:
        """Two threads against one."""
        return self.two.best / self.one.best

    def of_ceiling(self) -> float:
        """The share of what one thread could reach if it did nothing but read the arrays of this stage."""
        return self.one.best / (self.read_one.best / self.stage.arrays)


def run(plan: Plan) -> Section:
    """Time all stages; in every round, each group stands between reads of plain memory."""
    pair = model_pair(plan.model)
    say("speed: preparing the stages")
    found: dict[str, Speed] = {}
    for title, stages in groups(pair):
        say(f"speed: {title}, {plan.repeats} rounds")
        found |= {speed.stage.name: speed for speed in _measure(stages, repeats=plan.repeats)}
    title = f"speed: GB/s of model on {pair.name} ({pair.elements / 1e6:.0f} M elements), fastest and median run"
    return Section(tables={title: [_row(speed) for speed in found.values()]}, targets=list(_targets(found)))


def _measure(stages: list[Stage], *, repeats: int) -> Iterator[Speed]:
    memory = fill_memory()
    plain = [call for threads in THREAD_COUNTS for call in read_calls(memory, threads=threads)]
    plain += [computing_call(threads=threads) for threads in THREAD_COUNTS]
    calls = [
        Call(_name(stage, threads), partial(_run, stage, threads), stage.nbytes, stage.prepare)
        for stage in stages
        for threads in THREAD_COUNTS
    ]
    timings = time_rounds([*plain, *calls, *plain], repeats=repeats)
    read_one, read_two = (bandwidth(timings, threads=threads) for threads in THREAD_COUNTS)
    hash_one, hash_two = (timings[computing_name(threads)].best for threads in THREAD_COUNTS)
    for stage in stages:
        one, two = (timings[_name(stage, threads)] for threads in THREAD_COUNTS)
        yield Speed(stage, one, two, read_one, read_two, machine_gain=hash_two / hash_one)


def _run(stage: Stage, threads: int) -> None:
    set_threads(threads)
    stage.run(threads)


def _name(stage: Stage, threads: int) -> str:
    return f"{stage.name}, {threads} threads"


def _row(speed: Speed) -> Row:
    return {
        "stage": speed.stage.name,
        "1 thread": speed.one.best,
        "median": speed.one.median,
        f"{THREADS} threads": speed.two.best,
        "their median": speed.two.median,
        f"{THREADS} : 1": speed.gain,
        f"SHA-256 {THREADS} : 1": speed.machine_gain,
        "read, 1 thread": speed.read_one.best,
        f"read, {THREADS} threads": speed.read_two.best,
        "arrays read": speed.stage.arrays,
        "of ceiling, 1 thread": speed.of_ceiling(),
    }


def _targets(found: dict[str, Speed]) -> Iterator[Target]:
    encode = found[DETECT_ENCODE]
    yield at_least(f"{DETECT_ENCODE}, 1 thread / (read bandwidth / 2)", encode.of_ceiling(), 0.4)
    for name in (DECODE_APPLY, DECODE_INTO):
        yield at_least(f"{name}, 1 thread / read bandwidth", found[name].of_ceiling(), 0.3)
    for name in (DETECT_ENCODE, DECODE_APPLY, DECODE_INTO):
        yield at_least(f"{name}, {THREADS} threads / 1 thread", found[name].gain, 1.7)
    if TORCH in found:
        yield at_least(f"{DETECT_ENCODE} / {TORCH}, 1 thread", encode.one.best / found[TORCH].one.best, 5)
