"""The rules of Wordle, and games that are played side by side."""

import numpy as np
import pytest
from wordle.game import GREEN, GREY, REFUSED, TURNS, YELLOW, Games, Wordle, bundled_words, letters_of, marks

WORDS = ("allow", "crane", "eerie", "geese", "llama")
LETTERS = {".": GREY, "y": YELLOW, "g": GREEN, "?": REFUSED}


@pytest.mark.parametrize(
    ("guess", "answer", "wanted"),
    [
        ("crane", "crane", "ggggg"),
        ("crane", "moist", "....."),
        ("earth", "crane", "yyy.."),
        # A letter is yellow only as often as the answer has it besides the greens.
        ("eerie", "geese", "yg..g"),
        ("geese", "eerie", ".gy.g"),
        ("llama", "allow", "ygy.."),
        ("allow", "llama", "ygy.."),
        ("eerie", "crane", "..y.g"),
    ],
)
def test_marks(guess: str, answer: str, wanted: str) -> None:
    assert marks(guess, answer) == tuple(LETTERS[mark] for mark in wanted)


def test_bundled_words() -> None:
    words = bundled_words()
    assert 50 <= len(words) <= 200
    assert list(words) == sorted(set(words))
    assert all(len(word) == 5 and word.isascii() and word.islower() and word.isalpha() for word in words)


def test_find() -> None:
    wordle = Wordle(WORDS)
    asked = ("aaaaa", *WORDS, "crank", "zzzzz")
    positions = wordle.find(np.array([letters_of(word) for word in asked]))
    assert positions.tolist() == [-1, 0, 1, 2, 3, 4, -1, -1]


@pytest.mark.parametrize(
    ("guesses", "reward", "solved"),
    [
        (["crane"], 1.0, True),
        (["geese", "crane"], 0.9, True),
        (["geese"] * 5 + ["crane"], 0.5, True),
        # The best guess counts, not the last.
        (["eerie"] + ["llama"] * 5, 0.05, False),
        (["zzzzz", "crane"], 0.8, True),
        (["zzzzz"] * 6, -0.6, False),
        # Guesses after the end do not count.
        (["crane", "zzzzz", "geese"], 1.0, True),
    ],
)
def test_rewards(guesses: list[str], reward: float, solved: bool) -> None:
    wordle = Wordle(WORDS)
    games = Games(wordle, np.array([1]))
    for guess in guesses + guesses[-1:] * (TURNS - len(guesses)):
        games.guess(np.array([letters_of(guess)]))
    assert games.rewards.tolist() == pytest.approx([reward])
    assert games.solved.tolist() == [solved]


def test_games_are_independent() -> None:
    games = Games(Wordle(WORDS), np.array([0, 1, 2]))
    given = games.guess(np.array([letters_of(word) for word in ("allow", "geese", "xxxxx")]))
    assert given.tolist() == [[GREEN] * 5, [GREY, GREY, GREY, GREY, GREEN], [REFUSED] * 5]
    assert games.is_open.tolist() == [False, True, True]
