"""The state of an act, put together from the events of its processes."""

from dataclasses import dataclass, field
from statistics import median
from typing import Any

from demo.settings import Act

_RECENT_STEPS = 10
"""The number of steps from whose times the time left is estimated."""


@dataclass(slots=True)
class Row:
    """One optimizer step, and the version that carries it. A field is None until it is known.

    `lags`: how many versions each replica was behind when the step was done; None while it was dead.
    """

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
    events: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Recovery:
    """A replica that was killed: the version that it had, the one that it came back with, and what that took.

    `start_up_s`: until the new process followed the feed, with its imports and its model. `catch_up_s`: from then on,
    until the newest version was live.
    """

    replica: str
    at_step: int
    had: int | None
    killed_s: float
    following_s: float | None = None
    back: int | None = None
    back_at_step: int | None = None
    start_up_s: float | None = None
    catch_up_s: float | None = None
    edges: tuple[str, ...] = ()
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Score:
    """How good a policy is: the mean reward, and the share of games that it solves."""

    reward: float
    solved: float


@dataclass(frozen=True, slots=True)
class Game:
    """The same Wordle before and after training: guesses, and their marks as letters."""

    answer: str
    before: list[tuple[str, str]]
    after: list[tuple[str, str]]
    is_better: bool


@dataclass(slots=True)
class Board:
    """All that is known of an act, from the events of its processes. `digests`: of the live weights at the end."""

    act: Act
    warmed: tuple[int, int] | None = None
    weights: int = 0
    full_bytes: int = 0
    before: Score | None = None
    after: Score | None = None
    game: Game | None = None
    answer: tuple[int, str] | None = None
    answers: int = 0
    """Answers that a replica generated, and the last one with its version."""
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
            self.before = _score(fields)
        elif kind == "published":
            self._published(fields)
        elif kind == "stepped":
            self._stepped(fields)
        elif kind == "following":
            self._following(name, now_s)
        elif kind == "moved":
            self._moved(name, fields, now_s)
        elif kind == "answered":
            self.answer, self.answers = (fields["version"], fields["text"]), self.answers + 1
        elif kind == "trained":
            self.after = _score(fields)
            self.game = Game(**fields["game"]) if "game" in fields else None
            self.head, self.digests[name] = fields["version"], fields["digest"]
        elif kind == "final":
            self.digests[name] = fields["digest"]

    def kill(self, name: str, *, now_s: float) -> None:
        """Note that a replica was killed and is now started again."""
        self.recovery = Recovery(name, self.done, self.versions.get(name), killed_s=now_s)
        self.versions[name] = None
        self._row(self.done).events.append(f"kill -9 {name}")

    @property
    def done(self) -> int:
        """The last step that is done."""
        return max((row.step for row in self.rows if row.reward is not None), default=0)

    @property
    def left_s(self) -> float | None:
        """An estimate of the time until the last step is done; None while there is nothing to base it on."""
        times = [row.step_s + (row.wait_s or 0) for row in self.rows if row.step_s is not None][-_RECENT_STEPS:]
        return median(times) * (self.act.steps - self.done) if times else None

    @property
    def deltas(self) -> list[Row]:
        """The steps whose versions are deltas."""
        return [row for row in self.rows if row.version and row.nbytes is not None]

    @property
    def delta_bytes(self) -> int:
        """The size of all deltas."""
        return sum(row.nbytes or 0 for row in self.deltas)

    @property
    def sent_bytes(self) -> int:
        """The size of all payloads: the first version, the deltas, and the anchors on the way."""
        return self.anchor_bytes + sum(row.nbytes for row in self.rows if row.nbytes is not None)

    @property
    def copies_bytes(self) -> int:
        """The size of as many full copies as there are versions."""
        return self.full_bytes * sum(row.version is not None for row in self.rows)

    @property
    def density(self) -> float | None:
        """The share of weights that a step changed: the median over the deltas."""
        shares = [row.changed / row.elements for row in self.deltas if row.changed is not None and row.elements]
        return median(shares) if shares else None

    @property
    def bits(self) -> float | None:
        """Bits per changed element: the median over the deltas, whole files."""
        found = [8 * row.nbytes / row.changed for row in self.deltas if row.nbytes and row.changed]
        return median(found) if found else None

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
        row.reward, row.step_s = fields["reward"], fields["step_s"]
        row.solved, row.age, row.wait_s = fields.get("solved"), fields.get("age"), fields.get("wait_s")
        row.lags = {name: self.lag(name) for name in self.act.replicas}

    def _following(self, name: str, now_s: float) -> None:
        recovery = self.recovery
        if recovery is not None and recovery.replica == name:
            recovery.following_s, recovery.start_up_s = now_s, now_s - recovery.killed_s

    def _moved(self, name: str, fields: dict[str, Any], now_s: float) -> None:
        self.versions[name] = fields["version"]
        for row in self.rows:
            if row.version == fields["version"]:
                row.pauses_s[name] = fields["pause_s"]
        recovery = self.recovery
        if recovery is None or recovery.replica != name or recovery.back is not None:
            return
        recovery.back, recovery.edges, recovery.nbytes = fields["version"], tuple(fields["edges"]), fields["nbytes"]
        recovery.back_at_step = self.done
        if recovery.following_s is not None:
            recovery.catch_up_s = now_s - recovery.following_s
        self._row(self.done).events.append(f"{name} is back")


def _score(fields: dict[str, Any]) -> Score | None:
    return Score(fields["reward"], fields["solved"]) if "solved" in fields else None
