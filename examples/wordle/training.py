"""The policy: a small language model whose text is a game of Wordle. It plays, and learns by imitation and by GRPO."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from numpy.typing import NDArray
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from deltasync import InvalidInputError
from wordle.game import ALPHABET, LETTERS, REFUSED, TURNS, Array, Games, Wordle, marks

BEGIN = 0
FIRST_LETTER = 1
FIRST_MARKED = FIRST_LETTER + ALPHABET
NO_WORD = FIRST_MARKED + REFUSED * ALPHABET
VOCABULARY = NO_WORD + 1
"""One token for the beginning, for each letter, for each letter with each mark, and for a guess that is not a word."""

PER_TURN = 2 * LETTERS
TEXT = 1 + TURNS * PER_TURN - LETTERS
"""A game as tokens: the beginning, then letters and marks of each turn. The marks of the last turn are left out."""

_BEFORE_LETTERS = np.add.outer(PER_TURN * np.arange(TURNS), np.arange(LETTERS)).ravel()
"""Positions in the text whose next token is a letter that the policy chooses."""

CLIP = 0.2
_GRADIENT_NORM_MAX = 1.0
_SPREAD_MIN = 1e-4
"""Keeps the advantages at zero in groups whose games all got the same reward."""

_WARMUP_STEPS = 80
_WARMUP_GAMES = 64
_WARMUP_LR = 3e-3
_LR_RISE_STEPS = 10
_FOLLOWS_MARKS = 0.7
"""The probability that a guess of the careless player fits all marks so far."""


# --- the policy -------------------------------------------------------------------------------------------------------


def new_policy(seed: int) -> PreTrainedModel:
    """An untrained policy, small enough for a CPU."""
    torch.manual_seed(seed)
    return _without_dropout(small_model(vocabulary=VOCABULARY, tokens_max=64))


def small_model(*, vocabulary: int, tokens_max: int, **options: Any) -> Qwen3ForCausalLM:
    """A Qwen3 of 0.6 million weights; `options` are further fields of its configuration."""
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=tokens_max,
        tie_word_embeddings=True,
        **options,
    )
    return Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]


def loaded_policy(folder: Path) -> PreTrainedModel:
    """A causal language model of transformers from its checkpoint, in float32. Its tokens get a new meaning."""
    if not (folder / "config.json").is_file():
        raise InvalidInputError(f"{folder} has no config.json", hint="give the folder of a transformers checkpoint")
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError, StrictDataclassError) as error:
        # Some of these messages are pages long.
        reason = str(error).partition("\n")[0]
        raise InvalidInputError(
            f"{folder} cannot be loaded as a causal language model: {reason:.300}",
            hint="give the folder of a transformers checkpoint",
        ) from error
    if model.config.vocab_size < VOCABULARY:
        raise InvalidInputError(
            f"the model in {folder} has {model.config.vocab_size} tokens, a game needs {VOCABULARY}",
            hint="give a model with a larger vocabulary",
        )
    return _without_dropout(model)


def policy_of_config(config_json: bytes) -> PreTrainedModel:
    """A policy of the shape that a config.json describes. Its weights are still to come."""
    config = AutoConfig.for_model(**json.loads(config_json))
    return _without_dropout(AutoModelForCausalLM.from_config(config, dtype=torch.float32))  # type: ignore[no-untyped-call]


def _without_dropout(model: Any) -> PreTrainedModel:
    """Without it, a letter has the same probability in the replica and in the trainer."""
    policy: PreTrainedModel = model.eval()
    return policy


# --- games as text ----------------------------------------------------------------------------------------------------


def letter_tokens(letters: Array) -> Array:
    """The tokens that the policy writes for a guess."""
    return FIRST_LETTER + letters


def mark_tokens(letters: Array, given: Array) -> Array:
    """The tokens that the policy reads after a guess."""
    return np.where(given == REFUSED, NO_WORD, FIRST_MARKED + given * ALPHABET + letters)


def letter_log_probs(logits: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the 26 letters: in its turn the policy can write nothing else."""
    return torch.log_softmax(logits[..., FIRST_LETTER:FIRST_MARKED].float(), dim=-1)


