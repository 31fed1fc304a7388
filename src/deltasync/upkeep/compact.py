"""Write skips: changes that lead over many versions at once, so that a late replica fetches few edges.

A skip of level n leads from one multiple of n to the next one. Every level is a multiple of the level below it, so any
distance is a handful of edges. A compactor walks through the versions with one copy of the weights. Beside it, it keeps
the bits that were replaced since the last multiple of each level.

The bytes of a skip depend on the feed alone. So a compactor can stop at any point and start again, and several of them
at once write the same objects.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from deltasync import blocks
from deltasync.errors import CorruptError, InvalidInputError, MismatchError, NotFoundError
from deltasync.feed.log import Log, manifest_key
from deltasync.feed.route import Route
from deltasync.feed.upload import Upload
from deltasync.format.manifest import Manifest, PayloadRef
from deltasync.format.payload import Block, PayloadHeader, grouped, write_payload
from deltasync.past import Past
from deltasync.state import State, load
from deltasync.store import Feed, opened
from deltasync.store.protocol import Store
from deltasync.upkeep.stats import MaintenanceStats

logger = logging.getLogger(__name__)

LEVELS = (4, 16, 64)
RETRY_S = 60.0


def compact(feed: Feed, *, levels: Sequence[int] = LEVELS, retry_s: float = RETRY_S) -> tuple[Manifest, ...]:
    """Write the skips of a feed that are missing up to its head, and return their manifests.

    This needs memory for the weights of one version. Publishers, replicas, `prune` and other compactors may work on the
    feed at the same time. NotFoundError if the feed has no version.
    """
    with opened(feed) as store:
        return tuple(Compactor(store, levels=levels, retry_s=retry_s).advance())


def require_levels(name: str, levels: Sequence[int]) -> None:
    """InvalidInputError unless these can be levels; `name` is that of the argument."""
    are_numbers = isinstance(levels, Sequence) and all(type(level) is int for level in levels)
    if not are_numbers or not levels or levels[0] < 2 or any(b <= a or b % a for a, b in pairwise(levels)):
        found = list(levels) if are_numbers else f"{levels!r:.80}"
        raise InvalidInputError(
            f"{name} must start with 2 or more, and each must be a multiple of the one before, not {found}",
            hint="such as 4, 16, 64",
        )


class Compactor:
    """Writes the skips of a feed. `advance` continues where the last call ended, also after an error.

    Once `stop` is set, nothing more is read, and `advance` fails. A skip that is being put is finished.
    """

    def __init__(
        self,
        store: Store,
        *,
        levels: Sequence[int] = LEVELS,
        retry_s: float = RETRY_S,
        stop: threading.Event | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        require_levels("levels", levels)
        self.upkeep = MaintenanceStats()
        self._upload = Upload(store, retry_s=retry_s, stop=stop, clock=clock)
        self._store = self._upload.patient
        self._log = Log(self._store)
        self._levels = tuple(levels)
        self._state = State()
        self._head: Manifest | None = None
        self._first = 0
        """No skip starts before this version: what is there was pruned or is damaged."""
        self._pasts: list[Past] = []
        """Of each level, where its next skip starts."""

    def advance(self) -> Iterator[Manifest]:
        """Write the missing skips up to the head, and return each as it is committed.

        If there is nothing to do, this is one small request.
        """
        with self.upkeep.attempt(self._store):
            newer = self._log.head(after=None if self._head is None else self._head.version)
            self._head = head = newer or self._head or self._log.require_head()
            self.upkeep.head = head.version
            at = self._state.at
            if at is not None and not self._is_behind(at, head):
                return
            lowest = self._log.floor() if at is None else self._pasts[-1].at.version
            known = set(self._log.skips(start=lowest))
            if at is None:
                self._start(lowest, head, known)
            while (at := self._state.at) is not None and self._is_behind(at, head):
                yield from self._close(at, known)
                end = self._next_end(at)
                if end > head.version:
                    continue
                try:
                    with self.upkeep.phase("replay"):
                        self._state.advance(Route(self._log, self._log.read(end)))
                        if self._pasts[0].is_lost:
                            # All weights were cheaper than the changes, or the model is another one: no skip leads
                            # over that.
                            self._open_windows()
                    self.upkeep.version = end
                except (CorruptError, MismatchError, NotFoundError) as error:
                    logger.warning("no skip leads to version %d: %s", end, error)
                    self._first = end
                    self._start(self._log.floor(), head, known)

    def _is_behind(self, at: Manifest, head: Manifest) -> bool:
        """Whether a skip that ends at this version is left to write, or a later version to move to."""
        return self._next_end(at) <= head.version or any(
            _is_due(level, past, at) for level, past in zip(self._levels, self._pasts, strict=True)
        )

    def _next_end(self, at: Manifest) -> int:
        return (at.version // self._levels[0] + 1) * self._levels[0]

    def _start(self, floor: int, head: Manifest, known: set[tuple[int, int]]) -> None:
        """Load the version where the first missing skip starts, if there is one that can be loaded."""
        # The old weights go first: there may be no memory for both.
        self._pasts, self._state = [], State()
        first = max(floor, self._first)
        starts = {
            start
            for level in self._levels
            for start in range(-(-first // level) * level, head.version - level + 1, level)
            if (start, start + level) not in known
        }
        for start in sorted(starts):
            try:
                with self.upkeep.phase("replay"):
                    manifest = self._log.read(start)
                    self._state = State(load(self._log, manifest), manifest)
                    self._open_windows()
                self.upkeep.version = start
            except (CorruptError, MismatchError, NotFoundError) as error:
                logger.warning("no skip can start at version %d: %s", start, error)
                self._first = start + 1
            else:
                return

    def _open_windows(self) -> None:
        """Let the first skip of every level start at the version that is held."""
        self._pasts = [self._state.past() for _ in self._levels]
        # The levels above get their steps from the one below: what came back in between is left out.
        self._state.pasts = self._pasts[:1]

    def _close(self, at: Manifest, known: set[tuple[int, int]]) -> Iterator[Manifest]:
        """Write the skips that end at this version, the lowest level first."""
        for level, past, above in zip(self._levels, self._pasts, [*self._pasts[1:], None], strict=True):
            if not _is_due(level, past, at):
                continue
            start = past.at
            skip = None
            if at.version - start.version == level and (start.version, at.version) not in known:
                with self.upkeep.phase("encode"):
                    coded = blocks.encode_difference(past, self._state.require_weights())
                skip = self._commit(start, at, coded)
            if above is not None:
                with self.upkeep.phase("encode"):
                    above.absorb(past)
            past.restart(at)
            if skip is not None:
                yield skip

    def _commit(self, start: Manifest, end: Manifest, coded: Sequence[Block]) -> Manifest:
        digest = sum((block.digest for block in coded), start.digest)
        if digest != end.digest:
            raise CorruptError(
                f"the change from version {start.version} leads to the digest {digest}, but version {end.version} has "
                f"{end.digest}",
                rule="skip.digest",
                version=end.version,
                hint="the memory of this machine may be faulty: run it again",
            )
        with self.upkeep.phase("encode"):
            layout, payloads = self._state.require_weights().layout, []
            for group in grouped(coded):
                digest = sum((block.digest for block in group), start.digest)
                payloads.append(write_payload(PayloadHeader("delta", layout, start.digest, digest, end.version), group))
        skip = replace(
            end,
            kind="skip",
            parent=start.version,
            parent_digest=start.digest,
            changed=sum(block.changed for block in coded),
            payloads=tuple(PayloadRef.of(data) for data in payloads),
            files=None,
            base=None,
            extra={},
            timeline=None,
        )
        self._put(payloads)
        # This process may have slept, and `prune` may have removed what no manifest names yet.
        if self._upload.is_late(skip.refs):
            self._put(payloads)
        with self.upkeep.phase("commit"):
            # If it exists, another compactor, or an earlier attempt, has written it.
            self._upload.store.create(manifest_key(skip), skip.to_bytes())
        self.upkeep.count("skips")
        self.upkeep.count("payload_bytes", skip.nbytes)
        if self._upload.is_late(skip.refs):
            self._put(payloads)
        self._upload.forget(skip.refs)
        return skip

    def _put(self, payloads: Iterable[bytes]) -> None:
        with self.upkeep.phase("put"):
            for data in payloads:
                self._upload.put(data)


def _is_due(level: int, past: Past, at: Manifest) -> bool:
    """Whether a skip of this level ends at a version."""
    return at.version > past.at.version and at.version % level == 0
