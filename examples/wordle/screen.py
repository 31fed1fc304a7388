"""What a run shows while it runs: a live table on a terminal, a line for each step elsewhere."""

import sys
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from wordle.board import Board, Row

_ROWS = 16
_REFRESHES = 4
"""In a second."""


class Screen(Protocol):
    """Shows a board whenever it has changed."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def show(self, board: Board) -> None: ...


class Silent:
    """Shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None

    def show(self, board: Board) -> None:
        """Nothing."""


class Lines(Silent):
    """A line for each step, once its version was published, and one for everything else that happens."""

    def __init__(self) -> None:
        self._shown = 0
        self._told = ""

    def show(self, board: Board) -> None:
        """What is new."""
        told = happening(board)
        if told != self._told and (board.before is not None or not self._told):
            print(told, flush=True)
            self._told = told
        while self._shown < len(board.rows) - 1:
            cells = zip(columns(board), row_cells(board, board.rows[self._shown]), strict=True)
            print(", ".join(f"{name} {cell}" for name, cell in cells), flush=True)
            self._shown += 1


class Terminal(Silent):
    """A table that is drawn anew."""

    def __init__(self) -> None:
        self._live = Live(console=Console(), refresh_per_second=_REFRESHES)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, board: Board) -> None:
        """The last steps, and what is going on."""
        table = Table(*columns(board))
        for column in table.columns:
            column.justify = "right"
        for row in board.rows[-_ROWS:]:
            table.add_row(*row_cells(board, row))
        self._live.update(Group(table, Text(happening(board))))


def best_screen() -> Screen:
    """For what stdout is."""
    return Terminal() if sys.stdout.isatty() else Lines()


def columns(board: Board) -> list[str]:
    """Names of the columns."""
    lags = [f"lag {name}" for name in board.replicas]
    return ["step", "reward", "version", "changed", "sent", "full / sent", "held", "pause", *lags]


def row_cells(board: Board, row: Row) -> list[str]:
    """One step; a dash for what is not known, or not yet."""
    changed = None if row.changed is None or not row.elements else f"{row.changed / row.elements:.1%}"
    return [
        str(row.step),
        _text(row.reward, "{:.3f}"),
        _text(row.version, "{}"),
        "all" if row.version == 0 else _text(changed, "{}"),
        _text(None if row.nbytes is None else row.nbytes / 1e3, "{:.1f} kB"),
        _text(None if not row.nbytes else board.full_bytes / row.nbytes, "{:.1f}"),
        _text(row.held_s, "{:.2f} ms", scale=1e3),
        _text(max(row.pauses_s.values(), default=None), "{:.2f} ms", scale=1e3),
        *(_text(row.lags.get(name), "{}") for name in board.replicas),
    ]


def happening(board: Board) -> str:
    """What is going on, in a line or two."""
    if board.before is None:
        done, steps = board.warmed
        return f"warming the policy up on games of a careless player, supervised: step {done} of {steps}"
    score = board.before
    told = f"{board.weights} weights; after the warm-up: reward {score.reward:.3f}, {score.solved:.0%} solved"
    return told + ("" if board.recovery is None else f"\n{recovery_text(board)}")


def recovery_text(board: Board) -> str:
    """How the killed replica fares."""
    found = board.recovery
    if found is None:
        return "no replica was killed"
    told = f"{found.replica} was killed (SIGKILL) at step {found.at_step} with version {found.had}, and started again: "
    if found.back is None:
        return told + "it is on its way"
    way = ", ".join(f"{found.edges.count(kind)} {kind}" for kind in sorted(set(found.edges)))
    mirror = "its mirror was current" if not found.edges else f"{way}, {found.nbytes / 1e3:.1f} kB"
    return told + f"back with version {found.back} after {found.took_s or 0:.1f} s ({mirror})"


def _text(value: float | str | None, form: str, *, scale: float = 1) -> str:
    if value is None:
        return "-"
    return form.format(value if isinstance(value, str) or scale == 1 else value * scale)
