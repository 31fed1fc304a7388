"""Line charts as SVG elements. Colors and sizes of text are set by `STYLE`, for light and dark pages and for phones."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby

Points = Sequence[tuple[float, float | None]]
"""Points of a line. It has a gap where y is None."""

_WIDTH, _HEIGHT = 640, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 30, 46
_COLORS = 4

STYLE = """
.chart { width: 100%; height: auto; display: block }
.chart text { font: 12px system-ui, sans-serif; fill: var(--muted) }
.chart .grid { stroke: var(--grid) } .chart .mark { stroke: var(--alarm); stroke-dasharray: 4 3 }
.chart .marked { fill: var(--alarm) } .chart .band { fill: var(--alarm); opacity: .12 }
.chart polyline { fill: none; stroke-width: 2; stroke-linejoin: round }
.c0 { stroke: var(--c0) } .c1 { stroke: var(--c1) } .c2 { stroke: var(--c2) } .c3 { stroke: var(--c3) }
circle.c0 { fill: var(--c0) } circle.c1 { fill: var(--c1) } circle.c2 { fill: var(--c2) } circle.c3 { fill: var(--c3) }
.legend { display: flex; flex-wrap: wrap; gap: .1em 1.2em; margin: 0; font-size: .87em; color: var(--muted) }
.legend svg { width: 1.6em; height: .7em; margin-right: .4em } .legend line { stroke-width: 3 }
@media (max-width: 36em) {
  .chart text { font-size: 19px } .chart polyline { stroke-width: 3 } .chart .minor { display: none }
}
"""


def ticks(low: float, high: float, *, about: int = 5) -> list[float]:
    """Round numbers that cover a range: multiples of 1, 2 or 5 times a power of ten."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / about))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * about >= span * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, max(last, first + 1) + 1)]


def chart(
    lines: Mapping[str, Points],
    *,
    x_title: str,
    y_title: str,
    y_to: float = 0.0,
    marks: Mapping[float, str] | None = None,
    band: tuple[float, float] | None = None,
) -> str:
    """Lines over a common x axis, with a legend if there are several.

    The y axis reaches `y_to` at least. `marks` are vertical lines with a label, `band` is a range of x that is shaded.
    """
    every = [(x, y) for points in lines.values() for x, y in points if y is not None]
    if not every:
        return "<p>Nothing was measured.</p>"
    right = max(x for x, _ in every)
    xs = ticks(min(x for x, _ in every), right, about=8)
    ys = ticks(min(0.0, *(y for _, y in every)), max(y_to, *(y for _, y in every)))
    left = xs[0]
    right = max(right, left + 1)

    def at_x(x: float) -> float:
        return _LEFT + (x - left) / (right - left) * (_WIDTH - _LEFT - _RIGHT)

    def at_y(y: float) -> float:
        return _HEIGHT - _BOTTOM - (y - ys[0]) / (ys[-1] - ys[0]) * (_HEIGHT - _TOP - _BOTTOM)

    bottom = _HEIGHT - _BOTTOM
    parts = []
    if band is not None:
        x, width = at_x(band[0]), at_x(band[1]) - at_x(band[0])
        parts.append(f'<rect class="band" x="{x:.1f}" y="{_TOP}" width="{width:.1f}" height="{bottom - _TOP}"/>')
    for y in ys:
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at_y(y):.1f}" y2="{at_y(y):.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{at_y(y) + 4:.1f}" text-anchor="end">{y:,.10g}</text>')
    for i, x in enumerate(tick for tick in xs if tick <= right):
        minor = ' class="minor"' if i % 2 else ""
        parts.append(f'<text{minor} x="{at_x(x):.1f}" y="{bottom + 18}" text-anchor="middle">{x:,.10g}</text>')
    parts.append(
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(x_title)}</text>'
    )
    parts.append(f'<text x="4" y="16">{escape(y_title)}</text>')
    for x, label in (marks or {}).items():
        parts.append(f'<line class="mark" x1="{at_x(x):.1f}" x2="{at_x(x):.1f}" y1="{_TOP}" y2="{bottom}"/>')
        anchor = "end" if x > (left + right) / 2 else "start"
        offset = -5 if anchor == "end" else 5
        place = f'x="{at_x(x) + offset:.1f}" y="{_TOP - 6}" text-anchor="{anchor}"'
        parts.append(f'<text class="marked" {place}>{escape(label)}</text>')
    for i, points in enumerate(lines.values()):
        parts += [
            _run(run, f"c{i % _COLORS}")
            for run in _runs([(at_x(x), None if y is None else at_y(y)) for x, y in points])
        ]
    shape = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(y_title)}"'
    legend = _legend(list(lines)) if len(lines) > 1 else ""
    return f'{legend}<svg class="chart" {shape}>{"".join(parts)}</svg>'


def _runs(points: Points) -> list[list[tuple[float, float]]]:
    """The parts of a line between its gaps."""
    return [
        [(x, y) for x, y in group if y is not None]
        for is_there, group in groupby(points, key=lambda point: point[1] is not None)
        if is_there
    ]


def _run(points: Sequence[tuple[float, float]], color: str) -> str:
    if len(points) == 1:
        return f'<circle class="{color}" cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="3"/>'
    return f'<polyline class="{color}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'


def _legend(names: Sequence[str]) -> str:
    items = []
    for i, name in enumerate(names):
        sample = f'<svg viewBox="0 0 16 7"><line class="c{i % _COLORS}" x1="0" x2="16" y1="4" y2="4"/></svg>'
        items.append(f"<span>{sample}{escape(name)}</span>")
    return f'<p class="legend">{"".join(items)}</p>'


def smooth(points: Sequence[tuple[float, float]], *, over: int) -> list[tuple[float, float]]:
    """A running mean over an odd number of points."""
    half = over // 2
    near = [[y for _, y in points[max(0, i - half) : i + half + 1]] for i in range(len(points))]
    return [(x, sum(ys) / len(ys)) for (x, _), ys in zip(points, near, strict=True)]
