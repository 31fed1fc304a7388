"""`deltasync serve` without a model: what the feed must have, what vLLM is started with, and what is left of it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support import LONG_S, processes
from support.feeds import Feed
from support.helpers import state, write_sharded
from support.replicas import wait_until

from deltasync.blocks import digest
from deltasync.checkpoint import open_checkpoint
from deltasync.cli import main as cli
from deltasync.cli.serve import Launch, with_model
from deltasync.errors import DeltasyncError, InvalidInputError, NotFoundError
from deltasync.feed.log import Log
from deltasync.files import locked
from deltasync.store.local import LocalStore
from deltasync.vllm.bootstrap import MODEL, BareModel

Out = pytest.CaptureFixture[str]
FEED = {"DELTASYNC_FEED": "feed"}
TENSORS = state()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with a checkpoint that has a tokenizer and code."""
    monkeypatch.chdir(tmp_path)
    write_sharded(tmp_path / "checkpoint", TENSORS)
    (tmp_path / "checkpoint/tokenizer.json").write_text("{}")
    (tmp_path / "checkpoint/modeling.py").write_text("evil = True")
    (tmp_path / "checkpoint/chat").mkdir()
    (tmp_path / "checkpoint/chat/template.jinja").write_text("{{ x }}")
    return tmp_path


def publish(*arguments: str) -> None:
    assert cli.main(["publish", "feed", "checkpoint", *arguments]) == 0


def of_feed(**options: Any) -> BareModel:
    return BareModel.of_feed("feed", **{"base": None, "trust_code": False, "needs_tokenizer": True, **options})


# --- The model of the feed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trust_code", [False, True])
def test_the_folder_has_the_files_and_the_header_but_no_weights(place: Path, trust_code: bool) -> None:
    publish("--trust-code")
    model = of_feed(trust_code=trust_code)
    model.write(place / "model")
    names = {path.relative_to(place / "model").as_posix() for path in (place / "model").rglob("*") if path.is_file()}
    code = {"modeling.py"} if trust_code else set()
    assert names == {"config.json", "tokenizer.json", "chat/template.jinja", "model.safetensors", *code}
    weights = open_checkpoint(place / "model").weights
    assert weights.layout == open_checkpoint(place / "checkpoint").weights.layout
    assert not any(bits.any() for bits in weights.arrays)


def test_holes_take_no_space(place: Path) -> None:
    feed = Feed(LocalStore("feed"))
    feed.anchor({"large": TENSORS["embed"].repeat(1000)})
    BareModel(0, {}, feed.states[0].layout).write(place / "model")
    status = (place / "model/model.safetensors").stat()
    assert status.st_size > 4_000_000
    assert status.st_blocks * 512 <= 8192


@pytest.mark.parametrize(
    ("left_out", "options", "message", "hint"),
    [
        ("config.json", {}, "version 0 of file://.*/feed has no config.json beside its weights", "files=.*--model"),
        ("tokenizer.json", {}, "version 0 of .* has no tokenizer beside its weights", "processing_class.*--tokenizer"),
        ("tokenizer.json", {"needs_tokenizer": False}, None, None),
    ],
)
def test_what_a_feed_lacks_is_named(
    place: Path, left_out: str, options: dict[str, Any], message: str | None, hint: str | None
) -> None:
    (place / "checkpoint" / left_out).unlink()
    publish()
    if message is None or hint is None:
        assert "config.json" in of_feed(**options).files
        return
    with pytest.raises(InvalidInputError, match=message) as caught:
        of_feed(**options)
    assert caught.value.hint is not None
    assert re.search(hint, caught.value.hint)


def test_the_feed_of_an_adapter_is_named_as_such(place: Path) -> None:
    (place / "checkpoint/config.json").rename(place / "checkpoint/adapter_config.json")
    publish()
    with pytest.raises(InvalidInputError, match=r"no config\.json") as caught:
        of_feed()
    assert "--adapter NAME=URL" in str(caught.value.hint)


def test_a_feed_without_versions(place: Path) -> None:
    with pytest.raises(NotFoundError, match="there is no version"):
        of_feed()


def test_a_feed_that_starts_from_a_base_needs_it(place: Path) -> None:
    publish("--base", "org/model")
    with pytest.raises(InvalidInputError, match="starts from the checkpoint 'org/model'") as caught:
        of_feed()
    assert "--base DIR" in str(caught.value.hint)
    assert "--model MODEL" in str(caught.value.hint)
    assert of_feed(base=place / "checkpoint").layout == open_checkpoint(place / "checkpoint").weights.layout


def test_a_base_that_is_here_is_used(place: Path) -> None:
    publish("--base", "checkpoint")
    assert of_feed().layout == open_checkpoint(place / "checkpoint").weights.layout


