"""A trainer that is killed, and goes on from its last checkpoint. Its replica notices nothing but one more version.

The checkpoint is older than the feed, as it is in real life: the trainer goes back by a few steps. Its first
publication compares with the feed's last version, and is a delta like any other. The example runs on a CPU in seconds.
The feed goes to the store of your choice, or to a temporary folder:

    python examples/resume.py [STORE]
"""

import multiprocessing
import os
import signal
import sys
import tempfile
from pathlib import Path

import torch
from shared import published, ratio_text, same_bits

import deltasync
from deltasync import Follower, PublishEvent
from deltasync.torch import ModuleTarget, Publisher

STEPS, SAVE_EVERY, KILLED_AT = 12, 5, 8


def new_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))


def train(url: str, checkpoint: Path, dies_at: int | None) -> None:
    """Train from the last checkpoint, or from the beginning, and publish every step; die at one of them."""
    model, events = new_model(), list[PublishEvent]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-6)
    step = 0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
        print(f"trainer: goes on from step {step}", flush=True)
    options = deltasync.PublisherOptions(observer=events.append, wait=True)
    # On a feed that exists, the first `publish` rebuilds the shadow from it. With `shadow_path` it is on the disk.
    with Publisher(url, dtype=torch.bfloat16, options=options) as publisher:
        publication = publisher.publish(model, step=step)
        while step < STEPS:
            batch = torch.randn(32, 256)
            torch.nn.functional.mse_loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            publication = publisher.publish(model, step=step)
            if step % SAVE_EVERY == 0:
                unfinished = checkpoint.with_suffix(".part")
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, unfinished)
                os.replace(unfinished, checkpoint)
            if step == dies_at:
                publication.wait()
                os.kill(os.getpid(), signal.SIGKILL)
        publication.wait()
    torch.save(published(model), checkpoint.with_name("trained.pt"))
    print(f"trainer: {ratio_text(events)}", flush=True)


def main(url: str, folder: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    served = new_model().bfloat16()
    with Follower(url, ModuleTarget(served)) as follower:
        for dies_at in (KILLED_AT, None):
            trainer = spawn.Process(target=train, args=(url, folder / "checkpoint.pt", dies_at), daemon=True)
            trainer.start()
            trainer.join(timeout=120)
            if (trainer.exitcode == -signal.SIGKILL) != (dies_at is not None):
                raise SystemExit(f"the trainer ended with exit code {trainer.exitcode}")
            # A replica in a process of its own would call start(), and poll for versions by itself.
            print(f"replica: {follower.advance()}")
    head = deltasync.restore(url, folder / "last")
    exact = same_bits(served.state_dict(), torch.load(folder / "trained.pt"))
    print(f"version {head.version} is step {head.step}, bit for bit: {'yes' if exact else 'NO'}")
    if not exact or head.step != STEPS or not deltasync.verify(url, deep=True).is_clean:
        raise SystemExit(3)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(sys.argv[1] if len(sys.argv) > 1 else f"{temporary}/feed", Path(temporary))
