"""The processes of the demo, as the one that starts them sees them. None outlives `Processes.close`."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from deltasync.errors import DeltasyncError, EngineError, StoreError
from wordle.settings import LOGS, Settings

_STOPS = (signal.SIGINT, signal.SIGTERM)
_GRACE_S = 5.0
"""How long a process may take to end by itself."""


@dataclass(frozen=True, slots=True)
class Told:
    """An event of a process; `fields` is None when it has ended."""

    name: str
    fields: dict[str, Any] | None


class Processes:
    """The trainer and the replicas. They tell through a queue; errors of theirs are raised here."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._told: SimpleQueue[tuple[subprocess.Popen[str], Told]] = SimpleQueue()
        self._errors: dict[str, dict[str, Any]] = {}
        self._begun: set[subprocess.Popen[str]] = set()

    def start(self, module: str, name: str, *arguments: str) -> None:
        """Start a module of this package as a process. It does not get the Ctrl-C that is meant for us."""
        with self._log(name).open("ab") as log, _undisturbed():
            process = subprocess.Popen(
                [sys.executable, "-m", f"wordle.{module}", self._settings.to_json(), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
                text=True,
            )
            self._running[name] = process
        threading.Thread(target=self._read, args=(process, name), daemon=True, name=f"{name}-events").start()

    def next(self, timeout_s: float) -> Told | None:
        """The next event; None if there is none for a while. An error that a process ended with is raised."""
        try:
            process, told = self._told.get(timeout=timeout_s)
        except Empty:
            return None
        if self._running.get(told.name) is not process:
            # Killed on purpose, and perhaps started again since.
            return None
        if told.fields is None:
            del self._running[told.name]
            self._require_success(told.name, process)
        elif told.fields["event"] == "error":
            self._errors[told.name] = told.fields
            return None
        return told

    def order(self, name: str, version: int) -> None:
        """Tell a replica to come to a version, then to end."""
        pipe = self._running[name].stdin
        # One that has ended by itself is told by its last event.
        with suppress(BrokenPipeError):
            if pipe is not None:
                pipe.write(f"{version}\n")
                pipe.flush()

    def kill(self, name: str) -> None:
        """SIGKILL."""
        process = self._running.pop(name)
        process.kill()
        process.wait()

    def close(self) -> None:
        """Let all end by themselves, and kill what does not.

        One that has told nothing yet has nothing to bring to an end, and may be seconds away from listening.
        """
        with _undisturbed():
            for process in self._running.values():
                if process not in self._begun:
                    process.kill()
                _close(process)
            until_s = time.monotonic() + _GRACE_S
            for process in self._running.values():
                try:
                    process.wait(max(0.0, until_s - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            self._running.clear()

    def _log(self, name: str) -> Path:
        return self._settings.folder / LOGS / f"{name}.log"

    def _read(self, process: "subprocess.Popen[str]", name: str) -> None:
        if process.stdout is not None:
            with process.stdout as lines:
                for line in lines:
                    # A process that was killed may leave half a line.
                    if line.endswith("\n"):
                        self._begun.add(process)
                        self._told.put((process, Told(name, json.loads(line))))
        self._told.put((process, Told(name, None)))

    def _require_success(self, name: str, process: "subprocess.Popen[str]") -> None:
        code = process.wait()
        told = self._errors.get(name)
        if told is not None:
            raise _same_error(told["kind"], f"{name}: {told['message']}", told["hint"])
        if code != 0:
            log = self._log(name)
            last = log.read_text(errors="replace").rstrip().rpartition("\n")[2]
            raise EngineError(f"{name} ended with exit code {code}: {last:.300}", hint=f"look at {log}")


def _same_error(kind: str, message: str, hint: str | None) -> DeltasyncError:
    """The error that a process told, as if it had happened here."""
    if kind == StoreError.kind:
        return StoreError(message, transient=False, hint=hint)
    found = (each for each in DeltasyncError.__subclasses__() if each.kind == kind)
    return next(found, DeltasyncError)(message, hint=hint)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """SIGINT and SIGTERM wait for the end of the block: no process is forgotten half way."""
    waiting: list[int] = []
    before = {each: signal.signal(each, lambda number, _: waiting.append(number)) for each in _STOPS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    for number in waiting:
        signal.raise_signal(number)


def _close(process: "subprocess.Popen[str]") -> None:
    if process.stdin is not None:
        with suppress(BrokenPipeError):
            process.stdin.close()
