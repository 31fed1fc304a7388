"""The trainer of the soak, a process of its own: the weights after a step depend on the number of the step alone.

    python -m soak.training FOLDER URL [--mapped]

`FOLDER/base` is the checkpoint that it starts with. It continues from its own last checkpoint, and appends a line of
JSON to `FOLDER/published.jsonl` for each version that is committed. SIGTERM ends it after the publication in progress.
"""

import argparse
import hashlib
import json
import logging
import os
import signal
import threading
from pathlib import Path

import torch
import torch._dynamo  # The first optimizer would import it, which takes seconds.
from safetensors.torch import load_file

from deltasync.checkpoint import companion_files, open_checkpoint
from deltasync.format.weights import Weights
from deltasync.torch.publisher import Publisher
from deltasync.trainer.events import PublishEvent
from deltasync.trainer.publisher import PublisherOptions
from deltasync.trainer.schedule import AnchorPolicy

CHECKPOINT_STEPS = 3
ANCHOR_VERSIONS = 15
PACE_S = 0.4

State = dict[str, torch.Tensor]


class Training:
    """AdamW on fp32 master weights, with gradients that the number of the step determines."""

    def __init__(self, folder: Path) -> None:
        self.step = 0
        self._path = folder / "checkpoint.pt"
        self._weights = {name: tensor.float() for name, tensor in load_file(folder / "base/model.safetensors").items()}
        self._optimizer = torch.optim.AdamW(self._weights.values(), lr=3e-5)

    @property
    def state(self) -> State:
        return self._weights

    def train(self) -> None:
        """One step."""
        data = torch.Generator().manual_seed(self.step)
        for tensor in self._weights.values():
            tensor.grad = torch.randn(tensor.shape, generator=data)
        self._optimizer.step()
        self.step += 1

    def save(self) -> None:
        """Whole or not at all."""
        state = {"step": self.step, "weights": self._weights, "optimizer": self._optimizer.state_dict()}
        temporary = self._path.with_suffix(".tmp")
        torch.save(state, temporary)
        os.replace(temporary, self._path)

    def load(self) -> None:
        """The last checkpoint, if there is one."""
        if self._path.exists():
            state = torch.load(self._path)
            self.step = state["step"]
            for name, tensor in self._weights.items():
                tensor.copy_(state["weights"][name])
            self._optimizer.load_state_dict(state["optimizer"])


def state_hash(state: State) -> str:
    """Of the weights as they are published, by torch and hashlib alone."""
    found = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        bits = tensor.detach().to(torch.bfloat16).view(torch.int16).contiguous()
        found.update(name.encode() + bits.numpy().tobytes())
    return found.hexdigest()


def weights_hash(weights: Weights) -> str:
    """The same hash of weights that were read from a feed or a file."""
    found = hashlib.sha256()
    arrays = {spec.name: array for spec, array in zip(weights.layout.tensors, weights.arrays, strict=True)}
    for name, array in sorted(arrays.items()):
        found.update(name.encode() + array.tobytes())
    return found.hexdigest()


def append_line(path: Path, fields: dict[str, object]) -> None:
    """In one write, so that a kill leaves no part of a line."""
    with path.open("ab", buffering=0) as file:
        file.write(json.dumps(fields).encode() + b"\n")


def stop_on_sigterm() -> threading.Event:
    """An event that SIGTERM sets."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    return stop


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("url")
    parser.add_argument("--mapped", action="store_true", help="keep the shadow in a mapped file")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    torch.set_num_threads(1)
    stop, folder = stop_on_sigterm(), options.folder

    def report(event: PublishEvent) -> None:
        fields = ("kind", "version", "step", "payload_bytes", "retries", "coalesced")
        append_line(folder / "published.jsonl", {name: getattr(event, name) for name in fields})

    training = Training(folder)
    training.load()
    publishing = PublisherOptions(
        shadow_path=folder / "shadow" if options.mapped else None,
        anchors=AnchorPolicy(versions=ANCHOR_VERSIONS),
        files=companion_files(open_checkpoint(folder / "base")),
        observer=report,
    )
    with Publisher(options.url, dtype=torch.bfloat16, options=publishing) as publisher:
        while not stop.wait(PACE_S):
            training.train()
            publisher.publish(training.state, step=training.step)
            if training.step % CHECKPOINT_STEPS == 0:
                training.save()


if __name__ == "__main__":
    main()
