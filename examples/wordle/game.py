"""Wordle: guess a word of five letters in six turns. Each guess is answered with a mark for each letter.

Many games are played side by side, one row of an array for each. This module needs NumPy and nothing else.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

LETTERS = 5
TURNS = 6
ALPHABET = 26

GREY, YELLOW, GREEN, REFUSED = range(4)
"""Marks: the letter is not in the word, is elsewhere in it, is in its place; or the guess is not in the word list."""

Array = NDArray[np.int64]

_PLACE_VALUES = ALPHABET ** np.arange(LETTERS - 1, -1, -1)


def marks(guess: str, answer: str) -> tuple[int, ...]:
    """The mark of each letter of a guess. A letter is yellow at most as often as it is left in the answer."""
    left = [wanted for letter, wanted in zip(guess, answer, strict=True) if letter != wanted]
    result = []
    for letter, wanted in zip(guess, answer, strict=True):
        if letter == wanted:
            result.append(GREEN)
        elif letter in left:
            left.remove(letter)
            result.append(YELLOW)
        else:
            result.append(GREY)
    return tuple(result)


def letters_of(word: str) -> list[int]:
    """A word as numbers: a is 0."""
    return [ord(letter) - ord("a") for letter in word]


def bundled_words() -> tuple[str, ...]:
    """The word list of the examples. Every word of it can be the answer, and nothing else is a word."""
    return tuple(Path(__file__).with_name("words.txt").read_text("ascii").split())


class Wordle:
    """The rules for one word list, with the marks of every guess for every answer: `marks[guess, answer]`."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = tuple(sorted(words))
        self.letters: Array = np.array([letters_of(word) for word in self.words])
        self.marks: Array = np.array([[marks(guess, answer) for answer in self.words] for guess in self.words])
        self._codes = self.letters @ _PLACE_VALUES

    @classmethod
    def bundled(cls) -> Self:
        """The rules for the word list of the examples."""
        return cls(bundled_words())

    def find(self, guesses: Array) -> Array:
        """The positions in the list of words that are given as rows of letters; -1 for what is not a word."""
        codes = guesses @ _PLACE_VALUES
        near = np.minimum(np.searchsorted(self._codes, codes), len(self.words) - 1)
        return np.where(self._codes[near] == codes, near, -1)


class Games:
    """Games in progress, each with the position of its answer in the word list."""

    def __init__(self, wordle: Wordle, answers: Array) -> None:
        self._wordle = wordle
        self._answers = answers
        self._turn = 0
        self._solved_at: Array = np.full(len(answers), TURNS)
        self._refused = np.zeros(len(answers))
        self._greens = np.zeros(len(answers))

    @property
    def is_open(self) -> NDArray[np.bool_]:
        """Which games are not solved yet."""
        return np.equal(self._solved_at, TURNS)

    def guess(self, guesses: Array) -> Array:
        """The marks of one guess in each game. A guess after the end of a game does not count."""
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

        Every guess that is not a word costs 0.1.
        """
        return np.where(self.solved, 1 - 0.1 * self._solved_at, 0.05 * self._greens) - 0.1 * self._refused
