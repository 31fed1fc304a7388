"""FSDP2: every rank publishes its own shard, and no rank gathers the model. The last version is restored and compared.

The example runs on two ranks of a CPU in seconds. On GPUs only the backend and the mesh differ. The feed goes to the
store of your choice, or to a temporary folder:

    torchrun --standalone --nproc-per-node 2 examples/fsdp2.py [STORE]
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from shared import ratio_text, same_bits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import deltasync
from deltasync.torch import ShardedPublisher

STEPS = 5


def sharded_model() -> torch.nn.Sequential:
    """A model with the same weights on all ranks, then sharded. 257 rows: shards may differ in size."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 257), torch.nn.GELU(), torch.nn.Linear(257, 256))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
    return model


def main(url: str, folder: Path) -> None:
    model = sharded_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    rank = dist.get_rank()
    torch.manual_seed(1 + rank)  # each rank has its own batches

    events: list[deltasync.PublishEvent] = []
    options = deltasync.PublisherOptions(observer=events.append)
    with ShardedPublisher(url, dtype=torch.bfloat16, options=options) as publisher:
        publisher.publish(model, step=0)
        for step in range(1, STEPS + 1):
            batch = torch.randn(32, 256)
            torch.nn.functional.mse_loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            publisher.publish(model, step=step)  # on every rank

    # Gathered only for the comparison.
    trained = {name: weight.full_tensor().bfloat16() for name, weight in model.state_dict().items()}
    if rank == 0:
        manifest = deltasync.restore(url, folder / "last")
        exact = same_bits(load_file(folder / "last" / "model.safetensors"), trained)
        print(*events, ratio_text(events), sep="\n")
        print(f"version {manifest.version} is step {manifest.step}, bit for bit: {'yes' if exact else 'NO'}")
        if not exact or manifest.step != STEPS:
            raise SystemExit(3)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as temporary:
        given = [sys.argv[1] if len(sys.argv) > 1 else f"{temporary}/feed"]
        dist.broadcast_object_list(given)  # all ranks use the folder of rank 0
        main(given[0], Path(temporary))
    dist.destroy_process_group()
