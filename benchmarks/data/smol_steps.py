"""The training behind the real deltas: load the model, warm up, then step at each learning rate and save."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.bits import Bits
from benchmarks.data.files import write_checkpoint
from benchmarks.data.smol import FOLDER, Log, Plan, master_path, state_path
from examples.smollm2.policy import PolicyTrainer, Settings
from examples.smollm2.weights import load_model, load_tokenizer

TIED = "lm_head.weight"  # an alias of the embedding: a checkpoint leaves it out


def run(folder: Path, plan: Plan, log: Log) -> None:
    """Generate the states of a plan; every learning rate starts from the same weights and moments."""
    started = time.monotonic()
    model = load_model(seed=plan.seed)
    settings = Settings(prompts=plan.prompts, samples=plan.samples, tokens=plan.tokens)
    trainer = PolicyTrainer(model, load_tokenizer(), settings=settings, seed=plan.seed)
    log(f"{FOLDER}: model loaded in {time.monotonic() - started:.1f} s")

    def step(label: str, learning_rate: float) -> None:
        begun = time.monotonic()
        outcome = trainer.step(learning_rate)
        log(
            f"{label}: reward {outcome.reward:.3f}, loss {outcome.loss:+.4f}, "
            f"gradient norm {outcome.gradient_norm:.2f}, {time.monotonic() - begun:.1f} s"
        )

    for number in range(1, plan.warmup + 1):
        step(f"warm-up {number}/{plan.warmup}", plan.learning_rates[0])
    settled = trainer.save()
    for learning_rate in plan.learning_rates:
        trainer.restore(settled)
        for number in range(plan.pairs + 1):
            if number:
                step(f"lr {learning_rate:g} step {number}/{plan.pairs}", learning_rate)
            state = {name: value for name, value in model.state_dict().items() if name != TIED}
            write_checkpoint(state_path(folder, learning_rate, number), _rounded(state), dtype="BF16")
            if number < 2:
                master = _master(state, layers=plan.fp32_layers)
                write_checkpoint(master_path(folder, learning_rate, number), master, dtype="F32")
    log(f"{FOLDER}: done in {time.monotonic() - started:.0f} s")


def _rounded(state: dict[str, Any]) -> dict[str, Bits]:
    """Cast a state to bf16, as a trainer does before it hands its weights over."""
    return {
        name: value.detach().to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        for name, value in state.items()
    }


def _master(state: dict[str, Any], *, layers: int) -> dict[str, Bits]:
    """Take the float32 weights of the first layers."""
    prefixes = tuple(f"model.layers.{layer}." for layer in range(layers))
    return {
        name: value.detach().view(torch.int32).numpy().view(np.uint32)
        for name, value in state.items()
        if name.startswith(prefixes)
    }
