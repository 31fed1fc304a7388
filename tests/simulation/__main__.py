"""Run seeds of the simulation, print what happened, and shorten the schedule of one that fails."""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from .choices import shortened
from .planted import PLANTED
from .virtual import virtual
from .world import Outcome, simulate

SHORTENING_RUNS = 600
_COMMAND = "PYTHONPATH=tests python -m simulation"


def run(seeds: Sequence[int], *, stop_at_first: bool = False) -> tuple[Counter[str], list[Outcome]]:
    """Run seeds inside of `virtual`; returns what happened in all of them, and the outcomes of those that failed."""
    counts: Counter[str] = Counter()
    failed: list[Outcome] = []
    for seed in seeds:
        outcome = simulate(seed)
        counts += outcome.counts
        if outcome.failure is not None:
            failed.append(outcome)
            if stop_at_first:
                break
    return counts, failed


def explain(outcome: Outcome) -> str:
    """The failure of a seed, how to replay it, and the shortest schedule that was found. Inside of `virtual`."""
    failure = outcome.failure
    assert failure is not None

    def fails(keys: Sequence[str]) -> bool:
        again = simulate(outcome.seed, keep=keys).failure
        return again is not None and again.rule == failure.rule

    keys = shortened([choice.key for choice in outcome.choices], fails, runs=SHORTENING_RUNS)
    short = simulate(outcome.seed, keep=keys)
    seeds = f"--seeds {outcome.seed}-{outcome.seed}"
    return "\n".join(
        [
            f"seed {outcome.seed} breaks the rule {failure}",
            f"  replay:    {_COMMAND} {seeds} --trace",
            f"  shortened: {_COMMAND} {seeds} --trace --keep {','.join(keys)!r}",
            f"  {len(short.choices)} of {len(outcome.choices)} choices are enough for {short.failure}:",
            *(f"  {choice}" for choice in short.choices),
            "  the last operations:",
            *(f"  {operation}" for operation in short.operations[-25:]),
            "" if short.failure is None else short.failure.trace,
        ]
    )


def table(counts: Counter[str]) -> str:
    """What happened, as lines of a name and a number."""
    width = max(map(len, counts), default=0)
    return "\n".join(f"{name:{width}} {counts[name]:>12,}" for name in sorted(counts))


def _seeds(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def main() -> int:
    """0 if no seed fails, else 1."""
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument("--seeds", type=_seeds, required=True, metavar="A-B", help="first and last seed")
    parser.add_argument("--stop-at-first", action="store_true", help="end at the first seed that fails")
    parser.add_argument("--keep", help="take only these choices of the seed, by their keys, separated by commas")
    parser.add_argument("--trace", action="store_true", help="print all choices and operations")
    parser.add_argument("--plant", choices=sorted(PLANTED), metavar="NAME", help="put a fault into the code under test")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what happened to a file")
    options = parser.parse_args()
    with virtual(), PLANTED[options.plant]() if options.plant else nullcontext():
        if options.keep is not None or options.trace:
            keep = None if options.keep is None else options.keep.split(",")
            outcome = simulate(options.seeds[0], keep=keep)
            for line in (*outcome.choices, *(outcome.operations if options.trace else ())):
                print(line)
            print(outcome.failure or "no rule is broken")
            return int(outcome.failure is not None)
        counts, failed = run(options.seeds, stop_at_first=options.stop_at_first)
        for outcome in failed if len(failed) <= 3 else failed[:3]:
            print(explain(outcome), end="\n\n")
    print(table(counts))
    rules = Counter("" if outcome.failure is None else outcome.failure.rule for outcome in failed)
    print(f"\n{len(failed)} of {counts['seeds']} seeds failed", dict(rules) if failed else "")
    if options.json is not None:
        report = {"counts": dict(sorted(counts.items())), "failed": [[o.seed, str(o.failure)] for o in failed]}
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
