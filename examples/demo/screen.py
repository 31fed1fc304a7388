"""How an act is shown while it runs: as a table on a terminal, as lines elsewhere. Both fit 80 columns."""

import sys
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from demo.board import Board, Row
from demo.projection import bytes_text, seconds_text

_ROWS = 12
_REFRESHES_PER_S = 4
_TILES = {"g": "black on green", "y": "black on yellow", ".": "white on grey37", "x": "white on red"}
"""The colors of marks: in place, elsewhere, absent, and a guess that is not a word."""


class Screen(Protocol):
    """Shows the board of an act. `show` is called after every change."""

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
        """Show nothing."""


class Lines(Silent):
    """Prints a line for each step, once its version is published, and one for everything else that happens."""

    def __init__(self) -> None:
        self._shown = 0
        self._printed: set[str] = set()

    def show(self, board: Board) -> None:
        """Print what is new."""
        self._once(board.act.title)
        if board.warmed is not None and not board.rows:
            self._once(f"supervised warm-up on games of a careless player, {board.warmed[1]} steps")
        while self._shown < len(board.rows) - 1 or (board.digests and self._shown < len(board.rows)):
            row = board.rows[self._shown]
            cells = zip(columns(), row_cells(board, row), strict=True)
            print(", ".join(f"{name} {cell}" for name, cell in cells if name and cell), flush=True)
            self._shown += 1
        if board.recovery is not None:
            self._once(recovery_text(board))
        if board.digests:
            self._once(total_text(board))

    def _once(self, text: str) -> None:
        if text not in self._printed:
            self._printed.add(text)
            print(text, flush=True)


class Terminal(Silent):
    """Redraws a table."""

    def __init__(self) -> None:
        self._live = Live(console=Console(), refresh_per_second=_REFRESHES_PER_S)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, board: Board) -> None:
        """Show the last steps, and what is going on."""
        table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
        for name in columns():
            table.add_column(name, justify="right" if name else "left", no_wrap=True)
        for row in board.rows[-_ROWS:]:
            table.add_row(*row_cells(board, row), style="bold red" if any("kill" in e for e in row.events) else None)
        lines = [Text(board.act.title, style="bold"), Text(progress_text(board)), Text(), table, Text()]
        if board.deltas:
            lines.append(Text(total_text(board), style="bold"))
        if board.answer is not None:
            version, text = board.answer
            lines.append(Text(f"replica-1, version {version}: {' '.join(text.split())}", style="dim"))
        if board.recovery is not None:
            lines.append(Text(recovery_text(board)))
        self._live.update(Group(*lines))


def best_screen() -> Screen:
    """A table on a terminal, lines elsewhere."""
    return Terminal() if sys.stdout.isatty() else Lines()


def columns() -> list[str]:
    """The names of the columns. `ratio` is full copy to sent; the last column has the events of a step, and no name."""
    return ["step", "reward", "changed", "sent", "ratio", "held", "pause", "behind", ""]


def row_cells(board: Board, row: Row) -> list[str]:
    """One step; a dash stands for what is not known."""
    share = None if row.changed is None or not row.elements else row.changed / row.elements
    lags = (row.lags.get(name) for name in board.act.replicas)
    return [
        str(row.step),
        "-" if row.reward is None else f"{row.reward:.3f}",
        "all" if row.version == 0 else "-" if share is None else f"{share:.2%}",
        "-" if row.nbytes is None else bytes_text(row.nbytes),
        "-" if not row.nbytes else ratio_text(board.full_bytes / row.nbytes),
        _ms_text(row.held_s),
        _ms_text(max(row.pauses_s.values(), default=None)),
        " ".join("-" if lag is None else str(lag) for lag in lags),
        ", ".join(row.events),
    ]


def _ms_text(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.{1 if seconds < 0.01 else 0}f} ms"


def progress_text(board: Board) -> str:
    """Which step it is, and how long the rest will take."""
    if not board.weights:
        if board.warmed is None:
            return "starting processes and loading the model"
        done, steps = board.warmed
        return f"supervised warm-up on games of a careless player: step {done} of {steps}"
    if board.digests:
        return f"{board.weights:,} weights, {board.act.steps} steps done"
    left = "" if board.left_s is None else f", about {seconds_text(max(1.0, board.left_s))} left"
    return f"{board.weights:,} weights, step {board.done} of {board.act.steps}{left}"


def total_text(board: Board) -> str:
    """What was sent so far, and what full copies would have been: by the steps alone, and with all anchors."""
    copies = board.full_bytes * len(board.deltas)
    return (
        f"{len(board.deltas)} steps: {instead_text(board.delta_bytes, copies)}\n"
        f"with all anchors: {instead_text(board.sent_bytes, board.copies_bytes)}"
    )


def instead_text(sent: int, copies: int) -> str:
    """How much less was sent than full copies."""
    return f"sent {bytes_text(sent)} instead of {bytes_text(copies)}, {ratio_text(copies / max(1, sent))} times less"


def ratio_text(ratio: float) -> str:
    """A ratio with as many digits as mean something."""
    return f"{ratio:.{1 if ratio < 99.95 else 0}f}"


def recovery_text(board: Board) -> str:
    """What became of the killed replica."""
    recovery = board.recovery
    if recovery is None:
        return "no replica was killed"
    text = f"{recovery.replica}: kill -9 at step {recovery.at_step}, version {recovery.had}"
    if recovery.back is None:
        return text + ", and started again"
    edges = ", ".join(f"{recovery.edges.count(kind)} {kind}s" for kind in sorted(set(recovery.edges)))
    fetched = f"{edges}, {bytes_text(recovery.nbytes)}" if edges else "its mirror was up to date"
    return (
        f"{text}; back with {recovery.back}\n"
        f"start-up {recovery.start_up_s or 0:.1f} s, "
        f"catch-up {recovery.catch_up_s or 0:.2f} s ({fetched})"
    )


def game_text(board: Board, *, color: bool) -> Text:
    """The same Wordle before and after, side by side: tiles in color, or marks below the letters."""
    game = board.game
    if game is None:
        return Text()
    chosen = "lost before and won after" if game.is_better else "the first of the trial"
    text = Text(f"one Wordle ({chosen}), the answer is {game.answer}\n{'before':<16}after\n")
    for turn in range(max(len(game.before), len(game.after))):
        for guesses in (game.before, game.after):
            guess, given = guesses[turn] if turn < len(guesses) else ("", "")
            for letter, mark in zip(guess, given, strict=True):
                text.append(
                    f" {letter.upper()} " if color else letter.upper() + mark, style=_TILES[mark] if color else ""
                )
            text.append(" " * (16 - len(guess) * (3 if color else 2)))
        text.append("\n")
    return text
