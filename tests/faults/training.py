"""A training run that may be killed at any time: the weights after a step depend on the number of the step alone."""

import hashlib
import os
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path

import torch
import torch._dynamo  # The first optimizer would import it, which takes seconds.
from torch import nn

from deltasync.torch.publisher import Publisher
from deltasync.trainer.publisher import PublisherOptions
from deltasync.trainer.schedule import AnchorPolicy

CHECKPOINT_STEPS = 3


class Run:
    """A small model and its optimizer. `folder` has the checkpoints that the trainer itself makes."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.step = 0
        self._path = folder / "checkpoint.pt"
        self.model = nn.Sequential(nn.Embedding(300, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def train(self) -> None:
        """One step, on data that its number chooses."""
        data = torch.Generator().manual_seed(self.step)
        tokens = torch.randint(0, 300, (8, 4), generator=data)
        loss = self.model(tokens).square().mean()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.step += 1

    def save(self) -> None:
        """Whole or not at all."""
        state = {"step": self.step, "model": self.model.state_dict(), "optimizer": self._optimizer.state_dict()}
        temporary = self._path.with_suffix(".tmp")
        torch.save(state, temporary)
        os.replace(temporary, self._path)

    def load(self) -> None:
        """The last checkpoint, if there is one."""
        if self._path.exists():
            state = torch.load(self._path)
            self.step = state["step"]
            self.model.load_state_dict(state["model"])
            self._optimizer.load_state_dict(state["optimizer"])

    @property
    def hash(self) -> str:
        """Of the weights as they are published, by torch and hashlib alone."""
        found = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            cast = tensor.to(torch.bfloat16).view(torch.int16).contiguous()
            found.update(name.encode() + cast.numpy().tobytes())
        return found.hexdigest()


def run(folder: str, url: str, stop: int, is_mapped: bool, has_begun: Event) -> None:
    """Go on from the last checkpoint, and publish every step, until step `stop` or until it is ended."""
    has_begun.set()
    torch.set_num_threads(1)
    training = Run(Path(folder))
    training.load()
    shadow = Path(folder) / "shadow" if is_mapped else None
    policy = AnchorPolicy(versions=7)
    with Publisher(
        url, dtype=torch.bfloat16, options=PublisherOptions(shadow_path=shadow, anchors=policy)
    ) as publisher:
        while training.step < stop:
            training.train()
            publisher.publish(training.model, step=training.step)
            if training.step % CHECKPOINT_STEPS == 0:
                training.save()


def hashes(folder: Path) -> Iterator[tuple[int, str]]:
    """Step by step, what an uninterrupted run has."""
    torch.set_num_threads(1)
    training = Run(folder)
    while True:
        training.train()
        yield training.step, training.hash
