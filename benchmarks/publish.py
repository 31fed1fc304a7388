"""The publisher benchmark: how long a trainer is held up, what runs behind its back, and what memory that takes.

    python -m benchmarks.publish [--quick] [--only held|memory|real]

A full run writes `benchmarks/results/publish.json`; a partial one writes `publish-partial.json`, which git ignores.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks import publish_held, publish_memory, publish_real
from benchmarks.codec_plan import Section, at_least
from benchmarks.data.synthetic import QWEN3_0_6B, SMALL, Shape
from benchmarks.report import Row, print_table, say, write_results
from deltasync.kernels.dispatch import kernels
from deltasync.store.opening import open_store
from tests.servers import seaweed


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
            publish_real.row(label, store, expected, told)
            for (label, store), told in zip(stores.items(), events, strict=True)
        ]
    exact = min(int(count) for row in rows if isinstance(count := row["bit-exact"], int))
    claim = f"SmolLM2-135M, {plan.steps} steps on two stores: versions that are the trainer's weights, bit by bit"
    return Section(tables={"real steps: SmolLM2-135M, fp32 master": rows}, targets=[at_least(claim, exact, plan.steps)])


SECTIONS: dict[str, Callable[[Plan], Section]] = {
    "held": lambda plan: publish_held.run(plan.model, repeats=plan.repeats),
    "memory": lambda plan: publish_memory.run(plan.model),
    "real": real,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.publish", description="Measure the publisher.")
    parser.add_argument("--quick", action="store_true", help="small shapes and few repeats: a smoke test")
    parser.add_argument("--only", choices=sorted(SECTIONS), help="run one section")
    options = parser.parse_args(arguments)
    plan = QUICK if options.quick else FULL
    started = time.monotonic()
    found = [SECTIONS[name](plan) for name in ([options.only] if options.only else SECTIONS)]
    tables: dict[str, Sequence[Row]] = {title: rows for one in found for title, rows in one.tables.items()}
    tables["targets"] = [target.row() for one in found for target in one.targets]
    for title, rows in tables.items():
        print_table(title, rows)
    is_partial = options.quick or options.only is not None
    path = write_results(
        "publish-partial" if is_partial else "publish",
        tables,
        facts={"kernels": kernels().name, "quick": options.quick, "run_seconds": round(time.monotonic() - started)},
    )
    say(f"results in {path.parent.name}/{path.name}")


if __name__ == "__main__":
    main()
