"""All that is known of a run, put together from what its processes tell."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Row:
    """One optimizer step, and the version that carries it. What is not known yet is None."""

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
    """A replica that was killed: the versions that it had and came back with, and what that took."""

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
    """A run so far. `digests` are those of the live weights, by process, at the end."""

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

    def take(self, name: str, fields: dict[str, Any], *, now_s: float) -> None:
        """One event of a process."""
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
        """A replica was killed and is started again at this moment."""
        self.recovery = Recovery(name, self.done, self.versions.get(name), started_s=now_s)
        self.versions[name] = None

    @property
    def done(self) -> int:
        """The last step that was taken."""
        return max((row.step for row in self.rows if row.reward is not None), default=0)

    @property
    def sent_bytes(self) -> int:
        """Payloads of all versions, and of anchors on top."""
        return self.anchor_bytes + sum(row.nbytes for row in self.rows if row.nbytes is not None)

    @property
    def copies_bytes(self) -> int:
        """What as many full copies would have been."""
        return self.full_bytes * sum(row.version is not None for row in self.rows)

    def lag(self, name: str) -> int | None:
        """Versions that a replica is behind the last commit."""
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
        back = self.recovery
        if back is not None and back.replica == name and back.back is None:
            back.back, back.edges, back.nbytes = fields["version"], tuple(fields["edges"]), fields["nbytes"]
            back.took_s = now_s - back.started_s
