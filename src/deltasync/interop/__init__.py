"""Folders of deltas that slime, Miles, Stitch and others exchange: import them into a feed, export a feed as such.

Needs the extra `interop`. `deltasync.interop.slime` has the function for slime's and Miles' own hook.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import get_args

from deltasync import arguments
from deltasync.checkpoint import INDEX_NAME, Checkpoint, new_checkpoint, open_checkpoint, require_space
from deltasync.errors import CorruptError, InvalidInputError, MismatchError, NotFoundError
from deltasync.feed.files import find_files
from deltasync.feed.log import Log
from deltasync.feed.route import Route
from deltasync.files import make_folder, release_folder, sync_file, sync_folder, temporary_folder_beside
from deltasync.format.digest import StateDigest
from deltasync.format.manifest import Manifest
from deltasync.format.sealed import canonical_json, parse_object
from deltasync.format.weights import Changes, Weights
from deltasync.interop.folder import (
    ChecksumFormat,
    DeltaFolder,
    Encoding,
    TensorDelta,
    decode_folder,
    folder_name,
    folder_version,
    list_folders,
    open_folder,
    tensor_deltas,
    write_files,
)
from deltasync.parallel import Closable
from deltasync.state import Applied, State
from deltasync.store import Feed, opened
from deltasync.trainer.capture import Source
from deltasync.trainer.checkpoint import FolderPublisher
from deltasync.trainer.events import Publication
from deltasync.trainer.publisher import FeedPublisher, PublisherOptions

__all__ = ["Exported", "Exporter", "Importer"]

VERSION = "weight_version"
"""The key in a manifest's `extra` with the version of the folder that was imported."""

_INDEX = "weight_index_sha256"
"""The key with the SHA-256 of the folder's index, which distinguishes two runs."""

MARK = "deltasync-export.json"
"""The file in each folder with the version and the state digest of the feed. It marks the folder as ours."""

_MARK_BYTES_MAX = 4096
_Path = str | os.PathLike[str]


class FolderSource(Source):
    """A folder of deltas, which is decoded and compared with its checksums."""

    def __init__(self, folder: DeltaFolder) -> None:
        self._folder = folder

    def copy_into(self, weights: Weights) -> None:
        raise InvalidInputError("the first version is not committed yet", hint="wait for it")

    def changes(self, shadow: State) -> list[Changes]:
        return decode_folder(self._folder, shadow.require_weights())


