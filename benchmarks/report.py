"""Results as a table on the terminal and as JSON in `benchmarks/results`, with the facts of the machine."""

import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("deltasync", "numpy", "torch", "transformers", "zstandard", "ml_dtypes", "safetensors")
FILE_WIDTH = 180  # of a table that goes to a file
SIMD = ("avx2", "bmi2", "avx512f", "avx512bw", "avx512vbmi2", "asimd", "sve")

Cell = str | int | float | bool | None
Row = Mapping[str, Cell]

_STARTED = time.monotonic()


def say(text: str) -> None:
    """Report progress on stderr, with the seconds since the start."""
    print(f"[{time.monotonic() - _STARTED:5.0f} s] {text}", file=sys.stderr, flush=True)


def print_table(title: str, rows: Sequence[Row]) -> None:
    """Print rows; the columns are those of the first row."""
    names = list(rows[0] if rows else ())
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in names:
        is_text = all(isinstance(row.get(name), str | bool) for row in rows)
        table.add_column(name, justify="left" if is_text else "right", overflow="fold", no_wrap=name == names[0])
    for row in rows:
        table.add_row(*(_text(row.get(name)) for name in names))
    console = Console()
    if not console.is_terminal:
        console = Console(width=FILE_WIDTH)
    console.print(table)


def write_results(name: str, tables: Mapping[str, Sequence[Row]], *, facts: Mapping[str, Cell] | None = None) -> Path:
    """Write tables to `results/<name>.json`, with the facts of the machine and those given; return the file."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    content = {
        "machine": {**machine_facts(), **(facts or {})},
        "versions": package_versions(),
        "tables": {title: [_rounded(row) for row in rows] for title, rows in tables.items()},
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def machine_facts() -> dict[str, Cell]:
    """Describe the machine, without anything that identifies it."""
    model, flags = platform.machine(), set[str]()
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            model = value.strip()
        elif key.strip() in ("flags", "Features"):
            flags.update(value.split())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "simd": " ".join(flag for flag in SIMD if flag in flags),
        "memory_gib": round(memory / 2**30, 1),
        "system": platform.system(),
        "python": platform.python_version(),
    }


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that the numbers depend on, as far as they are installed."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _rounded(row: Row) -> dict[str, Cell]:
    """Cut floats to digits that mean something."""
    return {name: float(f"{cell:.6g}") if isinstance(cell, float) else cell for name, cell in row.items()}


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return f"{cell:,}"
    if isinstance(cell, str):
        return cell
    size = abs(cell)
    return f"{cell:,.4f}" if size < 0.1 else f"{cell:,.3f}" if size < 10 else f"{cell:,.2f}"
