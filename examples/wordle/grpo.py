"""GRPO: games on the same answer are each other's baseline, and the ratio to the policy that played them is clipped."""

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from wordle.playing import Played
from wordle.policy import all_letter_log_probs, chosen_letters

CLIP = 0.2
_GRADIENT_NORM_MAX = 1.0
_SPREAD_MIN = 1e-4
"""Keeps groups in which all games went alike at zero."""


def advantages(rewards: NDArray[np.float64], *, group: int) -> NDArray[np.float64]:
    """How much better than the others of its group each game went, in standard deviations of the group."""
    by_group = rewards.reshape(-1, group)
    apart = by_group - by_group.mean(axis=1, keepdims=True)
    spread = by_group.std(axis=1, keepdims=True) + _SPREAD_MIN
    found: NDArray[np.float64] = (apart / spread).ravel()
    return found


def loss_of(model: PreTrainedModel, played: Played, *, group: int) -> torch.Tensor:
    """The loss of one batch: the mean over the letters that count."""
    texts = torch.from_numpy(played.texts)
    log_probs = all_letter_log_probs(model, texts).gather(2, chosen_letters(texts)[..., None])[..., 0]
    better = torch.from_numpy(advantages(played.rewards, group=group).astype(np.float32))[:, None]
    ratio = torch.exp(log_probs - torch.from_numpy(played.log_probs))
    gain = torch.minimum(ratio * better, ratio.clamp(1 - CLIP, 1 + CLIP) * better)
    return -gain[torch.from_numpy(played.counts)].mean()


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
        """One step down; the loss."""
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), _GRADIENT_NORM_MAX)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss.detach())
