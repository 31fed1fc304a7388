"""A checkpoint folder as a target: any engine that loads from disk finds the newest version under one name.

The name `X` is a symbolic link into the hidden folder `.X.deltasync` beside it, which has one folder for each version.
A commit replaces the link in one rename, so that a reader sees one complete version. The folder of the previous version
is kept until the next commit.

Each folder of a version carries a sealed record. Nothing without one is ever removed, and only a link that leads into
the hidden folder is replaced: everything else may be the user's.

`Hook` runs a command after each switch, so that any engine can load the new version.
"""

import hashlib
import logging
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deltasync import blocks
from deltasync.blocks import overwrite
from deltasync.checkpoint import map_files, mapped_layout, new_checkpoint, open_checkpoint
from deltasync.errors import CorruptError, FormatError, InvalidInputError, NotFoundError
from deltasync.files import atomic_write, locked, sync_folder, temporary_beside
from deltasync.format import limits
from deltasync.format.companions import has_config
from deltasync.format.layout import Layout
from deltasync.format.sealed import FORMAT, read_sealed, sealed
from deltasync.format.weights import Weights
from deltasync.replica.target import STAGED_DIGEST, Damage, Staged, Target

logger = logging.getLogger(__name__)

RECORD_NAME = ".deltasync.json"


class FolderTarget(Target):
    """Keeps `path`, a symbolic link, at the checkpoint folder of the live version. Only one process may use a path."""

    engine = "folder"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(os.path.abspath(path))
        self._home = self._path.with_name(f".{self._path.name}.deltasync")
        self._before: Path | None = None
        self._owned = ExitStack()
        self._is_open = False
        self._staged: Path | None = None
        self._has_warned = False

    def open(self) -> None:
        """Lock the path, and read the version that an earlier process left."""
        if not self._is_open:
            self._current()
            self._owned.enter_context(locked(self._path))
            self._is_open = True
            self.version = recorded_version(self._current())

    def close(self) -> None:
        """Release the path for other processes. The folder stays as it is."""
        self._owned.close()
        self._is_open = False

    def require(self, layout: Layout) -> None:
        """Raise MismatchError unless the live folder has this layout, which its readers expect."""
        if recorded_version(self._current()) is not None:
            live = mapped_layout(self._path)
            if live is not None:
                live.require_equal(layout, ours=str(self._path), theirs="the feed")

    def stage(self, staged: Staged) -> bool:
        """Write the folder of the version beside the live one, read it back, and prove it by its digest."""
        self._clean(self._current(), self._before)
        self._home.mkdir(exist_ok=True)
        out = self._home / f"v{staged.version}"
        if os.path.lexists(out):
            out = out.with_name(f"{out.name}.{secrets.token_hex(4)}")
        record = sealed({"format": FORMAT, "version": staged.version, "digest": staged.manifest.digest.hex})
        # The record comes first, so that a folder that is not finished carries it, too.
        files = staged.files()
        if not has_config(files) and not self._has_warned:
            logger.warning(
                "version %d has no config.json: engines cannot load %s without one", staged.version, self._path
            )
            self._has_warned = True
        with new_checkpoint(staged.weights.layout, {RECORD_NAME: record, **files}, out) as new:
            whole = staged.weights if staged.changes is None else open_checkpoint(self._path).weights
            for ordinal, array in enumerate(whole.arrays):
                new.write_run(ordinal, 0, array)
            for changes in staged.changes or ():
                overwrite(new, changes)
        digest = blocks.digest(open_checkpoint(out).weights)
        if digest != staged.manifest.digest:
            shutil.rmtree(out)
            raise CorruptError(
                f"version {staged.version} was written to {out} with the digest {digest}, not with that of the feed, "
                f"{staged.manifest.digest}",
                version=staged.version,
                rule=STAGED_DIGEST,
                hint="the disk of the folder or the mirror may be faulty",
            )
        self._staged = out
        return True

    def commit(self, staged: Staged) -> float:
        """Switch the link. The previous folder stays for those who still read it; older ones are removed."""
        self.version = None
        pause_s = self._switch(staged)
        self.version = staged.version
        return pause_s

    def _switch(self, staged: Staged) -> float:
        out, self._staged = self._staged, None
        if out is None:
            raise InvalidInputError(f"version {staged.version} was not staged", hint="call stage first")
        self._before = self._current()
        since = time.perf_counter()
        with temporary_beside(self._home / "link") as temporary:
            temporary.symlink_to(out.relative_to(self._path.parent))
            os.replace(temporary, self._path)
        sync_folder(self._path.parent)
        pause_s = time.perf_counter() - since
        self._clean(out, self._before)
        return pause_s

    def scrub(self, weights: Weights, tensors: Sequence[int], *, repair: bool) -> list[Damage]:
        """Compare the files with the weights. Every element of an unreadable checkpoint counts as damage."""
        specs = weights.layout.tensors
        try:
            checkpoint = open_checkpoint(self._path)
            checkpoint.weights.layout.require_equal(weights.layout, ours=str(self._path), theirs="the feed")
        except (CorruptError, FormatError, NotFoundError):
            self.version = None
            return [Damage(specs[i].name, specs[i].elements) for i in tensors]
        counts = {i: int(np.count_nonzero(checkpoint.weights.arrays[i] != weights.arrays[i])) for i in tensors}
        if repair and any(counts.values()):
            mapped = map_files(checkpoint.files, writable=True)
            for i in (i for i, count in counts.items() if count):
                mapped.weights.write_run(i, 0, weights.arrays[i])
            mapped.flush()
        return [Damage(specs[i].name, count) for i, count in counts.items() if count]

    def _current(self) -> Path | None:
        """The folder that the link leads to; None if there is none.

        InvalidInputError if the path or the hidden folder is taken by something that no follower has created.
        """
        folder = None
        if os.path.lexists(self._path):
            # The link is read, not resolved: what it leads to may be gone.
            folder = self._path.parent / self._path.readlink() if self._path.is_symlink() else self._path
            if folder.parent != self._home:
                raise InvalidInputError(
                    f"{self._path} is not a link that a follower created", hint="choose a path that does not exist yet"
                )
        if os.path.lexists(self._home) and (self._home.is_symlink() or not self._home.is_dir()):
            raise InvalidInputError(
                f"{self._home} is not a folder, which is needed for the versions", hint="choose another path"
            )
        return folder if folder is not None and folder.is_dir() else None

    def _clean(self, *kept: Path | None) -> None:
        """Remove the folders of other versions and incomplete ones, and links that were not put in place."""
        for path in list(self._home.iterdir()) if self._home.is_dir() else ():
            if path.is_symlink():
                if (self._path.parent / path.readlink()).parent == self._home:
                    path.unlink()
            elif path not in kept and recorded_version(path) is not None:
                shutil.rmtree(path)


