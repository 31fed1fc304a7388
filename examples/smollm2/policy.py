"""A small policy-gradient trainer: sample completions, score them, step AdamW on normalised advantages."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy

PROMPTS = (
    "Name a colour and say where you see it.",
    "Give me one tip for learning to cook.",
    "What do bees do in winter?",
    "Write a short line about the sea.",
    "Why is the sky blue?",
    "Tell me a fact about the moon.",
    "How do I keep a plant alive?",
    "Suggest a name for a friendly dog.",
    "What is a good breakfast?",
    "Describe rain in a few words.",
    "What does a clock do?",
    "Say something kind to a tired friend.",
)


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of one step: `prompts` times `samples` completions of `tokens` tokens each."""

    prompts: int = 2
    samples: int = 4
    tokens: int = 16
    clip: float = 1.0
    weight_decay: float = 0.01


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one step saw, before it moved the weights."""

    reward: float
    loss: float
    gradient_norm: float


class PolicyTrainer:
    """Trains a causal language model in float32 with REINFORCE; the same seed takes the same steps."""

    def __init__(self, model: Any, tokenizer: Any, *, settings: Settings, seed: int) -> None:
        """Take the model as it is; `seed` sets torch's random numbers, from which completions are sampled."""
        self.model = model
        self.settings = settings
        self._tokenizer = tokenizer
        self._optimizer = torch.optim.AdamW(model.parameters(), weight_decay=settings.weight_decay)
        self._steps = 0
        torch.manual_seed(seed)

    def step(self, learning_rate: float) -> Outcome:
        """Take one step on the next prompts."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        inputs = self._prompts()
        tokens = self._sample(inputs)
        start = inputs["input_ids"].shape[1]
        rewards = self._rewards(tokens[:, start:])
        loss = self._loss(tokens, start, inputs["attention_mask"], self._advantages(rewards))
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self._optimizer.step()
        self._steps += 1
        return Outcome(reward=rewards.mean().item(), loss=loss.item(), gradient_norm=norm.item())

    def save(self) -> dict[str, Any]:
        """Copy everything that the next step depends on."""
        optimizer = self._optimizer.state_dict()
        return {
            "model": _clone(self.model.state_dict()),
            "moments": {key: _clone(moments) for key, moments in optimizer["state"].items()},
            "groups": optimizer["param_groups"],
            "steps": self._steps,
            "random": torch.get_rng_state(),
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Go back to a saved point; it stays usable for another return."""
        self.model.load_state_dict(saved["model"])
        moments = {key: _clone(moments) for key, moments in saved["moments"].items()}
        self._optimizer.load_state_dict({"state": moments, "param_groups": saved["groups"]})
        self._steps = saved["steps"]
        torch.set_rng_state(saved["random"])

    def _prompts(self) -> Any:
        first = self._steps * self.settings.prompts
        chosen = [PROMPTS[(first + i) % len(PROMPTS)] for i in range(self.settings.prompts)]
        texts = [
            self._tokenizer.apply_chat_template(
                [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}],
                add_generation_prompt=True,
                tokenize=False,
            )
            for text in chosen
            for _ in range(self.settings.samples)
        ]
        return self._tokenizer(texts, return_tensors="pt", padding=True)

    @torch.no_grad()
    def _sample(self, inputs: Any) -> torch.Tensor:
        count = self.settings.tokens
        output = self.model.generate(
            **inputs, do_sample=True, temperature=1.0, top_k=0, min_new_tokens=count, max_new_tokens=count
        )
        return torch.as_tensor(output)

    def _rewards(self, completions: torch.Tensor) -> torch.Tensor:
        """Reward short words: the share of characters that are not letters."""
        texts = self._tokenizer.batch_decode(completions, skip_special_tokens=True)
        return torch.tensor([sum(not c.isalpha() for c in text) / max(1, len(text)) for text in texts])

    def _advantages(self, rewards: torch.Tensor) -> torch.Tensor:
        """Normalise within the completions of each prompt."""
        groups = rewards.reshape(-1, self.settings.samples)
        centred = groups - groups.mean(1, keepdim=True)
        return (centred / (groups.std(1, keepdim=True) + 1e-6)).reshape(-1)

    def _loss(self, tokens: torch.Tensor, start: int, mask: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        """Return the mean of advantage times negative log-probability over the sampled tokens."""
        seen = torch.cat([mask, torch.ones_like(tokens[:, start:])], 1)
        keep = tokens.shape[1] - start + 1  # positions whose logits predict a sampled token, and the last
        logits = self.model(input_ids=tokens, attention_mask=seen, logits_to_keep=keep).logits[:, :-1]
        losses = cross_entropy(logits.flatten(0, 1), tokens[:, start:].flatten(), reduction="none")
        return (losses.reshape(len(tokens), -1).mean(1) * advantages).mean()


def _clone(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}
