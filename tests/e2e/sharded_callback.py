"""A small model of transformers under FSDP2, published by the callback. Run by torchrun.

Accelerate shards on accelerators only, so a loop calls the callback as a `Trainer` would. The same weights, gathered
for the purpose, go to a second feed from rank 0 alone, to compare with.
"""

import argparse

import torch
import torch.distributed as dist
from sharded_trainer import gathered
from support.vllm import tiny_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import TrainerControl, TrainerState

from deltasync.torch.publisher import Publisher
from deltasync.trainer.publisher import PublisherOptions
from deltasync.transformers import DeltasyncCallback


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--feed", required=True)
    parser.add_argument("--reference", required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    model = tiny_model("qwen3").float()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, 300, (2, 16), generator=torch.Generator().manual_seed(1))
    state, control = TrainerState(is_world_process_zero=dist.get_rank() == 0), TrainerControl()
    with (
        DeltasyncCallback(options.feed, dtype=torch.bfloat16) as callback,
        Publisher(options.reference, dtype=torch.bfloat16, options=PublisherOptions(wait=True)) as reference,
    ):
        callback.on_train_begin(None, state, control, model=model)
        for step in range(options.steps):
            if step:
                model(input_ids=tokens, labels=tokens).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                state.global_step = step
                callback.on_step_end(None, state, control, model=model)
            whole = gathered(model)
            if dist.get_rank() == 0:
                reference.publish(whole, step=step).wait(300)
        callback.on_train_end(None, state, control, model=model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