# --- What vLLM is started with ----------------------------------------------------------------------------------------


def test_a_mirror_that_another_server_uses(place: Path) -> None:
    publish()
    launch = Launch(("python",), {**os.environ, **FEED, "DELTASYNC_MIRROR": "mirror"})
    with locked(Path("mirror")), pytest.raises(DeltasyncError, match="mirror is used by another process"):
        with_model(launch, trust_code=False)


def test_a_mirror_that_does_not_fit_into_shared_memory(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish()
    free = shutil.disk_usage("/")._replace(free=100)
    monkeypatch.setattr("shutil.disk_usage", lambda path: free)
    with pytest.raises(InvalidInputError, match=r"needs \d+ bytes of shared memory, and 100 are free") as caught:
        with_model(Launch(("python",), {**os.environ, **FEED}), trust_code=False)
    assert "--mirror FILE" in str(caught.value.hint)


KEEPING = """
import os
from pathlib import Path
from deltasync.cli.serve import Launch, with_model
from deltasync.errors import InvalidInputError
from deltasync.files import locked

mirror = Path(with_model(Launch(("python",), os.environ), trust_code=False).environment["DELTASYNC_MIRROR"])
try:
    with locked(mirror):
        print("complete" if mirror.exists() else "not begun")
except InvalidInputError:
    print("locked")
"""


def test_the_mirror_is_being_filled_before_the_server_starts(place: Path) -> None:
    """So that its workers wait for that, and nothing writes to the mirror while they load from it."""
    publish()
    command = [sys.executable, "-c", KEEPING]
    done = processes.run(command, env={**os.environ, **FEED}, timeout_s=60, check=True)
    assert done.stdout in ("locked\n", "complete\n")


# --- The whole command ------------------------------------------------------------------------------------------------

SERVER = """
import json, os, sys, time
print(json.dumps([os.getpid(), sys.argv[1:], os.environ["DELTASYNC_MIRROR"]]), flush=True)
sys.stdin.read()
"""


@contextmanager
def served(place: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, str], Path]]:
    """A package in vLLM's place, with the options and the mirror that it was started with. It ends with its stdin."""
    package = place / "path/vllm/entrypoints/openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(SERVER)
    command = [sys.executable, "-m", "deltasync", "serve", "--feed", "feed", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(place / "path"), "DELTASYNC_TOKEN": "t"}
    with processes.running(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid, given, mirror = json.loads(process.stdout.readline())
        assert pid == process.pid
        yield process, dict(zip(given[::2], given[1::2], strict=True)), Path(mirror)
        process.kill()


def test_the_server_gets_the_model_and_its_weights(place: Path) -> None:
    publish()
    with served(place, "--", "--port", "1") as (process, options, mirror):
        model = Path(options["--model"])
        assert (options["--load-format"], options["--served-model-name"], options["--port"]) == (
            "deltasync",
            "feed",
            "1",
        )
        assert mirror.parent == model.parent
        assert model.name == MODEL
        assert json.loads((model / "config.json").read_text()) == {"model_type": "test"}
        wanted = Log(LocalStore("feed")).require_head().digest
        wait_until(lambda: mirror.exists() and digest(open_checkpoint(mirror).weights) == wanted)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(LONG_S) == 0
        wait_until(lambda: not model.parent.exists())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_that_is_killed_leaves_nothing(place: Path, number: signal.Signals) -> None:
    publish()
    with served(place, "--", "--served-model-name", "policy") as (process, options, _):
        home = Path(options["--model"]).parent
        assert home.is_dir()
        assert options["--served-model-name"] == "policy"
        # All of its group, as a terminal or a supervisor does it.
        os.killpg(process.pid, number)
        process.wait(LONG_S)
        wait_until(lambda: not home.exists())


def test_a_signal_for_all_processes_of_a_service_leaves_nothing(place: Path) -> None:
    """A supervisor sends it to the process that keeps the folder, too."""
    publish()
    with served(place) as (process, options, _):
        home = Path(options["--model"]).parent
        [keeper] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(int(keeper), number)
        process.terminate()
        process.wait(60)
        wait_until(lambda: not home.exists())


def test_a_mirror_of_the_user_stays(place: Path) -> None:
    publish()
    mirror = place / "mirror.safetensors"
    with served(place, "--mirror", str(mirror), "--", "--load-format", "deltasync") as (process, options, used):
        assert used == mirror
        wanted = Log(LocalStore("feed")).require_head().digest
        wait_until(lambda: mirror.exists() and digest(open_checkpoint(mirror).weights) == wanted)
        home = Path(options["--model"]).parent
        process.kill()
        process.wait(LONG_S)
        wait_until(lambda: not home.exists())
    assert digest(open_checkpoint(mirror).weights) == wanted
