"""Playing: many games at once, with the model's own cache of keys and values."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, PreTrainedModel

from wordle.policy import BEGIN, FIRST_LETTER, TEXT, letter_log_probs, letter_tokens, mark_tokens
from wordle.wordle import LETTERS, TURNS, Array, Games, Wordle


@dataclass(frozen=True, slots=True, eq=False)
class Played:
    """Finished games, one in each row: their text, the log-probability of each chosen letter, which of them count."""

    texts: NDArray[np.int64]
    log_probs: NDArray[np.float32]
    counts: NDArray[np.bool_]
    rewards: NDArray[np.float64]
    solved: NDArray[np.bool_]


@torch.inference_mode()
def play(model: PreTrainedModel, wordle: Wordle, answers: Array, random: torch.Generator) -> Played:
    """One game for each answer. Letters are drawn as the policy likes them, at temperature 1."""
    games, cache = Games(wordle, answers), DynamicCache()
    texts = np.full((len(answers), 1), BEGIN)
    unread = texts
    log_probs, counts = [], []
    for _ in range(TURNS):
        is_open = games.is_open
        for _ in range(LETTERS):
            logits = model(torch.from_numpy(unread), past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            of_letters = letter_log_probs(logits[:, -1])
            chosen = torch.multinomial(of_letters.exp(), 1, generator=random)
            log_probs.append(of_letters.gather(1, chosen).numpy())
            counts.append(is_open[:, None])
            unread = letter_tokens(chosen.numpy())
            texts = np.concatenate([texts, unread], axis=1)
        letters = texts[:, -LETTERS:] - FIRST_LETTER
        seen = mark_tokens(letters, games.guess(letters))
        unread = np.concatenate([unread, seen], axis=1)
        texts = np.concatenate([texts, seen], axis=1)
    return Played(
        texts=texts[:, :TEXT],
        log_probs=np.concatenate(log_probs, axis=1),
        counts=np.concatenate(counts, axis=1),
        rewards=games.rewards,
        solved=games.solved,
    )
