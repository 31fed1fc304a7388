"""The instruction sets against each other: each kernel of each set on the same block, in turns, on one thread.

    python -m benchmarks.kernel_sets [--quick]

The ratios decide which sets there are (docs/decisions/0010-instruction-sets-by-measurement.md). CPU time is measured,
so that other processes have less of an influence than on a clock.
"""

import time
from collections.abc import Callable

from benchmarks.codec_plan import FULL, MODEL_DENSITY, QUICK, Plan
from benchmarks.data import synthetic
from benchmarks.machine import Timing
from benchmarks.report import Row, say
from benchmarks.sections import Section, Target, at_least, run_sections
from benchmarks.states import states_of
from deltasync.blocks import layout_runs
from deltasync.format import limits
from deltasync.format.weights import Region, Runs, slice_runs
from deltasync.kernels import Kernels, available, load

BASE = "avx2"
WORTH_ITS_CODE = 1.25
ROUNDS_PER_REPEAT = 6
DELTA_ELEMENTS = 1 << 23

KernelCall = Callable[[], object]


def run(plan: Plan) -> Section:
    """Time the kernels of every instruction set that this build and this machine have."""
    sets = [load(name) for name in available() if name != "reference"]
    pair = synthetic.bf16_pair(MODEL_DENSITY, shape=synthetic.TINY)
    states = states_of(pair)
    runs = layout_runs(states.old.layout)[0]
    delta, anchor = _first(runs, DELTA_ELEMENTS), _first(runs, limits.PLANES_ELEMENTS)
    calls = {
        (title, k.name): call
        for k in sets
        for title, call in {
            **_delta_calls(k, states.old.region(delta), states.new.region(delta)),
            **_anchor_calls(k, states.new.region(anchor)),
        }.items()
    }
    rounds = plan.repeats * ROUNDS_PER_REPEAT
    say(f"sets: {', '.join(k.name for k in sets)}, {rounds} rounds")
    nbytes = {"delta": int(delta[:, 2].sum()) * 2, "anchor": int(anchor[:, 2].sum()) * 2}
    timings = _time(calls, nbytes, rounds=rounds)
    titles = list(dict.fromkeys(title for title, _ in timings))
    rows = [_row(title, {k.name: timings[title, k.name] for k in sets}) for title in titles]
    title = "instruction sets: GB/s of bf16 model on one thread, fastest run, CPU time"
    return Section(tables={title: rows}, targets=_targets(timings, titles))


def _first(runs: Runs, elements: int) -> Runs:
    return slice_runs(runs, 0, min(elements, int(runs[:, 2].sum())))


def _delta_calls(k: Kernels, old: Region, new: Region) -> dict[str, KernelCall]:
    whole = {"cell": limits.CELL_ELEMENTS, "enough": old.elements}
    _, _, absolute, data, _ = k.encode_difference(old, new, 0, **whole)
    return {
        "delta: detect": lambda: k.detect(old, new, 0, **whole),
        "delta: detect + encode": lambda: k.encode_difference(old, new, 0, **whole),
        "delta: decode": lambda: k.decode_changes(old, data, absolute=absolute),
    }


def _anchor_calls(k: Kernels, region: Region) -> dict[str, KernelCall]:
    data = k.encode_planes(region)
    return {
        "anchor: encode": lambda: k.encode_planes(region),
        "anchor: decode": lambda: k.decode_planes(data, region.elements, region.dtype),
        "anchor: digest": lambda: k.digest(region),
        "anchor: digest + encode": lambda: (k.digest(region), k.encode_planes(region)),
        "anchor: decode + digest": lambda: k.digest(
            region.holding(k.decode_planes(data, region.elements, region.dtype))
        ),
    }


def _time(
    calls: dict[tuple[str, str], KernelCall], nbytes: dict[str, int], *, rounds: int
) -> dict[tuple[str, str], Timing]:
    """Call everything in turns: a slow spell of the machine then hits all sets alike."""
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for number in range(-1, rounds):
        for key, call in calls.items():
            start = time.thread_time()
            result = call()
            elapsed = time.thread_time() - start
            del result  # freeing it is not part of the call
            if number >= 0:
                seconds[key].append(elapsed)
    return {key: Timing(nbytes[key[0].partition(":")[0]], tuple(spent)) for key, spent in seconds.items()}


def _row(title: str, timings: dict[str, Timing]) -> Row:
    row: dict[str, str | float] = {"kernel": title, **{name: timing.best for name, timing in timings.items()}}
    if BASE in timings:
        row |= {f"{name} : {BASE}": t.best / timings[BASE].best for name, t in timings.items() if name != BASE}
    return row


def _targets(timings: dict[tuple[str, str], Timing], titles: list[str]) -> list[Target]:
    """A set is so much faster than the portable one that it is worth its code and its tests."""
    return [
        at_least(
            f"{title}, {BASE} / portable", timings[title, BASE].best / timings[title, "portable"].best, WORTH_ITS_CODE
        )
        for title in titles
        if (title, BASE) in timings
    ]


if __name__ == "__main__":
    run_sections("kernel_sets", "Compare the instruction sets.", {"sets": run}, full=FULL, quick=QUICK)
