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

from deltasync.cli import main as cli

from . import processes
from .helpers import changed, state, write_sharded

Out = pytest.CaptureFixture[str]


def run(*argv: str) -> int:
    return cli.main(argv)


def write_checkpoints(folder: Path, count: int) -> None:
    """Checkpoints c0, c1 and so on, one step apart."""
    tensors = state()
    for i in range(count):
        write_sharded(folder / f"c{i}", tensors)
        tensors = changed(tensors, seed=i)


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
