"""What the mirror got that a target does not have yet."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from deltasync.following.events import Seconds
from deltasync.format.changes import Changes
from deltasync.format.manifest import Kind
from deltasync.log.planning import Edge

WHOLE_SHARE = 4
"""From one in so many elements on, a target takes all weights: changes would need more memory than they save."""


class Gathered:
    """Changes since the mirror was at version `start`, in order, and what they took."""

    def __init__(self, start: int | None, *, elements: int) -> None:
        self.start = start
        self.changed = 0
        self.edges: list[Kind] = []
        self.nbytes = 0
        self.plan_s = 0.0
        self.fetch_s = 0.0
        self.decode_s = 0.0
        self._changes: list[Changes] | None = None if start is None else []
        self._most = elements // WHOLE_SHARE
        self._is_torn = False

    @property
    def changes(self) -> tuple[Changes, ...] | None:
        """None where only all weights will do."""
        return None if self._changes is None or self._is_torn else tuple(self._changes)

    @property
    def is_lost(self) -> bool:
        """Whether changes need not be added any more."""
        return self._changes is None

    def add(self, changes: Iterable[Changes]) -> None:
        """Bits that the mirror is overwritten with."""
        for part in changes:
            if self._changes is not None:
                self.changed += len(part.values)
                self._changes.append(part)
                if self.changed > self._most:
                    self.lose()

    def lose(self) -> None:
        """The changes are not known any more, or too many."""
        self._changes = None

    @contextmanager
    def tearing(self) -> Iterator[None]:
        """The block overwrites the mirror. If it fails, only all weights of a later version will do."""
        if self._is_torn:
            self.lose()
        self._is_torn = True
        yield
        self._is_torn = False

    def count(self, edge: Edge, *, nbytes: int) -> None:
        """The mirror has taken an edge, for which so much was fetched."""
        self.edges.append(edge.manifest.kind)
        self.nbytes += nbytes

    def seconds(self, *, stage_s: float, commit_s: float, pause_s: float) -> Seconds:
        """All phases of a move."""
        return Seconds(self.plan_s, self.fetch_s, self.decode_s, stage_s, commit_s, pause_s)
