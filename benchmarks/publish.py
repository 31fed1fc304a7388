"""The publisher benchmark: how long a trainer is held up, what runs behind its back, and what memory that takes.

    python -m benchmarks.publish [--quick] [--only held|memory|real]

A full run writes `benchmarks/results/publish.json`; a partial one writes `publish-partial.json`, which git ignores.
"""

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks import publish_held, publish_memory, publish_real
from benchmarks.data.synthetic import QWEN3_0_6B, SMALL, Shape
from benchmarks.sections import Section, at_least, run_sections
from deltasync.store import open_store
from tests.support.servers import seaweed


@dataclass(frozen=True, slots=True)
class Plan:
    """How large a run is."""

    model: Shape
    repeats: int
    steps: int
    layers: int | None  # of the real model; None for all


FULL = Plan(model=QWEN3_0_6B, repeats=7, steps=50, layers=None)
QUICK = Plan(model=SMALL, repeats=2, steps=3, layers=2)


def real(plan: Plan) -> Section:
    """Real steps on a disk and on SeaweedFS, which runs beside the benchmark and takes its share of the cores."""
    with tempfile.TemporaryDirectory(prefix="deltasync-bench-") as folder, seaweed() as server:
        os.environ.update(server.environment)
        stores = {"file://": open_store(folder), "s3:// (SeaweedFS)": open_store(server.url("feed"))}
        models = publish_real.real_steps(plan.steps, layers=plan.layers)
        expected, events = publish_real.publish_steps(list(stores.values()), models)
        rows = [
            publish_real.row(label, store, expected, published)
            for (label, store), published in zip(stores.items(), events, strict=True)
        ]
    exact = min(int(count) for row in rows if isinstance(count := row["bit-exact"], int))
    claim = f"SmolLM2-135M, {plan.steps} steps on two stores: versions that are the trainer's weights, bit by bit"
    return Section(tables={"real steps: SmolLM2-135M, fp32 master": rows}, targets=[at_least(claim, exact, plan.steps)])


SECTIONS: dict[str, Callable[[Plan], Section]] = {
    "held": lambda plan: publish_held.run(plan.model, repeats=plan.repeats),
    "memory": lambda plan: publish_memory.run(plan.model),
    "real": real,
}


if __name__ == "__main__":
    run_sections("publish", "Measure the publisher.", SECTIONS, full=FULL, quick=QUICK)
