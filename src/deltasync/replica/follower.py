"""`Follower`: keeps a target at the newest version of a feed."""

import logging
import os
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial

from deltasync import arguments
from deltasync.errors import DeltasyncError, InvalidInputError, NotFoundError, StoreError
from deltasync.feed.log import Head, Log
from deltasync.files import locked
from deltasync.format.manifest import Manifest
from deltasync.parallel import Pool, ProcessBound
from deltasync.replica.events import Advance, Counts, Observer, Seconds, Status
from deltasync.replica.loop import BEAT_S, SCRUB_S, Heartbeats, Loop, ScrubSchedule, new_replica_id
from deltasync.replica.mirror import MappedState
from deltasync.replica.proved import ProvedTarget
from deltasync.replica.target import Damage, Target
from deltasync.state import State
from deltasync.store import Feed, opened
from deltasync.store.patient import PatientStore
from deltasync.tracing import VersionTracer

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
    `observer`: called with every advance, in the thread that made it, before the next one can start.
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
        if not hasattr(target, "commit"):
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
        self._log = Log(self._store)
        self._counts = Counts()
        # At INFO: the loop warns once that the store is unreachable, not for every read.
        self._patient = PatientStore(self._store, _PATIENCE_S, level=logging.INFO)
        # One lock guards both the mirror and the target, until what is read ahead is there, too.
        self._lock = threading.RLock()
        self._mirror = State() if mirror_path is None else MappedState(mirror_path)
        self._target = target
        self._proved = ProvedTarget(
            target,
            self._mirror,
            Log(self._patient),
            self._counts,
            base=base_path,
            trust_code=trust_code,
            newest=self._newest,
            on_advance=self._report,
        )
        self._heartbeats = None if beat_s is None else Heartbeats(self._log, self.replica, beat_s=beat_s)
        self._observer = observer
        self._schedule = None if scrub_s is None else ScrubSchedule(scrub_s)
        self._loop = Loop()
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._is_open = False
        self._is_closed = False
        self._is_paused = False
        self._head = Head(self._log)
        self._pinned: Manifest | None = None
        self._served: int | None = None
        self._confirmed: tuple[int, float] | None = None
        """The version that a poll found to be the one to serve, and when that poll began."""
        self._polled_at_s: float | None = None
        self._last: tuple[Advance, int] | None = None
        """The last advance, and when it went live, in milliseconds since 1970."""
        self._tracer = VersionTracer(self._log.feed_id)
        self._seconds = Seconds()
        """The time of all advances."""
        self._error: Exception | None = None

    def advance(self, *, to: int | None = None) -> Advance | None:
        """Bring the target to version `to`: by default the pinned one, else the newest. None if it is there already.

        `to` may be older than the live version. Versions in between are never live.

        NotFoundError for a version that the feed does not have; MismatchError, before anything is written, if the feed
        is of another model than the target; what the target raises if it cannot take the version. The next advance
        then writes all weights of the mirror. The error is in the status until an advance succeeds.
        """
        self._require_here()
        return self._advance(to=None if to is None else arguments.whole_number("to", to))

    def follow(self) -> None:
        """Keep the target at the newest version, or at the pinned one, until `stop`.

        A store or a target that fails is retried without limit, with back-off, and logged once. Raises only what a
        retry cannot fix: a target of another model, a format of a later release, a store that refuses.
        """
        self._require_here()
        try:
            self._loop.run(partial(self._step, Pool(1, "deltasync-ahead")), self._note_error)
        finally:
            with self._changed:
                self._changed.notify_all()

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
        with self._changed:
            self._changed.wait_for(lambda: self._served is not None or self._has_ended, timeout_s)
            served, error, has_ended = self._served, self._error, self._has_ended
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
        return self._error

    def stop(self) -> None:
        """End following after the advance in progress, for good. `close` waits for that."""
        self._require_here()
        self._loop.stop()
        with self._changed:
            self._changed.notify_all()

    def nudge(self) -> None:
        """Let `follow` poll for a new version at once."""
        self._require_here()
        self._loop.nudge()

    def pause(self) -> None:
        """Stop fetching in `follow` until `resume`; an advance in progress is finished."""
        self._require_here()
        self._is_paused = True

    def resume(self) -> None:
        """Let `follow` fetch again after `pause`."""
        self._require_here()
        self._is_paused = False
        self._loop.nudge()

    def pin(self, version: int | str | None) -> None:
        """Stay at a version, which may be older than the live one; None unpins. NotFoundError if it does not exist.

        `version` is a number, or the name of a pin of the feed.
        """
        self._require_here()
        if isinstance(version, str):
            self._pinned = self._log.resolve(version)
        else:
            version = arguments.optional_version(version)
            self._pinned = None if version is None else self._read(version)
        self._loop.nudge()

    def scrub(self, *, repair: bool = True) -> list[Damage]:
        """Compare all live weights with the mirror, and overwrite those that differ."""
        self._require_here()
        with self._lock:
            self._open()
            return self._proved.scrub(pinned=self._pinned_version, repair=repair)

    def status(self) -> Status:
        """The present state. Never blocks."""
        self._require_here()
        # Each is read once: another thread may change it at any time.
        head, served, confirmed = self._head.manifest, self._served, self._confirmed
        read_back, last, error = self._proved.read_back, self._last, self._error
        return Status(
            replica=self.replica,
            version=served,
            head=None if head is None else head.version,
            lag=None if head is None or served is None else max(0, head.version - served),
            mirror=self._mirror.version,
            pinned=self._pinned_version,
            is_paused=self._is_paused,
            is_following=self._loop.is_running,
            last=None if last is None else last[0],
            error=None if error is None else f"{type(error).__name__}: {error}",
            stale_s=None if confirmed is None or confirmed[0] != served else time.monotonic() - confirmed[1],
            counts=replace(
                self._counts,
                heartbeat_failures=0 if self._heartbeats is None else self._heartbeats.failures,
                retries=self._patient.retries,
            ),
            proved_version=None if read_back is None else read_back[0],
            proved_unix_s=None if read_back is None else read_back[1],
            scrubbed_unix_s=self._proved.scrubbed_unix_s,
            unseen_elements=self._target.unseen_elements,
            heartbeat_problem=None if self._heartbeats is None else self._heartbeats.problem,
            polled_s=None if self._polled_at_s is None else time.monotonic() - self._polled_at_s,
            seconds=self._seconds,
        )

    def close(self) -> None:
        """Stop, wait for the thread, delete the heartbeat, release the mirror's file. The target stays as it is.

        In a fork of the process this does nothing.
        """
        if not self._is_here():
            return
        self.stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._proved.take_back_mirror()
            if self._heartbeats is not None:
                self._heartbeats.leave()
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

    def _note_error(self, error: Exception | None) -> None:
        self._error = error

    def _step(self, ahead: Pool) -> bool:
        """One poll; whether the target advanced."""
        is_refused = False
        try:
            if not self._is_paused and self._advance(ahead=ahead) is not None:
                return True
            if self._schedule is not None:
                with self._lock:
                    if not self._is_closed:
                        self._proved.scrub_due(self._schedule, pinned=self._pinned_version)
            return False
        except StoreError as error:
            is_refused = not error.transient
            raise
        finally:
            # Also without an advance: `prune` must keep what this replica needs. A store that refuses ends following,
            # and would be reported twice.
            if not is_refused:
                self._beat()

    def _goal(self, to: int | None) -> Manifest:
        """The version to advance to. This takes one small request if the head is known."""
        if to is not None:
            manifest = self._read(to)
            if self._head.manifest is None or self._head.manifest.version < manifest.version:
                self._head.manifest = manifest
            return manifest
        head = self._head.poll()
        self._polled_at_s = time.monotonic()
        pinned = self._pinned
        return head if pinned is None else pinned

    def _read(self, version: int) -> Manifest:
        try:
            return self._log.read(version)
        except NotFoundError as error:
            head = self._log.require_head()
            raise NotFoundError(
                f"version {version} is not in {self._store.url}, which has {self._log.floor()} to {head.version}",
                version=version,
                key=error.key,
                hint="choose one of these",
            ) from error

    @property
    def _pinned_version(self) -> int | None:
        pinned = self._pinned
        return None if pinned is None else pinned.version

    def _newest(self) -> Manifest | None:
        """The version to read ahead to."""
        return None if self._is_paused or self._loop.is_stopping else self._goal(None)

    def _advance(self, *, to: int | None = None, ahead: Pool | None = None) -> Advance | None:
        with self._lock:
            try:
                self._open()
                self._proved.prove()
                polled_at_s = time.monotonic()
                goal = self._goal(to)
                is_there = self._proved.is_at(goal)
                if not is_there:
                    # Before a long fetch: a replica that may not write its heartbeat says so at its start.
                    self._beat()
                advanced = None if is_there else self._proved.serve(goal, ahead)
            except Exception as error:
                self._error = error
                self._counts.failures += 1
                raise
            finally:
                self._set_served(self._target.version)
            self._error = None
            if to is None:
                self._confirmed = goal.version, polled_at_s
            if advanced is None:
                self._beat()
            return advanced

    def _open(self) -> None:
        """Make the mirror ready for use: its file is locked at the first one."""
        # An observer may call back while the mirror is read ahead.
        self._proved.take_back_mirror()
        if self._is_closed:
            raise InvalidInputError("this follower is closed", hint="create a new one")
        if not self._is_open and isinstance(self._mirror, MappedState):
            self._mirror.require_ours()
            self._resources.enter_context(locked(self._mirror.path))
        self._is_open = True

    def _report(self, advanced: Advance) -> None:
        """Report an advance to the log, the tracer, those who wait, the observer and the feed."""
        self._last = advanced, int(1000 * time.time())
        self._seconds += advanced.seconds
        logger.info("%s", advanced)
        self._trace(advanced)
        self._set_served(advanced.version)
        if self._observer is not None:
            self._observer(advanced)
        self._beat()

    def _trace(self, advanced: Advance) -> None:
        """Record the span of the version that went live."""
        self._tracer.record(
            "move",
            advanced.version,
            [(name, value) for name, value in asdict(advanced.seconds).items() if name != "pause"],
            end_unix_s=time.time(),
            attributes={
                "replica": self.replica,
                "from_version": advanced.from_version,
                "edges": list(advanced.edges),
                "fetched_bytes": advanced.nbytes,
                "changed": advanced.changed,
                "pause_s": advanced.seconds.pause,
            },
        )

    def _set_served(self, version: int | None) -> None:
        with self._changed:
            self._served = version
            self._changed.notify_all()

    # Heartbeats

    def _beat(self) -> None:
        # Not into a place that has no feed: its name may be a typo.
        if self._heartbeats is not None and self._head.manifest is not None:
            # The facts are read later, after a request: by then the target may be at another version.
            version = self._target.version
            self._heartbeats.beat(version, partial(self._facts, version))

    def _facts(self, version: int | None) -> Mapping[str, str]:
        """What a heartbeat says beside the version."""
        facts = {"engine": self._target.engine}
        head, proved, last = self._head.manifest, self._proved, self._last
        if head is not None and version is not None:
            facts["lag"] = str(max(0, head.version - version))
        if (digest := proved.digest_of(version)) is not None:
            facts["digest"] = digest.hex
        if (read_back := proved.read_back) is not None:
            facts |= {"proved_version": str(read_back[0]), "proved_unix_s": str(read_back[1])}
        if proved.scrubbed_unix_s is not None:
            facts["scrubbed_unix_s"] = str(proved.scrubbed_unix_s)
        if unseen := self._target.unseen_elements:
            facts["unseen_elements"] = str(unseen)
        if last is not None:
            facts |= last[0].seconds.facts()
            facts |= {"moved_version": str(last[0].version), "moved_unix_ms": str(last[1])}
        return facts
