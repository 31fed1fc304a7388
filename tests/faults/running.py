"""Publishers in processes of their own, and small disks to run them on."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import LONG_S, processes
from support.servers import missing

FOLDER = Path(__file__).parent


class Publisher:
    """publisher.py. What it says is appended to `output`."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self._process = process
        self._output = output
        self._runs = 0

    def start(self) -> int:
        """One process that publishes; its id."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")
        self._process.stdin.flush()
        self._runs += 1
        return int(self._await("pid ", self._runs).split()[1])

    def kill(self, pid: int) -> None:
        """SIGKILL. A process that had failed by itself before is an error."""
        os.kill(pid, signal.SIGKILL)
        self._await("killed", self._runs)

    @contextmanager
    def paused(self, pid: int) -> Iterator[None]:
        """It stands still between two calls of the system, wherever it is."""
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def committed(self) -> int:
        """The newest version whose publication has returned; -1 before the first."""
        return max((int(line) for line in self._lines() if line.isdigit()), default=-1)

    def await_version(self, version: int) -> None:
        """Until its publication has returned."""
        self._await(str(version), 1)

    def _lines(self) -> list[str]:
        return self._output.read_text().split("\n")[:-1]

    def _await(self, begin: str, count: int) -> str:
        """The line number `count` of those that begin so."""
        deadline = time.monotonic() + LONG_S
        while time.monotonic() < deadline and "failed" not in self._lines() and self._process.poll() is None:
            found = [line for line in self._lines() if line == begin or (begin[-1] == " " and line.startswith(begin))]
            if len(found) >= count:
                return found[count - 1]
            time.sleep(0.002)
        pytest.fail(f"the publisher never said {begin!r}: {self._output.read_text()[-3000:]}")


@contextmanager
def publishing(url: str, output: Path, *options: str) -> Iterator[Publisher]:
    """A publisher that has not begun. No process of its is left at the end of the block."""
    with output.open("wb") as file:
        process = processes.start(
            [sys.executable, FOLDER / "publisher.py", url, *options],
            env={**os.environ, "PYTHONPATH": str(FOLDER.parent)},
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            text=False,
        )
    try:
        yield Publisher(process, output)
    finally:
        processes.kill(process)
        process.stdin.close()


@contextmanager
def mounted(at: Path, *arguments: str | Path) -> Iterator[Path]:
    """A file system at a new folder; where this process may not mount, the test is skipped, and in CI it fails."""
    if sys.platform != "linux" or os.geteuid() != 0:
        missing("mounting needs root on Linux")
    at.mkdir()
    done = processes.run(["mount", *arguments, at])
    if done.returncode != 0:
        missing(f"cannot mount here: {done.stderr.strip()}")
    try:
        yield at
    finally:
        processes.run(["umount", "--lazy", at])


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return processes.run(command)
