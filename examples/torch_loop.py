"""A plain torch training loop that publishes every optimizer step. The last version is restored and compared.

The example runs on a CPU in seconds. The feed goes to the store of your choice, or to a temporary folder:

    python examples/torch_loop.py [STORE]
"""

import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from shared import published, ratio_text, same_bits

import deltasync
from deltasync import PublishEvent
from deltasync.torch import Publisher

STEPS = 10


def main(url: str, folder: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-6)

    events: list[PublishEvent] = []
    options = deltasync.PublisherOptions(observer=events.append)
    with Publisher(url, dtype=torch.bfloat16, options=options) as publisher:
        publisher.publish(model, step=0)
        for step in range(1, STEPS + 1):
            batch = torch.randn(32, 256)
            torch.nn.functional.mse_loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            publisher.publish(model, step=step)

    manifest = deltasync.restore(url, folder / "last")
    exact = same_bits(load_file(folder / "last" / "model.safetensors"), published(model))
    print(*events, ratio_text(events), sep="\n")
    print(f"version {manifest.version} is step {manifest.step}, bit for bit: {'yes' if exact else 'NO'}")
    if not exact or manifest.step != STEPS:
        raise SystemExit(3)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(sys.argv[1] if len(sys.argv) > 1 else f"{temporary}/feed", Path(temporary))
