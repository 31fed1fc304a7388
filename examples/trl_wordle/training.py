"""A training script for TRL: a config, a dataset, an environment, a trainer; and a transfer to a feed."""

import argparse
import json
import threading
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import on_cpu
import torch
from datasets import Dataset
from game import PROMPT, WordleGame
from transformers import PrinterCallback, TrainerCallback, TrainerState
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from versions import Account, follow_versions

from deltasync import PublisherOptions, PublishEvent
from deltasync.trl import DeltasyncTransfer

GAMES, GENERATIONS, GROUPS = 1000, 8, 4
"""Games in the dataset; how often each is played, for comparison; how many of them a step learns from."""
TOKENS = 10
"""The most tokens of one guess. A correct one has eight."""


class Training:
    """One run, ready to start."""

    def __init__(self, options: argparse.Namespace, *, guesses: int) -> None:
        self._out: Path = options.out
        self._published: list[PublishEvent] = []
        transfer = DeltasyncTransfer(
            options.feed,
            max_lag=options.max_lag,
            timeout_s=options.wait_s,
            dtype=torch.bfloat16,
            options=PublisherOptions(observer=self._published.append),
        )
        self._trainer = new_trainer(options, transfer, guesses=guesses)
        transfer.attach(self._trainer)
        self._account: Account = follow_versions(self._trainer, transfer.count_of)

    def run(self) -> None:
        """Train, then write a report and the published weights."""
        started_s = time.perf_counter()
        self._trainer.train()
        seconds = time.perf_counter() - started_s
        self._trainer.model.to(torch.bfloat16).save_pretrained(self._out / "weights")
        logged = [entry for entry in self._trainer.state.log_history if "reward" in entry]
        report = {
            "steps": self._trainer.state.global_step,
            "seconds": seconds,
            "step_s": [entry["perf/step_s"] for entry in logged if "perf/step_s" in entry],
            "sync_s": [entry["perf/weight_sync_s"] for entry in logged],
            "rewards": [entry["reward"] for entry in logged],
            "account": self._account.to_json(),
            "versions": [asdict(event) for event in self._published],
        }
        (self._out / "report.json").write_text(json.dumps(report, indent=1))


def new_trainer(options: argparse.Namespace, transfer: Any, *, guesses: int) -> AsyncGRPOTrainer:
    """TRL's trainer, with the game and the transfer."""
    if on_cpu.is_needed():
        on_cpu.adjust_torch()
        on_cpu.adjust_trl()
    rows = {"prompt": [[{"role": "user", "content": PROMPT}]] * GAMES, "game": list(range(GAMES))}
    trainer = AsyncGRPOTrainer(
        options.model,
        args=config(options, guesses=guesses),
        train_dataset=Dataset.from_dict(rows),
        environment_factory=partial(WordleGame, options.environment),
        weight_transfer=transfer,
    )
    # By default it prints two hundred numbers for each step.
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Lines())
    trainer.add_callback(DrainQueues(trainer.rollout_worker))
    return trainer


class Lines(TrainerCallback):
    """Prints one line for each step."""

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        if logs is not None and "reward" in logs:
            taken = f"{logs.get('perf/step_s', 0):.2f} s, of which {logs['perf/weight_sync_s']:.3f} s held by the sync"
            progress = (
                f"step {state.global_step:4d}  reward {logs['reward']:6.3f}  stale {logs['sample/staleness_mean']:.1f}"
            )
            print(f"{progress}  {taken}", flush=True)


class DrainQueues(TrainerCallback):
    """Empties TRL's queues at the end: its rollout process does not exit before everything is read."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        for queue in (self._worker.rollout_buffer, self._worker.metrics_queue):
            threading.Thread(target=_drain, args=(queue,), daemon=True).start()


def _drain(queue: Any) -> None:
    while True:
        queue.get()


def config(options: argparse.Namespace, *, guesses: int) -> AsyncGRPOConfig:
    """The configuration of TRL's trainer."""
    return AsyncGRPOConfig(
        output_dir=str(options.out / "trl"),
        max_steps=options.steps,
        learning_rate=options.lr,
        # One group at a time: without a kernel for trees, attention costs the square of the length of a row.
        per_device_train_batch_size=GENERATIONS,
        gradient_accumulation_steps=GROUPS,
        num_generations=GENERATIONS,
        max_completion_length=TOKENS,
        max_tool_calling_iterations=guesses,
        vllm_server_base_url=options.server,
        weight_sync_steps=1,
        # Above the lag that the server is allowed; otherwise samples would be dropped for no fault of theirs.
        max_staleness=options.max_lag + 3,
        # At most as many games are played, and as many samples wait, as one step takes.
        max_inflight_tasks=GENERATIONS * GROUPS,
        queue_maxsize=GENERATIONS * GROUPS,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **(on_cpu.CONFIG if on_cpu.is_needed() else {}),
    )
