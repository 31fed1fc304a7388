"""Wordle: guess a word of five letters in six turns. Each guess is answered by a mark for each letter.

Many games are played side by side, one row of an array for each.
"""

from collections.abc import Sequence
from importlib import resources
from typing import Self

import numpy as np
from numpy.typing import NDArray

LETTERS = 5
TURNS = 6
ALPHABET = 26

GREY, YELLOW, GREEN, REFUSED = range(4)
"""Marks: not in the word, in another place, in its place; and for all letters of what is not a word of the list."""

Array = NDArray[np.int64]

_PLACE_VALUES = ALPHABET ** np.arange(LETTERS - 1, -1, -1)


def marks(guess: str, answer: str) -> tuple[int, ...]:
    """The mark of each letter of a guess. A letter is yellow at most as often as it is left in the answer."""
    left = [wanted for given, wanted in zip(guess, answer, strict=True) if given != wanted]
    found = []
    for given, wanted in zip(guess, answer, strict=True):
        if given == wanted:
            found.append(GREEN)
        elif given in left:
            left.remove(given)
            found.append(YELLOW)
        else:
            found.append(GREY)
    return tuple(found)


def letters_of(word: str) -> list[int]:
    """A word as numbers: a is 0."""
    return [ord(letter) - ord("a") for letter in word]


def bundled_words() -> tuple[str, ...]:
    """The list that comes with the demo. Every word of it is an answer, and nothing else is a word."""
    return tuple((resources.files("wordle") / "words.txt").read_text("ascii").split())


class Wordle:
    """The rules for one list of words: all marks of all guesses, `marks[guess, answer]`, worked out once."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = tuple(sorted(words))
        self.letters: Array = np.array([letters_of(word) for word in self.words])
        self.marks: Array = np.array([[marks(guess, answer) for answer in self.words] for guess in self.words])
        self._codes = self.letters @ _PLACE_VALUES

    @classmethod
    def bundled(cls) -> Self:
        """With the list of the demo."""
        return cls(bundled_words())

    def find(self, guesses: Array) -> Array:
        """The ordinals of words given as rows of letters; -1 where it is not a word."""
        codes = guesses @ _PLACE_VALUES
        near = np.minimum(np.searchsorted(self._codes, codes), len(self.words) - 1)
        return np.where(self._codes[near] == codes, near, -1)


class Games:
    """Games in progress, each with the ordinal of its answer."""

    def __init__(self, wordle: Wordle, answers: Array) -> None:
        self._wordle = wordle
        self._answers = answers
        self._turn = 0
        self._solved_at: Array = np.full(len(answers), TURNS)
        self._refused = np.zeros(len(answers))
        self._greens = np.zeros(len(answers))

    @property
    def is_open(self) -> NDArray[np.bool_]:
        """Which games go on: not solved yet."""
        return np.equal(self._solved_at, TURNS)

    def guess(self, guesses: Array) -> Array:
        """The marks of one guess in each game. What is guessed after the end of a game counts for nothing."""
        words = self._wordle.find(guesses)
        given = np.where(words[:, None] < 0, REFUSED, self._wordle.marks[words, self._answers])
        is_open = self.is_open
        self._refused += is_open & (words < 0)
        self._greens = np.maximum(self._greens, (given == GREEN).sum(axis=1) * is_open)
        self._solved_at[is_open & (words == self._answers)] = self._turn
        self._turn += 1
        return given

    @property
    def solved(self) -> NDArray[np.bool_]:
        """Which games were won."""
        return self._solved_at < TURNS

    @property
    def rewards(self) -> NDArray[np.float64]:
        """From 1 for the first guess down to 0.5 for the sixth; unsolved, 0.05 for each green of the best guess.

        Every guess that is not a word takes 0.1 away.
        """
        return np.where(self.solved, 1 - 0.1 * self._solved_at, 0.05 * self._greens) - 0.1 * self._refused
