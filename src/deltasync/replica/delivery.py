"""From the mirror to the target: advance both, compare them, repair the target."""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from deltasync.errors import CorruptError, DeltasyncError, InvalidInputError
from deltasync.feed.fetch import find_files
from deltasync.feed.log import Log
from deltasync.feed.route import Route
from deltasync.files import locked
from deltasync.format.layout import Layout
from deltasync.format.manifest import Manifest
from deltasync.format.weights import Weights
from deltasync.parallel import Pool
from deltasync.replica.events import Advance, Seconds
from deltasync.replica.live import Live
from deltasync.replica.loop import Loop, ScrubSchedule
from deltasync.replica.mirror import MappedState
from deltasync.replica.target import STAGED_DIGEST, Damage, Staged, Target
from deltasync.state import Applied, State

logger = logging.getLogger(__name__)

WHOLE_SHARE = 4
"""If more than one element in this many changed, a target takes all weights: changes would use more memory."""


class Delivery:
    """Brings a target to versions through the mirror, and knows which version its bits are proved to have.

    Nothing here is locked: one thread at a time may use it, and the mirror. While the target takes changes, the mirror
    is lent to the thread that reads ahead, until the advance is done.
    """

    def __init__(
        self, target: Target, mirror: State, log: Log, live: Live, loop: Loop, *, base: Path | None, trust_code: bool
    ) -> None:
        self._target = target
        self._mirror = mirror
        self._log = log
        self._live = live
        self._loop = loop
        self._base = base
        self._trust_code = trust_code
        self._applied = Applied()
        """What the mirror took since the last hand-off."""
        self._held = ExitStack()
        self._is_open = False
        self.is_closed = False
        self._ahead = Pool(1, "deltasync-ahead")
        self._reading: Future[None] | None = None

    def open(self) -> None:
        """Take the mirror back, and look at what the target has. InvalidInputError after `close`.

        Once before that, open the target, lock the file of the mirror, and look for what an earlier process left in it.
        """
        if self.is_closed:
            raise InvalidInputError("this follower is closed", hint="create a new one")
        # An observer may call back while the mirror is read ahead.
        self.take_back()
        if not self._is_open:
            self._target.open()
            with ExitStack() as held:
                if isinstance(self._mirror, MappedState):
                    self._mirror.require_ours()
                    held.enter_context(locked(self._mirror.path))
                    self._mirror.open(self._log, self._applied)
                    self._count()
                self._held = held.pop_all()
            self._is_open = True
            self._collect()
        self._target.look()

    def close(self) -> None:
        """Release the file of the mirror, and the target."""
        self.is_closed = True
        self.take_back()
        self._held.close()
        self._target.close()

    def take_back(self) -> None:
        """Wait until the mirror is no longer read ahead. The next step meets any error of that again."""
        if self._reading is not None:
            wait([self._reading])
            self._reading = None

    def prove(self) -> None:
        """If the target claims the mirror's version without proof, compare them. A wrong claim means all weights."""
        mirror, weights, target = self._mirror, self._mirror.weights, self._target
        if self._live.proved is not None or weights is None or mirror.version is None or mirror.digest is None:
            return
        if target.version != mirror.version:
            return
        target.require(weights.layout)
        if target.scrub(weights, range(len(weights.layout.tensors)), repair=False):
            logger.warning("the target claims version %d but has other bits: it is rewritten", mirror.version)
            return
        self._live.proved = mirror.version, mirror.digest
        self._live.note_read_back(mirror.version)
        self._collect()

    def to(self, goal: Manifest, *, reads_ahead: bool = False) -> Advance:
        """Bring the mirror and then the target to a version; `reads_ahead`: in the meantime, where that is possible."""
        self._advance(goal)
        try:
            return self._switch(goal, reads_ahead=reads_ahead)
        except CorruptError as error:
            if error.rule != STAGED_DIGEST:
                raise
            logger.warning("the target is rewritten with all weights: %s", error)
        finally:
            self.take_back()
        # From a mirror that is proved. It may have read ahead to a later version by now.
        mirror = self._mirror
        if not mirror.is_sound():
            mirror.discard(self._applied)
        if mirror.version is not None and mirror.version != goal.version:
            goal = self._log.read(mirror.version)
        self._advance(goal)
        return self._switch(goal)

    def _advance(self, goal: Manifest) -> None:
        """Bring the mirror to a version, after the target has accepted the layout of it."""
        route, weights = Route(self._log, goal, base=self._base), self._mirror.weights
        if weights is None or weights.layout.sha256 != goal.layout_sha256:
            since = time.perf_counter()
            self._target.require(route.layout())
            self._applied.plan_s += time.perf_counter() - since
        try:
            self._mirror.advance(route, self._applied)
        finally:
            self._count()

    def _read_ahead(self, layout: Layout) -> None:
        """Bring only the mirror to the newest version. A version of another layout has to wait for the target."""
        if self._live.is_paused or self._loop.is_stopping:
            return
        try:
            newest = self._live.poll()
            if newest.layout_sha256 == layout.sha256:
                self._advance(newest)
        except DeltasyncError as error:
            # The next step meets the same error, and reports it.
            logger.debug("cannot read ahead: %s", error)

    def _collect(self) -> Applied:
        """Return what the mirror took since the last hand-off, and collect what comes after the present version."""
        collected, version, weights = self._applied, self._mirror.version, self._mirror.weights
        self._applied = Applied(start=version)
        if version is not None and weights is not None:
            self._applied.limit, self._applied.changes = weights.layout.elements // WHOLE_SHARE, []
        return collected

    def _count(self) -> None:
        """Move what the status shows from the record of the mirror to the counts."""
        counts, applied = self._live.counts, self._applied
        counts.rerouted += applied.rerouted
        counts.refetched += applied.refetched
        counts.rebuilt += applied.rebuilt
        applied.rerouted = applied.refetched = applied.rebuilt = 0

    def _switch(self, goal: Manifest, *, reads_ahead: bool = False) -> Advance:
        """Give the target the version that the mirror holds, and tell of it.

        If the target fails, it gets all weights the next time.
        """
        target, live = self._target, self._live
        weights, applied = self._require_weights(), self._collect()
        changes = None
        if applied.changes is not None and applied.start is not None and self._is_proved_at(applied.start):
            changes = tuple(applied.changes)
        else:
            target.require(weights.layout)
        staged = Staged(
            manifest=goal,
            changes=changes,
            start=None if changes is None else applied.start,
            weights=weights,
            path=self._mirror.path if isinstance(self._mirror, MappedState) else None,
            files=partial(find_files, self._log, goal, trust_code=self._trust_code),
            edges=len(applied.edges),
        )
        if reads_ahead and changes is not None and not target.reads_state:
            self._reading = self._ahead.submit(self._read_ahead, weights.layout)
        before, live.proved = target.version, None
        began = time.perf_counter()
        is_read_back = target.stage(staged)
        staged_at = time.perf_counter()
        pause_s = target.commit(staged)
        seconds = Seconds(
            plan=applied.plan_s,
            fetch=applied.fetch_s,
            decode=applied.decode_s,
            stage=staged_at - began,
            commit=time.perf_counter() - staged_at,
            pause=pause_s,
        )
        live.proved = goal.version, goal.digest
        if is_read_back:
            live.note_read_back(goal.version)
        changed = None if changes is None else applied.changed
        edges = tuple(applied.edges)
        advanced = Advance(before, goal.version, edges, applied.nbytes, changed, seconds, goal.created_unix_s)
        live.tell(advanced)
        return advanced

    def scrub_due(self, schedule: ScrubSchedule) -> None:
        """Compare the tensors that are due, and check the mirror once in each round."""
        if None in (self._mirror.version, self._target.version):
            return
        weights = self._require_weights()
        due = schedule.due([spec.elements for spec in weights.layout.tensors])
        if 0 in due:
            self._prove_mirror()
        if due:
            self.scrub(repair=True, tensors=due)
            if len(weights.layout.tensors) - 1 in due and not self._target.reads_state:
                self._live.scrubbed_unix_s = int(time.time())

    def scrub(self, *, repair: bool, tensors: Sequence[int] | None = None) -> list[Damage]:
        """Compare the live weights of these tensors, by default of all, with the mirror, and repair those that differ.

        The target and the mirror are brought to the same version first: the mirror's, or the pinned one. The mirror
        itself is checked by its digest before all weights are compared, and before any are repaired.
        """
        self.prove()
        self._require_weights()
        pinned, counts = self._live.pinned, self._live.counts
        wanted = self._mirror.version if pinned is None else pinned.version
        assert wanted is not None
        if self._mirror.version != wanted or not self._is_proved_at(wanted):
            self.to(self._log.read(wanted))
        if tensors is None:
            self._prove_mirror()
        weights = self._require_weights()
        tensors = range(len(weights.layout.tensors)) if tensors is None else tensors
        damages = self._target.scrub(weights, tensors, repair=False)
        elements = sum(damage.elements for damage in damages)
        counts.scrubbed += sum(weights.layout.tensors[i].elements for i in tensors)
        counts.damaged += elements
        for damage in damages:
            logger.warning("version %s: %d elements of %r differ", wanted, damage.elements, damage.tensor)
        if not damages and len(tensors) == len(weights.layout.tensors):
            self._live.note_read_back(wanted)
        if damages and repair:
            if self._prove_mirror():
                self._target.scrub(weights, tensors, repair=True)
                if self._target.version is None:
                    # The target cannot repair single tensors: it gets all weights.
                    self.to(self._log.read(wanted))
            counts.repaired += elements
        return damages

    def _prove_mirror(self) -> bool:
        """Check the mirror by its digest. If that is wrong, rebuild the mirror and rewrite the target from it.

        A change is relative to the mirror, so a bit that flipped there can reach the target unnoticed.
        """
        mirror = self._mirror
        if mirror.version is None or mirror.is_sound():
            return True
        # The mirror may be ahead of the target, which stays at its version.
        version = mirror.version if self._target.version is None else self._target.version
        self._live.proved = None
        mirror.discard(self._applied)
        self.to(self._log.read(version))
        return False

    def _is_proved_at(self, version: int) -> bool:
        proved = self._live.proved
        return proved is not None and proved[0] == self._target.version == version

    def _require_weights(self) -> Weights:
        if self._mirror.weights is None or self._mirror.version is None:
            raise InvalidInputError("there is nothing to compare with yet", hint="advance first")
        return self._mirror.weights
