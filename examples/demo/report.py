"""The result of a run: as text, as JSON, and as `report.html`, one file with charts as SVG that loads nothing else."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from itertools import accumulate
from statistics import mean, median
from typing import Any

from deltasync import Verification
from demo.board import Board, Row, Score
from demo.charts import STYLE as CHART_STYLE
from demo.charts import chart, smooth
from demo.projection import LINK_BITS_PER_S, Projection, bytes_text, project, seconds_text
from demo.screen import recovery_text, total_text
from demo.settings import REAL, TRAINER, Settings

_SMOOTH = 9
"""The number of steps that the smoothed reward is the mean of: a single batch of games is noisy."""
_STYLE = """
:root { color-scheme: light dark; --text: #1f2328; --muted: #59636e; --page: #fff; --grid: #d8dee4; --alarm: #cf222e;
  --c0: #0969da; --c1: #bc4c00; --c2: #1a7f37; --c3: #8250df; --green: #2da44e; --yellow: #d4a72c; --grey: #8c959f }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --muted: #9198a1; --page: #0d1117; --grid: #30363d;
  --alarm: #ff7b72; --c0: #58a6ff; --c1: #f0883e; --c2: #3fb950; --c3: #bc8cff; --grey: #59636e } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem;
  color: var(--text); background: var(--page) }
