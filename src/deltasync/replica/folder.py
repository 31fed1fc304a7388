"""A checkpoint folder as a target: any engine that loads from disk finds the newest version under one name.

The name is a symbolic link to a folder beside it, one for each version. A commit replaces the link in one rename, so
that a reader sees one complete version. The folder of the previous version is kept until the next commit.
"""

import os
import re
import secrets
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from deltasync.blocks import overwrite
from deltasync.checkpoint import map_files, mapped_layout, open_checkpoint, write_checkpoint
from deltasync.errors import CorruptError, FormatError, InvalidInputError, NotFoundError
from deltasync.files import locked, sync_folder, temporary_beside
from deltasync.format.layout import Layout
from deltasync.format.sealed import FORMAT, read_sealed, sealed
from deltasync.format.weights import Weights
from deltasync.replica.target import Damage, Staged

RECORD_NAME = ".deltasync.json"


class FolderTarget:
    """Keeps `path`, a symbolic link, at the checkpoint folder of the live version. Only one process may use a path."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(os.path.abspath(path))
        name = re.escape(self._path.name)
        self._folders = re.compile(rf"{name}\.v[0-9]+(\.[0-9a-f]+)?")
        self._leftovers = re.compile(rf"\.{name}(\.v[0-9]+(\.[0-9a-f]+)?)?\.[0-9a-f]{{12}}\.tmp")
        self._before: Path | None = None
        self._owned = ExitStack()
        self._is_open = False
        self._version: int | None = None
        self._staged: Path | None = None

    @property
    def reads_mirror(self) -> bool:
        return False

    @property
    def engine(self) -> str:
        return "folder"

    @property
    def version(self) -> int | None:
        """The version of the folder that the link points to; None if there is none."""
        self._open()
        return self._version

    def close(self) -> None:
        """Release the path for other processes. The folder stays as it is."""
        self._owned.close()
        self._is_open = False

    def require(self, layout: Layout) -> None:
        """Raise MismatchError unless the live folder has this layout, which its readers expect."""
        self._open()
        if self._version is not None:
            live = mapped_layout(self._path)
            if live is not None:
                live.require_equal(layout, ours=str(self._path), theirs="the feed")

    def stage(self, staged: Staged) -> None:
        """Write the folder of the version beside the live one."""
        self._open()
        self._clean(self._current(), self._before)
        weights = staged.weights

        def fill(new: Weights) -> None:
            if staged.changes is None:
                _copy(weights, new)
                return
            _copy(open_checkpoint(self._path).weights, new)
            for changes in staged.changes:
                overwrite(new, changes)

        out = self._path.with_name(f"{self._path.name}.v{staged.version}")
        if out.exists():
            out = out.with_name(f"{out.name}.{secrets.token_hex(4)}")
        record = sealed({"format": FORMAT, "version": staged.version, "digest": staged.manifest.digest.hex})
        write_checkpoint(weights.layout, {**staged.files(), RECORD_NAME: record}, out, fill)
        self._staged = out

    def commit(self, staged: Staged) -> float:
        """Switch the link. The previous folder stays for those who still read it; older ones are removed."""
        out, self._staged = self._staged, None
        if out is None:
            raise InvalidInputError(f"version {staged.version} was not staged", hint="call stage first")
        self._before = self._current()
        self._version = None
        since = time.perf_counter()
        with temporary_beside(self._path) as temporary:
            temporary.symlink_to(out.name)
            os.replace(temporary, self._path)
        sync_folder(self._path.parent)
        self._version = staged.version
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
            self._version = None
            return [Damage(specs[i].name, specs[i].elements) for i in tensors]
        counts = {i: int(np.count_nonzero(checkpoint.weights.arrays[i] != weights.arrays[i])) for i in tensors}
        if repair and any(counts.values()):
            mapped = map_files(checkpoint.files, writable=True)
            for i in (i for i, count in counts.items() if count):
                mapped.weights.arrays[i][:] = weights.arrays[i]
            mapped.flush()
        return [Damage(specs[i].name, count) for i, count in counts.items() if count]

    def _open(self) -> None:
        """Lock the path and read the version that an earlier process left, at the first use."""
        if self._is_open:
            return
        if os.path.lexists(self._path) and not self._path.is_symlink():
            raise InvalidInputError(
                f"{self._path} is not a link that a follower created", hint="choose a path that does not exist yet"
            )
        self._owned.enter_context(locked(self._path))
        self._is_open = True
        current = self._current()
        self._version = None if current is None else _recorded(current)

    def _current(self) -> Path | None:
        """The folder that the link points to, if this class has created it."""
        if not self._path.is_symlink():
            return None
        folder = self._path.parent / self._path.readlink()
        return folder if self._folders.fullmatch(folder.name) is not None and folder.is_dir() else None

    def _clean(self, *kept: Path | None) -> None:
        """Remove the folders of other versions and incomplete ones."""
        for path in self._path.parent.iterdir():
            is_leftover = self._leftovers.fullmatch(path.name) is not None
            if path.is_symlink():
                # A link to a folder that is still there counts as a folder, too.
                if is_leftover:
                    path.unlink()
            elif path.is_dir() and (is_leftover or (self._folders.fullmatch(path.name) and path not in kept)):
                shutil.rmtree(path)


def _recorded(folder: Path) -> int | None:
    """The version that a folder was written as."""
    try:
        return read_sealed((folder / RECORD_NAME).read_bytes(), "folder", ("version", "digest")).count("version")
    except (CorruptError, FormatError, OSError):
        return None


def _copy(source: Weights, target: Weights) -> None:
    for before, after in zip(source.arrays, target.arrays, strict=True):
        after[:] = before
