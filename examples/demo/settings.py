"""The settings of one run, as the command and all of its processes get them, and the acts that it consists of."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

DEFAULT_REPLICAS = 2
DEFAULT_REAL_STEPS = 8
DEFAULT_STEPS = 96
DEFAULT_LR = 1e-4

REAL = "smollm2"
WORDLE = "wordle"
"""Names of the acts: of their packages, and of their feeds below the store."""

TRAINER = "trainer"
"""The name of the trainer's process."""

LOGS = "logs"
"""The folder of the logs, below that of the run."""


@dataclass(frozen=True, slots=True)
class Act:
    """One part of a run: a trainer and its replicas, with a feed of their own."""

    name: str
    title: str
    feed: str
    steps: int
    replicas: tuple[str, ...]
    kills: bool
    """Whether the last replica is killed half-way, and started again."""


@dataclass(frozen=True, slots=True)
class Settings:
    """`steps` and `lr` are those of Wordle, `real_steps` those of SmolLM2; 0 steps leave an act out.

    `model` is a folder with a checkpoint of transformers that learns Wordle; None starts with a small, new policy.
    """

    store: str
    out: str
    replicas: int = DEFAULT_REPLICAS
    real_steps: int = DEFAULT_REAL_STEPS
    steps: int = DEFAULT_STEPS
    model: str | None = None
    lr: float = DEFAULT_LR
    seed: int = 0

    @property
    def folder(self) -> Path:
        """The folder for everything but the feeds."""
        return Path(self.out)

    def feed(self, act: str) -> str:
        """The URL of the feed of an act."""
        return f"{self.store.rstrip('/')}/{act}"

    def mirror(self, act: str, replica: str) -> Path:
        """The folder in which a replica keeps its mirror."""
        return self.folder / f"{act}-{replica}.mirror"

    @property
    def acts(self) -> tuple[Act, ...]:
        """The acts of this run."""
        names = tuple(f"replica-{i + 1}" for i in range(self.replicas))
        every = (
            Act(
                REAL,
                "Act one: SmolLM2-135M, a policy gradient at a real learning rate",
                self.feed(REAL),
                self.real_steps,
                names[:1],
                kills=False,
            ),
            Act(
                WORDLE,
                "Act two: a small policy learns Wordle, and one replica is killed",
                self.feed(WORDLE),
                self.steps,
                names,
                kills=True,
            ),
        )
        return tuple(act for act in every if act.steps > 0)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))
