"""What a run came to, in words and as JSON."""

from dataclasses import asdict
from statistics import mean, median
from typing import Any

from wordle.board import Board, Score
from wordle.run import TRAINER, Outcome
from wordle.screen import recovery_text


def facts(outcome: Outcome) -> list[tuple[str, str]]:
    """Names and values, for people."""
    board, found = outcome.board, outcome.verification
    versions = sum(row.version is not None for row in board.rows)
    return [
        ("before", f"{_score(board.before)} (after a supervised warm-up, before the first step of GRPO)"),
        ("after", f"{_score(board.after)} (after {board.done} steps)"),
        ("feed", outcome.settings.store),
        ("versions", f"{versions}, {_changed(board)} of {board.weights} weights changed in the median"),
        ("sent", _sent(board, versions)),
        ("times", _times(board)),
        ("lag", _lags(board)),
        ("killed", recovery_text(board)),
        ("digests", f"equal: {board.digests[TRAINER]} in {', '.join(board.digests)}"),
        ("verify --deep", f"{'clean' if found.is_clean else 'DAMAGED'}, {len(found.restorable)} versions decoded"),
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
    return f"games were {mean(ages):.1f} versions old in the mean, {max(ages)} at most" if ages else "unknown"


def _median(values: list[float]) -> float:
    return median(values) if values else 0.0


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.2f} MB"
