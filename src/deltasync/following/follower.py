"""`Follower`: brings a target to versions of a feed, one move at a time or for as long as it is let."""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from deltasync.errors import DeltasyncError, InvalidInputError, NotFoundError
from deltasync.files import locked
from deltasync.following.events import Advance, Counts, Observer, Status
from deltasync.following.heartbeat import BEAT_S, Heart, new_replica_id
from deltasync.following.loop import Loop, Rounds
from deltasync.following.mirror import Mirror
from deltasync.following.moving import Mover
from deltasync.following.nudging import watching
from deltasync.following.reading import Reader
from deltasync.following.target import Damage, Target
from deltasync.format.manifest import Manifest
from deltasync.log.log import Log
from deltasync.store.opening import open_store
from deltasync.store.patient import PatientStore
from deltasync.store.protocol import Store

_log = logging.getLogger(__name__)

_PATIENCE_S = 5.0
"""How long a single read of a move is tried again before the move fails."""


class Follower:
    """Follows a feed for one target. Every method may be called from any thread.

    `mirror`: keep the mirror in a mapped file, which a later process goes on from; in memory by default.
    `base`: a local copy of the checkpoint that the feed began with, where the one that it names is not at hand.
    `replica`: the id in heartbeats; by default one that nobody else has.
    `observer`: told every move, in the thread that made it, before another one can begin.
    `beat_s`: time between heartbeats; None writes none.
    `scrub_s`: while following, compare all weights of the target with the mirror in about this time, over and over;
    None does not.
    """

    def __init__(
        self,
        store: Store | str,
        *,
        mirror: Path | None = None,
        base: Path | None = None,
        replica: str | None = None,
        threads: int | None = None,
        observer: Observer | None = None,
        beat_s: float | None = BEAT_S,
        scrub_s: float | None = None,
    ) -> None:
        self.replica = new_replica_id() if replica is None else replica
        self._store = open_store(store) if isinstance(store, str) else store
        self._owns_store = isinstance(store, str)
        self._log = Log(self._store)
        self._counts = Counts()
        patient = Log(PatientStore(self._store, limit_s=_PATIENCE_S))
        reader = Reader(patient, path=mirror, base=base, threads=threads, counts=self._counts)
        self._mover = Mover(patient, reader, self._counts, self._moved)
        self._heart = None if beat_s is None else Heart(self._log, self.replica, beat_s=beat_s)
        self._observer = observer
        self._rounds = None if scrub_s is None else Rounds(scrub_s)
        self._loop = Loop()
        self._mirror_path = mirror
        self._held = ExitStack()
        self._is_open = False
        self._is_closed = False
        self._is_paused = False
        self._head: Manifest | None = None
        self._pinned: Manifest | None = None
        self._served: int | None = None
        self._last: Advance | None = None
        self._error: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def advance(self, target: Target, *, to: int | None = None) -> Advance | None:
        """Bring the target to version `to`: by default the one that is pinned, else the newest. None if it is there.

        `to` may be older than what is live. Versions between are never shown.

        NotFoundError for a version that the feed does not have; MismatchError, before anything is touched, if the feed
        is of another model than the target; what the target raises if it cannot take the version: next time it is
        brought there with all weights of the mirror.
        """
        return self._advance(target, to=to)

    def follow(self, target: Target) -> None:
        """Keep the target at the newest version, or the pinned one, until `stop`.

        A store or a target that fails is tried again for ever, with back-off, and the log tells it once. Raises only
        what trying again cannot help: a target of another model, a format of a later release, a store that refuses.
        """
        ahead = ThreadPoolExecutor(1, thread_name_prefix="deltasync-ahead")
        with ahead, watching(self._store, self._loop.nudge):
            self._loop.run(lambda: self._step(target, ahead), self._note)

    def stop(self) -> None:
        """Let `follow` return after the move that is under way, for good."""
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

    def scrub(self, target: Target, *, repair: bool = True) -> list[Damage]:
        """Compare all live weights with the mirror, and overwrite what differs."""
        with self._mover.serving:
            self._open()
            return self._mover.scrub(target, repair=repair, stay=self._stay)

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
            error=self._error,
            counts=replace(self._counts),
        )

    def close(self) -> None:
        """Stop, delete the heartbeat, give back the mirror's file. The target stays as it is."""
        self.stop()
        with self._mover.serving, self._mover.moving:
            if self._is_closed:
                return
            self._is_closed = True
            if self._heart is not None:
                self._heart.leave()
            self._held.close()
            if self._owns_store:
                self._store.close()

    def _open(self) -> None:
        """The first use takes the mirror's file."""
        if self._is_closed:
            raise InvalidInputError("this follower is closed", hint="make a new one")
        if not self._is_open and self._mirror_path is not None:
            self._held.enter_context(locked(self._mirror_path))
        self._is_open = True

    def _advance(
        self, target: Target, *, to: int | None = None, meanwhile: Callable[[], object] = lambda: None
    ) -> Advance | None:
        try:
            with self._mover.serving:
                self._open()
                moved = self._mover.advance(target, lambda: self._goal(to), meanwhile)
        finally:
            self._served = target.version
        self._beat(target)
        return moved

    def _moved(self, moved: Advance) -> None:
        self._last, self._served = moved, moved.version
        if self._observer is not None:
            self._observer(moved)

    def _step(self, target: Target, ahead: Executor) -> bool:
        """One look while following; whether there was anything new."""
        try:
            if not self._is_paused:
                moved = self._advance(target, meanwhile=lambda: ahead.submit(self._read_ahead))
                if moved is not None:
                    return True
            if self._rounds is not None and self._mover.mirror is not None and target.version is not None:
                self._scrub_some(target, self._rounds, self._mover.mirror)
            return False
        finally:
            # Also while nothing moves: what is live is still served, and its way must be kept.
            self._beat(target)

    def _scrub_some(self, target: Target, rounds: Rounds, mirror: Mirror) -> None:
        """The tensors that are due; once in each round the mirror, too."""
        due = rounds.due([spec.elements for spec in mirror.weights.layout.tensors])
        with self._mover.serving:
            if due and not self._is_closed:
                if 0 in due:
                    self._mover.prove_mirror(target)
                self._mover.scrub(target, repair=True, tensors=due, stay=self._stay)

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
            _log.debug("cannot read ahead: %s", error)

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
        self._error = None if error is None else f"{type(error).__name__}: {error}"

    def _beat(self, target: Target) -> None:
        if self._heart is not None:
            self._heart.beat(target.version, lambda: self._facts(target))

    def _facts(self, target: Target) -> Mapping[str, str]:
        facts, lag, mirror = {"engine": target.engine}, self.status().lag, self._mover.mirror
        if lag is not None:
            facts["lag"] = str(lag)
        if mirror is not None and mirror.digest is not None and mirror.version == target.version:
            facts["digest"] = mirror.digest.hex
        if self._last is not None:
            facts |= self._last.seconds.facts()
        return facts
