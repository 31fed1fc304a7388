"""Replicas as Ray actors: each follows the feed in a thread of its own, and answers with the live version.

Weights do not go through Ray's object store: actors on any host need only the URL. A new actor, after a crash or on a
machine that was added, catches up from the feed. The example runs on a CPU. The feed goes to the store of your
choice, or to a temporary folder:

    pip install ray
    python examples/ray_actor.py [STORE]
"""

import logging
import os
import sys
import tempfile
import threading
import time
from typing import Any

import ray
import torch
from shared import published, ratio_text, same_bits

import deltasync
from deltasync import Follower, PublishEvent
from deltasync.torch import ModuleTarget, Publisher

STEPS = 5


def new_model() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))


class Rollouts:
    """A replica. The follower is made in the actor's own process: it is neither pickled nor forked."""

    def __init__(self, url: str, name: str) -> None:
        torch.set_num_threads(1)
        self._model, self._lock = new_model().bfloat16(), threading.Lock()
        self._target = ModuleTarget(self._model, hold=self._lock)
        self._follower = Follower(url, self._target, replica=name)
        self._follower.start()

    def wait(self, version: int, timeout_s: float = 120.0) -> int:
        """Wait until a version is live, or a later one; the live version."""
        deadline_s = time.monotonic() + timeout_s
        while (live := self._follower.wait_live(timeout_s)) < version:
            if time.monotonic() > deadline_s or not self._follower.status().is_following:
                raise RuntimeError(f"version {version} is not live: {self._follower.error}")
            time.sleep(0.05)
        return live

    def generate(self, prompts: torch.Tensor) -> tuple[torch.Tensor, int | None]:
        """Answers, and the version that made all of them."""
        with self._lock, torch.no_grad():
            return self._model(prompts), self._target.version

    def weights(self) -> dict[str, torch.Tensor]:
        """A copy of the live weights, for the comparison at the end."""
        with self._lock:
            return {name: tensor.clone() for name, tensor in self._model.state_dict().items()}

    def close(self) -> None:
        self._follower.close()


def main(url: str) -> None:
    actor: Any = ray.remote(num_cpus=0)(Rollouts)
    replicas = {name: actor.remote(url, name) for name in ("replica-1", "replica-2")}
    model, events = new_model(), list[PublishEvent]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-6)
    options = deltasync.PublisherOptions(wait=True, observer=events.append)
    with Publisher(url, dtype=torch.bfloat16, options=options) as publisher:
        for step in range(STEPS + 1):
            if step == STEPS // 2:
                # As after a crash: the new actor has nothing, and catches up by itself.
                ray.kill(replicas["replica-2"])
                replicas["replica-2"] = actor.remote(url, "replica-2")
            batch = torch.randn(32, 256)
            torch.nn.functional.mse_loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            head = publisher.publish(model, step=step).wait()
            answers = ray.get([each.generate.remote(batch[:2].bfloat16()) for each in replicas.values()])
            print(f"version {head.version} is published; the actors answered with {[live for _, live in answers]}")
    exact = True
    for name, replica in replicas.items():
        live = ray.get(replica.wait.remote(head.version))
        equal = same_bits(ray.get(replica.weights.remote()), published(model))
        print(f"{name} has version {live}, bit for bit: {'yes' if equal else 'NO'}")
        exact &= equal
        ray.get(replica.close.remote())
    print(ratio_text(events))
    if not exact:
        raise SystemExit(3)


if __name__ == "__main__":
    # A local Ray that only this machine reaches, without dashboard and telemetry. With a cluster: address="auto".
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=2, include_dashboard=False, logging_level=logging.ERROR, _node_ip_address="127.0.0.1")
    try:
        with tempfile.TemporaryDirectory() as temporary:
            main(sys.argv[1] if len(sys.argv) > 1 else f"{temporary}/feed")
    finally:
        ray.shutdown()
