"""One rank of a sharded trainer that publishes fixed weights: `python sharded.py RANK SIZE FOLDER`."""

import sys
import zlib
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import golden  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Shard, distribute_tensor  # noqa: E402

from deltasync.torch import ShardedPublisher  # noqa: E402

SHARDED = {"embed.weight": 0, "layers.0.up.weight": 1, "layers.0.half": 0}


def main(rank: int, size: int, folder: Path) -> None:
    zlib.compress = golden.stored
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "ranks"), size), rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    with ShardedPublisher(folder / "feed", options=golden.options()) as publisher:
        for step in range(3):
            tensors = golden.fixed_tensors(step)
            for name, dimension in SHARDED.items():
                tensors[name] = distribute_tensor(tensors[name], mesh, [Shard(dimension)], src_data_rank=None)
            publisher.publish(tensors, step=step, anchor=step == 2).wait(600)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
