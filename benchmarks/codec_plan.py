"""What one run of the codec benchmark covers: sizes, repeats and data sets."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice

from benchmarks.data import recorded, smol, synthetic
from benchmarks.data.pair import Pair
from benchmarks.data.synthetic import QWEN3_0_6B, SMALL, TINY, Shape
from benchmarks.report import say

THREADS = 2
MODEL_DENSITY = 0.01
FP8_DENSITY = 0.01

# What a data set stands for.
REAL = "real training steps"
RECORDED = "recorded from whole runs"
MODEL = "synthetic model at 1 %"
DENSITY = "other densities"
ELEMENT_TYPE = "other types"


@dataclass(frozen=True, slots=True)
class Plan:
    """How large a run is. Densities other than that of `model` use the smaller shape, to save time."""

    quick: bool = False
    model: Shape = QWEN3_0_6B
    small: Shape = SMALL
    real_steps: int = 2  # of each learning rate
    densities: tuple[float, ...] = (0.0001, 0.05, 0.25, 0.6)
    repeats: int = 7
    file_repeats: int = 3


FULL = Plan()
QUICK = Plan(quick=True, model=SMALL, small=TINY, real_steps=1, repeats=2, file_repeats=1)


@cache
def model_pair(shape: Shape) -> Pair:
    """Make the pair that speed and files are measured on, once in a run."""
    say(f"making the synthetic pair at {MODEL_DENSITY:.0%}")
    return synthetic.bf16_pair(MODEL_DENSITY, shape=shape)


def data_sets(plan: Plan) -> Iterator[tuple[str, Pair]]:
    """Yield what each data set stands for, and its pair, one at a time."""
    yield from _real_pairs(plan)
    yield from _recorded_pairs()
    yield MODEL, model_pair(plan.model)
    for density in plan.densities:
        yield DENSITY, synthetic.bf16_pair(density, shape=plan.small)
    yield ELEMENT_TYPE, synthetic.fp8_pair(FP8_DENSITY, shape=plan.small)
    yield ELEMENT_TYPE, synthetic.fp32_pair(shape=plan.small)


def _real_pairs(plan: Plan) -> Iterator[tuple[str, Pair]]:
    try:
        folder = smol.generate(log=say)
    except ModuleNotFoundError as error:
        if not plan.quick:
            raise
        say(f"SmolLM2 is left out: the package {error.name or error} is missing")
        return
    rates = smol.Plan().learning_rates
    for rate in rates:
        for pair in islice(smol.load_pairs(folder, rate), plan.real_steps):
            yield REAL, pair
    yield ELEMENT_TYPE, smol.load_fp32_pair(folder, rates[0])


def _recorded_pairs() -> Iterator[tuple[str, Pair]]:
    """Pairs of small policies, if they have been recorded: that takes minutes, and vLLM."""
    found = False
    for pair in recorded.load_pairs():
        found = True
        yield RECORDED, pair
    if not found:
        say("no run was recorded: python -m benchmarks.data.recorded does it")
