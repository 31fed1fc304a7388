"""The peak of memory that encoding and decoding take beyond their inputs, at few and at many changes."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from benchmarks.codec_plan import MODEL_DENSITY, THREADS, Plan
from benchmarks.data.synthetic import Shape, bf16_pair
from benchmarks.machine import peak_extra_bytes
from benchmarks.report import Row, say
from benchmarks.sections import Section, Target, at_most
from benchmarks.states import copy_of, delta_file, states_of
from deltasync import blocks
from deltasync.format.payload import Block, Payload

DENSITIES = (MODEL_DENSITY, 0.6)
MODEL_SHARE = 0.05
ALLOWANCE = 64_000_000


@dataclass(frozen=True, slots=True)
class Peak:
    """Peak extra memory of one piece of work; `output` is the part that is its result."""

    work: str
    density: float
    model: int
    extra: int
    output: int

    @property
    def working(self) -> int:
        """What it takes beyond the result."""
        return max(0, self.extra - self.output)

    @property
    def allowed(self) -> float:
        """The limit that the project sets itself."""
        return MODEL_SHARE * self.model + ALLOWANCE


def run(plan: Plan) -> Section:
    """Measure each density in a process of its own, so that nothing freed earlier can be used again."""
    found: list[Peak] = []
    for density in DENSITIES:
        say(f"memory: {density:.0%} changed, in a fresh process")
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            found += pool.submit(_measure, density, plan.model).result()
    title = f"memory: peak beyond the inputs, {THREADS} threads"
    return Section(tables={title: [_row(peak) for peak in found]}, targets=list(_targets(found)))


def _measure(density: float, shape: Shape) -> list[Peak]:
    states = states_of(bf16_pair(density, shape=shape))
    model = states.old.layout.nbytes
    found: list[Block] = []
    extra = peak_extra_bytes(lambda: found.extend(blocks.encode_delta(states.old, states.new)))
    output = sum(len(block.data) for block in found)
    encode = Peak("detect + encode", density, model, extra, output)
    file = delta_file(states, found)
    found.clear()
    target = copy_of(states.old)

    def decode() -> None:
        blocks.decode_into(target, states.old, Payload.parse(file).blocks())

    return [encode, Peak("decode + apply", density, model, peak_extra_bytes(decode), 0)]


def _row(peak: Peak) -> Row:
    return {
        "work": peak.work,
        "changed %": 100 * peak.density,
        "model MB": peak.model / 1e6,
        "peak extra MB": peak.extra / 1e6,
        "of it the delta MB": peak.output / 1e6,
        "working MB": peak.working / 1e6,
        "working % of model": 100 * peak.working / peak.model,
    }


def _targets(found: list[Peak]) -> Iterator[Target]:
    for peak in found:
        claim = f"{peak.work}, {peak.density:.0%} changed: peak memory beyond input and output, MB"
        yield at_most(claim, peak.working / 1e6, peak.allowed / 1e6)
