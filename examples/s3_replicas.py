"""One trainer and two replicas, each in a process of its own, that share nothing but a bucket.

The replicas follow the feed by themselves, and may start before the trainer or late. At the end their live weights are
compared with those of the trainer. Credentials and endpoint come from the environment (docs/stores.md):

    export AWS_ACCESS_KEY_ID=… AWS_SECRET_ACCESS_KEY=… AWS_ENDPOINT_URL=…
    python examples/s3_replicas.py s3://bucket/prefix      # any other store will do
"""

import multiprocessing
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from shared import ratio_text

import deltasync
from deltasync import Advance, Follower, PublishEvent
from deltasync.torch import ModuleTarget, Publisher

STEPS = 10


def new_model() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))


def train(url: str) -> deltasync.Manifest:
    """Publish every step as a version, and return the last one."""
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-6)
    events: list[PublishEvent] = []
    options = deltasync.PublisherOptions(wait=True, observer=events.append)
    with Publisher(url, dtype=torch.bfloat16, options=options) as publisher:
        publisher.publish(model, step=0)
        for step in range(1, STEPS + 1):
            batch = torch.randn(32, 256)
            torch.nn.functional.mse_loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            handle = publisher.publish(model, step=step)
        head = handle.wait()
    print(ratio_text(events))
    return head


def replica(name: str, url: str, last: int, out: Path) -> None:
    """Follow until the last version is live, then save the live weights."""
    model = new_model().bfloat16()

    def moved(advance: Advance) -> None:
        print(f"{name}: {advance}", flush=True)
        if advance.version >= last:
            follower.stop()

    with Follower(url, ModuleTarget(model), replica=name, observer=moved) as follower:
        follower.follow()
    save_file(model.state_dict(), out)


def main(url: str, folder: Path) -> None:
    # A feed that exists is continued: with `wait=True`, every step is one more version.
    before = deltasync.verify(url).head
    last = STEPS if before is None else before + 1 + STEPS
    # Not forked: the threads of the store's client do not survive a fork.
    spawn = multiprocessing.get_context("spawn")
    live = {name: folder / f"{name}.safetensors" for name in ("replica-1", "replica-2")}
    replicas = [spawn.Process(target=replica, args=(name, url, last, out), daemon=True) for name, out in live.items()]
    for process in replicas:
        process.start()
    head = train(url)
    for process in replicas:
        process.join(timeout=120)

    exact = True
    for name, out in live.items():
        equal = out.exists() and deltasync.digest(out) == head.digest
        print(f"{name} has version {head.version} of the trainer, bit for bit: {'yes' if equal else 'NO'}")
        exact &= equal
    if not exact:
        raise SystemExit(3)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python examples/s3_replicas.py STORE")
    with tempfile.TemporaryDirectory() as temporary:
        main(sys.argv[1], Path(temporary))
