"""Publish checkpoints: one as the next version of a feed, or folders as they appear, in order, each as a version."""

import glob
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path

from deltasync import arguments, blocks
from deltasync.checkpoint import Checkpoint, companion_files, open_checkpoint
from deltasync.errors import CorruptError, FormatError, InvalidInputError, MismatchError, NotFoundError
from deltasync.feed.log import Log
from deltasync.feed.upload import Upload
from deltasync.format.manifest import BaseRef, Manifest
from deltasync.format.weights import Weights
from deltasync.parallel import Closable, Progress, counting
from deltasync.state import load
from deltasync.store import Feed, opened
from deltasync.store.probe import PATIENCE_S
from deltasync.trainer.capture import WeightsSource
from deltasync.trainer.events import Publication
from deltasync.trainer.publisher import FeedPublisher, PublisherOptions
from deltasync.trainer.versions import Metadata, VersionWriter

logger = logging.getLogger(__name__)

NUMBER = "checkpoint_number"
"""The key in a manifest's `extra` with the number in the name of the folder that was published."""

SETTLE_S = 2.0
"""How long the files of a folder must stay as they are before it counts as complete."""

ABANDONED_S = 120.0
"""A folder that is not complete, has not changed for this long and has a complete one after it, is left out."""

_STARTED, _FINISHED = ".started", ".finished"
"""Markers that some trainers create before and after they write: a folder with the first one needs the second one."""

_Path = str | os.PathLike[str]


