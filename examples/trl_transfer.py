"""TRL's asynchronous GRPO with its real trainer: weights go to a feed, and a replica follows it by itself.

The example runs on a CPU in half a minute, without a download or a server: the model is tiny and random, and the
replica is a torch module in this process that follows the feed in a thread. With vLLM, TRL's own rollout worker takes
the place of the one here.

    python examples/trl_transfer.py [STORE]
"""

import queue
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from shared import ratio_text, same_bits
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
from trl_wordle import on_cpu

import deltasync
from deltasync import Follower
from deltasync.torch import ModuleTarget
from deltasync.transformers import model_files
from deltasync.trl import DeltasyncTransfer

STEPS, MAX_LAG = 12, 1
VOCABULARY, PROMPT_TOKENS, COMPLETION_TOKENS, GENERATIONS = 32, 4, 8, 4
WANTED_TOKEN = 7


class Replica:
    """A model that follows a feed in a thread. `lock` is held while it generates, and while its weights change."""

    def __init__(self, url: str, model: Path) -> None:
        self.lock = threading.Lock()
        self.model = AutoModelForCausalLM.from_pretrained(model).eval()
        self._target = ModuleTarget(self.model, hold=self.lock)
        self._follower = Follower(url, self._target, replica="replica-0")

    def __enter__(self) -> "Replica":
        self._follower.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._follower.close()

    @property
    def version(self) -> int | None:
        """The version that is live; None before the first one."""
        return self._target.version


class Rollouts:
    """A rollout worker for TRL: generates with the replica's weights in a thread, and scores."""

    def __init__(self, replica: Replica) -> None:
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue(maxsize=2 * GENERATIONS)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.served: list[tuple[int, int]] = []
        """The label of each group, as TRL counts versions, and the version of the feed that made it."""
        self.published: list[deltasync.PublishEvent] = []
        self._replica, self._label = replica, 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def update_model_version(self, model_version: int) -> None:
        self._label = model_version

    def check_health(self, stale_after_s: float) -> None:
        if not self._thread.is_alive():
            raise RuntimeError("the rollouts have stopped")

    def _run(self) -> None:
        group = 0
        while not self._stopped.is_set():
            label = self._label
            with self._replica.lock:
                version = self._replica.version
                samples = [] if version is None else self._generated(self._replica.model, label, group)
            if version is None:
                time.sleep(0.05)
                continue
            self.served.append((label, version))
            for sample in samples:
                self._put(sample)
            group += 1

    def _put(self, sample: RolloutSample) -> None:
        while not self._stopped.is_set():
            try:
                self.rollout_buffer.put(sample, timeout=0.1)
                return
            except queue.Full:
                continue

    @torch.no_grad()
    def _generated(self, model: torch.nn.Module, label: int, group: int) -> list[RolloutSample]:
        """One group of completions; the reward is the share of one token in them."""
        ids = torch.randint(0, VOCABULARY, (1, PROMPT_TOKENS)).repeat(GENERATIONS, 1)
        chosen = []
        for _ in range(COMPLETION_TOKENS):
            logs = torch.log_softmax(model(input_ids=ids).logits[:, -1].float(), -1)
            token = torch.multinomial(logs.exp(), 1)
            chosen.append(logs.gather(1, token))
            ids = torch.cat((ids, token), 1)
        rewards = (ids[:, PROMPT_TOKENS:] == WANTED_TOKEN).float().mean(1)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        mask = np.repeat([0, 1], [PROMPT_TOKENS, COMPLETION_TOKENS])
        logs_of = torch.cat((torch.zeros(GENERATIONS, PROMPT_TOKENS), torch.cat(chosen, 1)), 1).numpy()
        return [
            RolloutSample(
                prompt=[],
                completion=[],
                input_ids=ids[i].numpy(),
                completion_mask=mask,
                old_log_probs=logs_of[i],
                advantage=float(advantages[i]),
                model_version=label,
                group_id=group,
                metrics={"reward": float(rewards[i])},
            )
            for i in range(GENERATIONS)
        ]


def tiny_model(folder: Path) -> PreTrainedTokenizerFast:
    """A random model in a folder, and its tokenizer."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")
    tokenizer.save_pretrained(folder)
    return tokenizer


def main() -> None:
    on_cpu.adjust_trl()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        url = sys.argv[1] if len(sys.argv) > 1 else str(folder / "feed")
        tokenizer = tiny_model(folder / "model")
        with Replica(url, folder / "model") as replica:
            rollouts = Rollouts(replica)
            trainer, transfer = train(url, folder, tokenizer, rollouts)
        # One version may carry several of TRL's counts.
        is_honest = all(label <= transfer.count_of(version) for label, version in rollouts.served)
        report(url, folder, trainer, rollouts, is_honest=is_honest)


def train(
    url: str, folder: Path, tokenizer: PreTrainedTokenizerFast, rollouts: Rollouts
) -> tuple[AsyncGRPOTrainer, DeltasyncTransfer]:
    """The training script: a transfer, a trainer, and the two attached to each other."""
    files = model_files(AutoModelForCausalLM.from_pretrained(folder / "model"), tokenizer)
    options = deltasync.PublisherOptions(files=files, observer=rollouts.published.append)
    transfer = DeltasyncTransfer(url, max_lag=MAX_LAG, timeout_s=60, options=options)
    trainer = AsyncGRPOTrainer(
        str(folder / "model"),
        args=AsyncGRPOConfig(
            output_dir=str(folder / "trainer"),
            max_steps=STEPS,
            per_device_train_batch_size=GENERATIONS,
            gradient_accumulation_steps=1,
            num_generations=GENERATIONS,
            learning_rate=1e-3,
            weight_sync_steps=1,
            max_staleness=4,
            token_budget=-1,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=STEPS,
            report_to=[],
            save_strategy="no",
        ),
        train_dataset=Dataset.from_dict({"prompt": ["-"] * 8}),
        reward_funcs=[],
        processing_class=tokenizer,
        rollout_worker=rollouts,
        weight_transfer=transfer,
    )
    transfer.attach(trainer)
    trainer.train()
    return trainer, transfer


def report(url: str, folder: Path, trainer: AsyncGRPOTrainer, rollouts: Rollouts, *, is_honest: bool) -> None:
    """Print what was published, and whether it is what was trained."""
    head = deltasync.restore(url, folder / "last")
    last = dict(AutoModelForCausalLM.from_pretrained(folder / "last").named_parameters())
    exact = same_bits(last, {name: p.detach() for name, p in trainer.model.named_parameters()})
    table = Table(title="Asynchronous GRPO through a feed", show_header=False)
    table.add_row("steps, versions", f"{trainer.state.global_step}, {head.version + 1}")
    table.add_row("groups generated, with versions", f"{len(rollouts.served)}, {len({v for _, v in rollouts.served})}")
    table.add_row("the last version is what was trained", "yes" if exact else "NO")
    table.add_row("no sample is older than its label", "yes" if is_honest else "NO")
    Console().print(table)
    print(ratio_text(rollouts.published, itemsize=4))
    if not exact or not is_honest:
        raise SystemExit(3)


if __name__ == "__main__":
    main()
