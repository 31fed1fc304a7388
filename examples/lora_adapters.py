"""Two LoRA adapters of one base model, each with a feed of its own, and a replica that serves both.

Only adapters are published: the base model stays where it is. With vLLM, `deltasync serve --adapter NAME=URL` is the
replica (docs/vllm.md). The example runs on a CPU in seconds and downloads nothing: the model is tiny and random. Feeds
go below the store of your choice, or to a temporary folder:

    python examples/lora_adapters.py [STORE]
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file
from shared import ratio_text, same_bits
from transformers import LlamaConfig, LlamaForCausalLM

import deltasync
from deltasync import Advance, FolderTarget, Follower, PublisherOptions, PublishEvent
from deltasync.torch import Publisher

STEPS = 5
ADAPTERS = ("math", "chat")


def base_model() -> LlamaForCausalLM:
    """The same on every host."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 512}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4))


def with_adapters() -> PeftModel:
    """The base model with both adapters, untrained."""
    lora = LoraConfig(target_modules=["q_proj", "v_proj"], r=8)
    model = get_peft_model(base_model(), lora, adapter_name=ADAPTERS[0])
    for name in ADAPTERS[1:]:
        model.add_adapter(name, lora)
    return model


def tensors_of(model: PeftModel, adapter: str) -> dict[str, torch.Tensor]:
    """The tensors of one adapter, under the names of PEFT's own checkpoints, as they are published."""
    found = get_peft_model_state_dict(model, adapter_name=adapter)
    return {name: tensor.bfloat16() for name, tensor in found.items()}


def train(model: PeftModel, adapter: str, url: str) -> None:
    """Train one adapter, and publish every step."""
    model.set_adapter(adapter)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-6)
    rows = torch.randint(0, 256, (8, 16))
    config = json.dumps(model.peft_config[adapter].to_dict(), default=list).encode()
    events: list[PublishEvent] = []
    options = PublisherOptions(files={"adapter_config.json": config}, wait=True, observer=events.append)
    with Publisher(url, options=options) as publisher:
        publisher.publish(tensors_of(model, adapter), step=0)
        for step in range(1, STEPS + 1):
            model(input_ids=rows, labels=rows).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            publisher.publish(tensors_of(model, adapter), step=step)
    whole = 2 * sum(p.numel() for p in model.get_base_model().parameters() if not p.requires_grad)
    print(f"{adapter}: {ratio_text(events)}; a full copy of the base model has {whole:,} bytes")


def follow(model: PeftModel, adapter: str, url: str, folder: Path) -> None:
    """Load the newest version of an adapter into the served model."""
    current = folder / adapter

    def on_switch(moved: Advance) -> None:
        # Resolve the link once: files that are read through it one by one could be of two versions.
        weights = load_file(f"{os.path.realpath(current)}/model.safetensors")
        set_peft_model_state_dict(model, weights, adapter_name=adapter)
        print(f"{adapter}: version {moved.version} is served")

    with Follower(url, FolderTarget(current), observer=on_switch) as follower:
        follower.advance()


def main(root: str, folder: Path) -> None:
    trained, served = with_adapters(), with_adapters()
    exact = True
    for adapter in ADAPTERS:
        url = f"{root}/{adapter}"
        train(trained, adapter, url)
        follow(served, adapter, url, folder)
        exact &= deltasync.verify(url, deep=True).is_clean
    # The other adapter is still the one that was loaded before.
    exact &= all(same_bits(tensors_of(served, name), tensors_of(trained, name)) for name in ADAPTERS)
    print(f"both adapters are served as they were trained, bit for bit: {'yes' if exact else 'NO'}")
    if not exact:
        raise SystemExit(3)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(sys.argv[1] if len(sys.argv) > 1 else f"{temporary}/feeds", Path(temporary))