def publish(
    feed: Feed,
    checkpoint: _Path,
    *,
    step: int | None = None,
    parent: _Path | None = None,
    anchor: bool = False,
    base: BaseRef | None = None,
    extra: Mapping[str, str] | None = None,
    trust_code: bool = False,
    require_fencing: bool = False,
    must_exist: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Commit the weights of a checkpoint as the next version, and return its manifest.

    `parent`: a checkpoint with the weights of the feed's head, which are rebuilt from the feed otherwise.
    `anchor`: add all weights, for replicas that join late; with other tensors than before, in place of a change.
    `base`: the feed is new, and every replica has this checkpoint under that name: no weights are uploaded.
    `extra`: metadata of your own, which the manifest carries.
    `trust_code`: also publish files of the folder that can run code when it is loaded, such as `modeling.py`.
    `must_exist`: raise NotFoundError if the feed has no version yet, instead of starting a new one.

    A new feed begins with version 0. ConflictError if another writer committed first: none of its objects is touched;
    call this again to publish on top.
    """
    metadata = Metadata.of(step, extra)
    if base is not None:
        arguments.instance("base", base, BaseRef, hint='use BaseRef("Qwen/Qwen3-0.6B", revision), from deltasync')
    parent = arguments.optional_path("parent", parent)
    source = open_checkpoint(arguments.local_path("checkpoint", checkpoint))
    new, files = source.weights, companion_files(source, trust_code=trust_code)
    with opened(feed) as store, closing(Upload(store, retry_s=PATIENCE_S, require_fencing=require_fencing)) as upload:
        if must_exist:
            upload.log.require_head()
        head = upload.open()
        versions = VersionWriter(upload=upload, layout=new.layout)
        if base is not None:
            if head is not None:
                raise InvalidInputError(
                    f"the feed is at version {head.version}: only its first version can be a base",
                    hint="leave out the base to publish the change",
                )
            metadata = replace(metadata, files=versions.put_files(files, head))
            return versions.base(new, base, metadata, progress=progress).manifest
        if head is None or (anchor and head.layout_sha256 != new.layout.sha256):
            metadata = replace(metadata, files=versions.put_files(files, head))
            return versions.anchor(new, head, metadata, progress=progress).manifest
        old = load(upload.log, head, progress=progress) if parent is None else _parent_weights(parent, head, progress)
        try:
            old.layout.require_equal(new.layout, ours="the feed", theirs=str(source.path))
        except MismatchError as error:
            hint = "publish it as an anchor (`--anchor`) if the model is meant to change"
            raise MismatchError(error.message, rule=error.rule, hint=hint) from error
        changes = blocks.encode_delta(old, new, on_progress=counting(progress, "encode", new.layout.elements))
        metadata = replace(metadata, files=versions.put_files(files, head))
        manifest = head
        # A second attempt finds its version at the head, where only the anchor may be missing.
        if changes or not anchor or head.step != metadata.step:
            changed = sum(block.changed for block in changes)
            manifest = versions.delta(lambda: changes, head, metadata, changed=changed).manifest
        if anchor and manifest.kind == "delta":
            versions.add_anchor(manifest, new, progress=progress)
        return manifest


def _parent_weights(parent: _Path, head: Manifest, progress: Progress | None) -> Weights:
    weights = open_checkpoint(parent).weights
    digest = blocks.digest(weights, on_progress=counting(progress, "parent", weights.layout.elements))
    if digest != head.digest:
        raise MismatchError(
            f"{parent} has the digest {digest}, version {head.version} has {head.digest}",
            rule="publish.parent",
            version=head.version,
            hint="give the checkpoint that was published last, or leave it out: then the feed is read",
        )
    return weights


class FolderPublisher(Closable):
    """Publishes folders to a feed, which it opens for the first of them. Their files settle for `settle_s`."""

    def __init__(
        self,
        feed: Feed,
        options: PublisherOptions | None,
        *,
        settle_s: float = SETTLE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._feed = feed
        self._options = PublisherOptions() if options is None else options
        self._settle_s = arguments.seconds("settle_s", settle_s)
        self._clock = clock
        self._seen: dict[Path, tuple[list[tuple[str, int, int]], float]] = {}
        """The names, sizes and times of the files of folders, and since when they have been so."""
        self._publisher: FeedPublisher | None = None
        self._resources = ExitStack()
        self.waiting_for: str | None = None
        """Why `advance` returned None although there is another folder: it is not complete."""

    def close(self) -> None:
        """Finish what is in flight, and release the feed."""
        self._resources.close()

    def _opened(self, check: Callable[[Manifest | None], object]) -> FeedPublisher:
        """The publisher. Before the feed is opened for writing, `check` gets its head and raises if it does not fit."""
        if self._publisher is None:
            # After a failure nothing is left open: the next attempt locks the shadow again.
            with ExitStack() as resources:
                store = resources.enter_context(opened(self._feed))
                check(Log(store).head())
                publisher = FeedPublisher(store, self._options)
                resources.callback(publisher.close)
                publisher.open()
                self._publisher, self._resources = publisher, resources.pop_all()
        return self._publisher

    def _unchanged_s(self, path: Path) -> float:
        """For how many seconds the files of a folder have been as they are, counted from the first call at most."""
        now_s, found = self._clock(), []
        for file in sorted(path.iterdir()):
            with suppress(FileNotFoundError):
                status = file.stat()
                found.append((file.name, status.st_size, status.st_mtime_ns))
        seen = self._seen.get(path)
        if seen is None or seen[0] != found:
            seen = self._seen[path] = found, now_s
        return now_s - seen[1]

    def _publish_weights(
        self,
        publisher: FeedPublisher,
        checkpoint: Checkpoint,
        *,
        step: int,
        extra: dict[str, str],
        rule: str,
        trust_code: bool = False,
    ) -> Publication:
        """Publish a checkpoint; MismatchError with this rule if its tensors are not those of the feed."""
        publisher.files, publisher.needs_files = companion_files(checkpoint, trust_code=trust_code), True
        try:
            return publisher.publish(WeightsSource(checkpoint.weights), step=step, extra=extra)
        except InvalidInputError as error:
            raise MismatchError(f"{checkpoint.path}: {error.message}", rule=rule, hint=error.hint) from error


class CheckpointWatch(FolderPublisher):
    """Publishes the checkpoint folders that match a pattern, in the order of the numbers in their names.

        with CheckpointWatch("run/weights/step_*", "s3://bucket/run-42") as watch:
            while True:
                if watch.advance() is None:
                    time.sleep(1)

    The number is what a `*` of the pattern stands for; other folders are ignored. It becomes the step of the version,
    and the feed remembers it, so that another process continues after it. `after` is needed for a feed that was
    published to in other ways: only folders with a larger number are published.

    A folder is complete once all weights that its index or headers name are there in full, its files have not changed
    for `settle_s`, and it has the file `marker`, if one is given. A folder with a file `.started` also needs
    `.finished`. One that stays incomplete is left out, with a warning, once a later one is complete.

    The folders stay, also those of versions that the retention of `options` deletes.
    """

    def __init__(
        self,
        pattern: str,
        feed: Feed,
        *,
        after: int | None = None,
        marker: str | None = None,
        settle_s: float = SETTLE_S,
        trust_code: bool = False,
        options: PublisherOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not isinstance(pattern, str) or "*" not in pattern:
            what = arguments.described(pattern)
            raise InvalidInputError(
                f"the pattern must have a * for the number, not {what}",
                hint="such as 'run/weights/step_*', in quotes, so that the shell leaves it as it is",
            )
        if marker is not None and Path(marker).name != marker:
            raise InvalidInputError(f"the marker must be the name of a file, not {marker!r:.80}")
        super().__init__(feed, options, settle_s=settle_s, clock=clock)
        parts = pattern.split("*")
        self._pattern = pattern
        self._glob = "*".join(map(glob.escape, parts))
        self._match = re.compile("([^/]*)".join(map(re.escape, parts)))
        self._after = None if after is None else arguments.whole_number("after", after)
        self._marker = marker
        self._trust_code = trust_code
        self._skipped: set[Path] = set()

    def folders(self) -> dict[int, Path]:
        """The folders that match, by their numbers, ascending. InvalidInputError if two have the same number."""
        found: dict[int, Path] = {}
        for name in sorted(glob.glob(self._glob)):
            match = self._match.fullmatch(name)
            numbers = [] if match is None else [g for g in match.groups() if g.isascii() and g.isdecimal()]
            path = Path(name)
            if not numbers or len(numbers[-1]) > 18 or not path.is_dir():
                continue
            number = int(numbers[-1])
            if number in found:
                raise InvalidInputError(f"{found[number]} and {path} have the same number", hint="rename one of them")
            found[number] = path
        return dict(sorted(found.items()))

    def advance(self) -> Publication | None:
        """Publish the next folder and wait for its commit. None if there is none, or if it is not complete yet.

        MismatchError if its tensors are not those of the feed. The feed is as it was then.
        """
        self.waiting_for = None
        publisher = self._opened(self._last)
        last = self._last(publisher.head)
        following = {n: p for n, p in self.folders().items() if (last is None or n > last) and p not in self._skipped}
        for number, path in following.items():
            problem = self._problem(path)
            if problem is None:
                publication = self._publish_weights(
                    publisher,
                    open_checkpoint(path),
                    step=number,
                    extra={NUMBER: str(number)},
                    rule="watch.layout",
                    trust_code=self._trust_code,
                )
                publication.wait()
                return publication
            later = [other for n, other in following.items() if n > number]
            is_passed = any(self._problem(other) is None for other in later)
            if not is_passed or self._unchanged_s(path) < ABANDONED_S:
                self.waiting_for = problem
                return None
            logger.warning("%s; it is left out, because a later folder is complete", problem)
            self._skipped.add(path)
        return None

    def _problem(self, path: Path) -> str | None:
        """Why a folder is not complete; None if it is."""
        try:
            names = {file.name for file in path.iterdir()}
            is_settled = self._unchanged_s(path) >= self._settle_s
            for marker in (self._marker, _FINISHED if _STARTED in names else None):
                if marker is not None and marker not in names:
                    return f"{path} has no {marker} yet"
            open_checkpoint(path)
        except (NotFoundError, CorruptError, FormatError, FileNotFoundError) as error:
            return f"{path} is not complete: {error}"
        return None if is_settled else f"the files in {path} have changed within the last seconds"

    def _last(self, head: Manifest | None) -> int | None:
        """The number of the folder that was published last."""
        if head is None:
            return self._after
        text = head.extra.get(NUMBER, "")
        if text.isdecimal():
            return int(text)
        if self._after is None:
            raise InvalidInputError(
                f"version {head.version} of the feed was not published from a folder of {self._pattern}",
                hint="pass --after N to publish only folders with a larger number, or choose a new feed",
            )
        return self._after
