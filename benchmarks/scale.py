"""Beyond this machine: measured rates, a model that is checked here, how costs grow, and a projection to large models.

    python -m benchmarks.scale [--quick] [--only rates|model|growth|projection]

The model is checked with rates of the same run, on a machine that may be busy. The projection takes those of
`deltasync plan`. It is no measurement, and what others have published was not measured here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from benchmarks import scale_growth, scale_rates
from benchmarks.data.synthetic import SMALL, TINY, Shape
from benchmarks.report import Row
from benchmarks.scale_growth import GrowthPlan
from benchmarks.scale_rates import RatesPlan
from benchmarks.sections import Section, run_sections
from deltasync.estimate import MEASURED, Change, Deployment, Link, Rates, density_at, estimate

LITTLE = Shape(layers=1, hidden=256, intermediate=768, heads=4, kv_heads=2, head=64, vocabulary=4096)  # 2 M elements
MIDDLE = Shape(layers=2, vocabulary=8192)  # 40 M elements

RANKS_PER_HOST = 8
HOST_LINK = Link(bits_per_s=10e9, round_trip_s=0.02)
CORES = 32
EGRESS_USD_PER_GB = 0.09
FP8_SHARE = 1 / 9
"""Copies in fp8 change about nine times less than those in bf16, by what others have published."""


@dataclass(frozen=True, slots=True)
class Plan:
    rates: RatesPlan
    growth: GrowthPlan


FULL = Plan(
    RatesPlan(
        shapes=(TINY, MIDDLE, SMALL),
        densities=(0.002, 0.01, 0.05),
        check_shapes=(Shape(layers=2, vocabulary=16_384), Shape(layers=5, vocabulary=24_576)),
        check_densities=(0.005, 0.02),
        links=(Link(bits_per_s=100e6, round_trip_s=0.05), Link(bits_per_s=1e9, round_trip_s=0.05)),
        repeats=7,
    ),
    GrowthPlan(
        shapes=(LITTLE, TINY, SMALL),
        densities=(0.001, 0.01, 0.1),
        versions=(8, 32, 128),
        replicas=(1, 4, 16, 64),
        ranks=(1, 2, 4, 8),
        repeats=3,
    ),
)
QUICK = Plan(
    RatesPlan(
        shapes=(LITTLE, TINY),
        densities=(0.005, 0.02),
        check_shapes=(LITTLE,),
        check_densities=(0.01,),
        links=(Link(bits_per_s=1e9, round_trip_s=0.01),),
        repeats=2,
    ),
    GrowthPlan(
        shapes=(LITTLE, TINY),
        densities=(0.005, 0.02),
        versions=(2, 4),
        replicas=(1, 2),
        ranks=(1, 2),
        repeats=1,
    ),
)


@cache
def _measured(plan: RatesPlan) -> tuple[Rates, list[Row]]:
    return scale_rates.measure(plan)


def rates(plan: Plan) -> Section:
    """The rates of this machine now, as `deltasync.estimate` takes them."""
    found, rows = _measured(plan.rates)
    return Section({"rates": scale_rates.rate_rows(found), "rates: measurements, the fastest of each phase": rows})


def model(plan: Plan) -> Section:
    """The model against runs over a simulated link."""
    return scale_rates.check(plan.rates, _measured(plan.rates)[0])


def growth(plan: Plan) -> Section:
    return scale_growth.run(plan.growth)


def projection(plan: Plan) -> Section:
    """Large models with the rates of the package, and what others have published."""
    return Section({**project(MEASURED), PUBLISHED: published(MEASURED)})


BF16_DENSITY = density_at(3e-6)
MODELS = {
    "7B": Change.assumed(7 * 10**9, BF16_DENSITY),
    "70B": Change.assumed(70 * 10**9, BF16_DENSITY),
    "405B": Change.assumed(405 * 10**9, BF16_DENSITY),
    "671B MoE": Change.assumed(671 * 10**9, BF16_DENSITY),
    "1T fp8": Change.assumed(10**12, BF16_DENSITY * FP8_SHARE, dtype="fp8"),
}
PUBLISHED = "published by others, not measured here, and the model's estimate for the same"


def _deployment(ranks: int, replicas: int) -> Deployment:
    return Deployment(
        ranks=ranks,
        uplink=HOST_LINK,
        uplinks=max(1, ranks // RANKS_PER_HOST),
        replicas=replicas,
        downlink=HOST_LINK,
        cores=CORES,
        egress_usd_per_gb=EGRESS_USD_PER_GB,
    )


def project(rates: Rates) -> dict[str, list[Row]]:
    """Seconds from step to live, bytes and dollars of large models."""
    rows: list[Row] = []
    for name, change in MODELS.items():
        for ranks in (8, 64, 512):
            for replicas in (1, 1000):
                e = estimate(change, _deployment(ranks, replicas), rates)
                rows.append(
                    {
                        "model": name,
                        "ranks": ranks,
                        "replicas": replicas,
                        "delta GB": change.delta_bytes / 1e9,
                        "full copy GB": change.weight_bytes / 1e9,
                        "step to live s": e.step_to_live_s,
                        "full copy s": e.copy_step_to_live_s,
                        "held s": e.held_s,
                        "pause s": e.pause_s,
                        "put GB/h": e.traffic.up_bytes_per_hour / 1e9,
                        "egress $/h": e.traffic.egress_usd_per_hour,
                        "full copies $/h": e.copy_traffic.egress_usd_per_hour,
                    }
                )
    title = (
        f"projection, not a measurement: {BF16_DENSITY:.2%} of bf16 changed, {BF16_DENSITY * FP8_SHARE:.3%} of fp8; "
        f"{HOST_LINK.bits_per_s / 1e9:.0f} Gbit/s for {RANKS_PER_HOST} ranks and for each replica, {CORES} cores each"
    )
    return {title: rows}


def published(rates: Rates) -> list[Row]:
    """What others have published for a model, and what the model gives for as many changes."""
    cases: list[tuple[str, str, str, Change, str]] = [
        (
            "TRL",
            "Qwen3-0.6B",
            "1.2 GB -> 20 to 35 MB a step",
            Change.assumed(596 * 10**6, 35e6 * 8 / 32 / 596e6),
            "as many changes as 35 MB are at 32 bits",
        ),
        (
            "TRL",
            "405B",
            "6 GB a step",
            Change.assumed(405 * 10**9, 6e9 * 8 / 32 / 405e9),
            "as many changes as 6 GB are at 32 bits",
        ),
        (
            "PULSE",
            "7B",
            "14 GB -> 108 MB a step",
            Change.assumed(7 * 10**9, 108e6 * 8 / 23 / 7e9),
            "as many changes as 108 MB are at 23 bits",
        ),
        (
            "Fireworks",
            "1,024 GiB",
            "1,024 -> 20.3 GiB a step",
            Change.assumed(1024 * 2**30, 20.3 * 2**30 * 8 / 12.7 / (1024 * 2**30), dtype="fp8"),
            "fp8, as many changes as 20.3 GiB are at 12.7 bits",
        ),
        ("verl", "235B", "11 to 15 s, over NCCL", Change.assumed(235 * 10**9, 0.01), "1 % changed"),
        ("NeMo RL", "247 GB", "20 s at 3 % changed", Change.assumed(247 * 10**9 // 2, 0.03), "bf16, 3 % changed"),
    ]
    rows: list[Row] = []
    for system, name, text, change, assumption in cases:
        e = estimate(change, _deployment(64, 16), rates)
        rows.append(
            {
                "system": system,
                "model": name,
                "published": text,
                "assumed": assumption,
                "changed %": 100 * change.density,
                "our delta GB": change.delta_bytes / 1e9,
                "our step to live s, 64 ranks, 16 replicas": e.step_to_live_s,
            }
        )
    return rows


SECTIONS: dict[str, Callable[[Plan], Section]] = {
    "rates": rates,
    "model": model,
    "growth": growth,
    "projection": projection,
}

if __name__ == "__main__":
    run_sections("scale", "Measure how costs grow.", SECTIONS, full=FULL, quick=QUICK)
