"""The result of a run: as text, as JSON, and as `report.html`, one file with plots as SVG that loads nothing else."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from statistics import mean, median
from typing import Any

from deltasync import Verification
from wordle.processes import Settings
from wordle.screen import Board, Score, recovery_text

TRAINER = "trainer"
"""The name of the trainer's process."""

Points = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT, _MARGIN = 640, 220, 48
_COLORS = ("#1f6feb", "#d1691b", "#2a8a4a", "#8957c9", "#b0344a", "#777777")
_SMOOTH = 9
"""The number of steps that the smoothed reward is the mean of: a single batch of games is noisy."""
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 44em; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse } td { padding: .15em 1em .15em 0; vertical-align: top }
svg { width: 100%; height: auto } svg text { font: 11px system-ui, sans-serif; fill: #555 }
code { font-size: .9em; word-break: break-all }
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run that was completed."""

    settings: Settings
    board: Board
    verification: Verification
    seconds: float


def facts(outcome: Outcome) -> list[tuple[str, str]]:
    """Names and values, for people."""
    board, verification = outcome.board, outcome.verification
    versions = sum(row.version is not None for row in board.rows)
    return [
        ("before", f"{_score(board.before)} (after a supervised warm-up, before the first step of GRPO)"),
        ("after", f"{_score(board.after)} (after {board.done} steps)"),
        ("feed", outcome.settings.store),
        ("versions", f"{versions}, {_changed(board)} of {board.weights} weights changed (median)"),
        ("sent", _sent(board, versions)),
        ("times", _times(board)),
        ("lag", _lags(board)),
        ("killed", recovery_text(board)),
        ("digests", f"equal: {board.digests[TRAINER]} in {', '.join(board.digests)}"),
        (
            "verify --deep",
            f"{'clean' if verification.is_clean else 'DAMAGED'}, {len(verification.restorable)} versions decoded",
        ),
        ("time", f"{outcome.seconds:.0f} s"),
    ]


def to_json(outcome: Outcome) -> dict[str, Any]:
    """The same for programs, with every step."""
    board = outcome.board
    return {
        "settings": asdict(outcome.settings),
        "weights": board.weights,
        "before": None if board.before is None else asdict(board.before),
        "after": None if board.after is None else asdict(board.after),
        "sent_bytes": board.sent_bytes,
        "copies_bytes": board.copies_bytes,
        "full_bytes": board.full_bytes,
        "head": board.head,
        "digests": board.digests,
        "recovery": None if board.recovery is None else asdict(board.recovery),
        "verification": outcome.verification.to_json(),
        "seconds": outcome.seconds,
        "rows": [asdict(row) for row in board.rows],
    }


def _score(score: Score | None) -> str:
    return "unknown" if score is None else f"mean reward {score.reward:.3f}, {score.solved:.0%} of the games solved"


def _sent(board: Board, versions: int) -> str:
    deltas = [row.nbytes for row in board.rows if row.version and row.nbytes is not None]
    ratio = board.copies_bytes / max(1, board.sent_bytes)
    return (
        f"{_mb(sum(deltas))} in {len(deltas)} deltas and {_mb(board.sent_bytes - sum(deltas))} in anchors; "
        f"{versions} full copies are {_mb(board.copies_bytes)}, {ratio:.1f} times as much"
    )


def _changed(board: Board) -> str:
    shares = [row.changed / row.elements for row in board.rows if row.changed is not None and row.elements]
    return f"{median(shares):.1%}" if shares else "none"


def _times(board: Board) -> str:
    held = [1e3 * row.held_s for row in board.rows[1:] if row.held_s is not None]
    paused = [1e3 * pause_s for row in board.rows[1:] for pause_s in row.pauses_s.values()]
    steps = [row.step_s for row in board.rows if row.step_s is not None]
    return (
        f"median step {_median(steps):.2f} s, of which {_median(held):.2f} ms held up by publishing; "
        f"median pause of a replica {_median(paused):.2f} ms"
    )


def _lags(board: Board) -> str:
    ages = [row.age for row in board.rows if row.age is not None]
    return f"games were {mean(ages):.1f} versions old on average, {max(ages)} at most" if ages else "unknown"


def _median(values: list[float]) -> float:
    return median(values) if values else 0.0


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.2f} MB"


def report_html(outcome: Outcome) -> str:
    """The report as one HTML page."""
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
        ("How long publishing held up the trainer, and how long a replica paused", plot(times)),
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
