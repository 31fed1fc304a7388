"""Publish checkpoints as they appear: find the folders that are complete, in order, and commit each as a version."""

import glob
import logging
import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from deltasync import arguments
from deltasync.checkpoint import Checkpoint, companion_files, open_checkpoint
from deltasync.errors import CorruptError, FormatError, InvalidInputError, MismatchError, NotFoundError
from deltasync.feed.log import Log
from deltasync.format.manifest import Manifest
from deltasync.parallel import Closable
from deltasync.store import Feed, opened
from deltasync.trainer.events import Publication
from deltasync.trainer.publisher import FeedPublisher, PublisherOptions
from deltasync.trainer.source import WeightsSource

logger = logging.getLogger(__name__)

NUMBER = "checkpoint_number"
"""The key in a manifest's `extra` with the number in the name of the folder that was published."""

SETTLE_S = 2.0
"""How long the files of a folder must stay as they are before it counts as complete."""

ABANDONED_S = 120.0
"""A folder that is not complete, has not changed for this long and has a complete one after it, is left out."""

_STARTED, _FINISHED = ".started", ".finished"
"""Markers that some trainers create before and after they write: a folder with the first one needs the second one."""

_Signature = tuple[tuple[str, int, int], ...]


class SettledFolders:
    """Says how long the files of folders have been as they are: their names, sizes and times."""

    def __init__(self, settle_s: float = SETTLE_S, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._settle_s = arguments.seconds("settle_s", settle_s)
        self._clock = clock
        self._seen: dict[Path, tuple[_Signature, float]] = {}

    def is_settled(self, path: Path) -> bool:
        """Whether nothing has changed for long enough. It has to be asked at least twice."""
        return self.unchanged_s(path) >= self._settle_s

    def unchanged_s(self, path: Path) -> float:
        """For how many seconds nothing has changed, counted from the first call at most."""
        now_s, signature = self._clock(), _signature(path)
        seen = self._seen.get(path)
        if seen is None or seen[0] != signature:
            seen = self._seen[path] = signature, now_s
        return now_s - seen[1]


def _signature(path: Path) -> _Signature:
    found = []
    for file in sorted(path.iterdir()):
        try:
            status = file.stat()
        except FileNotFoundError:
            continue
        found.append((file.name, status.st_size, status.st_mtime_ns))
    return tuple(found)


class FolderPublisher(Closable):
    """Publishes folders to a feed, which it opens for the first of them."""

    def __init__(self, feed: Feed, options: PublisherOptions, settled: SettledFolders) -> None:
        self._feed = feed
        self._options = options
        self._settled = settled
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
        super().__init__(
            feed, PublisherOptions() if options is None else options, SettledFolders(settle_s, clock=clock)
        )
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
                return self._publish(publisher, number, path)
            later = [other for n, other in following.items() if n > number]
            if not any(self._problem(other) is None for other in later):
                self.waiting_for = problem
                return None
            if self._settled.unchanged_s(path) < ABANDONED_S:
                self.waiting_for = problem
                return None
            logger.warning("%s; it is left out, because a later folder is complete", problem)
            self._skipped.add(path)
        return None

    def _problem(self, path: Path) -> str | None:
        """Why a folder is not complete; None if it is."""
        try:
            names = {file.name for file in path.iterdir()}
            is_settled = self._settled.is_settled(path)
            for marker in (self._marker, _FINISHED if _STARTED in names else None):
                if marker is not None and marker not in names:
                    return f"{path} has no {marker} yet"
            open_checkpoint(path)
        except (NotFoundError, CorruptError, FormatError, FileNotFoundError) as error:
            return f"{path} is not complete: {error}"
        return None if is_settled else f"the files in {path} have changed within the last seconds"

    def _publish(self, publisher: FeedPublisher, number: int, path: Path) -> Publication:
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
