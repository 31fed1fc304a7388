"""A checkpoint folder as a target: any engine that loads from disk finds the newest version under one name.

The name `X` is a symbolic link into the hidden folder `.X.deltasync` beside it, which has one folder for each version.
A commit replaces the link in one rename, so that a reader sees one complete version. The folder of the previous version
is kept until the next commit.

Each folder of a version carries a sealed record. Nothing without one is ever removed, and only a link that leads into
the hidden folder is replaced: everything else may be the user's.
"""

import logging
import os
import secrets
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from deltasync import blocks
from deltasync.blocks import overwrite
from deltasync.checkpoint import map_files, mapped_layout, new_checkpoint, open_checkpoint
from deltasync.errors import CorruptError, FormatError, InvalidInputError, NotFoundError
from deltasync.files import locked, sync_folder, temporary_beside
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
            self._require_ours()
            self._owned.enter_context(locked(self._path))
            self._is_open = True
            self.version = self._recorded_version()

    def close(self) -> None:
        """Release the path for other processes. The folder stays as it is."""
        self._owned.close()
        self._is_open = False

    def require(self, layout: Layout) -> None:
        """Raise MismatchError unless the live folder has this layout, which its readers expect."""
        if self._recorded_version() is not None:
            live = mapped_layout(self._path)
            if live is not None:
                live.require_equal(layout, ours=str(self._path), theirs="the feed")

    def stage(self, staged: Staged) -> bool:
        """Write the folder of the version beside the live one, read it back, and prove it by its digest."""
        self._require_ours()
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
            if staged.changes is None:
                new.copy_from(staged.weights)
            else:
                new.copy_from(open_checkpoint(self._path).weights)
                for changes in staged.changes:
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
        self._require_ours()
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

    def _require_ours(self) -> None:
        """InvalidInputError if the path or the hidden folder is taken by something that no follower has created."""
        if os.path.lexists(self._path) and self._linked() is None:
            raise InvalidInputError(
                f"{self._path} is not a link that a follower created", hint="choose a path that does not exist yet"
            )
        if os.path.lexists(self._home) and (self._home.is_symlink() or not self._home.is_dir()):
            raise InvalidInputError(
                f"{self._home} is not a folder, which is needed for the versions", hint="choose another path"
            )

    def _linked(self) -> Path | None:
        """What the link leads to, which need not be there, if a follower has created it."""
        if not self._path.is_symlink():
            return None
        # The link is read, not resolved: what it leads to may be gone.
        folder = self._path.parent / self._path.readlink()
        return folder if folder.parent == self._home else None

    def _current(self) -> Path | None:
        folder = self._linked()
        return folder if folder is not None and folder.is_dir() else None

    def _recorded_version(self) -> int | None:
        """The version of the folder that the link leads to; None if there is none."""
        current = self._current()
        return None if current is None else _recorded(current)

    def _clean(self, *kept: Path | None) -> None:
        """Remove the folders of other versions and incomplete ones, and links that were not put in place."""
        for path in list(self._home.iterdir()) if self._home.is_dir() else ():
            if path.is_symlink():
                if (self._path.parent / path.readlink()).parent == self._home:
                    path.unlink()
            elif path not in kept and _recorded(path) is not None:
                shutil.rmtree(path)


def _recorded(folder: Path) -> int | None:
    """The version that a folder was written as; None without a record."""
    try:
        with (folder / RECORD_NAME).open("rb") as file:
            data = file.read(limits.RECORD_BYTES_MAX + 1)
        return read_sealed(data, "folder", ("version", "digest")).count("version")
    except (CorruptError, FormatError, OSError):
        return None
