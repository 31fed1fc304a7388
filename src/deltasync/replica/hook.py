"""A command that runs after each switch of a checkpoint folder, so that any engine can load the new version."""

import hashlib
import logging
import os
import shlex
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from deltasync.errors import CorruptError, FormatError, InvalidInputError
from deltasync.files import atomic_write
from deltasync.format import limits
from deltasync.format.sealed import FORMAT, read_sealed, sealed
from deltasync.replica.folder import RECORD_NAME

logger = logging.getLogger(__name__)

DONE_NAME = "exec.json"
"""In the hidden folder: the version that the command last succeeded for, so that a restart does not repeat it."""

_GRACE_S = 10.0
"""How long a command may go on after the follower was stopped, and after SIGTERM."""

_WAIT_FIRST_S = 1.0
_WAIT_MOST_S = 60.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class HookStatus:
    """The state of a hook. `version` is the newest one that the command succeeded for.

    `failing_version` is the one that it failed for since then, with `exit_code` (None if it did not start or was ended)
    and `error`. `failures` counts failed runs since the follower was started.
    """

    version: int | None = None
    failing_version: int | None = None
    exit_code: int | None = None
    error: str | None = None
    failures: int = 0

    @property
    def is_failing(self) -> bool:
        return self.failing_version is not None


class Hook:
    """Runs a command for the version that the folder `target` is at, once for each version until it succeeds.

    The command is split as a shell would, and never given to one. `{path}` in its words becomes the folder of the
    version, `{version}` its number. Its output goes to stderr.
    """

    def __init__(self, command: str, target: Path, *, timeout_s: float) -> None:
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise InvalidInputError(
                f"the command of --exec cannot be split: {error}", hint="close the quotes"
            ) from error
        if not self._words:
            raise InvalidInputError("the command of --exec is empty", hint="leave the option out")
        self._target = Path(os.path.abspath(target))
        self._done_path = self._target.with_name(f".{self._target.name}.deltasync") / DONE_NAME
        self._timeout_s = timeout_s
        self._stopping = threading.Event()
        self._tries = 0
        self.status = HookStatus()

    def stop(self) -> None:
        """Let `run` return soon: a command that runs gets a few seconds to finish."""
        self._stopping.set()

    def is_due(self) -> bool:
        """Whether the folder is at a version that the command has not succeeded for."""
        folder = self._folder()
        if folder is None:
            return False
        _, version, record_sha256 = folder
        if self._done() != (version, record_sha256, self._command_sha256()):
            return True
        if self.status.version != version:
            self.status = HookStatus(version, failures=self.status.failures)
        return False

    def run(self) -> float | None:
        """Run the command if it is due. Returns the seconds until a retry, or None if there is nothing to retry."""
        folder = self._folder()
        if folder is None or not self.is_due():
            return None
        path, version, record_sha256 = folder
        began_s = time.monotonic()
        exit_code, error = self._execute([_filled(word, path, version) for word in self._words])
        if error is None:
            logger.info("the command for version %d succeeded in %.1f s", version, time.monotonic() - began_s)
            self._tries = 0
            self.status = HookStatus(version, failures=self.status.failures)
            record = {"version": version, "record_sha256": record_sha256, "command_sha256": self._command_sha256()}
            atomic_write(self._done_path, [sealed({"format": FORMAT, **record})])
            return None
        before = self.status
        self._tries = self._tries + 1 if before.failing_version == version else 1
        self.status = HookStatus(before.version, version, exit_code, error, before.failures + 1)
        wait_s = min(_WAIT_FIRST_S * float(1 << min(self._tries - 1, 10)), _WAIT_MOST_S)
        if not self._stopping.is_set():
            message = "the command for version %d %s (try %d), retrying in %g s: %s"
            logger.warning(message, version, error, self._tries, wait_s, shlex.join(self._words))
        return wait_s

    def _execute(self, words: list[str]) -> tuple[int | None, str | None]:
        """The exit code, and what is wrong with it; None for 0."""
        try:
            # stdout has our own results.
            output = subprocess.DEVNULL if sys.__stderr__ is None else sys.__stderr__
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output)
        except OSError as error:
            return None, f"cannot be started: {error.strerror}"
        ends_s = time.monotonic() + self._timeout_s
        is_stopping = False
        while process.poll() is None:
            now_s = time.monotonic()
            if self._stopping.is_set() and not is_stopping:
                is_stopping, ends_s = True, min(ends_s, now_s + _GRACE_S)
            if now_s >= ends_s:
                _end(process)
                return None, "was stopped" if is_stopping else f"took longer than {self._timeout_s:g} s and was ended"
            with suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)
        code = process.returncode
        if code < 0:
            return code, f"was ended by signal {-code}"
        return code, None if code == 0 else f"failed with exit code {code}"

    def _folder(self) -> tuple[Path, int, str] | None:
        """The folder that the link leads to, its version, and the hash of its record; None if there is none."""
        path = Path(os.path.realpath(self._target))
        try:
            data = (path / RECORD_NAME).read_bytes()[: limits.RECORD_BYTES_MAX + 1]
            version = read_sealed(data, "folder", ("version", "digest")).count("version")
        except (CorruptError, FormatError, OSError):
            return None
        return path, version, hashlib.sha256(data).hexdigest()

    def _done(self) -> tuple[int, str, str] | None:
        try:
            data = self._done_path.read_bytes()[: limits.RECORD_BYTES_MAX + 1]
            fields = read_sealed(data, "exec", ("version", "record_sha256", "command_sha256"))
            return fields.count("version"), fields.sha256("record_sha256"), fields.sha256("command_sha256")
        except (CorruptError, FormatError, OSError):
            return None

    def _command_sha256(self) -> str:
        return hashlib.sha256("\0".join(self._words).encode(errors="surrogateescape")).hexdigest()


def _filled(word: str, path: Path, version: int) -> str:
    # The path last: it may contain braces of its own.
    return word.replace("{version}", str(version)).replace("{path}", str(path))


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
