"""The codec benchmark: sizes, speed, memory and files, with the targets of the project.

    python -m benchmarks.codec [--quick] [--only sizes|speed|memory|files|exact]

A full run writes `benchmarks/results/codec.json`; a partial one writes `codec-partial.json`, which git ignores.
"""

import argparse
import time
from collections.abc import Callable, Sequence

from benchmarks import codec_exact, codec_files, codec_memory, codec_sizes, codec_speed
from benchmarks.codec_plan import FULL, QUICK, Plan, Section
from benchmarks.report import Row, print_table, say, write_results
from deltasync.kernels.dispatch import kernels

SECTIONS: dict[str, Callable[[Plan], Section]] = {
    "exact": codec_exact.run,
    "speed": codec_speed.run,
    "files": codec_files.run,
    "memory": codec_memory.run,
    "sizes": codec_sizes.run,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.codec", description="Measure the codec.")
    parser.add_argument("--quick", action="store_true", help="small shapes and few repeats: a smoke test")
    parser.add_argument("--only", choices=sorted(SECTIONS), help="run one section")
    options = parser.parse_args(arguments)
    plan = QUICK if options.quick else FULL
    if kernels().name == "reference" and not options.quick:
        parser.error("the native kernels are not built: a full run would measure NumPy, for hours")
    started = time.monotonic()
    found = [SECTIONS[name](plan) for name in ([options.only] if options.only else SECTIONS)]
    tables: dict[str, Sequence[Row]] = {title: rows for one in found for title, rows in one.tables.items()}
    tables["targets"] = [target.row() for one in found for target in one.targets]
    for title, rows in tables.items():
        print_table(title, rows)
    is_partial = options.quick or options.only is not None
    path = write_results(
        "codec-partial" if is_partial else "codec",
        tables,
        facts={
            "kernels": kernels().name,
            "quick": options.quick,
            "run_seconds": round(time.monotonic() - started),
        },
    )
    say(f"results in {path.parent.name}/{path.name}")


if __name__ == "__main__":
    main()
