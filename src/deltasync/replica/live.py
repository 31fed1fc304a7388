"""What a replica aims at and what it serves: one thread advances it, all others look here, heartbeats tell the feed."""

import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Literal

from deltasync.errors import CorruptError, DeltasyncError, FormatError, NotFoundError
from deltasync.feed.log import Head, Log
from deltasync.format.digest import StateDigest
from deltasync.format.keys import replica_key
from deltasync.format.manifest import Manifest
from deltasync.format.sealed import Heartbeat
from deltasync.observe import VersionTracer, tell
from deltasync.replica.events import Advance, Counts, Observer, Seconds
from deltasync.replica.target import Target
from deltasync.store.patient import get_record

logger = logging.getLogger(__name__)


class Live:
    """The version to serve, the one that is served, and what is known of it; and those who are told of an advance.

    Any thread may pin, pause and read. One thread at a time writes the rest.
    """

    def __init__(
        self,
        target: Target,
        log: Log,
        replica: str,
        *,
        observer: Observer | None = None,
        beat_s: float | None = None,
    ) -> None:
        self.pinned: Manifest | None = None
        self.is_paused = False
        self.head = Head(log)
        self.polled_at_s: float | None = None
        """When the store last answered a poll."""
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
        self._log = log
        self._replica = replica
        self._observer = observer
        self._tracer = VersionTracer(log.feed_id)

    def poll(self) -> Manifest:
        """The version to serve now, the newest or the pinned one: one small request if the head is known."""
        head = self.head.poll()
        self.polled_at_s = time.monotonic()
        pinned = self.pinned
        return head if pinned is None else pinned

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
        if self.heartbeats is not None and self.head.manifest is not None:
            version = self._target.version
            self.heartbeats.beat(version, self.facts(version))

    def facts(self, version: int | None) -> Mapping[str, str]:
        """What a heartbeat says beside the version."""
        # Each is read once: another thread may change it at any time.
        head, proved, read_back, last = self.head.manifest, self.proved, self.read_back, self.last
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
            facts |= {f"{phase}_s": f"{seconds:.4f}" for phase, seconds in asdict(last[0].seconds).items()}
            facts |= {"moved_version": str(last[0].version), "moved_unix_ms": str(last[1])}
        return facts


BEAT_S = 30.0
"""Seconds between heartbeats while the version stays: far below the 15 minutes until a replica counts as gone."""


class Heartbeats:
    """Writes heartbeats when they are due. A failure is logged and not raised: the replica serves without them.

    `problem` says why they do not serve their purpose: they cannot be written, or another follower writes them, too.
    """

    def __init__(
        self, log: Log, replica: str, *, beat_s: float = BEAT_S, clock: Callable[[], float] = time.time
    ) -> None:
        self.problem: str | None = None
        self.failures = 0
        """Heartbeats that could not be written."""
        self._problem_kind: Literal["unwritten", "shared"] | None = None
        self._log = log
        self._replica = replica
        self._key = replica_key(replica)
        self._instance = secrets.token_hex(8)
        """Distinguishes this follower from another one with the same name."""
        self._beat_s = beat_s
        self._clock = clock
        self._last: tuple[int | None, float] | None = None
        self._looked_s: float | None = None
        """When the stored heartbeat was last known to be this follower's."""
        self._has_left = False
        self._lock = threading.Lock()

    def beat(self, version: int | None, facts: Mapping[str, str]) -> None:
        """Write a heartbeat if the last one is old or has another version."""
        with self._lock:
            now = self._clock()
            last = self._last
            is_fresh = last is not None and last[0] == version and 0 <= now - last[1] < self._beat_s
            if is_fresh or self._has_left:
                return
            # After a failure the store is not called again before the next heartbeat is due.
            self._last = version, now
            try:
                is_taken = self._is_taken(now)
                self._log.beat(Heartbeat(self._replica, version, int(now), {**facts, "instance": self._instance}))
            except DeltasyncError as error:
                self.failures += 1
                self._report(
                    "unwritten",
                    f"cannot write the heartbeat of {self._replica}, continuing without it; `prune` may delete the "
                    f"deltas that this replica needs, which then begins again at an anchor: {error}",
                )
                return
            if self._looked_s is None:
                self._looked_s = now
            if is_taken:
                self._report(
                    "shared",
                    f"another follower of {self._log.store.url} has the name {self._replica}, too: their heartbeats "
                    "replace each other, so that `prune` and `status` see only one of them; give each its own name",
                )
            elif is_taken is False or self._problem_kind == "unwritten":
                self.problem = self._problem_kind = None

    def leave(self) -> None:
        """Delete the heartbeat of a replica that ends for good, so that `prune` keeps nothing for it."""
        with self._lock:
            self._has_left = True
            if self._last is None:
                return
            try:
                if not self._is_anothers():
                    self._log.store.delete(self._key)
            except DeltasyncError as error:
                if self._problem_kind == "unwritten":
                    # It could not be written either, which was reported.
                    return
                message = "cannot delete the heartbeat of %s, which counts as live until it expires: %s"
                logger.warning(message, self._replica, error)

    def _report(self, kind: Literal["unwritten", "shared"], problem: str) -> None:
        """Log a problem once, until there is one of another kind, or none."""
        if self._problem_kind != kind:
            logger.warning("%s", problem)
        self.problem, self._problem_kind = problem, kind

    def _is_taken(self, now: float) -> bool | None:
        """Whether another follower has written this heartbeat since; None if it is too early to look again.

        The first heartbeat replaces any: it may be that of an earlier process, which ended without deleting it.
        """
        if self._looked_s is None:
            return False
        if 0 <= now - self._looked_s < self._beat_s:
            return None
        self._looked_s = now
        return self._is_anothers()

    def _is_anothers(self) -> bool:
        try:
            stored = Heartbeat.from_bytes(get_record(self._log.store, self._key))
        except (NotFoundError, CorruptError, FormatError):
            return False
        return stored.facts.get("instance") != self._instance


def new_replica_id() -> str:
    """Host name, process id and a random suffix, in the form that keys allow."""
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:60].lstrip("-")
    return f"{host}-{os.getpid()}-{secrets.token_hex(3)}".lstrip("-")
