"""The trainer's half of weight transfer, inside vLLM's environment, with vLLM's own source, factory and client.

Prints JSON; run by `test_vllm_trainer`.
"""

import json
import sys
from collections.abc import Collection, Iterator
from typing import Any

import requests
import torch
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from deltasync.errors import DeltasyncError
from deltasync.feed.log import Log
from deltasync.store import open_store
from deltasync.trainer.publisher import PublisherOptions
from deltasync.vllm.trainer import DeltasyncTrainerInitInfo


class NoClient:
    """A client that nothing may call."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was called")


class Counted(ModuleSource):
    """Counts the tensors that were gathered."""

    gathered = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for pair in super().__iter__():
            self.gathered += 1
            yield pair


class Split(ModuleSource):
    """Each rank holds only some of the tensors."""

    def held_names(self) -> Collection[str]:
        return [self.metadata()[0].name]


def init(feed: str, source: Any, client: Any = None, *, rank: int = 0, **options: Any) -> Any:
    info = DeltasyncTrainerInitInfo(feed, rank=rank, **options)
    return WeightTransferTrainerFactory.trainer_init(
        info, client=NoClient() if client is None else client, source=source
    )


def refused(feed: str, source: Any) -> str:
    try:
        init(feed, source)
    except DeltasyncError as error:
        return f"{error.kind}: {error.message}"
    return "accepted"


def main() -> None:
    folder, old, new, url = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(old, dtype=torch.bfloat16)
    trained = AutoModelForCausalLM.from_pretrained(new, dtype=torch.bfloat16)
    found: dict[str, Any] = {}

    # Servers that follow by themselves: nothing calls them.
    feed = f"{folder}/alone"
    sender, follower = Counted(model), Counted(model)
    engines = [init(feed, sender, wait_s=300.0), init(f"{folder}/other", follower, rank=1)]
    for _ in range(2):
        for engine in engines:
            engine.send_weights()
        model.load_state_dict(trained.state_dict())
    found["gathered"] = [sender.gathered, follower.gathered]
    for engine in engines:
        engine.shutdown()
    log = Log(open_store(feed))
    found["versions"] = [log.read(version).kind for version in log.versions()]
    found["refused"] = [
        refused(feed, torch_linear()),
        refused(feed, Split(model)),
        refused(feed, None),
    ]
    # A round that fails still gathers every tensor, so that no other rank waits.
    stuck = Counted(model)
    engine = init(feed, stuck, options=PublisherOptions(retry_s=0.0))
    with torch.no_grad():
        extra = torch.nn.Parameter(torch.zeros(3))
        model.register_parameter("unknown", extra)
    try:
        engine.send_weights()
    except DeltasyncError as error:
        found["failed"] = [error.kind, stuck.gathered - len(stuck.metadata())]
    del model.unknown

    # Servers that are moved by the client.
    model.load_state_dict(AutoModelForCausalLM.from_pretrained(old, dtype=torch.bfloat16).state_dict())
    answers = [answer(url, new)]
    moved = init(
        f"{folder}/moved", ModuleSource(model), HTTPVLLMWeightSyncClient(url), wait_s=300.0, moves_servers=True
    )
    for state in (model.state_dict(), trained.state_dict()):
        model.load_state_dict(state)
        moved.send_weights()
        requests.post(f"{url}/reset_prefix_cache", timeout=300).raise_for_status()
        answers.append(answer(url, new))
    moved.shutdown()
    found["answers"] = answers
    print(json.dumps(found))


def torch_linear() -> ModuleSource:
    return ModuleSource(torch.nn.Linear(2, 2, dtype=torch.bfloat16))


def answer(url: str, name: str) -> Any:
    body = {"model": name, "prompt": [5, 17, 99, 240, 33, 8], "max_tokens": 8, "temperature": 0, "logprobs": 3}
    response = requests.post(f"{url}/v1/completions", json=body, timeout=300)
    response.raise_for_status()
    return response.json()["choices"][0]["logprobs"]["token_logprobs"]


if __name__ == "__main__":
    main()
