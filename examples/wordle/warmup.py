"""The warm-up: a policy learns to spell, and to heed marks to some degree, from games of a careless player.

Without it there would be nothing to reward: letters drawn by chance are never a word.
"""

from collections.abc import Iterator

import numpy as np
import torch
from transformers import PreTrainedModel

from wordle.grpo import Learner
from wordle.policy import BEGIN, TEXT, all_letter_log_probs, chosen_letters, letter_tokens, mark_tokens
from wordle.wordle import TURNS, Array, Wordle

_STEPS = 80
_GAMES = 64
_LR = 3e-3
_LR_RISES = 10
_HEEDS = 0.7


class Warmup:
    """Imitation of a careless player. Iterating takes the steps, and gives the loss of each."""

    def __init__(self, model: PreTrainedModel, wordle: Wordle, *, seed: int) -> None:
        self._learner = Learner(model, lr=_LR)
        self._wordle = wordle
        self._random = np.random.default_rng(seed)

    def __len__(self) -> int:
        return _STEPS

    def __iter__(self) -> Iterator[float]:
        for step in range(_STEPS):
            self._learner.lr = _LR * min((step + 1) / _LR_RISES, 1 - step / _STEPS)
            texts = careless_games(self._wordle, _GAMES, heeds=_HEEDS, random=self._random)
            yield self._learner.step(imitation_loss(self._learner.model, texts))


def careless_games(wordle: Wordle, games: int, *, heeds: float, random: np.random.Generator) -> Array:
    """Texts of games in which a guess fits all marks so far with the probability `heeds`; else it is any word."""
    answers = random.integers(len(wordle.words), size=games)
    fits = np.ones((games, len(wordle.words)), dtype=bool)
    texts = [np.full((games, 1), BEGIN)]
    for _ in range(TURNS):
        may = np.where(random.random((games, 1)) < heeds, fits, True)
        guess = np.argmax(random.random(fits.shape) * may, axis=1)
        given = wordle.marks[guess, answers]
        texts += [letter_tokens(wordle.letters[guess]), mark_tokens(wordle.letters[guess], given)]
        fits &= (wordle.marks[guess] == given[:, None]).all(axis=2)
    return np.concatenate(texts, axis=1)[:, :TEXT]


def imitation_loss(model: PreTrainedModel, texts: Array) -> torch.Tensor:
    """How surprised the policy is by the letters of other players' games."""
    given = torch.from_numpy(texts)
    return -all_letter_log_probs(model, given).gather(2, chosen_letters(given)[..., None]).mean()
