"""`Follower`: keeps a target at the newest version of a feed."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from deltasync.errors import DeltasyncError, InvalidInputError, NotFoundError, StoreError
from deltasync.feed.fetch import fetch_files
from deltasync.feed.log import Log
from deltasync.files import locked
from deltasync.format.layout import Layout
from deltasync.format.manifest import Manifest
from deltasync.replica.events import Advance, Counts, Observer, Status
from deltasync.replica.loop import BEAT_S, Heartbeats, Loop, ScrubSchedule, new_replica_id
from deltasync.replica.mirror import Gathered, Mirror, Reader
from deltasync.replica.target import Damage, Staged, Target
from deltasync.store import Feed, opened
from deltasync.store.retry import RetryingStore

logger = logging.getLogger(__name__)


class Mover:
    """Keeps a mirror and one target together. Safe for threads.

    `serving` is held while the target is changed or compared, `moving` while the mirror moves or must not move; the
    former is always taken first. A target that takes changes needs no mirror: that one may then move on.
    """

    def __init__(self, log: Log, reader: Reader, counts: Counts, tell: Observer) -> None:
        self.serving = threading.RLock()
        self.moving = threading.RLock()
        self._log = log
        self._reader = reader
        self._counts = counts
        self._tell = tell
        self._known: Target | None = None
        """The target that is known to have the bits of the version that it says."""

    @property
    def mirror(self) -> Mirror | None:
        return self._reader.mirror

    def advance(
        self, target: Target, choose: Callable[[], Manifest], meanwhile: Callable[[], object] = lambda: None
    ) -> Advance | None:
        """Bring the target to the version that `choose` tells; None if it is there.

        `meanwhile` is called while the target takes changes, once the mirror is free to move on.
        """
        with self.serving:
            with self.moving:
                self._open(target)
                goal = choose()
                # The mirror may be ahead: it is where the target will have to go next.
                if target is self._known and target.version == goal.version:
                    return None
                staged, gathered = self._prepare(target, goal)
                if staged.changes is None or target.reads_mirror:
                    return self._deliver(target, staged, gathered)
            meanwhile()
            return self._deliver(target, staged, gathered)

    def read_ahead(self, choose: Callable[[], Manifest]) -> None:
        """Bring only the mirror to the version that `choose` tells. A new layout waits for the target."""
        with self.moving:
            if self.mirror is not None:
                require = partial(
                    Layout.require_equal, self.mirror.weights.layout, ours="the mirror", theirs="the feed"
                )
                self._reader.move(choose(), require)

    def scrub(
        self, target: Target, *, repair: bool, tensors: Sequence[int] | None = None, stay: int | None = None
    ) -> list[Damage]:
        """Compare the live weights with the mirror, all of them or those of some tensors, and repair what differs.

        Both are brought to one version first: that of the mirror, or `stay`. Before all weights are compared, or any
        are repaired, the mirror itself is proved by its digest.
        """
        with self.serving, self.moving:
            self._open(target)
            mirror = self.mirror
            if mirror is None or mirror.version is None:
                raise InvalidInputError("there is nothing yet to compare with", hint="advance first")
            wanted = mirror.version if stay is None else stay
            if target is not self._known or not target.version == mirror.version == wanted:
                staged, gathered = self._prepare(target, self._log.read(wanted))
                self._deliver(target, staged, gathered)
                mirror = self.mirror
                assert mirror is not None
            if tensors is None:
                self.prove_mirror(target)
                tensors = range(len(mirror.weights.layout.tensors))
            return self._compare(target, mirror, tensors, repair=repair)

    def prove_mirror(self, target: Target) -> bool:
        """Read all of the mirror. If it has other bits than its version, build it anew and write it to the target.

        A change is relative to the mirror, so that a bit that it lost can get into the target unseen.
        """
        with self.serving, self.moving:
            mirror = self.mirror
            if mirror is None or mirror.version is None or self._reader.is_sound():
                return True
            # The mirror may be ahead of the target, which stays where it is.
            version, self._known = mirror.version if target.version is None else target.version, None
            self._reader.diverged()
            self.advance(target, lambda: self._log.read(version))
            return False

    def _compare(self, target: Target, mirror: Mirror, tensors: Sequence[int], *, repair: bool) -> list[Damage]:
        found = target.scrub(mirror.weights, tensors, repair=False)
        elements = sum(damage.elements for damage in found)
        self._counts.scrubbed += sum(mirror.weights.layout.tensors[i].elements for i in tensors)
        self._counts.damaged += elements
        for damage in found:
            logger.warning("version %s: %d elements of %r differ", mirror.version, damage.elements, damage.tensor)
        if found and repair:
            if self.prove_mirror(target):
                self._repair(target, mirror, tensors)
            self._counts.repaired += elements
        return found

    def _open(self, target: Target) -> None:
        """What a target that was not seen before says of its version is proved, as far as that can be."""
        self._reader.open()
        mirror = self.mirror
        if target is self._known or mirror is None or mirror.version is None or target.version != mirror.version:
            return
        target.require(mirror.weights.layout)
        if target.scrub(mirror.weights, range(len(mirror.weights.layout.tensors)), repair=False):
            logger.warning("the target has other bits than version %d, which it claims: it is written", mirror.version)
            return
        self._known = target
        self._reader.renew()

    def _prepare(self, target: Target, goal: Manifest) -> tuple[Staged, Gathered]:
        """The mirror becomes `goal`; what the target needs to become it, too."""
        mirror = self._reader.move(goal, target.require)
        gathered = self._reader.gathered
        changes, start = gathered.changes, gathered.start
        if target is not self._known or target.version is None or target.version != start:
            changes = None
        if changes is None:
            target.require(mirror.weights.layout)
            start = None
        self._reader.renew()
        files = partial(fetch_files, self._log.store, goal)
        return Staged(goal, changes, start, mirror.weights, mirror.path, files, len(gathered.edges)), gathered

    def _deliver(self, target: Target, staged: Staged, gathered: Gathered) -> Advance:
        # Whatever goes wrong from here on: all weights, next time.
        before, self._known = target.version, None
        since = time.perf_counter()
        target.stage(staged)
        stage_s = time.perf_counter() - since
        since = time.perf_counter()
        pause_s = target.commit(staged)
        commit_s = time.perf_counter() - since
        self._known = target
        moved = Advance(
            from_version=before,
            version=staged.version,
            edges=tuple(gathered.edges),
            nbytes=gathered.nbytes,
            changed=None if staged.changes is None else gathered.changed,
            seconds=gathered.seconds(stage_s=stage_s, commit_s=commit_s, pause_s=pause_s),
        )
        self._counts.moves += 1
        self._counts.nbytes += moved.nbytes
        logger.info("%s", moved)
        self._tell(moved)
        return moved

    def _repair(self, target: Target, mirror: Mirror, tensors: Sequence[int]) -> None:
        """Overwrite what differs from a mirror that is proved; everything if the target cannot do less."""
        target.scrub(mirror.weights, tensors, repair=True)
        if target.version is None and mirror.version is not None:
            self._deliver(target, *self._prepare(target, self._log.read(mirror.version)))


_PATIENCE_S = 5.0
"""How long a single read of a move is tried again before the move fails."""


class Follower:
    """Keeps one target at versions of a feed. Every method may be called from any thread.

        with Follower("s3://bucket/run-42", ModuleTarget(model, hold=lock)) as follower:
            follower.start()
            follower.wait_live(timeout_s=600)

    `mirror`: keep the mirror in a mapped file, from which a later process resumes; by default it is in memory.
    `base`: a local copy of the checkpoint that the feed began with, if the one that the feed names is not available.
    `replica`: the id in heartbeats; random by default.
    `observer`: called with every move, in the thread that made it, before the next one can begin.
    `beat_s`: seconds between heartbeats; None writes none.
    `scrub_s`: while following, compare all weights of the target with the mirror about once in this many seconds; None
    does not.
    """

    def __init__(
        self,
        feed: Feed,
        target: Target,
        *,
        mirror: Path | None = None,
        base: Path | None = None,
        replica: str | None = None,
        observer: Observer | None = None,
        beat_s: float | None = BEAT_S,
        scrub_s: float | None = None,
    ) -> None:
        self.replica = new_replica_id() if replica is None else replica
        self._target = target
        self._held = ExitStack()
        self._store = self._held.enter_context(opened(feed))
        self._log = Log(self._store)
        self._counts = Counts()
        patient = Log(RetryingStore(self._store, limit_s=_PATIENCE_S))
        reader = Reader(patient, path=mirror, base=base, counts=self._counts)
        self._mover = Mover(patient, reader, self._counts, self._moved)
        self._heart = None if beat_s is None else Heartbeats(self._log, self.replica, beat_s=beat_s)
        self._observer = observer
        self._rounds = None if scrub_s is None else ScrubSchedule(scrub_s)
        self._loop = Loop()
        self._mirror_path = mirror
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._is_open = False
        self._is_closed = False
        self._is_paused = False
        self._has_ended = False
        self._head: Manifest | None = None
        self._pinned: Manifest | None = None
        self._served: int | None = None
        self._last: Advance | None = None
        self._error: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def advance(self, *, to: int | None = None) -> Advance | None:
        """Bring the target to version `to`: by default the one that is pinned, else the newest. None if it is there.

        `to` may be older than what is live. Versions between are never shown.

        NotFoundError for a version that the feed does not have; MismatchError, before anything is touched, if the feed
        is of another model than the target; what the target raises if it cannot take the version: next time it is
        brought there with all weights of the mirror.
        """
        return self._advance(to=to)

    def follow(self) -> None:
        """Keep the target at the newest version, or at the pinned one, until `stop`.

        A store or a target that fails is retried without limit, with back-off, and logged once. Raises only what a
        retry cannot fix: a target of another model, a format of a later release, a store that refuses.
        """
        ahead = ThreadPoolExecutor(1, thread_name_prefix="deltasync-ahead")
        with ahead:
            self._loop.run(lambda: self._step(ahead), self._note)

    def start(self) -> None:
        """Call `follow` in a thread of its own. What ends it is `error`, and is logged."""
        if self._thread is not None:
            raise InvalidInputError("this follower was started before", hint="make another one for another target")
        self._thread = threading.Thread(target=self._run, name="deltasync-follow", daemon=True)
        self._thread.start()

    def wait_live(self, timeout_s: float | None = None) -> int:
        """Wait until a version is live, and return it.

        Raises `error` if following has ended with one; StoreError after `timeout_s`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._served is not None or self._has_ended, timeout_s)
        if self._served is not None:
            return self._served
        if self._error is not None and self._has_ended:
            raise self._error
        reason = "following has stopped" if self._error is None else f"{self._error}"
        raise StoreError(
            f"no version of {self._store.url} is live after {timeout_s} s: {reason}",
            transient=True,
            hint="call start() first" if self._thread is None else "wait longer, or look at the log",
        )

    @property
    def error(self) -> Exception | None:
        """The error that following fails with now, or has ended with; None while all is well."""
        return self._error

    def stop(self) -> None:
        """Let following end after the move in progress, for good. `close` waits for that."""
        self._loop.stop()

    def nudge(self) -> None:
        """Let `follow` look for a new version at once."""
        self._loop.nudge()

    def pause(self) -> None:
        """Let `follow` fetch nothing more until `resume`; what is under way is finished."""
        self._is_paused = True

    def resume(self) -> None:
        """The opposite of `pause`."""
        self._is_paused = False
        self._loop.nudge()

    def pin(self, version: int | None) -> None:
        """Stay at a version, which may be older than what is live; None lets go. NotFoundError if it is not there."""
        self._pinned = None if version is None else self._read(version)
        self._loop.nudge()

    def scrub(self, *, repair: bool = True) -> list[Damage]:
        """Compare all live weights with the mirror, and overwrite what differs."""
        with self._mover.serving:
            self._open()
            return self._mover.scrub(self._target, repair=repair, stay=self._stay)

    def status(self) -> Status:
        """How things stand. Waits for nothing."""
        head, mirror = self._head, self._mover.mirror
        return Status(
            replica=self.replica,
            version=self._served,
            head=None if head is None else head.version,
            lag=None if head is None or self._served is None else max(0, head.version - self._served),
            mirror=None if mirror is None else mirror.version,
            pinned=self._stay,
            is_paused=self._is_paused,
            is_following=self._loop.is_running,
            last=self._last,
            error=None if self._error is None else f"{type(self._error).__name__}: {self._error}",
            counts=replace(self._counts),
        )

    def close(self) -> None:
        """Stop, delete the heartbeat, release the mirror's file. The target stays as it is."""
        self.stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._mover.serving, self._mover.moving:
            if self._is_closed:
                return
            self._is_closed = True
            if self._heart is not None:
                self._heart.leave()
            self._held.close()

    def _open(self) -> None:
        """The first use takes the mirror's file."""
        if self._is_closed:
            raise InvalidInputError("this follower is closed", hint="make a new one")
        if not self._is_open and self._mirror_path is not None:
            self._held.enter_context(locked(self._mirror_path))
        self._is_open = True

    def _run(self) -> None:
        try:
            self.follow()
        except DeltasyncError as error:
            self._error = error
            logger.error("no longer following %s: %s", self._store.url, error)
        finally:
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()

    def _advance(self, *, to: int | None = None, meanwhile: Callable[[], object] = lambda: None) -> Advance | None:
        try:
            with self._mover.serving:
                self._open()
                moved = self._mover.advance(self._target, lambda: self._goal(to), meanwhile)
        finally:
            with self._changed:
                self._served = self._target.version
                self._changed.notify_all()
        self._beat()
        return moved

    def _moved(self, moved: Advance) -> None:
        self._last, self._served = moved, moved.version
        if self._observer is not None:
            self._observer(moved)

    def _step(self, ahead: Executor) -> bool:
        """One look while following; whether there was anything new."""
        try:
            if not self._is_paused:
                moved = self._advance(meanwhile=lambda: ahead.submit(self._read_ahead))
                if moved is not None:
                    return True
            if self._rounds is not None and self._mover.mirror is not None and self._target.version is not None:
                self._scrub_some(self._rounds, self._mover.mirror)
            return False
        finally:
            # Also while nothing moves: what is live is still served, and its way must be kept.
            self._beat()

    def _scrub_some(self, rounds: ScrubSchedule, mirror: Mirror) -> None:
        """The tensors that are due; once in each round the mirror, too."""
        due = rounds.due([spec.elements for spec in mirror.weights.layout.tensors])
        with self._mover.serving:
            if due and not self._is_closed:
                if 0 in due:
                    self._mover.prove_mirror(self._target)
                self._mover.scrub(self._target, repair=True, tensors=due, stay=self._stay)

    @property
    def _stay(self) -> int | None:
        return None if self._pinned is None else self._pinned.version

    def _read_ahead(self) -> None:
        """The mirror goes on while the target is at work."""
        if self._is_paused or self._is_closed or self._loop.is_stopping:
            return
        try:
            self._mover.read_ahead(lambda: self._goal(None))
        except DeltasyncError as error:
            # The next step meets it again, and tells.
            logger.debug("cannot read ahead: %s", error)

    def _goal(self, to: int | None) -> Manifest:
        """The version to go to. One small request where the head is known."""
        if to is not None:
            found = self._read(to)
            if self._head is None or self._head.version < found.version:
                self._head = found
            return found
        if self._head is None:
            self._head = self._log.require_head()
        else:
            newer = self._log.head(after=self._head.version)
            self._head = self._head if newer is None else newer
        return self._head if self._pinned is None else self._pinned

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

    def _note(self, error: Exception | None) -> None:
        self._error = error

    def _beat(self) -> None:
        if self._heart is not None:
            self._heart.beat(self._target.version, self._facts)

    def _facts(self) -> Mapping[str, str]:
        target = self._target
        facts, lag, mirror = {"engine": target.engine}, self.status().lag, self._mover.mirror
        if lag is not None:
            facts["lag"] = str(lag)
        if mirror is not None and mirror.digest is not None and mirror.version == target.version:
            facts["digest"] = mirror.digest.hex
        if self._last is not None:
            facts |= self._last.seconds.facts()
        return facts