def recorded_version(folder: Path | None) -> int | None:
    """The version that a folder was written as; None without a record."""
    record = None if folder is None else _read_record(folder)
    return None if record is None else record[0]


def _read_record(folder: Path) -> tuple[int, bytes] | None:
    try:
        with (folder / RECORD_NAME).open("rb") as file:
            data = file.read(limits.RECORD_BYTES_MAX + 1)
        return read_sealed(data, "folder", ("version", "digest")).count("version"), data
    except (CorruptError, FormatError, OSError):
        return None


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
        try:
            data = self._done_path.read_bytes()[: limits.RECORD_BYTES_MAX + 1]
            done = read_sealed(data, "exec", ("version", "record_sha256", "command_sha256"))
            found = done.count("version"), done.sha256("record_sha256"), done.sha256("command_sha256")
        except (CorruptError, FormatError, OSError):
            return True
        if found != (version, record_sha256, self._command_sha256()):
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
        # The path last: it may contain braces of its own.
        words = [word.replace("{version}", str(version)).replace("{path}", str(path)) for word in self._words]
        exit_code, error = self._execute(words)
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
                process.terminate()
                try:
                    process.wait(_GRACE_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
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
        record = _read_record(path)
        return None if record is None else (path, record[0], hashlib.sha256(record[1]).hexdigest())

    def _command_sha256(self) -> str:
        return hashlib.sha256("\0".join(self._words).encode(errors="surrogateescape")).hexdigest()
