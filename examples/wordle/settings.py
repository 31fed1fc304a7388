"""What a run of the demo is asked to do, as the command gives it and as its processes get it."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

DEFAULT_REPLICAS = 2
DEFAULT_STEPS = 160
DEFAULT_LR = 5e-5

GAMES, GROUP = 128, 8
"""What a replica plays at once and a step learns from; games of one group have the same answer."""

SPOOL = "rollouts"
LOGS = "logs"
"""Folders below that of the run."""


@dataclass(frozen=True, slots=True)
class Settings:
    """One run. `model` is a folder with a checkpoint of transformers; None is a small policy that knows nothing."""

    store: str
    out: str
    replicas: int = DEFAULT_REPLICAS
    steps: int = DEFAULT_STEPS
    model: str | None = None
    lr: float = DEFAULT_LR
    seed: int = 0

    @property
    def folder(self) -> Path:
        """Where everything but the feed goes."""
        return Path(self.out)

    @property
    def replica_names(self) -> tuple[str, ...]:
        return tuple(f"replica-{i + 1}" for i in range(self.replicas))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))