class Importer(FolderPublisher):
    """Publishes the folders `weight_v…` of `folders` to a feed, in order, each as one version.

        with Importer("run/weights", "s3://bucket/run-42", base="Qwen3-0.6B") as importer:
            while (publication := importer.advance()) is not None:
                print(publication.wait().version)

    `base`: the checkpoint that the trainer began with, which becomes version 0 of a new feed. It is not needed if the
    first folder is a checkpoint, nor for a feed that was imported to before: the feed remembers the last folder.
    `restart`: the trainer began again at `base`, with new folders: publish `base` once more, as the next version.
    `options`: as for every publisher; `shadow_path` keeps the weights in a mapped file instead of memory.

    A folder is decoded, and every tensor compared with its checksum, before anything of it is published.
    """

    def __init__(
        self,
        folders: _Path,
        feed: Feed,
        *,
        base: _Path | None = None,
        restart: bool = False,
        options: PublisherOptions | None = None,
    ) -> None:
        self._root = arguments.local_path("folders", folders)
        self._base = arguments.optional_path("base", base)
        self._restart = restart
        if restart and base is None:
            raise InvalidInputError("restart needs a base", hint="give the checkpoint that the trainer began with")
        # Each folder is a change to the version before it, which must be in the shadow.
        super().__init__(feed, replace(PublisherOptions() if options is None else options, wait=True))
        self._newest: Publication | None = None

    @property
    def version(self) -> int | None:
        """The version of the folder that was imported last; None if there was none."""
        head = None if self._publisher is None else self._publisher.head
        return None if head is None else _imported(head)

    def advance(self) -> Publication | None:
        """Import the next folder, or the base of a new feed. None if there is none, or if it is not complete yet.

        MismatchError if the folder does not follow the one that was imported last, has other tensors than the feed, or
        fails its checksums. The feed is as it was then.
        """
        self.waiting_for = None
        folders = list_folders(self._root)
        publisher = self._opened(partial(self._require_same_run, folders))
        self._require_committed()
        last = None if self._restart else self.version
        if last is None and self._base is not None:
            return self.publish_base(self._base)
        if last is not None and folders and max(folders) < last:
            raise MismatchError(
                f"{self._root} ends with version {max(folders)}, but version {last} was imported before",
                rule="folder.run",
                hint="the trainer began again: pass --base CHECKPOINT --restart",
            )
        following = [version for version in folders if last is None or version > last]
        if not following:
            return None
        path = folders[following[0]]
        try:
            folder = open_folder(path)
            if folder is None and self._unchanged_s(path) < self._settle_s:
                self.waiting_for = f"{path} may still be written"
                return None
        except NotFoundError as error:
            self.waiting_for = error.message
            return None
        return self._publish(publisher, path, folder)

    def publish_base(self, base: _Path | None) -> Publication:
        """Publish the checkpoint that the trainer begins with, or begins again with: the folders count from there."""
        checkpoint = open_checkpoint(arguments.local_path("base", base))
        self._restart = True
        publisher = self._opened(partial(self._require_same_run, {}))
        self._require_committed()
        publication = self._publish_checkpoint(publisher, checkpoint, {VERSION: "0"}, step=0)
        self._restart = False
        return publication

    def publish_folder(self, path: _Path) -> Publication:
        """Publish one folder, which is complete."""
        publisher = self._opened(partial(self._require_same_run, {}))
        self._require_committed()
        place = arguments.local_path("path", path)
        return self._publish(publisher, place, open_folder(place))

    def _publish(self, publisher: FeedPublisher, path: Path, folder: DeltaFolder | None) -> Publication:
        version = folder_version(path)
        if version is None:
            raise InvalidInputError(f"the name of a folder must be like {folder_name(7)}, not {path.name!r:.200}")
        extra = {VERSION: str(version), _INDEX: _index_sha256(path)}
        if folder is None:
            return self._publish_checkpoint(publisher, open_checkpoint(path), extra, step=version)
        last = self.version
        if last is None:
            raise MismatchError(
                f"{path} is a change to version {folder.base_version}, and the feed has no version yet",
                rule="folder.base",
                hint="pass the checkpoint that the trainer began with: --base CHECKPOINT",
            )
        if folder.base_version != last:
            raise MismatchError(
                f"{path} is a change to version {folder.base_version}, but version {last} was imported last",
                rule="folder.order",
                key=str(path),
                hint=f"put {folder_name(last + 1)} back, or pass --base CHECKPOINT --restart if training began again",
            )
        self._newest = publisher.publish(FolderSource(folder), step=version, extra=extra)
        return self._newest

    def _publish_checkpoint(
        self, publisher: FeedPublisher, checkpoint: Checkpoint, extra: dict[str, str], *, step: int
    ) -> Publication:
        self._newest = self._publish_weights(publisher, checkpoint, step=step, extra=extra, rule="folder.layout")
        return self._newest

    def _require_same_run(self, folders: dict[int, Path], head: Manifest | None) -> None:
        if head is None or self._restart:
            return
        last = _imported(head)
        if last in folders and head.extra.get(_INDEX) not in (None, _index_sha256(folders[last])):
            raise MismatchError(
                f"{folders[last]} is not the folder that was imported as version {head.version}",
                rule="folder.run",
                version=head.version,
                hint="the trainer began again: pass --base CHECKPOINT --restart, or choose a new feed",
            )

    def _require_committed(self) -> None:
        """Raise the error of the last publication: what follows it cannot be decoded."""
        newest, self._newest = self._newest, None
        if newest is not None:
            newest.wait()


def _imported(head: Manifest) -> int:
    text = head.extra.get(VERSION, "")
    if not text.isdecimal():
        raise InvalidInputError(
            f"version {head.version} of the feed was not imported from a folder",
            hint="import to a new feed, or pass --base CHECKPOINT --restart to continue this one",
        )
    return int(text)


def _index_sha256(path: Path) -> str:
    """Of the index, or of nothing for a checkpoint of one file."""
    index = path / INDEX_NAME
    return hashlib.sha256(index.read_bytes() if index.exists() else b"").hexdigest()


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
