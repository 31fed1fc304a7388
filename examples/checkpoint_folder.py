"""A checkpoint folder that is always the newest version, for engines that load from disk.

A trainer publishes. A follower keeps the link `current` at a whole Hugging Face checkpoint, and a callback lets the
engine load it after each switch. The engine here is transformers; SGLang has a route for the same,
`update_weights_from_disk`. The example runs on a CPU in seconds and downloads nothing. The feed goes to the store of
your choice, or to a temporary folder:

    python examples/checkpoint_folder.py [STORE]

Without any code, `deltasync follow STORE --target current` keeps such a folder.
"""

import os
import sys
import tempfile
from pathlib import Path

import torch
from shared import published, ratio_text, same_bits
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from deltasync import Advance, FolderTarget, Follower, PublisherOptions, PublishEvent
from deltasync.torch import Publisher
from deltasync.transformers import model_files

STEPS = 5


def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4))


class Engine:
    """Any engine: it gets a path, and knows nothing of feeds."""

    def load(self, folder: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder)

    def answer(self, prompt: list[int]) -> list[int]:
        tokens = self.model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, pad_token_id=0)
        return list(tokens[0, len(prompt) :].tolist())


def main(url: str, folder: Path) -> None:
    current, engine, trained = folder / "current", Engine(), tiny_model()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=3e-6)
    rows = torch.randint(0, 256, (8, 16))

    def on_switch(moved: Advance) -> None:
        # Resolve the link once: files that are read through it one by one could be of two versions.
        engine.load(os.path.realpath(current))
        print(f"version {moved.version} is in {current.readlink()}; the engine answers {engine.answer([1, 2, 3])}")

    # The configuration is published beside the weights, so that the folder can be loaded.
    files, target = model_files(trained, dtype=torch.bfloat16), FolderTarget(current)
    events: list[PublishEvent] = []
    options = PublisherOptions(files=files, observer=events.append)
    with (
        Publisher(url, dtype=torch.bfloat16, options=options) as publisher,
        Follower(url, target, mirror=folder / "mirror", observer=on_switch) as follower,
    ):
        publisher.publish(trained, step=0).wait()
        follower.advance()
        for step in range(1, STEPS + 1):
            trained(input_ids=rows, labels=rows).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            publisher.publish(trained, step=step).wait()
            # A replica in a process of its own would call start(), and poll for versions by itself.
            follower.advance()

    exact = same_bits(engine.model.state_dict(), published(trained))
    print(ratio_text(events))
    print(f"the engine has the weights of step {STEPS}, bit for bit: {'yes' if exact else 'NO'}")
    if not exact:
        raise SystemExit(3)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(sys.argv[1] if len(sys.argv) > 1 else f"{temporary}/feed", Path(temporary))
