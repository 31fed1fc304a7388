"""Adapters of a vLLM server: each version is a folder of its own, and one that vLLM refuses does not go live."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from support import LONG_S
from support.replicas import follower

from deltasync.errors import EngineError, MismatchError
from deltasync.replica.follower import Follower
from deltasync.store import open_store
from deltasync.torch.publisher import Publisher
from deltasync.trainer.publisher import PublisherOptions
from deltasync.vllm.target import CONFIG_NAME, WEIGHTS_NAME, AdapterTarget

CONFIG = json.dumps({"r": 4}).encode()


class Vllm:
    """What it was asked to load: the folder and the weights in it. `refuses` makes it fail."""

    def __init__(self) -> None:
        self.loaded: list[tuple[Path, dict[str, np.ndarray]]] = []
        self.refuses = False

    def load(self, folder: Path) -> None:
        if self.refuses:
            raise EngineError("vLLM did not load the adapter")
        assert (folder / CONFIG_NAME).read_bytes() == CONFIG
        self.loaded.append((folder, load_file(folder / WEIGHTS_NAME)))


def state(version: int, **others: torch.Tensor) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(version)
    names = [f"layers.{i}.q_proj.lora_{half}.weight" for i in range(2) for half in "AB"]
    return {**{name: torch.randn(4, 6, generator=rng) for name in names}, **others}


def publish(feed: Path, *states: dict[str, torch.Tensor], files: dict[str, bytes] | None = None) -> None:
    options = PublisherOptions(files={CONFIG_NAME: CONFIG} if files is None else files)
    with Publisher(str(feed), options=options) as publisher:
        for tensors in states:
            publisher.publish(tensors).wait(LONG_S)


def new_follower(feed: Path, folder: Path, engine: Vllm) -> tuple[Follower, AdapterTarget]:
    target = AdapterTarget("policy", engine.load, folder=folder / "adapter")
    return follower(open_store(str(feed)), target, mirror=folder / "mirror.safetensors"), target


def test_versions_go_live_one_after_the_other(tmp_path: Path) -> None:
    states, engine = [state(version) for version in range(7)], Vllm()
    publish(tmp_path / "feed", *states)
    replica, target = new_follower(tmp_path / "feed", tmp_path, engine)
    for version in (0, 1, 2, 3, 4, 5, 6, 2):
        replica.advance(to=version)
        assert target.version == version
        _, arrays = engine.loaded[-1]
        assert all(np.array_equal(arrays[name], tensor.numpy()) for name, tensor in states[version].items())
        assert len(arrays) == len(states[version])
    # Each version has a folder of its own, and old ones go away.
    assert len({folder for folder, _ in engine.loaded}) == 7
    assert len(list((tmp_path / "adapter").iterdir())) <= 5
    assert engine.loaded[-1][0].is_dir()


def test_a_version_that_vllm_does_not_load_is_not_live(tmp_path: Path) -> None:
    engine = Vllm()
    publish(tmp_path / "feed", state(0), state(1))
    replica, target = new_follower(tmp_path / "feed", tmp_path, engine)
    replica.advance(to=0)
    engine.refuses = True
    with pytest.raises(EngineError, match="did not load"):
        replica.advance(to=1)
    assert target.version is None
    engine.refuses = False
    replica.advance(to=1)
    assert target.version == 1


REFUSED = {
    "a whole model": (state(0, bias=torch.zeros(3)), None, "is not a tensor of a LoRA adapter"),
    "no configuration": (state(0), {"README.md": b""}, "version 0 has no adapter_config.json"),
}


@pytest.mark.parametrize(("tensors", "files", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_feeds_of_something_else_are_refused(
    tensors: dict[str, torch.Tensor], files: dict[str, bytes] | None, message: str, tmp_path: Path
) -> None:
    engine = Vllm()
    publish(tmp_path / "feed", tensors, files=files)
    replica, target = new_follower(tmp_path / "feed", tmp_path, engine)
    with pytest.raises(MismatchError, match=message):
        replica.advance()
    assert target.version is None
    assert engine.loaded == []


def test_a_damaged_folder_is_found_and_written_again(tmp_path: Path) -> None:
    engine = Vllm()
    publish(tmp_path / "feed", state(0))
    replica, target = new_follower(tmp_path / "feed", tmp_path, engine)
    replica.advance()
    assert replica.scrub() == []
    path = engine.loaded[0][0] / WEIGHTS_NAME
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert [damage.elements for damage in replica.scrub()] == [1]
    replica.advance()
    assert target.version == 0
    assert len(engine.loaded) == 2
    assert replica.scrub() == []
