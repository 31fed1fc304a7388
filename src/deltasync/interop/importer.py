"""Import folders of deltas into a feed as they appear. The weights are kept in memory, or in one mapped file."""

import hashlib
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

from deltasync import arguments
from deltasync.checkpoint import INDEX_NAME, Checkpoint, open_checkpoint
from deltasync.errors import InvalidInputError, MismatchError, NotFoundError
from deltasync.format.manifest import Manifest
from deltasync.format.weights import Changes, Weights
from deltasync.interop.folder import (
    DeltaFolder,
    decode_folder,
    folder_name,
    folder_version,
    list_folders,
    open_folder,
)
from deltasync.state import State
from deltasync.store import Feed
from deltasync.trainer.capture import Source
from deltasync.trainer.checkpoint import FolderPublisher
from deltasync.trainer.events import Publication
from deltasync.trainer.publisher import FeedPublisher, PublisherOptions

VERSION = "weight_version"
"""The key in a manifest's `extra` with the version of the folder that was imported."""

_INDEX = "weight_index_sha256"
"""The key with the SHA-256 of the folder's index, which distinguishes two runs."""

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
