"""What a replica aims at, and what it serves: one thread advances it, and all others look here."""

import logging
import threading
import time
from collections.abc import Mapping

from deltasync.errors import NotFoundError
from deltasync.feed.log import Head, Log
from deltasync.format.digest import StateDigest
from deltasync.format.manifest import Manifest
from deltasync.observe import VersionTracer, tell
from deltasync.replica.events import Advance, Counts, Observer, Seconds
from deltasync.replica.loop import Heartbeats, Loop
from deltasync.replica.target import Target

logger = logging.getLogger(__name__)


class Goals:
    """Which version to serve: the newest, or the pinned one. Any thread may pin, pause and stop."""

    def __init__(self, log: Log, loop: Loop) -> None:
        self.pinned: Manifest | None = None
        self.is_paused = False
        self.polled_at_s: float | None = None
        """When the store last answered a poll."""
        self._log = log
        self._loop = loop
        self._head = Head(log)

    @property
    def head(self) -> Manifest | None:
        """The newest version that was seen."""
        return self._head.manifest

    @property
    def pinned_version(self) -> int | None:
        pinned = self.pinned
        return None if pinned is None else pinned.version

    def poll(self) -> Manifest:
        """The version to serve now. This takes one small request if the head is known."""
        head = self._head.poll()
        self.polled_at_s = time.monotonic()
        pinned = self.pinned
        return head if pinned is None else pinned

    def ahead(self) -> Manifest | None:
        """The version to read ahead to; None if nothing should be read now."""
        return None if self.is_paused or self._loop.is_stopping else self.poll()

    def read(self, version: int | str) -> Manifest:
        """A version of the feed, or the one with the name of a pin. NotFoundError names the versions that there are."""
        if isinstance(version, str):
            return self._log.resolve(version)
        try:
            return self._log.read(version)
        except NotFoundError as error:
            head, url = self._log.require_head(), self._log.store.url
            raise NotFoundError(
                f"version {version} is not in {url}, which has {self._log.floor()} to {head.version}",
                version=version,
                key=error.key,
                hint="choose one of these",
            ) from error

    def choose(self, version: int) -> Manifest:
        """A version to serve once, which may be the newest that was seen so far."""
        manifest = self.read(version)
        if self.head is None or self.head.version < manifest.version:
            self._head.manifest = manifest
        return manifest


class Live:
    """What a target serves and what is known of it, for status and heartbeats; and those who are told of an advance.

    One thread at a time writes it, and any thread reads it.
    """

    def __init__(
        self,
        target: Target,
        goals: Goals,
        log: Log,
        replica: str,
        *,
        observer: Observer | None = None,
        beat_s: float | None = None,
    ) -> None:
        self.changed = threading.Condition()
        """Is notified when a version goes live, or following ends."""
        self.served: int | None = None
        self.proved: tuple[int, StateDigest] | None = None
        """The version whose bits the target is known to have, and their digest."""
        self.read_back: tuple[int, int] | None = None
        """The version that was live when all weights were last compared, and the time of that."""
        self.scrubbed_unix_s: int | None = None
        self.last: tuple[Advance, int] | None = None
        """The last advance, and when it went live, in milliseconds since 1970."""
        self.seconds = Seconds()
        """The time of all advances."""
        self.counts = Counts()
        self.error: Exception | None = None
        self.heartbeats = None if beat_s is None else Heartbeats(log, replica, beat_s=beat_s)
        self._target = target
        self._goals = goals
        self._replica = replica
        self._observer = observer
        self._tracer = VersionTracer(log.feed_id)

    def tell(self, advanced: Advance) -> None:
        """Tell the log, the tracer, those who wait, the observer and the feed that a version went live."""
        self.last = advanced, int(1000 * time.time())
        self.seconds += advanced.seconds
        self.counts.moves += 1
        self.counts.nbytes += advanced.nbytes
        logger.info("%s", advanced)
        self.serve(advanced.version)
        self._tracer.record("move", advanced, end_unix_s=time.time(), replica=self._replica)
        tell(self._observer, advanced)
        self.beat()

    def serve(self, version: int | None) -> None:
        """Let others know which version is live."""
        self.served = version
        self.notify()

    def notify(self) -> None:
        """Wake those who wait for a version, or for the end of following."""
        with self.changed:
            self.changed.notify_all()

    def note_read_back(self, version: int) -> None:
        """All live weights were compared, and are those of a version; unless the target cannot see all of them."""
        if not self._target.unseen_elements:
            self.read_back = version, int(time.time())

    def beat(self) -> None:
        """Write a heartbeat if it is due, but not into a place that has no feed: its name may be a typo."""
        if self.heartbeats is not None and self._goals.head is not None:
            version = self._target.version
            self.heartbeats.beat(version, self.facts(version))

    def facts(self, version: int | None) -> Mapping[str, str]:
        """What a heartbeat says beside the version."""
        # Each is read once: another thread may change it at any time.
        head, proved, read_back, last = self._goals.head, self.proved, self.read_back, self.last
        facts = {"engine": self._target.engine}
        if head is not None and version is not None:
            facts["lag"] = str(max(0, head.version - version))
        if proved is not None and proved[0] == version:
            facts["digest"] = proved[1].hex
        if read_back is not None:
            facts |= {"proved_version": str(read_back[0]), "proved_unix_s": str(read_back[1])}
        if self.scrubbed_unix_s is not None:
            facts["scrubbed_unix_s"] = str(self.scrubbed_unix_s)
        if unseen := self._target.unseen_elements:
            facts["unseen_elements"] = str(unseen)
        if last is not None:
            facts |= last[0].seconds.facts()
            facts |= {"moved_version": str(last[0].version), "moved_unix_ms": str(last[1])}
        return facts