def all_letter_log_probs(model: PreTrainedModel, texts: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of all letters at each of the choices in whole games."""
    logits = model(input_ids=texts[:, :-1], use_cache=False, logits_to_keep=torch.from_numpy(_BEFORE_LETTERS)).logits
    return letter_log_probs(logits)


def chosen_letters(texts: torch.Tensor) -> torch.Tensor:
    """The letters that were chosen in whole games, in the order of `all_letter_log_probs`."""
    return texts[:, _BEFORE_LETTERS + 1] - FIRST_LETTER


# --- playing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Played:
    """Finished games, one in each row: the text, the log-probability of each chosen letter, and which letters count."""

    texts: NDArray[np.int64]
    log_probs: NDArray[np.float32]
    counts: NDArray[np.bool_]
    rewards: NDArray[np.float64]
    solved: NDArray[np.bool_]


@torch.inference_mode()
def play(model: PreTrainedModel, wordle: Wordle, answers: Array, random: torch.Generator) -> Played:
    """Play one game for each answer, all at once. Letters are sampled from the policy at temperature 1."""
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


def guesses_of(wordle: Wordle, played: Played, game: int, answer: str) -> list[tuple[str, str]]:
    """The guesses of one game up to its end, each with its marks: "." grey, "y" yellow, "g" green, "x" not a word."""
    result = []
    for turn in range(int(played.counts[game].sum()) // LETTERS):
        start = 1 + turn * PER_TURN
        letters = played.texts[game, start : start + LETTERS] - FIRST_LETTER
        guess = "".join(chr(ord("a") + letter) for letter in letters)
        given = marks(guess, answer) if guess in wordle.words else (REFUSED,) * LETTERS
        result.append((guess, "".join(".ygx"[mark] for mark in given)))
    return result


# --- learning ---------------------------------------------------------------------------------------------------------


class Learner:
    """A policy and its optimizer."""

    def __init__(self, model: PreTrainedModel, *, lr: float) -> None:
        self.model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return float(self._optimizer.param_groups[0]["lr"])

    @lr.setter
    def lr(self, value: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = value

    def step(self, loss: torch.Tensor) -> float:
        """Take one optimizer step; return the loss."""
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), _GRADIENT_NORM_MAX)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss.detach())


def lr_share(step: int, steps: int) -> float:
    """The share of the largest learning rate that a step has: it rises for ten steps, then falls to zero."""
    return min((step + 1) / _LR_RISE_STEPS, 1 - step / steps)


def advantages(rewards: NDArray[np.float64], *, group: int) -> NDArray[np.float64]:
    """How much better than the rest of its group each game went, in standard deviations of the group."""
    by_group = rewards.reshape(-1, group)
    apart = by_group - by_group.mean(axis=1, keepdims=True)
    spread = by_group.std(axis=1, keepdims=True) + _SPREAD_MIN
    result: NDArray[np.float64] = (apart / spread).ravel()
    return result


def grpo_loss(model: PreTrainedModel, played: Played, *, group: int) -> torch.Tensor:
    """The GRPO loss of one batch: the mean over the letters that count.

    Games with the same answer are each other's baseline. The ratio to the policy that played them is clipped.
    """
    texts = torch.from_numpy(played.texts)
    log_probs = all_letter_log_probs(model, texts).gather(2, chosen_letters(texts)[..., None])[..., 0]
    better = torch.from_numpy(advantages(played.rewards, group=group).astype(np.float32))[:, None]
    ratio = torch.exp(log_probs - torch.from_numpy(played.log_probs))
    gain = torch.minimum(ratio * better, ratio.clamp(1 - CLIP, 1 + CLIP) * better)
    return -gain[torch.from_numpy(played.counts)].mean()


class Warmup:
    """The warm-up: the policy learns to spell, and to follow marks to some degree, from games of a careless player.

    Without it there would be nothing to reward: random letters are never a word. Iterating takes the steps and yields
    the loss of each.
    """

    def __init__(self, model: PreTrainedModel, wordle: Wordle, *, seed: int) -> None:
        self._learner = Learner(model, lr=_WARMUP_LR)
        self._wordle = wordle
        self._random = np.random.default_rng(seed)

    def __len__(self) -> int:
        return _WARMUP_STEPS

    def __iter__(self) -> Iterator[float]:
        for step in range(_WARMUP_STEPS):
            self._learner.lr = _WARMUP_LR * lr_share(step, _WARMUP_STEPS)
            texts = careless_games(self._wordle, _WARMUP_GAMES, follows_marks=_FOLLOWS_MARKS, random=self._random)
            yield self._learner.step(imitation_loss(self._learner.model, texts))


def careless_games(wordle: Wordle, games: int, *, follows_marks: float, random: np.random.Generator) -> Array:
    """Texts of games: a guess fits all marks so far with the probability `follows_marks`, and is any word otherwise."""
    answers = random.integers(len(wordle.words), size=games)
    fits = np.ones((games, len(wordle.words)), dtype=bool)
    texts = [np.full((games, 1), BEGIN)]
    for _ in range(TURNS):
        allowed = np.where(random.random((games, 1)) < follows_marks, fits, True)
        guess = np.argmax(random.random(fits.shape) * allowed, axis=1)
        given = wordle.marks[guess, answers]
        texts += [letter_tokens(wordle.letters[guess]), mark_tokens(wordle.letters[guess], given)]
        fits &= (wordle.marks[guess] == given[:, None]).all(axis=2)
    return np.concatenate(texts, axis=1)[:, :TEXT]


def imitation_loss(model: PreTrainedModel, texts: Array) -> torch.Tensor:
    """The mean negative log-probability of the letters in games of another player."""
    tokens = torch.from_numpy(texts)
    return -all_letter_log_probs(model, tokens).gather(2, chosen_letters(tokens)[..., None]).mean()
