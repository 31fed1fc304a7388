"""Programs on hosts, one on each: they tell by lines of JSON on stdout, and end when their stdin does."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from namespaces import Host

_LOOK_S = 0.1
_TAIL_LINES = 25


class Programs:
    """What was started. A program that fails is an error of whoever waits for another one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, host: Host, *command: str | Path, environment: Mapping[str, str]) -> None:
        """Start a program. What it prints goes to files that no host sees."""
        with self._events(name).open("wb") as events, self._log(name).open("wb") as log:
            self._running[name] = subprocess.Popen(
                host.command(*command),
                env={**host.environment, **environment},
                stdin=subprocess.PIPE,
                stdout=events,
                stderr=log,
                start_new_session=True,
            )

    def told(self, name: str, event: str) -> list[dict[str, Any]]:
        """The events of one kind so far."""
        # The last line may be only half there. Programs that are not ours print what they like.
        lines = self._events(name).read_text(errors="replace").split("\n")[:-1]
        found = [json.loads(line) for line in lines if line.startswith('{"event": ')]
        return [fields for fields in found if fields["event"] == event]

    def await_told(self, name: str, event: str, *, within_s: float) -> dict[str, Any]:
        """The first event of one kind, as soon as it is told."""
        deadline = time.monotonic() + within_s
        while not (found := self.told(name, event)):
            self.require_well()
            if self._running[name].poll() == 0 and not self.told(name, event):
                pytest.fail(f"{name} ended without {event!r}\n{self._tails()}")
            if time.monotonic() > deadline:
                pytest.fail(f"{name} did not tell {event!r} in {within_s:g} s\n{self._tails()}")
            time.sleep(_LOOK_S)
        return found[0]

    def require_well(self) -> None:
        """Fails, with the reason that it gave, if a program has failed."""
        for name, process in self._running.items():
            if process.poll() not in (None, 0):
                pytest.fail(f"{name} ended with {process.poll()}: {self._reason(name)}\n{self._tails()}")

    def finish(self, name: str, *, within_s: float) -> None:
        """Let a program end in good order."""
        process = self._running[name]
        assert process.stdin is not None
        process.stdin.close()
        process.wait(within_s)
        self.require_well()

    def kill(self) -> None:
        """End all that was started, at once."""
        for process in self._running.values():
            # The session is its own: this reaches what it started, and nobody else.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdin is not None:
                process.stdin.close()

    def _reason(self, name: str) -> str:
        """The error that a program told; of one that tells none, the last that it wrote."""
        for error in self.told(name, "error"):
            return f"{error['message']} ({error['hint']})"
        return self._log(name).read_text(errors="replace").rstrip().rpartition("\n")[2]

    def _events(self, name: str) -> Path:
        return self._folder / f"{name}.jsonl"

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _tails(self) -> str:
        found = []
        for name in self._running:
            for path in (self._events(name), self._log(name)):
                lines = path.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
                found.append("\n".join([f"--- {path.name}", *(line[:300] for line in lines)]))
        return "\n".join(found)


@contextmanager
def programs(folder: Path) -> Iterator[Programs]:
    """Programs that are gone at the end of the block."""
    folder.mkdir()
    started = Programs(folder)
    try:
        yield started
    finally:
        started.kill()
