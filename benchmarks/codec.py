"""The codec benchmark: sizes, speed, memory and files, with the targets of the project.

    python -m benchmarks.codec [--quick] [--only sizes|speed|memory|files|exact]

A full run writes `benchmarks/results/codec.json`; a partial one writes `codec-partial.json`, which git ignores.
"""

from collections.abc import Callable

from benchmarks import codec_exact, codec_files, codec_memory, codec_sizes, codec_speed
from benchmarks.codec_plan import FULL, QUICK, Plan
from benchmarks.sections import Section, run_sections

SECTIONS: dict[str, Callable[[Plan], Section]] = {
    "exact": codec_exact.run,
    "speed": codec_speed.run,
    "files": codec_files.run,
    "memory": codec_memory.run,
    "sizes": codec_sizes.run,
}


if __name__ == "__main__":
    run_sections("codec", "Measure the codec.", SECTIONS, full=FULL, quick=QUICK)
