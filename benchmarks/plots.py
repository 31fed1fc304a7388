"""Draw the plots of docs/benchmarks.md from the results, and fill in its tables.

    python -m benchmarks.plots

The same results give the same bytes: the files carry no date, and their ids depend on a fixed salt.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.page import PAGE, VIEWS, Results, View, read_results, rendered
from benchmarks.report import Row, say

FOLDER = PAGE.parent / "img"
STYLE = {
    "svg.hashsalt": "deltasync",
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "x",
    "grid.color": "#e3e3e3",
    "legend.frameon": False,
    "figure.facecolor": "white",
}
OURS, MUTED = "#1668a8", ("#c9c9c9", "#a3a3a3", "#7d7d7d", "#585858")
WIDTH_IN = 7.5


def _numbers(rows: Sequence[Row], key: str) -> list[float]:
    return [float(row[key] or 0.0) for row in rows]


def _labels(rows: Sequence[Row], key: str) -> list[str]:
    return [str(row[key]) for row in rows]


def _bars(
    axes: Axes, labels: Sequence[str], series: Mapping[str, Sequence[float]], colours: Sequence[str], *, unit: str
) -> None:
    """Horizontal bars in groups, the first group on top, each with its value."""
    height = 0.8 / len(series)
    for number, ((name, values), colour) in enumerate(zip(series.items(), colours, strict=True)):
        at = np.arange(len(labels)) + (number - (len(series) - 1) / 2) * height
        drawn = axes.barh(at, values, height * 0.92, color=colour, label=name)
        axes.bar_label(drawn, labels=[f"{value:.3g}" for value in values], padding=2, fontsize=7.5)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.margins(x=0.12)
    if len(series) > 1:
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=2 if len(series) == 4 else len(series),
            fontsize=8,
            borderpad=0,
        )


def _figure(height_in: float, *, columns: int = 1) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def _sizes(results: Results) -> Figure:
    """What one step costs, in the layouts that people use."""
    rows = VIEWS["sizes"].table(results)
    rows = [row for row in rows if "step 2" not in str(row["data"]) and "bf16" in str(row["data"])]
    ours = np.array(_numbers(rows, "exp/1 bits"))
    figure, (axes,) = _figure(5.0)
    series = {
        "entropy, given the old exponents": _numbers(rows, "entropy bits"),
        "exp/1": list(ours),
        "gaps + bf16, zstd-1": list(ours * _numbers(rows, "gaps + zstd / exp/1")),
        "u16 gaps + bf16": list(ours * _numbers(rows, "u16 gaps / exp/1")),
    }
    labels = [f"{row['data']}\n{float(row['changed %'] or 0):.2g} % changed" for row in rows]
    _bars(axes, labels, series, (MUTED[0], OURS, MUTED[1], MUTED[2]), unit="bits for each element that changed")
    return figure


def _speed(results: Results) -> Figure:
    """The codec on one thread and on two."""
    rows = VIEWS["speed"].table(results)
    figure, (axes,) = _figure(4.2)
    series = {name: _numbers(rows, name) for name in ("1 thread", "2 threads")}
    _bars(axes, _labels(rows, "stage"), series, (OURS, MUTED[1]), unit="GB of model per second")
    return figure


def _kernel_sets(results: Results) -> Figure:
    """Each kernel on every instruction set."""
    rows = VIEWS["kernel-sets"].table(results)
    figure, (axes,) = _figure(3.8)
    series = {name: _numbers(rows, name) for name in ("avx2", "portable")}
    _bars(axes, _labels(rows, "kernel"), series, (OURS, MUTED[1]), unit="GB of bf16 model per second, 1 thread")
    return figure


def _peers(results: Results) -> Figure:
    """The layouts of other systems on the same change."""
    rows = VIEWS["peers"].table(results)
    figure, (axes,) = _figure(3.6)
    densities = [key for key in rows[0] if key.endswith("changed")]
    series = {density: _numbers(rows, density) for density in densities}
    labels = [label.replace(": ", ":\n", 1) for label in _labels(rows, "bits per changed element")]
    _bars(axes, labels, series, (MUTED[0], OURS, MUTED[2]), unit="bits for each element that changed")
    return figure


def _ways(view: View, key: str, unit: str, *, ours: Sequence[str]) -> Callable[[Results], Figure]:
    """One bar for each way to do the same."""

    def draw(results: Results) -> Figure:
        rows = [row for row in view.table(results) if row[key] is not None]
        figure, (axes,) = _figure(0.7 + 0.35 * len(rows))
        _bars(axes, _labels(rows, "way"), {"": _numbers(rows, key)}, (MUTED[1],), unit=unit)
        for bar, row in zip(axes.patches, rows, strict=True):
            bar.set_color(OURS if row["way"] in ours else MUTED[1])
        return figure

    return draw


def _store(results: Results) -> Figure:
    """An anchor through a store, beside a plain file."""
    rows = VIEWS["store-anchor"].table(results)
    figure, (axes,) = _figure(2.4)
    series = {"deltasync": _numbers(rows, "seconds"), "a plain file": _numbers(rows, "plain file, seconds")}
    labels = [f"{row['store']}, {row['verb']}" for row in rows]
    _bars(axes, labels, series, (OURS, MUTED[1]), unit="seconds for an anchor of 1.19 GB of weights")
    return figure


def _late(results: Results) -> Figure:
    """What late replicas fetch, and why skips are smaller than their deltas."""
    rows = VIEWS["late"].table(results)
    figure, (left, right) = _figure(2.8, columns=2)
    distances = sorted({int(row["versions late"] or 0) for row in rows})
    series = {
        by: [
            float(row["payload MB"] or 0)
            for d in distances
            for row in rows
            if row["versions late"] == d and row["by"] == by
        ]
        for by in ("deltas", "skips")
    }
    series["an anchor"] = [float(rows[0]["an anchor MB"] or 0)] * len(distances)
    _bars(left, [f"{d} versions late" for d in distances], series, (MUTED[1], OURS, MUTED[3]), unit="MB of payloads")
    differences = VIEWS["late-differences"].table(results)
    at = _numbers(differences, "versions")
    right.plot(at, _numbers(differences, "bytes / those of deltas"), "o-", color=OURS, label="bytes")
    right.plot(at, _numbers(differences, "changes / those of deltas"), "s--", color=MUTED[2], label="changes")
    right.set_xscale("log", base=2)
    right.set_xticks(at, [f"{int(one)}" for one in at])
    right.set_ylim(0, 1.05)
    right.grid(axis="y")
    right.set_xlabel("versions in one difference")
    right.set_ylabel("share of the deltas")
    right.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, fontsize=8, borderpad=0)
    return figure


def _wan(results: Results) -> Figure:
    """From a step to live weights, over both links."""
    rows = VIEWS["wan"].table(results)
    ways = list(dict.fromkeys(str(row["way"]) for row in rows))
    links = list(dict.fromkeys(str(row["link"]) for row in rows))
    seconds = {(row["way"], row["link"]): float(row["step to live s"] or 0) for row in rows}
    figure, (axes,) = _figure(5.0)
    series = {link: [seconds[way, link] for way in ways] for link in links}
    _bars(axes, ways, series, (OURS, MUTED[1]), unit="seconds from a step to live weights, 0.6B weights, 1 % changed")
    axes.set_xscale("log")
    return figure


_HELD = _ways(VIEWS["held"], "held s, best", "seconds for which the trainer is held, best round", ours=("deltasync",))
_SCATTER = _ways(VIEWS["scatter"], "times the scatter", "times the scatter", ours=("prepare", "scatter"))
_PLOTS: dict[str, tuple[str, Callable[[Results], Figure]]] = {
    "bench-sizes": ("codec", _sizes),
    "bench-speed": ("codec", _speed),
    "bench-kernel-sets": ("kernel_sets", _kernel_sets),
    "bench-peers": ("peers", _peers),
    "bench-held": ("publish", _HELD),
    "bench-scatter": ("replica", _SCATTER),
    "bench-store": ("store", _store),
    "bench-late": ("late", _late),
    "bench-wan": ("wan", _wan),
}
"""By name: the benchmark, and what draws its results."""


def plots(results: Results) -> dict[str, bytes]:
    """Every plot that there are results for, as an SVG file."""
    return {name: drawn(draw, results) for name, (benchmark, draw) in _PLOTS.items() if benchmark in results}


def drawn(draw: Callable[[Results], Figure], results: Results) -> bytes:
    """One plot as an SVG file."""
    with matplotlib.rc_context(STYLE):
        figure = draw(results)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    # Without the white space at the ends of lines, which editors and git complain about.
    return b"\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + b"\n"


def main(folder: Path = FOLDER, page: Path = PAGE) -> None:
    """Run from the command line."""
    results = read_results()
    for name, plot in plots(results).items():
        (folder / f"{name}.svg").write_bytes(plot)
        say(f"drew {name}.svg")
    page.write_text(rendered(page.read_text(), results))
    say(f"wrote the tables of {page.name}")


if __name__ == "__main__":
    main()