h1 { font-size: 1.6em } h2 { margin-top: 2.2em; border-top: 1px solid var(--grid); padding-top: .8em }
h3 { margin: 1.8em 0 .2em; font-size: 1em }
.lead { font-size: 1.25em } .note { color: var(--muted); font-size: .9em }
table { border-collapse: collapse; width: 100% }
td, th { padding: .25em 1em .25em 0; vertical-align: top; text-align: left }
th { color: var(--muted); font-weight: normal } .facts td:first-child { color: var(--muted); white-space: nowrap }
td { overflow-wrap: anywhere; white-space: pre-line }
.games { display: flex; gap: 3em; flex-wrap: wrap } .games p { margin: .3em 0 }
.turn { display: flex; gap: 3px; margin-bottom: 3px }
.turn span { width: 2em; line-height: 2em; text-align: center; font-weight: bold; color: #fff; background: var(--grey) }
.turn .g { background: var(--green) } .turn .y { background: var(--yellow); color: #1f2328 }
.turn .x { background: var(--alarm) }
@media (max-width: 36em) {
  .facts td { display: block; padding: 0 } .facts td:first-child { margin-top: .5em } .games { gap: 1em }
  .turn span { width: 1.7em; line-height: 1.7em }
}
"""


@dataclass(frozen=True, slots=True)
class ActOutcome:
    """An act that was completed."""

    board: Board
    verification: Verification


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run that was completed."""

    settings: Settings
    acts: tuple[ActOutcome, ...]
    seconds: float

    @property
    def projection(self) -> list[Projection]:
        """From what SmolLM2's steps changed; none if that act was left out."""
        for act in self.acts:
            if act.board.act.name == REAL and act.board.density is not None and act.board.bits is not None:
                return project(density=act.board.density, bits=act.board.bits)
        return []


def facts(act: ActOutcome) -> list[tuple[str, str]]:
    """Names and values of one act, for people."""
    board, verification = act.board, act.verification
    found = [("feed", board.act.feed)]
    if board.before is not None:
        found.append(("before", f"{_score(board.before)}, after a warm-up"))
        found.append(("after", f"{_score(board.after)}, after {board.done} steps"))
    found += [("changed", _changed(board)), ("sent", total_text(board)), ("times", _times(board))]
    if board.answers:
        found.append(("replica", f"generated {board.answers} answers meanwhile"))
    ages = [row.age for row in board.rows if row.age is not None]
    if ages:
        found.append(("age", f"games were {mean(ages):.1f} versions old on average, {max(ages)} at most"))
    if board.act.kills:
        found.append(("killed", recovery_text(board)))
    clean = "clean" if verification.is_clean else "DAMAGED"
    return [
        *found,
        ("digests", f"equal: {board.digests[TRAINER]}\nin {', '.join(board.digests)}"),
        ("verify --deep", f"{clean}, {len(verification.restorable)} versions decoded"),
    ]


def facts_text(act: ActOutcome) -> str:
    """The facts of one act as lines."""
    return "\n".join(
        f"{name if i == 0 else '':<14} {line}" for name, text in facts(act) for i, line in enumerate(text.splitlines())
    )


def projection_lines(outcome: Outcome) -> list[str]:
    """The projection as lines; none if there is nothing to project from."""
    if not outcome.projection:
        return []
    board = outcome.acts[0].board
    lines = [
        f"A projection to larger models, at {LINK_BITS_PER_S / 1e9:g} Gbit/s",
        f"(from the {board.density or 0:.2%} and the {board.bits or 0:.1f} bits of SmolLM2's steps):",
        f"{'':<6} {'full copy':>10} {'':>12} {'one step':>12}",
    ]
    lines += [
        f"{each.model:>6} {bytes_text(each.copy_bytes):>10} {seconds_text(each.copy_s):>12} "
        f"{bytes_text(each.step_bytes):>12} {seconds_text(each.step_s):>8}"
        for each in outcome.projection
    ]
    return [*lines, "It assumes that they change as this one did, and counts the transfer alone."]


def to_json(outcome: Outcome) -> dict[str, Any]:
    """The same for programs, with every step."""
    return {
        "settings": asdict(outcome.settings),
        "seconds": outcome.seconds,
        "acts": {act.board.act.name: _act_json(act) for act in outcome.acts},
        "projection": [asdict(each) for each in outcome.projection],
    }


def _act_json(act: ActOutcome) -> dict[str, Any]:
    board = act.board
    return {
        "feed": board.act.feed,
        "weights": board.weights,
        "before": None if board.before is None else asdict(board.before),
        "after": None if board.after is None else asdict(board.after),
        "delta_bytes": board.delta_bytes,
        "sent_bytes": board.sent_bytes,
        "copies_bytes": board.copies_bytes,
        "full_bytes": board.full_bytes,
        "density": board.density,
        "bits": board.bits,
        "head": board.head,
        "digests": board.digests,
        "recovery": None if board.recovery is None else asdict(board.recovery),
        "game": None if board.game is None else asdict(board.game),
        "verification": act.verification.to_json(),
        "rows": [asdict(row) for row in board.rows],
    }


def _score(score: Score | None) -> str:
    return "unknown" if score is None else f"mean reward {score.reward:.3f}, {score.solved:.0%} of the games solved"


def _changed(board: Board) -> str:
    if board.density is None or board.bits is None:
        return "nothing"
    return f"{board.density:.2%} of {board.weights:,} weights in a step, {board.bits:.1f} bits each (medians)"


def _times(board: Board) -> str:
    held = [1e3 * row.held_s for row in board.deltas if row.held_s is not None]
    paused = [1e3 * pause_s for row in board.deltas for pause_s in row.pauses_s.values()]
    steps = [row.step_s for row in board.rows if row.step_s is not None]
    return (
        f"median step {_median(steps):.2f} s, held up by publishing for {_median(held):.1f} ms;\n"
        f"median pause of a replica {_median(paused):.1f} ms"
    )


def _median(values: Sequence[float]) -> float:
    return median(values) if values else 0.0


# --- the page ---------------------------------------------------------------------------------------------------------


def report_html(outcome: Outcome) -> str:
    """The report as one HTML page."""
    acts = "".join(
        f"<h2>{escape(act.board.act.title)}</h2>{_facts_html(act)}{_game_html(act.board)}{_charts(act.board)}"
        for act in outcome.acts
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>deltasync demo</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}{CHART_STYLE}</style></head><body><h1>A run of the deltasync demo</h1>{_lead(outcome)}"
        "<p>Trainers and replicas were processes of their own. Weights went through the store only, as the bits that "
        f"each step changed.</p>{acts}{_projection_html(outcome)}</body></html>\n"
    )


def _lead(outcome: Outcome) -> str:
    board = outcome.acts[0].board
    copies = board.full_bytes * len(board.deltas)
    if not board.delta_bytes:
        return ""
    return (
        f'<p class="lead">{len(board.deltas)} steps sent <b>{bytes_text(board.delta_bytes)}</b> instead of '
        f"<b>{bytes_text(copies)}</b>: {copies / board.delta_bytes:.0f} times less, and every bit arrived.</p>"
    )


def _facts_html(act: ActOutcome) -> str:
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>" for name, text in facts(act))
    return f'<table class="facts">{rows}</table>'


def _game_html(board: Board) -> str:
    game = board.game
    if game is None:
        return ""
    columns = "".join(
        f"<div><p>{title}</p>{''.join(_turn_html(guess, given) for guess, given in guesses)}</div>"
        for title, guesses in (("before", game.before), ("after", game.after))
    )
    chosen = "A game that was lost before and won after" if game.is_better else "The first game of the trial"
    return f'<h3>{chosen}; the answer is {escape(game.answer)}</h3><div class="games">{columns}</div>'


def _turn_html(guess: str, given: str) -> str:
    tiles = "".join(
        f'<span class="{escape(mark)}">{escape(letter.upper())}</span>'
        for letter, mark in zip(guess, given, strict=True)
    )
    return f'<div class="turn">{tiles}</div>'


def _charts(board: Board) -> str:
    rewards = [(float(row.step), row.reward) for row in board.rows if row.reward is not None]
    is_long = len(rewards) > 2 * _SMOOTH
    smoothed = {f"mean of {_SMOOTH} steps": smooth(rewards, over=_SMOOTH)} if is_long else {}
    deltas = board.deltas
    recovery = board.recovery
    marks = {} if recovery is None else {float(recovery.at_step): f"kill -9 {recovery.replica}"}
    dead = (
        None
        if recovery is None or recovery.back_at_step is None
        else (float(recovery.at_step), float(max(recovery.at_step, recovery.back_at_step)))
    )
    lags = {f"{name} behind": _lag_points(board, name) for name in board.act.replicas}
    ages = [(float(row.step), float(row.age)) for row in board.rows if row.age is not None]
    found = [
        ("Sent since the beginning", chart(_cumulative(board), x_title="step", y_title="MB, all versions so far")),
        (
            f"Size of each version; a full copy has {bytes_text(board.full_bytes)}",
            chart({"sent": [(row.step, (row.nbytes or 0) / 1e3) for row in deltas]}, x_title="step", y_title="kB"),
        ),
        (
            "Weights that changed",
            chart(
                {"changed": [(row.step, _percent(row)) for row in deltas]}, x_title="step", y_title="% of all weights"
            ),
        ),
        (
            "Reward",
            chart({"each step": rewards} | smoothed, x_title="step", y_title="mean reward"),
        ),
        (
            "Versions behind when a step was done",
            chart(
                lags | ({"age of the games": ages} if ages else {}),
                x_title="step",
                y_title="versions",
                y_to=4,
                marks=marks,
                band=dead,
            ),
        ),
        (
            "How long publishing held up the trainer, and how long a replica paused",
            chart(
                {
                    "trainer held up": [(row.step, None if row.held_s is None else 1e3 * row.held_s) for row in deltas],
                    "longest pause": [
                        (row.step, 1e3 * max(row.pauses_s.values()) if row.pauses_s else None) for row in deltas
                    ],
                },
                x_title="step",
                y_title="ms",
            ),
        ),
    ]
    return "".join(f"<h3>{escape(title)}</h3>{svg}" for title, svg in found)


def _cumulative(board: Board) -> dict[str, list[tuple[float, float]]]:
    """MB of all versions up to each step, as they were sent and as full copies. Later anchors are left out."""
    rows = [row for row in board.rows if row.version is not None]
    sent = accumulate((row.nbytes or 0) / 1e6 for row in rows)
    return {
        "as deltas, with the first version": [(float(row.step), total) for row, total in zip(rows, sent, strict=True)],
        "as full copies": [(float(row.step), (i + 1) * board.full_bytes / 1e6) for i, row in enumerate(rows)],
    }


def _lag_points(board: Board, name: str) -> list[tuple[float, float | None]]:
    """Gaps are where a replica was dead."""
    lags = ((row.step, row.lags.get(name)) for row in board.rows if row.lags)
    return [(float(step), None if lag is None else float(lag)) for step, lag in lags]


def _percent(row: Row) -> float:
    return 100 * (row.changed or 0) / (row.elements or 1)


def _projection_html(outcome: Outcome) -> str:
    if not outcome.projection:
        return ""
    board = outcome.acts[0].board
    rows = "".join(
        f"<tr><td>{each.model}</td><td>{bytes_text(each.copy_bytes)}, {seconds_text(each.copy_s)}</td>"
        f"<td>{bytes_text(each.step_bytes)}, {seconds_text(each.step_s)}</td></tr>"
        for each in outcome.projection
    )
    return (
        f"<h2>Projection to larger models, at {LINK_BITS_PER_S / 1e9:g} Gbit/s</h2>"
        f"<table><tr><th>weights</th><th>a full copy</th><th>one step</th></tr>{rows}</table>"
        f'<p class="note">This is a projection, not a measurement. It takes the {board.density or 0:.2%} and '
        f"{board.bits or 0:.1f} bits of the first act, assumes that larger models change as this one did, and counts "
        "the transfer alone.</p>"
    )
