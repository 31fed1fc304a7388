"""Rollouts on their way from the replicas to the trainer: files in a folder.

This folder is the only thing besides the store that the processes of the demo share. Weights never go through it.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from demo.settings import Settings

from wordle.training import Played

GAMES, GROUP = 128, 8
"""The number of games that a replica plays at once and a step learns from; games of one group have the same answer."""

_SUFFIX = ".npz"


@dataclass(frozen=True, slots=True, eq=False)
class Rollouts:
    """Games that one replica played. All of their letters were chosen by one version."""

    replica: str
    version: int
    played: Played


class Spool:
    """A folder of rollouts. A file appears whole or not at all; the trainer takes the oldest first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """The folder of a run. It is made if it is not there."""
        folder = settings.folder / "rollouts"
        folder.mkdir(exist_ok=True)
        return cls(folder)

    def waiting(self, replica: str) -> int:
        """The number of files of a replica that the trainer has not taken yet."""
        return sum(path.stem.endswith(f".{replica}") for path in self._files())

    def put(self, rollouts: Rollouts) -> None:
        """Add rollouts for the trainer."""
        path = self._folder / f"{time.time_ns():020d}.{rollouts.replica}{_SUFFIX}"
        unfinished = path.with_suffix(".part")
        played = rollouts.played
        with unfinished.open("wb") as file:
            np.savez(
                file,
                version=rollouts.version,
                texts=played.texts.astype(np.uint8 if played.texts.max() < 256 else np.int64),
                log_probs=played.log_probs,
                counts=played.counts,
                rewards=played.rewards,
                solved=played.solved,
            )
        os.replace(unfinished, path)

    def take(self) -> Rollouts | None:
        """Remove the oldest rollouts from the folder and return them; None if there are none."""
        path = min(self._files(), default=None)
        if path is None:
            return None
        with np.load(path, allow_pickle=False) as arrays:
            rollouts = Rollouts(
                replica=path.stem.partition(".")[2],
                version=int(arrays["version"]),
                played=Played(
                    texts=arrays["texts"].astype(np.int64),
                    log_probs=arrays["log_probs"],
                    counts=arrays["counts"],
                    rewards=arrays["rewards"],
                    solved=arrays["solved"],
                ),
            )
        path.unlink()
        return rollouts

    def _files(self) -> list[Path]:
        return [path for path in self._folder.iterdir() if path.suffix == _SUFFIX]
