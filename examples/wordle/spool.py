"""Rollouts on their way from replicas to the trainer: files in a folder.

This is the one thing besides the store that the processes of the demo share. Weights never go this way.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wordle.playing import Played

_SUFFIX = ".npz"


@dataclass(frozen=True, slots=True, eq=False)
class Rollouts:
    """Games that one replica played with one version: every token of them was made by it."""

    replica: str
    version: int
    played: Played


class Spool:
    """A folder of rollouts. A file appears whole; the trainer takes the oldest first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def waiting(self, replica: str) -> int:
        """How many files of a replica were not taken yet."""
        return sum(path.stem.endswith(f".{replica}") for path in self._files())

    def put(self, rollouts: Rollouts) -> None:
        """Hand rollouts over."""
        path = self._folder / f"{time.time_ns():020d}.{rollouts.replica}{_SUFFIX}"
        part = path.with_suffix(".part")
        played = rollouts.played
        with part.open("wb") as file:
            np.savez(
                file,
                version=rollouts.version,
                texts=played.texts.astype(np.uint8 if played.texts.max() < 256 else np.int64),
                log_probs=played.log_probs,
                counts=played.counts,
                rewards=played.rewards,
                solved=played.solved,
            )
        os.replace(part, path)

    def take(self) -> Rollouts | None:
        """The oldest rollouts, which are then gone from the folder; None if none wait."""
        path = min(self._files(), default=None)
        if path is None:
            return None
        with np.load(path, allow_pickle=False) as found:
            rollouts = Rollouts(
                replica=path.stem.partition(".")[2],
                version=int(found["version"]),
                played=Played(
                    texts=found["texts"].astype(np.int64),
                    log_probs=found["log_probs"],
                    counts=found["counts"],
                    rewards=found["rewards"],
                    solved=found["solved"],
                ),
            )
        path.unlink()
        return rollouts

    def _files(self) -> list[Path]:
        return [path for path in self._folder.iterdir() if path.suffix == _SUFFIX]
