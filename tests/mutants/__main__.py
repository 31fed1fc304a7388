"""Try mutants: `python -m mutants [NAME…]`. Prints one row for each, and ends with 1 unless all are killed."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from . import MUTANTS
from .mutant import Mutant
from .sandbox import KILLED, Sandbox, Trial


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m mutants")
    parser.add_argument("names", nargs="*", metavar="NAME", help="by default all mutants")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file, too")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - MUTANTS.keys())
    if unknown:
        parser.error(f"there is no mutant {unknown[0]!r}")
    chosen = [mutant for name, mutant in MUTANTS.items() if not options.names or name in options.names]
    with Sandbox() as sandbox:
        # Native ones come last: the core is rebuilt for them.
        python, native = [m for m in chosen if not m.is_native], [m for m in chosen if m.is_native]
        trials = [trial for group in (python, native) for trial in try_all(sandbox, group)]
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps([asdict(trial) for trial in trials], indent=1) + "\n")
    killed = sum(trial.result == KILLED for trial in trials)
    print(f"{killed} of {len(trials)} mutants killed")
    return int(killed != len(trials))


def try_all(sandbox: Sandbox, mutants: list[Mutant]) -> list[Trial]:
    """Try mutants one after another. Their killers must pass without any of them first, or nothing is tried."""
    if not mutants:
        return []
    if any(mutant.is_native for mutant in mutants):
        sandbox.build_core()
    clean = sandbox.run_tests(dict.fromkeys(killer for mutant in mutants for killer in mutant.killers))
    if clean.code:
        print(clean.output, file=sys.stderr)
        raise SystemExit("the killers do not pass without a mutant")
    trials = []
    for mutant in mutants:
        trials.append(sandbox.try_out(mutant))
        print(row(trials[-1]), flush=True)
    return trials


def row(trial: Trial) -> str:
    return f"{trial.mutant:<41} {trial.result:<8} {trial.seconds:>6.1f} s  {trial.killer or trial.note}"


if __name__ == "__main__":
    sys.exit(main())
