"""Weights through a bucket of the Hugging Face Hub: a trainer publishes, a replica follows, and both need only the Hub.

A private bucket is made if there is none. A bucket has no create-if-absent, so the writer holds a lease
(docs/stores.md): run one trainer for each prefix.

    pip install 'deltasync[hf,torch]'
    export HF_TOKEN=…                                               # or `hf auth login`
    python examples/hub_bucket.py hf://buckets/NAMESPACE/NAME/PREFIX
"""

import sys

import huggingface_hub
import torch
from shared import published, ratio_text, same_bits

import deltasync
from deltasync import Follower, PublishEvent
from deltasync.torch import ModuleTarget, Publisher

STEPS = 5


def new_model() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))


def main(url: str) -> None:
    namespace, name = url.removeprefix("hf://buckets/").split("/")[:2]
    huggingface_hub.create_bucket(f"{namespace}/{name}", private=True, exist_ok=True)

    trained, served = new_model(), new_model().bfloat16()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=3e-6)
    events: list[PublishEvent] = []
    options = deltasync.PublisherOptions(observer=events.append)
    with (
        Publisher(url, dtype=torch.bfloat16, options=options) as publisher,
        Follower(url, ModuleTarget(served)) as follower,
    ):
        for step in range(STEPS + 1):
            if step > 0:
                batch = torch.randn(32, 256)
                torch.nn.functional.mse_loss(trained(batch), batch).backward()
                optimizer.step()
                optimizer.zero_grad()
            publisher.publish(trained, step=step).wait()
            # A replica in a process of its own would call start(), and poll for versions by itself.
            print(follower.advance())

    exact = same_bits(served.state_dict(), published(trained))
    clean = deltasync.verify(url, deep=True).is_clean
    print(ratio_text(events))
    print(f"the replica has the weights of step {STEPS}, bit for bit: {'yes' if exact else 'NO'}")
    print(f"verify --deep: {'clean' if clean else 'DAMAGED'}")
    if not exact or not clean:
        raise SystemExit(3)


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].startswith("hf://buckets/"):
        raise SystemExit("usage: python examples/hub_bucket.py hf://buckets/NAMESPACE/NAME/PREFIX")
    main(sys.argv[1])
