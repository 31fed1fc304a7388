"""A rollout worker: it waits for the first version, labels what it generates, and outlives a store that fails.

The trainer is a process of its own that starts late. In the middle the worker's store fails for a while: it goes on
with the version that it has, stops generating once that is too old, and catches up by itself. The example runs on a CPU
in seconds. The feed goes to the store of your choice, or to a temporary folder:

    python examples/rollout_worker.py [STORE]
"""

import multiprocessing
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import load_file
from shared import ratio_text, same_bits

import deltasync
from deltasync import Follower, PublishEvent
from deltasync.testing import Fault, FaultyStore, Operation
from deltasync.torch import ModuleTarget, Publisher

STEPS, LATE_S, STEP_S = 10, 2.0, 0.5
OUTAGE_S, STALE_MAX_S = 3.0, 1.0
"""How long the store fails, and from what age on a version is too old to generate with."""


def new_model() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))


def train(url: str) -> None:
    """The trainer: publishes every step as a version."""
    time.sleep(LATE_S)
    model, events = new_model(), list[PublishEvent]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-6)
    options = deltasync.PublisherOptions(wait=True, observer=events.append)
    with Publisher(url, dtype=torch.bfloat16, options=options) as publisher:
        for step in range(STEPS):
            batch = torch.randn(32, 256)
            torch.nn.functional.mse_loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            publisher.publish(model, step=step)
            time.sleep(STEP_S)
    print(f"trainer: {ratio_text(events)}", flush=True)


class Outage:
    """Lets every request to the store fail while it is on."""

    until_s: float | None = None

    def is_over(self) -> bool:
        return self.until_s is not None and time.monotonic() >= self.until_s

    def __call__(self, operation: Operation) -> Fault | None:
        return None if self.until_s is None or self.is_over() else Fault("refuse")


def work(url: str, first: int) -> torch.nn.Module:
    """Generate with the live version until the trainer's last one is live and the outage is over; return the model."""
    model, lock, outage = new_model().bfloat16(), threading.Lock(), Outage()
    target = ModuleTarget(model, hold=lock)
    rollouts, refused = Counter[int](), 0
    with (
        deltasync.open_store(url) as store,
        Follower(FaultyStore(store, outage), target, replica="worker-1") as follower,
    ):
        follower.start()
        print("worker: waiting for the first version")
        # Raises what following has ended with, such as wrong credentials, or StoreError after this time.
        print(f"worker: version {follower.wait_live(timeout_s=120)} is live")
        while target.version != first + STEPS - 1 or not outage.is_over():
            status = follower.status()
            if follower.error is not None and not status.is_following:
                # It has failed for good, and retrying does not help. End: what starts this process starts another one.
                raise follower.error
            if status.stale_s is None or status.stale_s > STALE_MAX_S:
                # The store fails, or a version is being fetched. It is retried in the background.
                refused += 1
                time.sleep(0.05)
                continue
            with lock, torch.no_grad():
                # The version cannot change while the lock is held, so it is the one that made all tokens.
                version = target.version
                model(torch.randn(8, 256, dtype=torch.bfloat16))
            if version is not None:
                rollouts[version] += 1
            if outage.until_s is None and version is not None and version >= first + 3:
                outage.until_s = time.monotonic() + OUTAGE_S
                print(f"worker: at version {version} the store fails, for {OUTAGE_S:g} s")
            time.sleep(0.02)
        print(f"worker: version {target.version} is live, after {follower.status().counts.moves} moves")
    print(f"worker: generated with {len(rollouts)} versions, held back {refused} times because its version was too old")
    if not refused:
        raise SystemExit("the outage was not noticed")
    return model


def main(url: str, folder: Path) -> None:
    head = deltasync.verify(url).head
    first = 0 if head is None else head + 1
    # Not forked: the threads of the store's client do not survive a fork.
    trainer = multiprocessing.get_context("spawn").Process(target=train, args=(url,), daemon=True)
    trainer.start()
    model = work(url, first)
    trainer.join(timeout=120)
    manifest = deltasync.restore(url, folder / "last")
    exact = same_bits(model.state_dict(), load_file(folder / "last" / "model.safetensors"))
    print(f"the worker has version {manifest.version}, bit for bit: {'yes' if exact else 'NO'}")
    if not exact or manifest.step != STEPS - 1:
        raise SystemExit(3)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(sys.argv[1] if len(sys.argv) > 1 else f"{temporary}/feed", Path(temporary))
