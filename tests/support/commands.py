"""What the tests of commands share: checkpoints to publish, commands here and as processes, and what they print."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import deltasync
from deltasync.cli import main as cli

from . import processes
from .helpers import changed, safetensors_bytes, state, write_sharded

Out = pytest.CaptureFixture[str]


def run(*argv: str) -> int:
    return cli.main(argv)


def write_checkpoints(folder: Path, count: int) -> None:
    """Checkpoints c0, c1 and so on, one step apart."""
    tensors = state()
    for i in range(count):
        write_sharded(folder / f"c{i}", tensors)
        tensors = changed(tensors, seed=i)


def enter_feed(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out) -> Path:
    """Work in this folder, with checkpoints c0 to c3, one step apart, and `feed`, which has the first three."""
    monkeypatch.chdir(folder)
    monkeypatch.delenv("DELTASYNC_TOKEN", raising=False)
    write_checkpoints(folder, 4)
    for i in range(3):
        assert run("publish", "feed", f"c{i}") == 0
    capsys.readouterr()
    return folder


def enter_checkpoints(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in this folder, with `old` and `new` (both sharded) and `one.safetensors` (`old` in one file)."""
    write_sharded(folder / "old", state())
    write_sharded(folder / "new", changed(state()), shards=3)
    (folder / "one.safetensors").write_bytes(safetensors_bytes(state()))
    monkeypatch.chdir(folder)
    # Child processes find the package that this process found, wherever they run.
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(Path(deltasync.__file__).absolute().parents[1]))
    return folder


def read_json(capsys: Out) -> Any:
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def text(capsys: Out) -> str:
    out, err = capsys.readouterr()
    assert err == ""
    return out


def refusal(capsys: Out) -> str:
    """The one line of an error, with nothing on stdout."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


@contextmanager
def process(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """The command as a process, which is ended in any case."""
    command = [sys.executable, "-m", "deltasync", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with processes.running(command, env={**os.environ, **environment}, **pipes) as started:
        yield started
        processes.kill(started)


def line(started: subprocess.Popen[str]) -> Any:
    """The next line of JSON."""
    assert started.stdout is not None
    text = started.stdout.readline()
    if not text:
        assert started.stderr is not None
        raise AssertionError(started.stderr.read())
    return json.loads(text)
