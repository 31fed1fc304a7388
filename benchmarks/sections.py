"""The frame of a benchmark that has sections: its options, its tables, its targets, and where the results go."""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from benchmarks.report import Row, print_table, say, write_results
from deltasync.kernels import kernels

_Plan = TypeVar("_Plan")


@dataclass(frozen=True, slots=True)
class Target:
    """One claim of the project, and whether this run confirms it."""

    claim: str
    wanted: str
    measured: float
    met: bool

    def row(self) -> Row:
        """Return a row of the table of targets."""
        return {"claim": self.claim, "target": self.wanted, "measured": self.measured, "met": self.met}


@dataclass(frozen=True, slots=True)
class Section:
    """What one part of the benchmark found: tables by title, and its targets."""

    tables: dict[str, list[Row]] = field(default_factory=dict)
    targets: list[Target] = field(default_factory=list)


def at_most(claim: str, measured: float, limit: float, *, unit: str = "") -> Target:
    """Make a target that is met by `limit` or less."""
    return Target(claim, f"<= {limit:,.4g}{unit}", measured, measured <= limit)


def at_least(claim: str, measured: float, limit: float) -> Target:
    """Make a target that is met by `limit` or more."""
    return Target(claim, f">= {limit:,.4g}", measured, measured >= limit)


def run_sections(
    name: str,
    what: str,
    sections: Mapping[str, Callable[[_Plan], Section]],
    *,
    full: _Plan,
    quick: _Plan,
    arguments: Sequence[str] | None = None,
) -> None:
    """Run from the command line. A full run writes `results/<name>.json`, a partial one `<name>-partial.json`."""
    parser = argparse.ArgumentParser(prog=f"benchmarks.{name}", description=what)
    parser.add_argument("--quick", action="store_true", help="small shapes and few repeats: a smoke test")
    parser.add_argument("--only", choices=sorted(sections), help="run one section")
    options = parser.parse_args(arguments)
    if kernels().name == "reference" and not options.quick:
        parser.error("the native kernels are not built: a full run would measure NumPy, for hours")
    plan = quick if options.quick else full
    started = time.monotonic()
    found = [sections[each](plan) for each in ([options.only] if options.only else sections)]
    tables: dict[str, Sequence[Row]] = {title: rows for one in found for title, rows in one.tables.items()}
    tables["targets"] = [target.row() for one in found for target in one.targets]
    for title, rows in tables.items():
        print_table(title, rows)
    is_partial = options.quick or options.only is not None
    path = write_results(
        f"{name}-partial" if is_partial else name,
        tables,
        facts={"kernels": kernels().name, "quick": options.quick, "run_seconds": round(time.monotonic() - started)},
    )
    say(f"results in {path.parent.name}/{path.name}")
