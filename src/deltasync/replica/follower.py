"""`Follower`: keeps a target at the newest version of a feed."""

import logging
import os
import threading
import time
from contextlib import ExitStack
from dataclasses import replace

from deltasync import arguments
from deltasync.errors import DeltasyncError, InvalidInputError, StoreError
from deltasync.feed.log import Log
from deltasync.parallel import ProcessBound
from deltasync.replica.delivery import Delivery
from deltasync.replica.events import Advance, Observer, Status
from deltasync.replica.live import BEAT_S, Live, new_replica_id
from deltasync.replica.loop import SCRUB_S, Loop, ScrubSchedule
from deltasync.replica.mirror import MappedState
from deltasync.replica.target import Damage, Target
from deltasync.state import State
from deltasync.store import Feed, opened
from deltasync.store.patient import PatientStore

logger = logging.getLogger(__name__)

_PATIENCE_S = 5.0
"""How long a read of the mirror is retried before the advance fails."""


class Follower(ProcessBound):
    """Keeps one target at versions of a feed. Every method may be called from any thread.

        with Follower("s3://bucket/run-42", ModuleTarget(model, hold=lock)) as follower:
            follower.start()
            follower.wait_live(timeout_s=600)

    `mirror`: keep the mirror in a mapped file, from which a later process resumes; by default it is in memory.
    `base`: a local copy of the checkpoint that the feed started with, if the one that the feed names is not available.
    `replica`: the id in heartbeats; random by default.
    `observer`: called with every advance, in the thread that made it, before the next one can start. It may call the
    follower. What it raises is logged, and changes nothing.
    `trust_code`: let the target write files of the feed that can run code when a folder is loaded.
    `beat_s`: seconds between heartbeats; None writes none.
    `scrub_s`: while following, compare all weights of the target with the mirror about once in this many seconds, and
    repair what differs; None does not.
    """

    def __init__(
        self,
        feed: Feed,
        target: Target,
        *,
        mirror: str | os.PathLike[str] | None = None,
        base: str | os.PathLike[str] | None = None,
        replica: str | None = None,
        observer: Observer | None = None,
        trust_code: bool = False,
        beat_s: float | None = BEAT_S,
        scrub_s: float | None = SCRUB_S,
    ) -> None:
        super().__init__()
        if not isinstance(target, Target):
            hint = "wrap a module in deltasync.torch.ModuleTarget, and a path in FolderTarget"
            raise InvalidInputError(f"target must be a Target, not {arguments.described(target)}", hint=hint)
        if scrub_s is not None:
            arguments.seconds("scrub_s", scrub_s, is_zero_allowed=False, hint="None compares nothing")
        if beat_s is not None:
            arguments.seconds("beat_s", beat_s, hint="None writes no heartbeats")
        if replica is not None:
            arguments.instance("replica", replica, str)
        mirror_path, base_path = arguments.optional_path("mirror", mirror), arguments.optional_path("base", base)
        self.replica = new_replica_id() if replica is None else replica
        self._resources = ExitStack()
        self._store = self._resources.enter_context(opened(feed))
        # At INFO: the loop warns once that the store is unreachable, not for every read.
        self._patient = PatientStore(self._store, _PATIENCE_S, level=logging.INFO)
        # One lock guards both the mirror and the target, until what is read ahead is there, too.
        self._lock = threading.RLock()
        self._mirror = State() if mirror_path is None else MappedState(mirror_path)
        self._target = target
        self._loop = Loop()
        log = Log(self._store)
        self._live = Live(target, log, self.replica, observer=observer, beat_s=beat_s)
        self._delivery = Delivery(
            target, self._mirror, Log(self._patient), self._live, self._loop, base=base_path, trust_code=trust_code
        )
        self._resources.callback(self._delivery.close)
        self._schedule = None if scrub_s is None else ScrubSchedule(scrub_s)
        self._thread: threading.Thread | None = None
        self._confirmed: tuple[int, float] | None = None
        """The version that a poll found to be the one to serve, and when that poll began."""

    def advance(self, *, to: int | None = None) -> Advance | None:
        """Bring the target to version `to`: by default the pinned one, else the newest. None if it is there already.

        `to` may be older than the live version. Versions in between are never live.

        NotFoundError for a version that the feed does not have; MismatchError, before anything is written, if the feed
        is of another model than the target; what the target raises if it cannot take the version. The next advance
        then writes all weights of the mirror. The error is in the status until an advance succeeds.
        """
        self._require_here()
        to = None if to is None else arguments.whole_number("to", to)
        with self._lock:
            return self._serve(to)

    def follow(self) -> None:
        """Keep the target at the newest version, or at the pinned one, until `stop`.

        A store or a target that fails is retried without limit, with back-off, and logged once. Raises only what a
        retry cannot fix: a target of another model, a format of a later release, a store that refuses.
        """
        self._require_here()
        try:
            self._loop.run(self._step)
        finally:
            self._live.notify()

    def start(self) -> None:
        """Call `follow` in a thread of its own. An error that ends it is kept as `error`, and logged."""
        self._require_here()
        if self._thread is not None:
            raise InvalidInputError("this follower was started before", hint="create another one")
        self._thread = threading.Thread(target=self._run, name="deltasync-follow", daemon=True)
        self._thread.start()

    def wait_live(self, timeout_s: float | None = None) -> int:
        """Wait until a version is live, and return it.

        Raises `error` if following has ended with one; StoreError if it was stopped, or after `timeout_s`.
        """
        self._require_here()
        with self._live.changed:
            self._live.changed.wait_for(lambda: self._live.served is not None or self._has_ended, timeout_s)
            served, error, has_ended = self._live.served, self._live.error, self._has_ended
        if served is not None:
            return served
        if self._loop.has_failed and error is not None:
            raise error
        if has_ended:
            message, hint = "following was stopped before a version went live", "create another follower"
        else:
            message = f"no version went live within {timeout_s} s"
            hint = "wait longer" if self._loop.is_running else "call start() first"
        if error is not None:
            message += f"; the last error was: {error}"
        raise StoreError(f"{self._store.url}: {message}", transient=True, hint=hint)

    @property
    def error(self) -> Exception | None:
        """The error of the last advance, or the one that following has ended with; None while all is well."""
        return self._live.error

    def stop(self) -> None:
        """End following after the advance in progress, for good. `close` waits for that."""
        self._require_here()
        self._loop.stop()
        self._live.notify()

    def nudge(self) -> None:
        """Let `follow` poll for a new version at once."""
        self._require_here()
        self._loop.nudge()

    def pause(self) -> None:
        """Stop fetching in `follow` until `resume`; an advance in progress is finished."""
        self._require_here()
        self._live.is_paused = True

    def resume(self) -> None:
        """Let `follow` fetch again after `pause`."""
        self._require_here()
        self._live.is_paused = False
        self._loop.nudge()

    def pin(self, version: int | str | None) -> None:
        """Stay at a version, which may be older than the live one; None unpins. NotFoundError if it does not exist.

        `version` is a number, or the name of a pin of the feed.
        """
        self._require_here()
        if not isinstance(version, str):
            version = arguments.optional_version(version)
        self._live.pinned = None if version is None else self._live.read(version)
        self._loop.nudge()

    def scrub(self, *, repair: bool = True) -> list[Damage]:
        """Compare all live weights with the mirror, and overwrite those that differ."""
        self._require_here()
        with self._lock:
            self._delivery.open()
            return self._delivery.scrub(repair=repair)

    def status(self) -> Status:
        """The present state. Never blocks."""
        self._require_here()
        # Each is read once: another thread may change it at any time.
        live = self._live
        head, served, confirmed, beats = live.head.manifest, live.served, self._confirmed, live.heartbeats
        read_back, last, error, polled_at_s = live.read_back, live.last, live.error, live.polled_at_s
        pinned = live.pinned
        return Status(
            replica=self.replica,
            version=served,
            head=None if head is None else head.version,
            lag=None if head is None or served is None else max(0, head.version - served),
            mirror=self._mirror.version,
            pinned=None if pinned is None else pinned.version,
            is_paused=live.is_paused,
            is_following=self._loop.is_running,
            last=None if last is None else last[0],
            error=None if error is None else f"{type(error).__name__}: {error}",
            stale_s=None if confirmed is None or confirmed[0] != served else time.monotonic() - confirmed[1],
            counts=replace(
                live.counts,
                heartbeat_failures=0 if beats is None else beats.failures,
                retries=self._patient.retries,
            ),
            proved_version=None if read_back is None else read_back[0],
            proved_unix_s=None if read_back is None else read_back[1],
            scrubbed_unix_s=live.scrubbed_unix_s,
            unseen_elements=self._target.unseen_elements,
            heartbeat_problem=None if beats is None else beats.problem,
            polled_s=None if polled_at_s is None else time.monotonic() - polled_at_s,
            seconds=live.seconds,
        )

    def close(self) -> None:
        """Stop, wait for the thread, delete the heartbeat, release the mirror's file and the target.

        What is live stays live, and another follower may take the target.

        In a fork of the process this does nothing.
        """
        if not self._is_here():
            return
        self.stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._lock:
            if self._delivery.is_closed:
                return
            if self._live.heartbeats is not None:
                self._live.heartbeats.leave()
            self._resources.close()

    # Following

    def _run(self) -> None:
        try:
            self.follow()
        except DeltasyncError as error:
            logger.error("no longer following %s: %s", self._store.url, error)

    @property
    def _has_ended(self) -> bool:
        """Whether following was stopped, or has ended with an error."""
        return (self._loop.is_stopping or self._loop.has_failed) and not self._loop.is_running

    def _step(self) -> bool:
        """One poll; whether the target advanced."""
        is_refused = False
        try:
            with self._lock:
                if self._delivery.is_closed:
                    return False
                if self._live.is_paused:
                    self._delivery.open()
                elif self._serve(reads_ahead=True) is not None:
                    return True
                if self._schedule is not None:
                    self._delivery.scrub_due(self._schedule)
            self._live.error = None
            return False
        except Exception as error:
            self._live.error = error
            is_refused = isinstance(error, StoreError) and not error.transient
            raise
        finally:
            # Also without an advance: `prune` must keep what this replica needs. A store that refuses ends following,
            # and would be reported twice.
            if not is_refused:
                self._live.beat()

    def _serve(self, to: int | None = None, *, reads_ahead: bool = False) -> Advance | None:
        """Bring the target to a version, by default to the one to serve now; None if it is known to be there."""
        try:
            self._delivery.open()
            self._delivery.prove()
            polled_at_s = time.monotonic()
            if to is None:
                goal = self._live.poll()
            else:
                goal, head = self._live.read(to), self._live.head
                if head.manifest is None or head.manifest.version < goal.version:
                    head.manifest = goal
            # The mirror may be ahead of the target.
            is_there = self._live.proved == (goal.version, goal.digest) and self._target.version == goal.version
            # Before a long fetch: a replica that may not write its heartbeat says so at its start.
            self._live.beat()
            advanced = None if is_there else self._delivery.to(goal, reads_ahead=reads_ahead)
        except Exception as error:
            self._live.error = error
            self._live.counts.failures += 1
            raise
        finally:
            self._live.serve(self._target.version)
        self._live.error = None
        if to is None:
            self._confirmed = goal.version, polled_at_s
        return advanced
