"""A plain torch training loop that publishes every optimizer step. The last version is restored and compared.

The example runs on a CPU in seconds. The feed goes to the store of your choice, or to a temporary folder:

    python examples/torch_loop.py [STORE]
"""

import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

import deltasync
from deltasync.torch import Publisher

STEPS = 10


def main(url: str, folder: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-6)

    with Publisher(url, dtype=torch.bfloat16, options=deltasync.PublisherOptions(observer=print)) as publisher:
        publisher.publish(model, step=0)
        for step in range(1, STEPS + 1):
            batch = torch.randn(32, 256)
            torch.nn.functional.mse_loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            publisher.publish(model, step=step)

    manifest = deltasync.restore(url, folder / "last")
    restored = load_file(folder / "last" / "model.safetensors")
    exact = all(torch.equal(restored[name], weight.bfloat16()) for name, weight in model.state_dict().items())
    print(f"version {manifest.version} is step {manifest.step}, bit for bit: {'yes' if exact else 'NO'}")
    if not exact or manifest.step != STEPS:
        raise SystemExit(3)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(sys.argv[1] if len(sys.argv) > 1 else f"{temporary}/feed", Path(temporary))
