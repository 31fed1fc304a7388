"""Processes for tests: each in a session of its own, with a limit on every wait, and gone with all that it started."""

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from . import LONG_S

Command = Sequence[str | Path]

_GRACE_S = 30.0
"""What has not ended so long after SIGTERM is killed."""


def start(command: Command, **options: Any) -> "subprocess.Popen[Any]":
    """Start a process, with the options of `Popen`. Its pipes are text, unless they say otherwise.

    Whoever calls this ends it with `stop` or `kill`, whatever the test does; `running` does that by itself.
    """
    return subprocess.Popen([str(word) for word in command], **{"text": True, "start_new_session": True, **options})


@contextmanager
def running(command: Command, **options: Any) -> "Iterator[subprocess.Popen[Any]]":
    """A process that is gone at the end of the block. An error in the block shows what it said last."""
    process = start(command, **options)
    try:
        yield process
    except BaseException as error:
        stop(process)
        error.add_note(f"{process.args!r:.500} ended with {process.returncode}. It said last:\n{_said(process, error)}")
        raise
    finally:
        stop(process)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


def run(
    command: Command, *, input: str | None = None, timeout_s: float = LONG_S, check: bool = False, **options: Any
) -> "subprocess.CompletedProcess[Any]":
    """Run a process to its end. The result has what it said, unless options lead that elsewhere.

    With `check` it must succeed.
    """
    pipes = {"stdin": subprocess.DEVNULL if input is None else subprocess.PIPE}
    pipes |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with running(command, **(pipes | options)) as process:
        out, err = process.communicate(input, timeout=timeout_s)
    assert not check or process.returncode == 0, f"{command!r:.500} ended with {process.returncode}:\n{out}\n{err}"
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def stop(process: "subprocess.Popen[Any]") -> None:
    """End a process and all that it started, gently first."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    kill(process)


def kill(process: "subprocess.Popen[Any]") -> None:
    """End a process and all that it started, at once."""
    # It leads a session of its own, so this reaches its children, and nothing else.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(LONG_S)


def _said(process: "subprocess.Popen[Any]", error: BaseException) -> str:
    """What was read before a timeout, and what is left in the pipes. A process that has left the session may hold them
    open, so this does not wait for their end.
    """
    said = [error.output, error.stderr] if isinstance(error, subprocess.TimeoutExpired) else []
    for pipe in (process.stdout, process.stderr):
        if pipe is not None and not pipe.closed:
            os.set_blocking(pipe.fileno(), False)
            with suppress(OSError, TypeError):
                said.append(pipe.read())
    return "\n".join(part.decode(errors="replace") if isinstance(part, bytes) else part for part in said if part)
