"""The contract between a follower and its target, which serves the weights of a version."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from deltasync.errors import InvalidInputError
from deltasync.format.layout import Layout
from deltasync.format.manifest import Manifest
from deltasync.format.weights import Changes, Weights


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """A version for a target, completely decoded and verified.

    `changes` are absolute bits for a target at version `start`, to be applied in this order. None means all weights, to
    be read from `weights`; `start` is None then.
    `weights` are those of the mirror, and `path` is its file, if it has one. The mirror holds the version while the
    target takes all weights. With changes it may have advanced already: read only the layout of `weights` then.
    """

    manifest: Manifest
    changes: tuple[Changes, ...] | None
    start: int | None
    weights: Weights
    path: Path | None
    files: Callable[[], Mapping[str, bytes]]
    """Fetches the files beside the weights, by their relative path."""
    edges: int = 0
    """How many edges the changes come from; 0 if the mirror had the version already."""

    @property
    def version(self) -> int:
        return self.manifest.version

    @property
    def is_one_edge(self) -> bool:
        """Whether no element is in more than one of the changes."""
        return self.edges <= 1


@dataclass(frozen=True, slots=True)
class Damage:
    """The number of elements of a tensor that differ from the mirror."""

    tensor: str
    elements: int


STAGED_DIGEST = "target.digest"
"""The rule of the CorruptError of a target that has written other bits than those of the version."""


class Target(ABC):
    """Something that serves weights. A follower calls it from one thread at a time.

    The attributes are plain values, which other threads read at any time: a method sets them when they change.
    """

    engine: str = "custom"
    """A name of the engine, for heartbeats and logs."""
    version: int | None = None
    """The version that is completely live; None while one is written, after a failure, or if it is unknown."""
    reads_state: bool = False
    """Whether it reads the mirror even when it gets changes: the mirror does not read ahead then."""
    unseen_elements: int = 0
    """How many elements that depend on the weights no scrub has compared; 0 for a target whose scrub reads all."""

    def open(self) -> None:  # noqa: B027 - most targets have nothing to open
        """Take what the target needs for itself, and find out its version. Called before anything else."""

    def look(self) -> None:  # noqa: B027 - most engines lose nothing by themselves
        """Set `version` to None if the engine lost it. Called at each step: ask the engine here, and nowhere else."""

    @abstractmethod
    def require(self, layout: Layout) -> None:
        """Raise MismatchError, naming the first difference, if weights of this layout do not fit. Changes nothing."""

    @abstractmethod
    def stage(self, staged: Staged) -> bool | None:
        """Prepare a version beside the live weights. This may take long.

        Returns True if it has read back what it wrote and found the digest of the manifest; CorruptError with the rule
        `STAGED_DIGEST` if it found another one. The follower then gives it all weights.
        """

    @abstractmethod
    def commit(self, staged: Staged) -> float:
        """Make the version that was staged last live; return the seconds for which serving was held up."""

    @abstractmethod
    def scrub(self, weights: Weights, tensors: Sequence[int], *, repair: bool) -> list[Damage]:
        """Compare these tensors, by ordinal, with `weights`, which have the live version; overwrite what differs.

        A target that cannot repair has `version` None afterwards, and gets all weights.
        """

    def close(self) -> None:  # noqa: B027 - most targets have nothing to close
        """Let go of what `open` took; what is live stays so. Another follower may open the target again."""


class Gate:
    """Keeps batches and switches of weights apart, fairly.

        gate = Gate()
        target = ModuleTarget(model, hold=gate)
        ...
        with gate:  # one batch: many threads may be inside at once
            generate(model, prompts)

    A switch waits for the batches that run, and for no later one: those queue behind it, and run before the next one.
    A lock gives no such promise: a loop that takes it again at once can keep a switch waiting. A thread that is inside
    may enter again.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._queued = 0
        self._is_switching = False
        self._switches = 0
        self._own = threading.local()

    def __enter__(self) -> Self:
        depth = getattr(self._own, "depth", 0)
        if depth == 0:
            with self._changed:
                self._begin()
        self._own.depth = depth + 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._own.depth -= 1
        if self._own.depth == 0:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    @contextmanager
    def switch(self) -> Iterator[None]:
        """Wait for the batches that run, and keep others out until the end of the block."""
        if getattr(self._own, "depth", 0):
            raise InvalidInputError(
                "weights cannot be switched inside a batch, whose end the switch would wait for",
                hint="leave the `with` block of the gate before you advance",
            )
        with self._changed:
            self._changed.wait_for(lambda: not self._is_switching)
            self._is_switching = True
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._running == 0)
            yield
        finally:
            with self._changed:
                # Those that queued are inside from now on: the next switch waits for them.
                self._running, self._queued = self._running + self._queued, 0
                self._is_switching = False
                self._switches += 1
                self._changed.notify_all()

    def _begin(self) -> None:
        """Enter, or queue behind the switch that waits or is in progress."""
        if not self._is_switching:
            self._running += 1
            return
        turn = self._switches
        self._queued += 1
        try:
            self._changed.wait_for(lambda: self._switches != turn)
        except BaseException:
            if self._switches == turn:
                self._queued -= 1
            else:
                self._running -= 1
                self._changed.notify_all()
            raise
