"""`report.html`: one file that needs nothing else, with plots drawn as SVG."""

from collections.abc import Mapping, Sequence
from html import escape

from wordle.run import Outcome
from wordle.screen import recovery_text
from wordle.summary import facts

Points = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT, _MARGIN = 640, 220, 48
_COLORS = ("#1f6feb", "#d1691b", "#2a8a4a", "#8957c9", "#b0344a", "#777777")
_SMOOTH = 9
"""Steps of which the reward's thick line is the mean: a single batch of games is noisy."""
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 44em; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse } td { padding: .15em 1em .15em 0; vertical-align: top }
svg { width: 100%; height: auto } svg text { font: 11px system-ui, sans-serif; fill: #555 }
code { font-size: .9em; word-break: break-all }
"""


def report_html(outcome: Outcome) -> str:
    """The whole page."""
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>" for name, text in facts(outcome))
    plots = "".join(f"<h2>{escape(title)}</h2>{plot}" for title, plot in _plots(outcome))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>deltasync demo</title>'
        f"<style>{_STYLE}</style></head><body><h1>A run of the deltasync demo</h1>"
        "<p>A small policy learned Wordle by GRPO. The trainer and the replicas that played were processes of their "
        "own; weights went through the store only, as the bits that each step changed.</p>"
        f"<table>{rows}</table>{plots}<p>{escape(recovery_text(outcome.board))}.</p></body></html>\n"
    )


def _plots(outcome: Outcome) -> list[tuple[str, str]]:
    board = outcome.board
    rewards = [(row.step, row.reward) for row in board.rows if row.reward is not None]
    deltas = [row for row in board.rows if row.version and row.nbytes is not None]
    lags = {
        f"lag of {name}": [(row.step, float(lag)) for row in board.rows if (lag := row.lags.get(name)) is not None]
        for name in board.replicas
    }
    ages = {"age of the games": [(row.step, float(row.age)) for row in board.rows if row.age is not None]}
    times = {
        "held, ms": [(row.step, 1e3 * row.held_s) for row in deltas if row.held_s is not None],
        "pause, ms": [(row.step, 1e3 * max(row.pauses_s.values())) for row in deltas if row.pauses_s],
    }
    sent = {"sent, kB": [(row.step, (row.nbytes or 0) / 1e3) for row in deltas]}
    changed = {"changed, %": [(row.step, 100 * (row.changed or 0) / (row.elements or 1)) for row in deltas]}
    return [
        ("Mean reward of the games of each step", plot({"each step": rewards, "mean": smooth(rewards)})),
        (f"Bytes of each version; a full copy has {board.full_bytes / 1e3:.0f} kB", plot(sent)),
        ("Elements that changed", plot(changed)),
        ("Versions behind", plot(lags | ages)),
        ("What the trainer was held up, and what a replica paused", plot(times)),
    ]


def smooth(points: Points) -> list[tuple[float, float]]:
    """A running mean."""
    half = _SMOOTH // 2
    near = [[y for _, y in points[max(0, i - half) : i + half + 1]] for i in range(len(points))]
    return [(x, sum(ys) / len(ys)) for (x, _), ys in zip(points, near, strict=True)]


def plot(series: Mapping[str, Points]) -> str:
    """Lines over a common x axis, as an SVG element."""
    every = [point for points in series.values() for point in points]
    if not every:
        return "<p>Nothing was measured.</p>"
    left, right = min(x for x, _ in every), max(x for x, _ in every)
    low, high = min(0.0, *(y for _, y in every)), max(y for _, y in every)
    across, up = (right - left) or 1.0, (high - low) or 1.0

    def place(x: float, y: float) -> str:
        at_x = _MARGIN + (x - left) / across * (_WIDTH - 2 * _MARGIN)
        at_y = _HEIGHT - _MARGIN + (low - y) / up * (_HEIGHT - 2 * _MARGIN)
        return f"{at_x:.1f},{at_y:.1f}"

    parts = []
    for tick in range(5):
        value = low + up * tick / 4
        begin, end = place(left, value).split(","), place(right, value).split(",")
        parts.append(f'<line x1="{begin[0]}" y1="{begin[1]}" x2="{end[0]}" y2="{end[1]}" stroke="#ddd"/>')
        parts.append(f'<text x="{_MARGIN - 6}" y="{begin[1]}" text-anchor="end" dy="4">{value:.3g}</text>')
        at_x = left + across * tick / 4
        x, _ = place(at_x, low).split(",")
        parts.append(f'<text x="{x}" y="{_HEIGHT - _MARGIN + 18}" text-anchor="middle">{at_x:.0f}</text>')
    for i, (name, points) in enumerate(series.items()):
        color = _COLORS[i % len(_COLORS)]
        line = " ".join(place(x, y) for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        parts.append(f'<text x="{_MARGIN + 150 * i}" y="20" style="fill:{color}">{escape(name)}</text>')
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(parts)}</svg>'
