"""The contract between a follower and its target, which serves the weights of a version."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

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


class Target(Protocol):
    """Something that serves weights. A follower calls it from one thread at a time."""

    @property
    def engine(self) -> str:
        """A name of the engine, for heartbeats and logs."""
        ...

    @property
    def version(self) -> int | None:
        """The version that is completely live; None while one is written, after a failure, or if it is unknown."""
        ...

    @property
    def reads_mirror(self) -> bool:
        """Whether it reads the mirror even when it gets changes: the mirror does not read ahead then."""
        ...

    def require(self, layout: Layout) -> None:
        """Raise MismatchError, naming the first difference, if weights of this layout do not fit. Changes nothing."""
        ...

    def stage(self, staged: Staged) -> None:
        """Prepare a version beside the live weights. This may take long."""
        ...

    def commit(self, staged: Staged) -> float:
        """Make the version that was staged last live; return the seconds for which serving was held up."""
        ...

    def scrub(self, weights: Weights, tensors: Sequence[int], *, repair: bool) -> list[Damage]:
        """Compare these tensors, by ordinal, with `weights`, which have the live version; overwrite what differs.

        A target that cannot repair has `version` None afterwards, and gets all weights.
        """
        ...
