"""The policy: a small language model whose text is a game of Wordle, token by token."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from deltasync.errors import InvalidInputError
from wordle.wordle import ALPHABET, LETTERS, REFUSED, TURNS, Array

BEGIN = 0
FIRST_LETTER = 1
FIRST_MARKED = FIRST_LETTER + ALPHABET
NO_WORD = FIRST_MARKED + REFUSED * ALPHABET
VOCABULARY = NO_WORD + 1
"""A token for the begin, for each letter, for each letter with each mark, and for a guess that is not a word."""

PER_TURN = 2 * LETTERS
TEXT = 1 + TURNS * PER_TURN - LETTERS
"""A game as tokens: the begin, then the letters and the marks of each turn. Nobody reads the last marks."""

_PREDICTING = np.add.outer(PER_TURN * np.arange(TURNS), np.arange(LETTERS)).ravel()
"""Places in the text whose next token is a letter that the policy chooses."""


def new_policy(seed: int) -> PreTrainedModel:
    """A policy that knows nothing, small enough for a CPU."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    return _without_dropout(Qwen3ForCausalLM(config))  # type: ignore[no-untyped-call]


def loaded_policy(folder: Path) -> PreTrainedModel:
    """A causal language model of transformers from its checkpoint, in float32. Its tokens get the meaning of ours."""
    if not (folder / "config.json").is_file():
        raise InvalidInputError(f"{folder} has no config.json", hint="give the folder of a transformers checkpoint")
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError, StrictDataclassError) as error:
        # Some of these go on for pages.
        why = str(error).partition("\n")[0]
        raise InvalidInputError(
            f"{folder} cannot be loaded as a causal language model: {why:.300}",
            hint="give the folder of a transformers checkpoint",
        ) from error
    if model.config.vocab_size < VOCABULARY:
        raise InvalidInputError(
            f"the model in {folder} has {model.config.vocab_size} tokens, a game needs {VOCABULARY}",
            hint="give a model with a larger vocabulary",
        )
    return _without_dropout(model)


def policy_of_config(config_json: bytes) -> PreTrainedModel:
    """A policy of the same shape as the one whose config.json this is; its weights are still to come."""
    config = AutoConfig.for_model(**json.loads(config_json))
    return _without_dropout(AutoModelForCausalLM.from_config(config, dtype=torch.float32))  # type: ignore[no-untyped-call]


def _without_dropout(model: Any) -> PreTrainedModel:
    """In the same state on both sides: what a letter's probability was must not be left to chance."""
    found: PreTrainedModel = model.eval()
    return found


def letter_tokens(letters: Array) -> Array:
    """What the policy writes."""
    return FIRST_LETTER + letters


def mark_tokens(letters: Array, given: Array) -> Array:
    """What it reads after a guess."""
    return np.where(given == REFUSED, NO_WORD, FIRST_MARKED + given * ALPHABET + letters)


def letter_log_probs(logits: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the 26 letters: in its turn the policy can write nothing else."""
    return torch.log_softmax(logits[..., FIRST_LETTER:FIRST_MARKED].float(), dim=-1)


def all_letter_log_probs(model: PreTrainedModel, texts: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of all letters at each of the choices of whole games."""
    logits = model(input_ids=texts[:, :-1], use_cache=False, logits_to_keep=torch.from_numpy(_PREDICTING)).logits
    return letter_log_probs(logits)


def chosen_letters(texts: torch.Tensor) -> torch.Tensor:
    """The letters that were chosen in whole games, in the order of `all_letter_log_probs`."""
    return texts[:, _PREDICTING + 1] - FIRST_LETTER
