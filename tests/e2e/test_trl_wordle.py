"""The TRL example: a whole run with a real vLLM server, and all that can be wrong before one begins."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from support import processes
from support.servers import free_port, json_server
from support.vllm import CORE, require_vllm, save, tiny_model
from support.vllm import PYTHON as VLLM_PYTHON

import deltasync
from deltasync.feed.log import Log

pytestmark = pytest.mark.e2e

EXAMPLE = Path(__file__).parents[2] / "examples" / "trl_wordle"
STEPS, MAX_LAG = 60, 2
LONG_S = 900.0
"""Longer than anything takes, on a machine that is busy with other things."""


@pytest.mark.long
def test_a_run_learns_and_what_is_served_is_what_was_trained(tmp_path: Path) -> None:
    require_vllm()
    done = run_local(tmp_path, "--steps", str(STEPS), "--max-lag", str(MAX_LAG))
    assert done.returncode == 0, done.stdout + tails(tmp_path)
    assert running(tmp_path) == []
    report = json.loads((tmp_path / "trainer/run/report.json").read_text())
    checks = json.loads((tmp_path / "trainer/run/check.json").read_text())
    store = deltasync.open_store(tmp_path / "feed")
    head = Log(store).require_head()

    assert (report["steps"], checks["version"]) == (STEPS, head.version)
    assert checks["tensors"] == {"compared": 35, "differing": []}
    assert checks["live"] == {"version": head.version, "damaged": [], "unseen_elements": 0}
    # Two implementations round differently. The weights of the beginning are further away by far.
    assert checks["apart"]["mean"] < min(0.03, checks["apart"]["before"] / 3)
    assert deltasync.verify(store, deep=True).is_clean

    rewards = report["rewards"]
    assert mean(rewards[-STEPS // 3 :]) > mean(rewards[: STEPS // 3]) + 0.03, rewards

    account = report["account"]
    assert account["older_than_label"] == 0
    assert account["samples"] >= STEPS * 32
    # TRL drops a sample that is older than `max_staleness`, which the example sets to three above `max_lag`.
    assert max(map(int, account["staleness"])) <= MAX_LAG + 3
    assert "NO" not in done.stdout.split()


def run_local(out: Path, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """The script as a newcomer runs it, on ports that are free."""
    return processes.run(
        [EXAMPLE / "run_local.sh", *arguments],
        env=local_environment(out, environment),
        stderr=subprocess.STDOUT,
        timeout_s=LONG_S,
    )


def local_environment(out: Path, more: Mapping[str, str]) -> dict[str, str]:
    ports = {"SERVER_PORT": str(free_port()), "ENVIRONMENT_PORT": str(free_port())}
    own = {"OUT": str(out), "PYTHON": sys.executable, "VLLM_PYTHON": str(VLLM_PYTHON), "HF_HUB_OFFLINE": "1"}
    own["VLLM_CPU_OMP_THREADS_BIND"] = CORE
    return {**os.environ, **ports, **own, **more}


def tails(out: Path) -> str:
    """The last lines of all logs of a run."""
    logs = sorted(out.glob("*.log"))
    return "\n".join(f"== {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-30:]) for log in logs)


def running(out: Path) -> list[str]:
    """Command lines and folders of processes that belong to a run."""
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal() or int(process.name) == os.getpid():
            continue
        try:
            words = (process / "cmdline").read_text().replace("\0", " ") + str((process / "cwd").readlink())
        except OSError:
            continue
        if str(out) in words:
            found.append(words)
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that is good enough to begin with."""
    return save(tiny_model("qwen3"), tmp_path_factory.mktemp("model"))


@contextmanager
def answering(**answers: Any) -> Iterator[str]:
    """Answers every GET with what is given for the last part of its path."""
    with json_server(lambda path, body, headers: (200, answers.get(path.rpartition("/")[2], {}))) as url:
        yield url


def example(
    name: str, *arguments: str | Path, folder: Path, python: str = sys.executable, **environment: str
) -> "subprocess.CompletedProcess[str]":
    return processes.run(
        [python, EXAMPLE / name, *arguments],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        timeout_s=LONG_S,
    )


def other_feed(folder: Path) -> str:
    """A feed of another model."""
    url = str(folder / "other-feed")
    other = save(tiny_model("qwen3", num_hidden_layers=3), folder / "other")
    deltasync.publish(deltasync.open_store(url), other)
    return url


