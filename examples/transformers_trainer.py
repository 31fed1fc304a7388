"""The trainer of transformers, with and without LoRA, publishes through one callback.

The example runs on a CPU in seconds and downloads nothing: the model is tiny and random. Feeds go below the store of
your choice, or to a temporary folder:

    python examples/transformers_trainer.py [STORE]
"""

import copy
import sys
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from shared import same_bits
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import deltasync
from deltasync import PublisherOptions, PublishEvent
from deltasync.transformers import DeltasyncCallback, What

STEPS = 5


def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    return LlamaForCausalLM(config)


def train(model: torch.nn.Module, what: What, url: str, folder: Path) -> list[PublishEvent]:
    """Train for some steps, each of which becomes a version; return the events of them."""
    rows = torch.randint(0, 256, (32, 16), generator=torch.Generator().manual_seed(0))
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=1e-5,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    events: list[PublishEvent] = []
    options = PublisherOptions(wait=True, observer=events.append)
    # A trainer does not notify its callbacks of an error: the `with` block releases the feed in any case.
    with DeltasyncCallback(url, what=what, options=options) as callback:
        Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()
    return events


def main(root: str, folder: Path) -> None:
    table = Table("published", "each delta, bytes", "a copy / a delta", "restored exactly")
    is_exact = True
    lora = LoraConfig(target_modules=["q_proj", "v_proj"], r=4)
    for what, model in (
        ("model", tiny_model()),
        ("adapter", get_peft_model(tiny_model(), lora)),
        ("merged", get_peft_model(tiny_model(), copy.deepcopy(lora))),
    ):
        deltas = [event for event in train(model, what, f"{root}/{what}", folder) if event.kind == "delta"]
        deltasync.restore(f"{root}/{what}", folder / what)
        restored, trained = load(what, folder / what), whole(model)
        exact = same_bits(restored, trained)
        sent, copies = (sum(sizes) / len(deltas) for sizes in zip(*map(sizes_of, deltas), strict=True))
        table.add_row(what, f"{sent:,.0f}", f"{copies / sent:.1f}", "yes" if exact else "NO")
        is_exact &= exact
    Console().print(table)
    if not is_exact:
        raise SystemExit(3)


def sizes_of(event: PublishEvent) -> tuple[int, int]:
    """Bytes of a delta, and of all float32 weights."""
    return event.payload_bytes, 4 * event.elements


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All weights, with the adapter merged in if there is one."""
    return copy.deepcopy(model).merge_and_unload().state_dict() if hasattr(model, "peft_config") else model.state_dict()


def load(what: What, folder: Path) -> dict[str, torch.Tensor]:
    """All weights of a restored folder."""
    if what != "adapter":
        return AutoModelForCausalLM.from_pretrained(folder).state_dict()
    from peft import PeftModel

    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    return whole(PeftModel.from_pretrained(tiny_model(), folder))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(sys.argv[1] if len(sys.argv) > 1 else f"{temporary}/feeds", Path(temporary))
