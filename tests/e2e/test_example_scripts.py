"""The examples, run as a newcomer runs them: as programs, offline, and on a store that is given or temporary."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import save_file
from support.hub import hub
from support.servers import seaweed

from deltasync import restore, verify

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@dataclass(frozen=True, slots=True)
class Example:
    """The last words of an example, and the feeds that it leaves below the store that it is given.

    `needs`: the kind of store that it takes; None is any kind, and by default a temporary folder. `ranks`: the number
    of ranks under torchrun.
    """

    output: str
    feeds: tuple[str, ...] = ("",)
    needs: Literal["s3", "hub"] | None = None
    ranks: int | None = None


SCRIPTS = {
    "feed.py": Example("rebuilt exactly: yes"),
    "torch_loop.py": Example("is step 10, bit for bit: yes"),
    "transformers_trainer.py": Example("restored exactly", feeds=("model", "adapter", "merged")),
    "fsdp2.py": Example("is step 5, bit for bit: yes", ranks=2),
    "s3_replicas.py": Example("replica-2 has version 10 of the trainer, bit for bit: yes", needs="s3"),
    "checkpoint_folder.py": Example("the engine has the weights of step 5, bit for bit: yes"),
    "hub_bucket.py": Example("the replica has the weights of step 5, bit for bit: yes", needs="hub"),
    "trl_transfer.py": Example("no sample is older than its label"),
}


def run(name: str, *arguments: str, folder: Path, environment: Mapping[str, str] | None = None) -> str:
    """Run an example, which must succeed and print its last words; return its output. By default there is no hub."""
    example = SCRIPTS[name]
    launcher = [] if example.ranks is None else ["-m", "torch.distributed.run", "--standalone"]
    if example.ranks is not None:
        launcher.append(f"--nproc-per-node={example.ranks}")
    given = {"HF_HUB_OFFLINE": "1"} if environment is None else environment
    done = subprocess.run(
        [sys.executable, *launcher, EXAMPLES / name, *arguments],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder), "COLUMNS": "120", "OMP_NUM_THREADS": "1", **given},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert example.output in done.stdout
    assert "NO" not in done.stdout.split()
    return done.stdout


@contextmanager
def store_for(name: str, folder: Path) -> Iterator[tuple[str, Mapping[str, str] | None]]:
    """The URL of an empty store of the kind that an example needs, and its environment variables."""
    if SCRIPTS[name].needs == "s3":
        with seaweed() as server:
            yield server.url("example"), server.environment
    elif SCRIPTS[name].needs == "hub":
        with hub() as standin:
            # The example makes the bucket itself.
            yield "hf://buckets/user/feeds/example", standin.environment()
    else:
        yield str(folder / "store"), None


def test_every_example_is_listed() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == SCRIPTS.keys()
    listed = re.findall(r"^\| \[`?([\w/.]+?)/?`?\]\(([\w/.]+?)/?\) \|", (EXAMPLES / "README.md").read_text(), re.M)
    assert all(text == link for text, link in listed)
    folders = {path.name for path in EXAMPLES.iterdir() if path.is_dir() and not path.name.startswith(("_", "."))}
    assert SCRIPTS.keys() | folders <= {link for _, link in listed}


@pytest.mark.parametrize("name", ["feed.py", "torch_loop.py", "fsdp2.py"])
def test_example_on_a_temporary_store(name: str, tmp_path: Path) -> None:
    run(name, folder=tmp_path)
    # Its own temporary folder is gone; torch leaves caches, and torchrun leaves logs.
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("torch")] == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_example_on_a_store_that_is_given(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with store_for(name, tmp_path) as (url, environment):
        run(name, url, folder=tmp_path, environment=environment)
        for variable, value in ({} if environment is None else environment).items():
            monkeypatch.setenv(variable, value)
        for feed in SCRIPTS[name].feeds:
            verification = verify(f"{url}/{feed}" if feed else url, deep=True)
            assert verification.is_clean
            assert (verification.head or 0) >= 1


@pytest.mark.parametrize(("name", "arguments"), [("s3_replicas.py", ()), ("hub_bucket.py", ("s3://bucket/run",))])
def test_wrong_usage(name: str, arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments], cwd=tmp_path, text=True, capture_output=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"usage: python examples/{name} ")


def code_of(document: str, feed: str) -> list[str]:
    """The Python blocks of a document, with another feed."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.M | re.S)
    return [block.replace("s3://bucket/run-42", feed) for block in blocks]


def test_code_of_the_readme(tmp_path: Path) -> None:
    """Both sides, as they are in the README. The reader brings a model, and functions that use it."""
    trainer, replica = code_of("README.md", str(tmp_path / "feed"))
    trained, served = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64).bfloat16()
    batches = list(torch.randn(5, 8, 64))
    exec(trainer, {"model": trained, "batches": batches, "loss": lambda model, batch: model(batch).square().mean()})

    # A step that was overtaken is part of a later version.
    head = restore(tmp_path / "feed", tmp_path / "last")
    assert head.step == len(batches) - 1
    versions: list[int | None] = []
    until_s = time.monotonic() + 120

    def requests() -> Iterator[torch.Tensor]:
        while given["target"].version != head.version:
            assert time.monotonic() < until_s
            yield torch.zeros(64, dtype=torch.bfloat16)

    given = {
        "model": served,
        "requests": requests(),
        "generate": lambda model, prompts: model(prompts),
        "answer": lambda _, version: versions.append(version),
    }
    exec(replica, given)
    assert all(torch.equal(served.state_dict()[n], weight.bfloat16()) for n, weight in trained.state_dict().items())
    assert set(versions) <= {None, *range(head.version + 1)}


def test_code_of_the_quickstart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for step in (100, 101):
        Path(f"checkpoint-{step}").mkdir()
        save_file({"weight": torch.full((64,), step, dtype=torch.bfloat16)}, f"checkpoint-{step}/model.safetensors")
    (code,) = code_of("docs/quickstart.md", str(tmp_path / "feed"))
    exec(code, {})
    assert (tmp_path / "rebuilt-101").is_dir()
