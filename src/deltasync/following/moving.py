"""Moves of a target: the mirror first, then what the target lacks, staged and committed. Compared on demand, too."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from deltasync.errors import InvalidInputError
from deltasync.following.events import Advance, Counts, Observer
from deltasync.following.gathering import Gathered
from deltasync.following.mirror import Mirror
from deltasync.following.reading import Reader
from deltasync.following.target import Damage, Staged, Target
from deltasync.format.layout import Layout
from deltasync.format.manifest import Manifest
from deltasync.log.log import Log
from deltasync.log.payloads import fetch_files

_log = logging.getLogger(__name__)


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
                mirror = staged.mirror
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
            _log.warning("version %s: %d elements of %r differ", mirror.version, damage.elements, damage.tensor)
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
            _log.warning("the target has other bits than version %d, which it claims: it is written", mirror.version)
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
        return Staged(goal, changes, start, mirror, files, len(gathered.edges)), gathered

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
        _log.info("%s", moved)
        self._tell(moved)
        return moved

    def _repair(self, target: Target, mirror: Mirror, tensors: Sequence[int]) -> None:
        """Overwrite what differs from a mirror that is proved; everything if the target cannot do less."""
        target.scrub(mirror.weights, tensors, repair=True)
        if target.version is None and mirror.version is not None:
            self._deliver(target, *self._prepare(target, self._log.read(mirror.version)))
