"""The state of a run, put together from the events of its processes, and how it is shown while it runs."""

import sys
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

_ROWS = 16
_REFRESHES_PER_S = 4


@dataclass(slots=True)
class Row:
    """One optimizer step, and the version that carries it. A field is None until it is known."""

    step: int
    reward: float | None = None
    solved: float | None = None
    age: int | None = None
    step_s: float | None = None
    wait_s: float | None = None
    version: int | None = None
    changed: int | None = None
    elements: int | None = None
    nbytes: int | None = None
    held_s: float | None = None
    pauses_s: dict[str, float] = field(default_factory=dict)
    lags: dict[str, int | None] = field(default_factory=dict)


@dataclass(slots=True)
class Recovery:
    """A replica that was killed: the version that it had, the one that it came back with, and what that took."""

    replica: str
    at_step: int
    had: int | None
    started_s: float
    back: int | None = None
    took_s: float | None = None
    edges: tuple[str, ...] = ()
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Score:
    """How good a policy is: the mean reward, and the share of games that it solves."""

    reward: float
    solved: float


@dataclass(slots=True)
class Board:
    """All that is known of a run, from the events of its processes. `digests`: of the live weights at the end."""

    replicas: tuple[str, ...]
    steps: int
    warmed: tuple[int, int] = (0, 0)
    weights: int = 0
    full_bytes: int = 0
    before: Score | None = None
    after: Score | None = None
    rows: list[Row] = field(default_factory=list)
    versions: dict[str, int | None] = field(default_factory=dict)
    anchor_bytes: int = 0
    head: int | None = None
    recovery: Recovery | None = None
    digests: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, fields: dict[str, Any], *, now_s: float) -> None:
        """Add one event of a process."""
        kind = fields["event"]
        if kind == "warmed":
            self.warmed = fields["step"], fields["steps"]
        elif kind == "ready":
            self.weights, self.full_bytes = fields["weights"], fields["full_bytes"]
            self.before = Score(fields["reward"], fields["solved"])
        elif kind == "published":
            self._published(fields)
        elif kind == "stepped":
            self._stepped(fields)
        elif kind == "moved":
            self._moved(name, fields, now_s)
        elif kind == "trained":
            self.after = Score(fields["reward"], fields["solved"])
            self.head, self.digests[name] = fields["version"], fields["digest"]
        elif kind == "final":
            self.digests[name] = fields["digest"]

    def kill(self, name: str, *, now_s: float) -> None:
        """Note that a replica was killed and is now started again."""
        self.recovery = Recovery(name, self.done, self.versions.get(name), started_s=now_s)
        self.versions[name] = None

    @property
    def done(self) -> int:
        """The last step that is done."""
        return max((row.step for row in self.rows if row.reward is not None), default=0)

    @property
    def sent_bytes(self) -> int:
        """The size of all payloads, those of anchors included."""
        return self.anchor_bytes + sum(row.nbytes for row in self.rows if row.nbytes is not None)

    @property
    def copies_bytes(self) -> int:
        """The size of as many full copies."""
        return self.full_bytes * sum(row.version is not None for row in self.rows)

    def lag(self, name: str) -> int | None:
        """How many versions a replica is behind the last commit."""
        version = self.versions.get(name)
        return None if version is None or self.head is None else max(0, self.head - version)

    def _row(self, step: int) -> Row:
        while len(self.rows) <= step:
            self.rows.append(Row(len(self.rows)))
        return self.rows[step]

    def _published(self, fields: dict[str, Any]) -> None:
        if fields["step"] is None or (fields["kind"] == "anchor" and fields["version"] > 0):
            self.anchor_bytes += fields["payload_bytes"]
            return
        row = self._row(fields["step"])
        self.head = row.version = fields["version"]
        row.changed, row.elements, row.nbytes = fields["changed"], fields["elements"], fields["payload_bytes"]
        row.held_s = fields["held_s"]

    def _stepped(self, fields: dict[str, Any]) -> None:
        row = self._row(fields["step"])
        row.reward, row.solved, row.age = fields["reward"], fields["solved"], fields["age"]
        row.step_s, row.wait_s = fields["step_s"], fields["wait_s"]
        row.lags = {name: self.lag(name) for name in self.replicas}

    def _moved(self, name: str, fields: dict[str, Any], now_s: float) -> None:
        self.versions[name] = fields["version"]
        for row in self.rows:
            if row.version == fields["version"]:
                row.pauses_s[name] = fields["pause_s"]
        recovery = self.recovery
        if recovery is not None and recovery.replica == name and recovery.back is None:
            recovery.back, recovery.edges, recovery.nbytes = fields["version"], tuple(fields["edges"]), fields["nbytes"]
            recovery.took_s = now_s - recovery.started_s


class Screen(Protocol):
    """Shows the board of a run. `show` is called after every change."""

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
        self._text = ""

    def show(self, board: Board) -> None:
        """Print what is new."""
        text = progress_text(board)
        if text != self._text and (board.before is not None or not self._text):
            print(text, flush=True)
            self._text = text
        while self._shown < len(board.rows) - 1:
            cells = zip(columns(board), row_cells(board, board.rows[self._shown]), strict=True)
            print(", ".join(f"{name} {cell}" for name, cell in cells), flush=True)
            self._shown += 1


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
        table = Table(*columns(board))
        for column in table.columns:
            column.justify = "right"
        for row in board.rows[-_ROWS:]:
            table.add_row(*row_cells(board, row))
        self._live.update(Group(table, Text(progress_text(board))))


def best_screen() -> Screen:
    """A table on a terminal, lines elsewhere."""
    return Terminal() if sys.stdout.isatty() else Lines()


def columns(board: Board) -> list[str]:
    """The names of the columns."""
    lags = [f"lag {name}" for name in board.replicas]
    return ["step", "reward", "version", "changed", "sent", "full / sent", "held", "pause", *lags]


def row_cells(board: Board, row: Row) -> list[str]:
    """One step; a dash stands for what is not known."""
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


def progress_text(board: Board) -> str:
    """What is going on, in a line or two."""
    if board.before is None:
        done, steps = board.warmed
        return f"supervised warm-up on games of a careless player: step {done} of {steps}"
    score = board.before
    text = f"{board.weights} weights; after the warm-up: reward {score.reward:.3f}, {score.solved:.0%} solved"
    return text + ("" if board.recovery is None else f"\n{recovery_text(board)}")


def recovery_text(board: Board) -> str:
    """What became of the killed replica."""
    recovery = board.recovery
    if recovery is None:
        return "no replica was killed"
    text = (
        f"{recovery.replica} was killed (SIGKILL) at step {recovery.at_step} with version {recovery.had}, "
        "and started again: "
    )
    if recovery.back is None:
        return text + "it is catching up"
    edges = ", ".join(f"{recovery.edges.count(kind)} {kind}" for kind in sorted(set(recovery.edges)))
    fetched = f"{edges}, {recovery.nbytes / 1e3:.1f} kB" if edges else "its mirror was up to date"
    return text + f"back with version {recovery.back} after {recovery.took_s or 0:.1f} s ({fetched})"


def _text(value: float | str | None, form: str, *, scale: float = 1) -> str:
    if value is None:
        return "-"
    return form.format(value if isinstance(value, str) or scale == 1 else value * scale)
