"""The examples, run as a newcomer runs them: as programs, offline, and on a store that is given or temporary."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import torch
import yaml
from safetensors.torch import save_file
from support import processes
from support.hub import hub
from support.servers import missing, seaweed

from deltasync import restore, verify

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@dataclass(frozen=True, slots=True)
class Example:
    """The last words of an example, and the feeds that it leaves below the store that it is given.

    `needs`: the kind of store that it takes; None is any kind, and by default a temporary folder. `ranks`: the number
    of ranks under torchrun. `package`: what it needs besides the packages of the other examples.
    """

    output: str
    feeds: tuple[str, ...] = ("",)
    needs: Literal["s3", "hub"] | None = None
    ranks: int | None = None
    package: str | None = None


SCRIPTS = {
    "feed.py": Example("rebuilt exactly: yes"),
    "torch_loop.py": Example("is step 10, bit for bit: yes"),
    "transformers_trainer.py": Example("restored exactly", feeds=("model", "adapter", "merged")),
    "fsdp2.py": Example("is step 5, bit for bit: yes", ranks=2),
    "s3_replicas.py": Example("of the trainer, bit for bit: yes", needs="s3"),
    "checkpoint_folder.py": Example("the engine has the weights of step 5, bit for bit: yes"),
    "hub_bucket.py": Example("the replica has the weights of step 5, bit for bit: yes", needs="hub"),
    "trl_transfer.py": Example("no sample is older than its label"),
    "rollout_worker.py": Example("the worker has version"),
    "resume.py": Example("is step 12, bit for bit: yes"),
    "lora_adapters.py": Example("both adapters are served as they were trained", feeds=("math", "chat")),
    "ray_actor.py": Example("replica-2 has version", package="ray"),
}


def run(name: str, *arguments: str, folder: Path, environment: Mapping[str, str] | None = None) -> str:
    """Run an example, which must succeed and print its last words; return its output. By default there is no hub."""
    example = SCRIPTS[name]
    if example.package is not None and importlib.util.find_spec(example.package) is None:
        missing(f"the package {example.package} is not installed")
    launcher = [] if example.ranks is None else ["-m", "torch.distributed.run", "--standalone"]
    if example.ranks is not None:
        launcher.append(f"--nproc-per-node={example.ranks}")
    given = {"HF_HUB_OFFLINE": "1"} if environment is None else environment
    done = processes.run(
        [sys.executable, *launcher, EXAMPLES / name, *arguments],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder), "COLUMNS": "120", "OMP_NUM_THREADS": "1", **given},
        stderr=subprocess.STDOUT,
        timeout_s=600,
    )
    assert done.returncode == 0, done.stdout
    assert example.output in done.stdout
    assert "NO" not in done.stdout.split()
    assert re.search(r"times less|weights / sent|a copy / a delta", done.stdout), "it does not say its ratio"
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
    notebooks = {path.name for path in EXAMPLES.glob("*.ipynb")}
    assert SCRIPTS.keys() | folders | notebooks <= {link for _, link in listed}


@pytest.mark.parametrize("name", ["feed.py", "torch_loop.py", "fsdp2.py"])
def test_example_on_a_temporary_store(name: str, tmp_path: Path) -> None:
    run(name, folder=tmp_path)
    # Its own temporary folder is gone; torch leaves caches, and torchrun leaves logs.
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("torch")] == []


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path leaves room for the names of Ray's sockets, which are limited to 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="ds-") as folder:
        yield Path(folder)


@pytest.mark.parametrize("name", SCRIPTS)
def test_example_twice_on_a_store_that_is_given(name: str, short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second run goes on with the feed of the first one."""
    with store_for(name, short_path) as (url, environment):
        for _ in range(2):
            run(name, url, folder=short_path, environment=environment)
        for variable, value in ({} if environment is None else environment).items():
            monkeypatch.setenv(variable, value)
        for feed in SCRIPTS[name].feeds:
            verification = verify(f"{url}/{feed}" if feed else url, deep=True)
            assert verification.is_clean
            assert (verification.head or 0) >= 1


@pytest.mark.parametrize(("name", "arguments"), [("s3_replicas.py", ()), ("hub_bucket.py", ("s3://bucket/run",))])
def test_wrong_usage(name: str, arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = processes.run([sys.executable, EXAMPLES / name, *arguments], cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"usage: python examples/{name} ")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.name)
def test_notebook(path: Path, tmp_path: Path) -> None:
    """It is a notebook as nbformat 4.5 describes it, was saved without outputs, and its cells run in their order."""
    notebook = json.loads(path.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = notebook["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    assert {cell["cell_type"] for cell in cells} == {"code", "markdown"}
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", cell["id"]) for cell in cells)
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    done = processes.run(
        [sys.executable, "-c", "\n".join("".join(cell["source"]) for cell in code)],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        timeout_s=600,
    )
    assert done.returncode == 0, done.stderr
    assert "bit for bit: True" in done.stdout
    assert "times less" in done.stdout


def test_compose_file() -> None:
    """As far as it can be checked without an engine: what it names exists, and the commands take these options."""
    folder = EXAMPLES / "compose"
    services = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    assert services.keys() == {"s3", "trainer", "replica-1", "replica-2", "tools"}
    s3 = services.pop("s3")
    assert "healthcheck" in s3
    for name, service in services.items():
        assert service["depends_on"]["s3"]["condition"] == "service_healthy", name
        for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            assert service["environment"][key] == s3["environment"][key], name
        context = (folder / service["build"]["context"]).resolve()
        dockerfile = context / service["build"]["dockerfile"]
        for line in re.findall(r"^COPY (.*)", dockerfile.read_text(), re.M):
            assert all((context / source).exists() for source in line.split()[:-1]), line
        # Compose reads $$ as $.
        program, *words = shlex.split(service["command"][-1].replace("$$FEED", "feed").removeprefix("exec "))
        if program == "python":
            assert words[0].removeprefix("examples/") in SCRIPTS
            assert (context / words[0]).is_file()
        else:
            assert program == "deltasync"
            done = processes.run([sys.executable, "-m", "deltasync", *words, "--help"], check=True)
            assert all(word in done.stdout for word in words if word.startswith("--"))
    assert {f"replica-{i}:/models" for i in (1, 2)} == {
        volume for name in ("replica-1", "replica-2") for volume in services[name]["volumes"]
    }


def code_of(document: str, feed: str) -> list[str]:
    """The Python blocks of a document, with another feed."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.M | re.S)
    return [block.replace("s3://bucket/run-42", feed) for block in blocks]


def test_complete_example_of_the_readme(tmp_path: Path) -> None:
    """It runs as it is pasted, and once more on the feed that it has left."""
    complete = code_of("README.md", "unused")[0]
    assert len([line for line in complete.splitlines() if line]) <= 15
    for head in (4, 9):
        done = processes.run([sys.executable, "-c", complete], cwd=tmp_path, timeout_s=600)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "bit for bit: True"
        verification = verify(tmp_path / "feed", deep=True)
        assert verification.is_clean
        assert verification.head == head


def test_code_of_the_readme(tmp_path: Path) -> None:
    """Both sides, as they are in the README. The reader brings a model, and functions that use it."""
    _, trainer, replica = code_of("README.md", str(tmp_path / "feed"))
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
