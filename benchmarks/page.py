"""The tables of docs/benchmarks.md, made from the results: no figure of the page is typed by hand.

    python -m benchmarks.plots

A comment in the page names a table, `<!-- table: held -->`, and everything up to `<!-- end -->` is replaced by it. What
each name stands for is in `VIEWS`.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, Cell, Row

PAGE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
_BLOCK = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

Results = Mapping[str, Mapping[str, Any]]
"""What the files hold, by the name of the benchmark."""


@dataclass(frozen=True, slots=True)
class View:
    """Some columns of a table: its benchmark, how its title starts, and the key of each column by its heading."""

    benchmark: str
    title: str
    columns: Mapping[str, str] = field(default_factory=dict)
    """All columns if empty."""

    def rows(self, results: Results) -> list[Row]:
        """The rows of the table, with these columns alone."""
        columns = self.columns or {key: key for key in self.table(results)[0]}
        return [{heading: row.get(key) for heading, key in columns.items()} for row in self.table(results)]

    def table(self, results: Results) -> Sequence[Row]:
        """The rows as they were measured. KeyError if the results have no such table, or no single one."""
        tables = results[self.benchmark]["tables"]
        found = [rows for title, rows in tables.items() if title.startswith(self.title)]
        if len(found) != 1:
            raise KeyError(f"{self.benchmark}.json has {len(found)} tables whose title starts with {self.title!r}")
        rows: Sequence[Row] = found[0]
        return rows


_HELD = {
    "": "way",
    "held, best s": "held s, best",
    "median s": "held s, median",
    "passes of reading, best": "/ one pass of reading, best",
    "median": "/ one pass of reading, median",
    "until it is in the store s": "until it is in the store s",
    "MB": "MB",
}
_STORE = {
    "": "store",
    "verb": "verb",
    "MB": "MB",
    "seconds": "seconds",
    "GB/s": "GB/s",
    "/ plain file": "/ plain file",
    "/ bare client": "/ obstore alone",
}
_LINK = {
    "": "way",
    "link": "link",
    "step to live s": "step to live s",
    "/ what its bytes need": "of what the bytes need",
    "MB on the link": "MB on the link",
    "trainer held s": "trainer held s",
    "pause ms": "pause ms",
    "steps": "steps",
    "exact": "exact",
}
VIEWS: dict[str, View] = {
    "sizes": View(
        "codec",
        "sizes: exp/1 compared",
        {
            "one step": "data",
            "million weights": "M",
            "changed %": "changed %",
            "`exp/1`, bits per change": "exp/1 bits",
            "entropy": "entropy bits",
            "`exp/1` / entropy": "exp/1 / entropy",
            "gaps + zstd-1 / `exp/1`": "gaps + zstd / exp/1",
            "u16 gaps / `exp/1`": "u16 gaps / exp/1",
            "`exp/1` / all weights": "exp/1 / dense",
        },
    ),
    "speed": View(
        "codec",
        "speed:",
        {
            "GB of model per second": "stage",
            "1 thread": "1 thread",
            "median": "median",
            "2 threads": "2 threads",
            "their median": "their median",
            "2 : 1": "2 : 1",
            "share of reading": "of ceiling, 1 thread",
        },
    ),
    "files": View("codec", "files: a pair"),
    "codec-memory": View("codec", "memory:"),
    "kernel-sets": View("kernel_sets", "instruction sets"),
    "peers": View("peers", "bits per changed element"),
    "held": View("publish", "held: bf16", _HELD),
    "held-fp32": View("publish", "held: fp32 master", _HELD),
    "publish-memory": View("publish", "memory:"),
    "real-steps": View("publish", "real steps"),
    "scatter": View("replica", "qwen3, into the model"),
    "experts": View("replica", "qwen3-moe, into the model"),
    "map": View("replica", "qwen3: memory of the map"),
    "experts-map": View("replica", "qwen3-moe: memory of the map"),
    "switches": View("replica", "switches"),
    "generation": View("replica", "generation"),
    "caches": View("replica", "4 streams"),
    "starts": View("replica", "starts of a server"),
    "trl": View("trl", "a step of TRL"),
    "store-payload": View("store", "payload", _STORE),
    "store-anchor": View("store", "anchor", _STORE),
    "requests": View("store", "requests"),
    "coldstart": View("coldstart", "cold start"),
    "overlap": View("overlap", "overlap"),
    "late": View("late", "a replica that advances"),
    "late-heads": View("late", "the same for every head"),
    "late-differences": View("late", "one difference"),
    "late-levels": View("late", "other levels"),
    "late-ways": View("late", "ways to version"),
    "growth": View("scale", "growth: exponents"),
    "model": View("scale", "model: from step"),
    "projection": View("scale", "projection, not"),
    "published": View("scale", "published by others"),
    "wan": View("wan", "over a link, Qwen3", _LINK),
    "wan-real": View("wan", "over a link, SmolLM2", {**_LINK, "replicas": "replicas"}),
    "wan-phases": View("wan", "phases of a step, Qwen3"),
}


def read_results(folder: Path = RESULTS) -> Results:
    """All results that are committed, by name."""
    files = sorted(path for path in folder.glob("*.json") if not path.stem.endswith("-partial"))
    return {path.stem: json.loads(path.read_text()) for path in files}


def rendered(page: str, results: Results) -> str:
    """The page with its tables as the results have them. KeyError for a table that is not known."""

    def table(match: re.Match[str]) -> str:
        name = match["name"]
        rows = _SUMMARIES[name](results) if name in _SUMMARIES else VIEWS[name].rows(results)
        return f"{match[1]}{markdown(rows)}{match[3]}"

    return _BLOCK.sub(table, page)


def markdown(rows: Sequence[Row]) -> str:
    """A table; the columns are those of the first row. Numbers are aligned to the right."""
    names = list(rows[0])
    is_number = {name: any(isinstance(row[name], int | float) for row in rows) for name in names}
    lines = [names, ["---:" if is_number[name] else "---" for name in names]]
    lines += [[_text(row[name]) for name in names] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _machines(results: Results) -> list[Row]:
    """Where each file of results comes from."""
    keys = {"cpu": "cpu", "cores": "cores", "instruction sets": "simd", "memory GiB": "memory_gib", "Python": "python"}
    return [
        {
            "results": f"[{name}](../benchmarks/results/{name}.json)",
            **{heading: result["machine"].get(key) for heading, key in keys.items()},
            "torch": result["versions"].get("torch"),
        }
        for name, result in results.items()
    ]


def _missed(results: Results) -> Iterable[Row]:
    for name, result in results.items():
        for row in result["tables"].get("targets", ()):
            if not row["met"]:
                yield {
                    "benchmark": name,
                    "claim": row["claim"],
                    "target": row["target"],
                    "measured": row["measured"],
                }


_SUMMARIES: dict[str, Callable[[Results], Sequence[Row]]] = {
    "machines": _machines,
    "missed": lambda results: list(_missed(results)),
}


def _text(cell: Cell) -> str:
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, str):
        return cell.replace("|", "\\|")
    if isinstance(cell, int) or abs(cell) >= 1000:
        return f"{cell:,.0f}"
    return f"{cell:.3g}"
