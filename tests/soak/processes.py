"""Processes that are killed, stopped and started again, and what they used in the meantime."""

import os
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from support import processes

MiB = 1 << 20
_PARTS = 4
SAMPLES_LEAST = 40
"""A life with fewer samples is too short to show growth."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What a process and its children use at a time."""

    at_s: float
    rss_bytes: int
    descriptors: int


@dataclass(slots=True)
class Life:
    """One process from its start to its end. `exit` is None until that is noticed."""

    process: subprocess.Popen[bytes]
    log_begin: int
    samples: list[Sample] = field(default_factory=list)
    exit: int | None = None
    _ready_at: int | None = None

    @property
    def is_running(self) -> bool:
        return self.exit is None

    @property
    def settled(self) -> list[Sample]:
        """The samples since it was ready: on a busy machine imports can take a minute, in which memory only grows."""
        return [] if self._ready_at is None else self.samples[self._ready_at :]

    def note_ready(self) -> None:
        """It does its work now."""
        if self._ready_at is None:
            self._ready_at = len(self.samples)


class Role:
    """A program that runs once at a time, and all of its lives. What it prints is appended to `log`."""

    def __init__(
        self, name: str, log: Path, launch: Callable[[], subprocess.Popen[bytes]], *, is_long_lived: bool = True
    ) -> None:
        self.name = name
        self.log = log
        self.is_long_lived = is_long_lived
        self.lives: list[Life] = []
        self.kills = 0
        self.stops = 0
        self.is_stopped = False
        self.shared_memory: set[Path] = set()
        """Files of deltasync in shared memory that one of the processes had mapped."""
        self._launch = launch

    @property
    def is_running(self) -> bool:
        return bool(self.lives) and self.lives[-1].is_running

    def start(self) -> None:
        """Start it, unless it runs."""
        if not self.is_running:
            self.is_stopped = False
            begin = self.log.stat().st_size if self.log.exists() else 0
            self.lives.append(Life(self._launch(), begin))

    def kill(self) -> None:
        """kill -9 of the process and its children, if it runs."""
        if self.is_running and self.lives[-1].process.poll() is None:
            self.kills += 1
            self._end(signal.SIGKILL, within_s=60.0)

    def terminate(self, *, within_s: float) -> int | None:
        """SIGTERM; the exit status, or None if it has not ended in time."""
        self.resume()
        if self.is_running:
            self._end(signal.SIGTERM, within_s=within_s)
        return self.lives[-1].process.poll()

    def stop(self) -> None:
        """SIGSTOP: it stands still wherever it is."""
        if self.is_running:
            self.stops += 1
            self.is_stopped = True
            self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self.is_stopped = False
        if self.is_running:
            self._signal(signal.SIGCONT)

    def ended(self) -> Life | None:
        """The last life if it has ended since the last call, and nothing here has ended it."""
        if not self.is_running:
            return None
        life = self.lives[-1]
        life.exit = life.process.poll()
        return None if life.exit is None else life

    def sample(self, at_s: float) -> None:
        """Note what it uses, and which files in shared memory."""
        if not self.is_running:
            return
        pids = list(_descendants(self.lives[-1].process.pid))
        rss_bytes = descriptors = 0
        for pid in pids:
            with suppress(OSError):
                rss_bytes += _rss_bytes(pid)
                descriptors += len(os.listdir(f"/proc/{pid}/fd"))
                maps = Path(f"/proc/{pid}/maps").read_text()
                self.shared_memory.update(
                    Path(line.split(maxsplit=5)[5]) for line in maps.splitlines() if "/dev/shm/deltasync-" in line
                )
        if rss_bytes:
            self.lives[-1].samples.append(Sample(at_s, rss_bytes, descriptors))

    def said(self, life: Life) -> str:
        """What a life has printed."""
        with self.log.open("rb") as file:
            file.seek(life.log_begin)
            return file.read().decode(errors="replace")

    def _end(self, number: signal.Signals, *, within_s: float) -> None:
        life = self.lives[-1]
        if number == signal.SIGTERM:
            life.process.terminate()
        else:
            self._signal(number)
        with suppress(subprocess.TimeoutExpired):
            status = life.process.wait(within_s)
            # One that was quicker has ended by itself, which `ended` reports.
            if status in (0, -number):
                life.exit = status

    def _signal(self, number: signal.Signals) -> None:
        pid = self.lives[-1].process.pid
        with suppress(ProcessLookupError):
            if os.getpgid(pid) == pid:
                os.killpg(pid, number)
            else:
                os.kill(pid, number)


def popen(command: Sequence[str | Path], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A process whose output is appended to a log."""
    with log.open("ab") as output:
        return processes.start(
            command, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )


def wait_until(is_so: Callable[[], bool], *, within_s: float) -> bool:
    """Whether a condition becomes true in time."""
    deadline = time.monotonic() + within_s
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def grows(values: Sequence[float], allowance: float) -> bool:
    """Whether a quantity grows without bound: it rises in every part of the time, and by more than the allowance.

    The first fifth is left out, in which pools and caches fill. The medians of the four parts of the rest are compared,
    so that no peak counts, and neither does a plateau, however high.
    """
    if len(values) < SAMPLES_LEAST:
        return False
    rest = values[len(values) // 5 :]
    cuts = [len(rest) * part // _PARTS for part in range(_PARTS + 1)]
    medians = [statistics.median(rest[a:b]) for a, b in pairwise(cuts)]
    least = allowance / (3 * (_PARTS - 1))
    rises = [b - a for a, b in pairwise(medians)]
    return medians[-1] - medians[0] > allowance and all(rise > least for rise in rises)


def _descendants(pid: int) -> list[int]:
    found = [pid]
    for each in found:
        with suppress(OSError):
            for task in Path(f"/proc/{each}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def _rss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0