NOWHERE = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("wrong", "messages"),
    [
        ({"--model": "nothing-here"}, ["no model in nothing-here", "make_model.py"]),
        ({"--environment": NOWHERE}, [f"no environment at {NOWHERE}", "environment.py"]),
        ({"--environment": "{server}"}, ["not the environment", "--environment"]),
        ({"--feed": "s3://no-bucket/feed"}, ["s3", "127.0.0.1:1"]),
        ({"--feed": "{other_feed}"}, ["model.layers.2", "the feed"]),
        ({"--server": NOWHERE, "--wait-s": "0"}, [f"no vLLM server answered at {NOWHERE}", "server.py"]),
        ({"--server": "{other_server}"}, ["has the model another", "--model"]),
        ({"--wait-s": "1"}, ["0 live replicas serve a version", "deltasync serve"]),
    ],
    ids=["model", "no-environment", "other-environment", "store", "feed", "no-server", "other-server", "no-replica"],
)
def test_the_trainer_says_what_is_missing_where(
    wrong: dict[str, str], messages: list[str], model: Path, tmp_path: Path
) -> None:
    game = {"environment": "wordle", "guesses": 4}
    with (
        answering(**{"": game}) as environment,
        answering(models={"data": [{"id": str(model)}]}) as server,
        answering(models={"data": [{"id": "another"}]}) as other_server,
    ):
        given = {"--feed": str(tmp_path / "feed"), "--model": str(model), "--environment": environment}
        given |= {"--server": server, "--wait-s": "60", **wrong}
        names = {"server": server, "other_server": other_server, "other_feed": other_feed(tmp_path)}
        arguments = [word.format(**names) for pair in given.items() for word in pair]
        keys = {"AWS_ENDPOINT_URL": NOWHERE, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
        done = example("trainer.py", *arguments, folder=tmp_path, **keys)
    assert done.returncode == 1, done
    last = done.stderr[done.stderr.index("error: ") :]
    assert all(each in last for each in messages), last
    assert "Traceback" not in done.stderr
    assert running(tmp_path) == []


@contextmanager
def taken_port() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        yield str(holder.getsockname()[1])


def test_the_server_says_what_is_missing(tmp_path: Path) -> None:
    feed = str(tmp_path / "feed")
    with taken_port() as port:
        done = example("server.py", "--feed", feed, "--port", port, folder=tmp_path)
    assert (done.returncode, f"cannot listen on 127.0.0.1:{port}" in done.stderr) == (1, True), done
    done = example("server.py", "--feed", feed, "--port", str(free_port()), "--wait-s", "0", folder=tmp_path)
    assert (done.returncode, "no version" in done.stderr, "trainer.py" in done.stderr) == (1, True, True), done
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("what", ["vllm", "server", "environment"])
def test_a_local_run_that_cannot_work_says_why_and_leaves_nothing(what: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer/wordle-policy").symlink_to(model)
    with taken_port() as port:
        if what == "vllm":
            # TRL's environment has no vLLM.
            done, messages = run_local(tmp_path, VLLM_PYTHON=sys.executable), ["vllm is not installed", "VLLM_PYTHON"]
        else:
            require_vllm()
            done = run_local(tmp_path, **{f"{what.upper()}_PORT": port})
            messages = [f"cannot listen on 127.0.0.1:{port}", "--port", f"the {what} has ended", f"{what}.log"]
    assert done.returncode == 1, done.stdout
    assert all(each in done.stdout for each in messages), done.stdout
    assert running(tmp_path) == []


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda how: how.name)
def test_a_local_run_that_is_stopped_leaves_nothing(how: signal.Signals, model: Path, tmp_path: Path) -> None:
    require_vllm()
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer/wordle-policy").symlink_to(model)
    process = processes.start(
        [EXAMPLE / "run_local.sh"],
        env=local_environment(tmp_path, {}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        # The trainer has published, so the server is coming up: this is when most processes are there.
        wait_until((tmp_path / "server/wordle-policy/config.json").exists)
        process.send_signal(how)
        process.wait(LONG_S)
        wait_until(lambda: running(tmp_path) == [])
    finally:
        processes.kill(process)
    assert deltasync.verify(deltasync.open_store(tmp_path / "feed"), deep=True).is_clean
    assert process.returncode == {"SIGINT": 130, "SIGTERM": 143, "SIGKILL": -9}[how.name]


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LONG_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
