"""Run all fuzz targets, each for its share of the time, and print what each of them did.

    PYTHONPATH=tests python -m fuzz [--seconds 60] [--seed 0] [--target NAME]... [--json FILE] [--keep]

First the corpus of each target is replayed, whatever the time. The native targets need clang++ or g++. An input that
fails is written to `build/fuzz/failed`; `--replay FILE --target NAME` runs it alone. `--keep` adds inputs that reach
something new to `tests/fuzz/corpus`: by default they are in `build/fuzz/new`.
"""

import argparse
import hashlib
import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

from .loop import CORPUS, Result, run_target
from .native import BUILD, NATIVE, build, compiler, run_native
from .targets import TARGETS

ALL = (*(f"native {name}" for name in NATIVE), *TARGETS)


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60, help="for all targets together; 0: the corpus only")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other inputs")
    parser.add_argument("--target", action="append", choices=ALL, help="only this one; may be repeated")
    parser.add_argument("--json", type=Path, help="write the table to this file, too")
    parser.add_argument("--keep", action="store_true", help="keep inputs that reach something new in the corpus")
    parser.add_argument("--replay", type=Path, help="run this input alone, with one --target")
    options = parser.parse_args()
    chosen = options.target or ALL
    if options.replay is not None:
        return _replay(options.replay, chosen)
    if any(name.startswith("native ") for name in chosen) and compiler() is None:
        print("fuzz: no C++ compiler, so the native targets are left out", file=sys.stderr)
        chosen = [name for name in chosen if name in TARGETS]
    program = build() if any(name.startswith("native ") for name in chosen) else None
    results = []
    for name in chosen:
        share = options.seconds / len(chosen)
        if program is not None and name not in TARGETS:
            result = run_native(program, name.removeprefix("native "), seconds=share, seed=options.seed)
        else:
            new = (CORPUS if options.keep else BUILD / "new") / (TARGETS[name].corpus or name.replace(" ", "-"))
            result = run_target(name, seconds=share, runs=None, seed=options.seed, new=new)
        _print_row(result, header=not results)
        results.append(result)
    failed = [result for result in results if result.failure is not None]
    for result in failed:
        print(f"\n{result.target} failed: {result.failure}", file=sys.stderr)
        if result.failed is not None:
            path = (
                BUILD / "failed" / f"{result.target.replace(' ', '-')}-{hashlib.sha256(result.failed).hexdigest()[:16]}"
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(result.failed)
            print(f"the input is {path}", file=sys.stderr)
    total = sum(result.executions for result in results)
    print(f"{total:,} executions of {len(results)} targets with seed {options.seed}; {len(failed)} failed")
    if options.json is not None:
        rows = [{**asdict(result), "failed": None} for result in results]
        options.json.write_text(json.dumps({"seed": options.seed, "executions": total, "targets": rows}, indent=1))
    return 1 if failed else 0


def _print_row(result: Result, *, header: bool) -> None:
    row = "{:<18} {:>11} {:>10} {:>7} {:>6} {:>9} {:>7}"
    if header:
        print(row.format("target", "executions", "refused", "rules", "new", "peak MB", "s"), flush=True)
    python = result.target in TARGETS
    numbers = [f"{result.refused:,}", len(result.rules), result.kept] if python else ["", "", ""]
    figures = (f"{result.executions:,}", *numbers, f"{result.peak_megabytes:.0f}", f"{result.seconds:.1f}")
    print(row.format(result.target, *figures) + ("  FAILED" if result.failure else ""), flush=True)


def _replay(path: Path, chosen: "list[str]") -> int:
    """Run one input in this process, so that a debugger can be attached and the traceback is whole."""
    if len(chosen) != 1:
        print("fuzz: --replay needs one --target", file=sys.stderr)
        return 2
    if chosen[0] in TARGETS:
        print(TARGETS[chosen[0]].run(path.read_bytes()))
        return 0
    folder = BUILD / "replay"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copy(path, folder)
    print(f"FUZZ_TARGET={chosen[0].removeprefix('native ')} {build()} {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
