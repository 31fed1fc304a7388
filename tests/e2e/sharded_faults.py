"""One rank of a trainer that publishes three steps, and of which one fails at the second.

The environment says which one, and how.

Each rank writes what became of every step as a line of JSON. From the first step on, nothing but the publisher talks to
the other ranks.
"""

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from deltasync.errors import DeltasyncError
from deltasync.feed.upload import Upload
from deltasync.format.manifest import Manifest
from deltasync.store import open_store
from deltasync.store.protocol import Store
from deltasync.testing.faulty import Fault, FaultyStore, Operation
from deltasync.torch.sharded import ShardedPublisher
from deltasync.trainer.publisher import PublisherOptions

FAULTS = ("none", "kill", "hang", "refuse", "lose", "tensor", "step", "fence")


def weights(step: int) -> dict[str, torch.Tensor]:
    """A tensor by rows, one by columns, and one that every rank has."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(65 * 40, dtype=torch.float32).reshape(65, 40) + step
    return {
        "rows": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None),
        "columns": distribute_tensor(whole.t().contiguous(), mesh, [Shard(1)], src_data_rank=None),
        "plain": torch.full((3,), float(step)),
    }


class Failing:
    """The fault of this rank, once it is armed."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.is_armed = False

    def plan(self, operation: Operation) -> Fault | None:
        if self.is_armed and self.fault == "lose" and operation.key.startswith("versions/"):
            # The commit happens, but neither its answer nor a look at it comes back.
            return Fault("lose" if operation.verb == "create" else "refuse", transient=False)
        if not self.is_armed or operation.verb != "put" or not operation.key.startswith("payloads/"):
            return None
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "hang":
            time.sleep(600)
        return Fault("refuse", transient=False) if self.fault == "refuse" else None


def commit_behind_its_back(store: Store) -> None:
    """Another writer takes the next version."""
    upload = Upload(store)
    head = upload.open()
    assert head is not None
    upload.commit(
        Manifest(
            kind="delta",
            version=head.version + 1,
            parent=head.version,
            parent_digest=head.digest,
            layout_sha256=head.layout_sha256,
            digest=head.digest,
            elements=head.elements,
            changed=0,
            writer=upload.id,
            created_unix_s=1,
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--feed", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--fault", choices=FAULTS, required=True)
    parser.add_argument("--victim", type=int, default=0)
    parser.add_argument("--shadow", type=Path)
    parser.add_argument("--timeout-s", type=float, default=60)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    # What is imported at the first use takes seconds, and longer on one rank than on another: before any rank waits.
    weights(0)
    dist.barrier()
    rank = dist.get_rank()
    is_victim = rank == options.victim
    failing = Failing(options.fault if is_victim else "none")
    store = open_store(options.feed)
    publisher = ShardedPublisher(
        FaultyStore(store, failing.plan),
        timeout_s=options.timeout_s,
        options=PublisherOptions(shadow_path=options.shadow),
    )
    with (options.out / f"{rank}.jsonl").open("w") as out:
        for step in range(3):
            tensors = weights(step)
            if step == 1 and is_victim and options.fault == "tensor":
                tensors["rows"] = DTensor.from_local(torch.zeros(2, 2), tensors["rows"].device_mesh, [Shard(0)])
            if step == 1 and is_victim and options.fault == "fence":
                commit_behind_its_back(store)
            failing.is_armed = step == 1
            given = step + 10 if step == 1 and is_victim and options.fault == "step" else step
            try:
                version = publisher.publish(tensors, step=given).wait(300).version
                line = {"version": version, "kind": None, "error": ""}
            except DeltasyncError as error:
                line = {"version": None, "kind": error.kind, "error": str(error)}
            out.write(json.dumps(line) + "\n")
            out.flush()
    publisher.close()


if __name__ == "__main__":
    main()
