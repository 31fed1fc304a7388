"""Everything that happens by chance: decisions that a seed makes, that are listed, and that can be left out.

Each decision has a default, in which nothing special happens. The others are listed with a key. A later run of the same
seed may keep only some of these keys, and takes the default everywhere else: that is how a schedule is shortened.
"""

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Choice:
    """A decision other than the default. `key` is its stream and its number there."""

    key: str
    at_s: float
    text: str

    def __str__(self) -> str:
        return f"{self.at_s:12.2f} s  {self.text}  [{self.key}]"


class Choices:
    """The decisions of one run. Once `is_calm` is set, all further ones are defaults."""

    def __init__(self, seed: int, *, keep: Collection[str] | None = None, clock: Callable[[], float]) -> None:
        self.seed = seed
        self.made: list[Choice] = []
        self.is_calm = False
        self._keep = None if keep is None else frozenset(keep)
        self._clock = clock

    def stream(self, name: str) -> "Stream":
        """Decisions that do not depend on those of other streams, so that each can be left out by itself."""
        return Stream(self, name)

    def make(self, key: str, text: str) -> bool:
        """Whether a decision is taken. It is listed then."""
        if self.is_calm or (self._keep is not None and key not in self._keep):
            return False
        self.made.append(Choice(key, self._clock(), text))
        return True


class Stream:
    """The decisions about one thing, in their order."""

    def __init__(self, choices: Choices, name: str) -> None:
        self._choices = choices
        self._name = name
        self._random = random.Random(f"{choices.seed}/{name}")
        self._count = 0

    def pick(self, options: Sequence[tuple[_T, float]], about: str) -> tuple[_T, float] | None:
        """One of the options, each with its probability, and a number from 0 to 1 to scale it with; None by default."""
        drawn = self.draw(options)
        if drawn is None or not self._choices.make(f"{self._name}:{self._count}", f"{about}: {drawn[0]}"):
            return None
        return drawn

    def draw(self, options: Sequence[tuple[_T, float]]) -> tuple[_T, float] | None:
        """The same, but not as a decision that can be left out: it says how likely others are."""
        self._count += 1
        drawn = self._random.random()
        for option, rate in options:
            if drawn < rate:
                return option, drawn / rate
            drawn -= rate
        return None

    def happens(self, rate: float, about: str) -> bool:
        """Whether something happens that has this probability; by default it does not."""
        return self.pick([("yes", rate)], about) is not None

    def uniform(self) -> float:
        """A number from 0 to 1 that is no decision of its own: it scales what happens anyway."""
        return self._random.random()


def shortened(keys: Sequence[str], fails: Callable[[Sequence[str]], bool], *, runs: int) -> list[str]:
    """The keys without those that the failure does not need, by delta debugging in at most so many runs."""
    kept, parts = list(keys), 2
    while runs > 0 and kept:
        size = max(1, len(kept) // parts)
        for first in range(0, len(kept), size):
            rest = kept[:first] + kept[first + size :]
            runs -= 1
            if fails(rest):
                kept, parts = rest, max(2, parts - 1)
                break
            if runs <= 0:
                return kept
        else:
            if size == 1:
                return kept
            parts = min(len(kept), 2 * parts)
    return kept
