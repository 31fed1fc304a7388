"""Run the soak: `python -m soak --minutes M --seed S`, with the folder `tests` on the path.

It starts all servers by itself, prints what it did and what was found, and ends with 1 if anything is wrong. Everything
that the processes wrote stays in the folder if something is wrong, or if a folder was given.
"""

import argparse
import json
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from .judgement import END_S, Verdict, conclude
from .processes import wait_until
from .schedule import schedule
from .system import System, running_system

START_S = 600.0
CALM_VERSIONS = 5
"""How many versions the trainer publishes after the faults."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long faults happen (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="chooses the faults and their times (default: 0)")
    parser.add_argument("--vllm", action="store_true", help="follow the feed with a vLLM server, too")
    parser.add_argument("--folder", type=Path, help="for all files (default: a temporary one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there, too")
    options = parser.parse_args()
    # SIGTERM unwinds, so that no server and no mount is left.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    folder = Path(tempfile.mkdtemp(prefix="deltasync-soak-")) if options.folder is None else options.folder
    try:
        with running_system(folder, seed=options.seed, with_vllm=options.vllm) as system:
            verdict = soak(system, seconds=60 * options.minutes, seed=options.seed)
    except (pytest.skip.Exception, pytest.fail.Exception) as error:
        print(f"cannot run: {error}", file=sys.stderr)
        return 2
    report = {"minutes": options.minutes, "seed": options.seed, "problems": verdict.problems, **verdict.facts}
    print_report(report)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    if options.folder is None and not verdict.problems:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"\nwhat the processes wrote is in {folder}")
    return int(bool(verdict.problems))


def soak(system: System, *, seconds: float, seed: int) -> Verdict:
    """Let faults happen for so long, then judge."""
    system.start()
    names = system.replicas
    if not wait_until(lambda: None not in map(system.version_of, names), within_s=START_S):
        system.watch(0.0)
        return Verdict([*system.problems, f"not all replicas are live after {START_S:g} s"], {})
    began_s = system.now_s
    for step in schedule(
        seed, seconds, disk=system.has_small_disk, clocks=system.has_clocks, vllm=system.vllm is not None
    ):
        system.watch(began_s + step.at_s)
        system.apply(step)
    system.watch(began_s + seconds)
    system.end_faults()
    wanted, end_s = system.published + CALM_VERSIONS, system.now_s + END_S
    while system.published < wanted and system.now_s < end_s:
        system.watch(system.now_s + 1.0)
    if system.published < wanted:
        system.problems.append(f"the trainer has not published {CALM_VERSIONS} versions within {END_S:g} s")
    return conclude(system)


def print_report(report: dict[str, Any]) -> None:
    """As text: what happened, what the processes used, what is wrong."""
    print(f"\nsoak of {report['minutes']:g} minutes, seed {report['seed']}\n")
    for name, value in report.items():
        if name not in ("minutes", "seed", "problems", "processes", "followers"):
            parts = ", ".join(f"{key} {count}" for key, count in value.items()) if isinstance(value, dict) else value
            print(f"  {name.replace('_', ' '):<26} {'-' if parts == '' else parts}")
    print(f"\n  {'follower':<12} {'moves':>6} {'bytes':>12} {'refetched':>10} {'rerouted':>9} {'rebuilt':>8}")
    for name, counts in report.get("followers", {}).items():
        figures = (counts[key] for key in ("moves", "nbytes", "refetched", "rerouted", "rebuilt"))
        print("  {:<12} {:>6} {:>12} {:>10} {:>9} {:>8}".format(name, *figures))
    print(f"\n  {'process':<12} {'lives':>6} {'longest':>9}   {'RSS, MiB: first/last/max':>26}   descriptors")
    for name, use in report.get("processes", {}).items():
        rss, descriptors = ("/".join(map(str, use[key].values())) for key in ("rss_mib", "descriptors"))
        print(f"  {name:<12} {use['lives']:>6} {use['longest_s']:>7} s   {rss:>26}   {descriptors}")
    print()
    for problem in report["problems"]:
        print(f"WRONG: {problem}")
    print("nothing is wrong" if not report["problems"] else f"{len(report['problems'])} problems")


if __name__ == "__main__":
    sys.exit(main())
