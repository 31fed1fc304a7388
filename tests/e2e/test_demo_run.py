"""`deltasync demo` as a newcomer runs it: to its end, interrupted, killed, and with what cannot work."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

import deltasync
from deltasync.demo.board import Board
from deltasync.demo.policy import VOCABULARY
from deltasync.demo.processes import Processes
from deltasync.demo.run import Director, prepare
from deltasync.demo.settings import Settings
from deltasync.errors import EngineError
from deltasync.log.log import Log

pytestmark = pytest.mark.e2e

LONG_S = 600.0
"""Longer than anything takes, on a machine that is busy with other things."""


def save_policy(folder: Path, *, vocabulary: int = VOCABULARY) -> Path:
    """A model that is even smaller than that of the demo, to be warmed up in seconds."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=vocabulary, **sizes, **heads)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


def children(out: Path) -> list[int]:
    """Processes of the run in this folder, but for the command itself."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if any(b"deltasync.demo." in word for word in words) and any(str(out).encode() in word for word in words):
                found.append(int(entry.name))
    return found


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + LONG_S
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.05)


@contextmanager
def demo(out: Path, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """The command as a process; nothing of it is left behind, whatever the test does."""
    # Shells start what runs in the background with SIGINT ignored, and that would be inherited.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [sys.executable, "-m", "deltasync", "demo", "--out", str(out), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        signal.signal(signal.SIGINT, before)
        process.kill()
        process.wait()
        for pid in children(out):
            os.kill(pid, signal.SIGKILL)


def head_of(feed: Path) -> int:
    found = Log(deltasync.open_store(feed)).head() if feed.exists() else None
    return -1 if found is None else found.version


def test_whole_run(policy: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with demo(out, "--model", str(policy), "--steps", "10", "--json") as process:
        told, errors = process.communicate(timeout=LONG_S)
    assert process.returncode == 0, errors
    assert children(out) == []
    found = json.loads(told)
    assert found["digests"].keys() == {"trainer", "replica-1", "replica-2"}
    assert len(set(found["digests"].values())) == 1
    assert found["verification"]["clean"]
    assert found["verification"]["deep"]
    # Proved once more, by what others would use.
    store = deltasync.open_store(out / "feed")
    assert deltasync.restore(store, tmp_path / "last").version == found["head"]
    assert deltasync.state_digest(tmp_path / "last").hex == found["digests"]["trainer"]
    assert (tmp_path / "last" / "config.json").is_file()
    assert [row["step"] for row in found["rows"]] == list(range(11))
    assert all(row["reward"] is not None and row["age"] >= 0 for row in found["rows"][1:])
    back = found["recovery"]
    assert (back["replica"], back["at_step"]) == ("replica-2", 5)
    assert back["had"] is not None
    # It went on from its mirror: no anchor was fetched.
    assert set(back["edges"]) <= {"delta"}
    assert back["back"] >= back["had"]
    assert "<svg" in (out / "report.html").read_text()
    assert found["sent_bytes"] < found["copies_bytes"]
    # Both left for good.
    assert Log(store).heartbeats() == []


@pytest.mark.parametrize(
    ("at", "number"),
    [
        ("start", signal.SIGINT),
        ("warm-up", signal.SIGTERM),
        ("training", signal.SIGINT),
        ("training", signal.SIGTERM),
        ("killed", signal.SIGINT),
    ],
)
def test_interrupted(at: str, number: int, policy: Path, tmp_path: Path) -> None:
    out, feed = tmp_path / "run", tmp_path / "run" / "feed"
    steps = "9" if at == "killed" else "1000"
    with demo(out, "--model", str(policy), "--steps", steps) as process:
        if at == "start":
            wait_until(lambda: bool(children(out)))
        elif at == "warm-up":
            assert process.stdout is not None
            assert "supervised" in process.stdout.readline()
        elif at == "training":
            wait_until(lambda: head_of(feed) >= 2)
        else:
            wait_until(lambda: head_of(feed) >= 5)
        process.send_signal(number)
        _, errors = process.communicate(timeout=LONG_S)
        assert process.returncode == 130, errors
        assert "error: interrupted" in errors
        assert "Traceback" not in errors
        assert children(out) == []
    if at in ("training", "killed"):
        found = deltasync.verify(deltasync.open_store(feed), deep=True)
        assert found.is_clean
        assert found.head is not None


def test_killed(policy: Path, tmp_path: Path) -> None:
    """Nobody is left to clean up, and yet nothing is left."""
    out = tmp_path / "run"
    with demo(out, "--model", str(policy), "--steps", "1000") as process:
        wait_until(lambda: head_of(out / "feed") >= 1)
        assert len(children(out)) == 3
        process.kill()
        wait_until(lambda: not children(out))
    assert deltasync.verify(deltasync.open_store(out / "feed"), deep=True).is_clean


def test_a_model_that_does_not_fit(tmp_path: Path) -> None:
    out, small = tmp_path / "run", save_policy(tmp_path / "small", vocabulary=50)
    with demo(out, "--model", str(small)) as process:
        _, errors = process.communicate(timeout=LONG_S)
        assert process.returncode == 1
        assert "has 50 tokens, a game needs 106" in errors
        assert children(out) == []


class _WithoutTheLast(Processes):
    """Replica 2 never comes."""

    def start(self, module: str, name: str, *arguments: str) -> None:
        if name != "replica-2":
            super().start(module, name, *arguments)


def test_a_replica_that_never_comes(policy: Path, tmp_path: Path) -> None:
    settings = Settings(str(tmp_path / "feed"), str(tmp_path / "run"), steps=1000, model=str(policy))
    prepare(settings)
    boards: list[Board] = []
    director = Director(settings, _WithoutTheLast(settings), boards.append, comes_s=5.0)
    with pytest.raises(EngineError, match="replica-2 did not come to the newest version in 5 s"):
        director.run()
    assert children(tmp_path / "run") == []
    assert deltasync.verify(deltasync.open_store(settings.store), deep=True).is_clean


def test_a_replica_that_dies(policy: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with demo(out, "--model", str(policy), "--steps", "1000", "--replicas", "1") as process:
        wait_until(lambda: head_of(out / "feed") >= 1)
        replica = next(pid for pid in children(out) if b"demo.replica" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(replica, signal.SIGKILL)
        _, errors = process.communicate(timeout=LONG_S)
        assert process.returncode == 1
        assert "replica-1 ended with exit code -9" in errors
        assert children(out) == []
