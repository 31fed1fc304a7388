"""Export a feed as folders of deltas, one for each version."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from deltasync import arguments
from deltasync.checkpoint import new_checkpoint, require_space
from deltasync.errors import CorruptError, InvalidInputError, MismatchError, NotFoundError
from deltasync.feed.files import find_files
from deltasync.feed.log import Log
from deltasync.feed.route import Route
from deltasync.files import make_folder, release_folder, sync_file, sync_folder, temporary_folder_beside
from deltasync.format.digest import StateDigest
from deltasync.format.manifest import Manifest
from deltasync.format.sealed import canonical_json, parse_object
from deltasync.interop.folder import (
    ChecksumFormat,
    Encoding,
    TensorDelta,
    folder_name,
    list_folders,
    tensor_deltas,
    write_files,
)
from deltasync.parallel import Closable
from deltasync.state import Applied, State
from deltasync.store import Feed, opened

MARK = "deltasync-export.json"
"""The file in each folder with the version and the state digest of the feed. It marks the folder as ours."""

_MARK_BYTES_MAX = 4096
_Path = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Exported:
    """One folder that was written. `base_version` is None for a checkpoint with all weights."""

    path: Path
    version: int
    base_version: int | None
    nbytes: int


class Exporter(Closable):
    """Writes the versions of a feed to `folders`, in order: first a checkpoint, then a delta for each version.

        with Exporter("s3://bucket/run-42", "shared/weights") as exporter:
            while (exported := exporter.advance()) is not None:
                print(exported.path)

    A folder appears whole or not at all, after its weights were proved by their digest. The folder of version n is
    `weight_v` and n with six digits. A process that starts later continues after the last folder: older ones may be
    removed at any time. The weights are kept in memory.

    `start`: the version of the first folder in place of the oldest one that the feed keeps.
    `base` is a local copy of the checkpoint that the feed began with, if the one that it names is not available.
    `trust_code`: also write files beside the weights that can run code when they are loaded.
    """

    def __init__(
        self,
        feed: Feed,
        folders: _Path,
        *,
        encoding: Encoding = "xor",
        checksum_format: ChecksumFormat = "adler32",
        start: int | None = None,
        base: _Path | None = None,
        trust_code: bool = False,
    ) -> None:
        arguments.one_of("encoding", encoding, get_args(Encoding))
        arguments.one_of("checksum_format", checksum_format, get_args(ChecksumFormat))
        self._root = arguments.local_path("folders", folders)
        self._start = arguments.optional_version(start)
        self._encoding = encoding
        self._checksum_format = checksum_format
        self._base = arguments.optional_path("base", base)
        self._trust_code = trust_code
        self._feed = feed
        self._log: Log | None = None
        self._resources = ExitStack()
        self._state = State()
        self._last: Manifest | None = None
        """The version of the last folder."""

    def close(self) -> None:
        """Release the feed."""
        self._resources.close()

    def advance(self) -> Exported | None:
        """Write the folder of the next version; None if there is no further version."""
        if self._log is None:
            self._log = Log(self._resources.enter_context(opened(self._feed)))
        log, state = self._log, self._state
        last = self._resumed(log) if self._last is None else self._last
        if last is None:
            head = log.require_head()
            # The oldest that is kept, so that no later one is left out, unless one is given.
            target = log.read(min(log.floor(), head.version) if self._start is None else self._start)
            self._go_to(log, target)
            exported = self._write_checkpoint(log, target)
        else:
            try:
                target = log.read(last.version + 1)
            except NotFoundError:
                return None
            if (floor := log.floor()) > target.version:
                target = log.read(floor)
            # A folder has whole tensors, also where nothing changes.
            if not state.is_sound():
                state.discard(Applied())
            # Another process wrote the last folder, or an attempt to write the next one failed.
            if state.version != last.version:
                self._go_to(log, last)
            past = state.past(over_anchors=True)
            state.pasts.append(past)
            try:
                self._go_to(log, target)
            finally:
                state.pasts.remove(past)
            if past.is_lost:
                # The weights have another layout.
                exported = self._write_checkpoint(log, target)
            else:
                exported = self._write_delta(last, target, tensor_deltas(state.require_weights(), past.difference()))
        self._last = target
        return exported

    def _go_to(self, log: Log, target: Manifest) -> None:
        self._state.advance(Route(log, target, base=self._base))

    def _write_checkpoint(self, log: Log, target: Manifest) -> Exported:
        path, weights = self._root / folder_name(target.version), self._state.require_weights()
        make_folder(self._root)
        beside = {**find_files(log, target, trust_code=self._trust_code), MARK: _mark(target)}

        with new_checkpoint(weights.layout, beside, path) as empty:
            empty.copy_from(weights)
        return Exported(path, target.version, None, weights.layout.nbytes)

    def _write_delta(self, last: Manifest, target: Manifest, deltas: Iterator[TensorDelta]) -> Exported:
        path = self._root / folder_name(target.version)
        require_space(path, target.nbytes)
        if path.exists():
            raise InvalidInputError(f"{path} exists already", hint="choose an empty folder to export to")
        with temporary_folder_beside(path) as temporary:
            nbytes = write_files(
                temporary,
                deltas,
                version=target.version,
                base_version=last.version,
                encoding=self._encoding,
                checksum_format=self._checksum_format,
            )
            (temporary / MARK).write_bytes(_mark(target))
            sync_file(temporary / MARK)
            release_folder(temporary)
            sync_folder(temporary)
            os.replace(temporary, path)
        sync_folder(self._root)
        return Exported(path, target.version, last.version, nbytes)

    def _resumed(self, log: Log) -> Manifest | None:
        """The version of the last folder that is there; None if there is no folder."""
        folders = list_folders(self._root) if self._root.exists() else {}
        if not folders:
            return None
        version = max(folders)
        path = folders[version]
        hint = "choose an empty folder to export to"
        try:
            with (path / MARK).open("rb") as file:
                fields = parse_object(file.read(_MARK_BYTES_MAX), what=str(path / MARK), scope="export")
        except FileNotFoundError as error:
            raise InvalidInputError(f"{path} was not written by `deltasync export`", hint=hint) from error
        text = fields.get("digest")
        if fields.get("version") != version or not isinstance(text, str):
            raise CorruptError(f"{path / MARK} is not the mark of version {version}", rule="export.mark", hint=hint)
        digest = StateDigest.from_hex(text)
        try:
            manifest = log.read(version)
        except NotFoundError as error:
            raise MismatchError(
                f"{path} is not of this feed: {error.message}",
                rule="export.feed",
                hint="choose an empty folder, or the feed that the folders were written from",
            ) from error
        if manifest.digest != digest:
            raise MismatchError(
                f"{path} has the digest {digest}, version {version} of the feed has {manifest.digest}",
                rule="export.feed",
                version=version,
                hint="it was exported from another feed: choose an empty folder",
            )
        return manifest


def _mark(manifest: Manifest) -> bytes:
    return canonical_json({"digest": manifest.digest.hex, "version": manifest.version})
