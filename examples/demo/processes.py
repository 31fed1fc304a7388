"""How the command starts the processes of an act, hears of them, and ends them. `child` is the inside of a process."""

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

from deltasync import DeltasyncError, EngineError, StoreError
from demo.settings import LOGS, Settings

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_GRACE_S = 5.0
"""How long a process may take to end by itself."""


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a process; `fields` is None when the process has ended."""

    name: str
    fields: dict[str, Any] | None


class Processes:
    """The trainer and the replicas of an act. Their events arrive in a queue, and their errors are raised by `next`."""

    def __init__(self, settings: Settings, act: str) -> None:
        self._settings = settings
        self._act = act
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._events: SimpleQueue[tuple[subprocess.Popen[str], Event]] = SimpleQueue()
        self._errors: dict[str, dict[str, Any]] = {}
        self._heard: set[subprocess.Popen[str]] = set()
        """Processes that have sent an event."""

    def start(self, module: str, name: str, *arguments: str) -> None:
        """Start a module of the act's package as a process, in a session of its own: it does not receive our Ctrl-C."""
        path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
        with self.log(name).open("ab") as log, _signals_deferred():
            process = subprocess.Popen(
                [sys.executable, "-m", f"{self._act}.{module}", self._settings.to_json(), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
                start_new_session=True,
                text=True,
            )
            self._running[name] = process
        threading.Thread(target=self._read, args=(process, name), daemon=True, name=f"{name}-events").start()

    def log(self, name: str) -> Path:
        """The file with the stderr of a process."""
        return self._settings.folder / LOGS / f"{self._act}-{name}.log"

    def next(self, timeout_s: float) -> Event | None:
        """The next event; None if none arrives in time. Raises the error that a process has ended with."""
        try:
            process, event = self._events.get(timeout=timeout_s)
        except Empty:
            return None
        if self._running.get(event.name) is not process:
            # It was killed on purpose, and may have been started again since.
            return None
        if event.fields is None:
            del self._running[event.name]
            self._require_success(event.name, process)
        elif event.fields["event"] == "error":
            self._errors[event.name] = event.fields
            return None
        return event

    def order(self, name: str, version: int) -> None:
        """Order a replica to reach a version and end."""
        pipe = self._running[name].stdin
        # If it has ended by itself, its last event says so.
        with suppress(BrokenPipeError):
            if pipe is not None:
                pipe.write(f"{version}\n")
                pipe.flush()

    def kill(self, name: str) -> None:
        """Kill a process with SIGKILL."""
        process = self._running.pop(name)
        process.kill()
        process.wait()

    def close(self) -> None:
        """Let all processes end by themselves, and kill those that do not.

        A process that has sent no event has nothing to finish, and may be seconds away from reading its stdin.
        """
        with _signals_deferred():
            for process in self._running.values():
                if process not in self._heard:
                    process.kill()
                if process.stdin is not None:
                    with suppress(BrokenPipeError):
                        process.stdin.close()
            deadline_s = time.monotonic() + _GRACE_S
            for process in self._running.values():
                try:
                    process.wait(max(0.0, deadline_s - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            self._running.clear()

    def _read(self, process: "subprocess.Popen[str]", name: str) -> None:
        if process.stdout is not None:
            with process.stdout as lines:
                for line in lines:
                    # A process that was killed may leave half a line.
                    if line.endswith("\n"):
                        self._heard.add(process)
                        self._events.put((process, Event(name, json.loads(line))))
        self._events.put((process, Event(name, None)))

    def _require_success(self, name: str, process: "subprocess.Popen[str]") -> None:
        code = process.wait()
        error = self._errors.get(name)
        if error is not None:
            raise _error_of_kind(error["kind"], f"{name}: {error['message']}", error["hint"])
        if code != 0:
            log = self.log(name)
            last_line = log.read_text(errors="replace").rstrip().rpartition("\n")[2]
            raise EngineError(f"{name} ended with exit code {code}: {last_line:.300}", hint=f"look at {log}")


def _error_of_kind(kind: str, message: str, hint: str | None) -> DeltasyncError:
    """The error that a process has sent, to be raised here."""
    if kind == StoreError.kind:
        return StoreError(message, transient=False, hint=hint)
    classes = (each for each in DeltasyncError.__subclasses__() if each.kind == kind)
    return next(classes, DeltasyncError)(message, hint=hint)


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Defer SIGINT and SIGTERM to the end of the block, so that no process is started and then forgotten."""
    deferred: list[int] = []
    before = {each: signal.signal(each, lambda number, _: deferred.append(number)) for each in _STOP_SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    for number in deferred:
        signal.raise_signal(number)
