"""A small model under FSDP2 (and, on four ranks, tensor parallelism too) that publishes after every step.

Run by torchrun. The same weights, gathered for the purpose, go to a second feed from rank 0 alone, to compare with.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from deltasync.torch.publisher import Publisher
from deltasync.torch.sharded import ShardedPublisher
from deltasync.torch.tensors import named_tensors
from deltasync.trainer.publisher import PublisherOptions

VOCABULARY = 65


class Model(nn.Module):
    """Rows that no number of ranks divides, a head that is tied to the embedding, and a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = 2 * width + 34
        self.embed = nn.Embedding(VOCABULARY, width)
        self.uneven = nn.Linear(width, width + 1)
        self.back = nn.Linear(width + 1, width, bias=False)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += tokens.numel()
        x = self.embed(tokens)
        x = x + self.back(torch.relu(self.uneven(x)))
        x = x + self.down(torch.relu(self.up(x)))
        logits: torch.Tensor = self.head(x)
        return logits


def sharded(width: int) -> Model:
    torch.manual_seed(0)
    model = Model(width)
    ranks = dist.get_world_size()
    if ranks == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        for module in (model.uneven, model.up, model.down, model):
            fully_shard(module, mesh=mesh["data"])
    else:
        mesh = init_device_mesh("cpu", (ranks,))
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        apart = {*model.up.parameters(), *model.down.parameters()}
        for module in (model.uneven, model):
            fully_shard(module, mesh=mesh, ignored_params=apart)
    return model


def gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole model, on every rank."""
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in named_tensors(model).items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--feed", required=True)
    parser.add_argument("--reference", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--first-step", type=int, default=0)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    model = sharded(options.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate)
    tokens = torch.randint(0, VOCABULARY, (4, 16), generator=torch.Generator().manual_seed(1))
    with (
        ShardedPublisher(
            options.feed, dtype=torch.bfloat16, timeout_s=300, options=PublisherOptions(files={"config.json": b"{}"})
        ) as publisher,
        Publisher(options.reference, dtype=torch.bfloat16, options=PublisherOptions(wait=True)) as reference,
    ):
        for step in range(options.first_step, options.first_step + options.steps):
            if step:
                loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            whole = gathered(model)
            # An anchor is written while the next versions come.
            done = publisher.publish(model, step=step, anchor=step == 1)
            if dist.get_rank() == 0:
                reference.publish(whole, step=step).wait(300)
            if step % 2:
                done.wait(300)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
