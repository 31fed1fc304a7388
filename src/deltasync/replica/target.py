"""What receives the weights of a version: the contract between a follower and whatever serves them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from deltasync.format.layout import Layout
from deltasync.format.manifest import Manifest
from deltasync.format.weights import Changes, Weights


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """A version for a target to become, all of it decoded and proved.

    `changes` are absolute bits for a target that is at version `start`: in this order, a later one wins. None means
    all weights, to be read from `weights`; `start` is None then.
    `weights` are those of the mirror, and `path` its file, if it has one. The mirror holds the version while the target
    takes all weights. With changes it may have advanced already: read only the layout of `weights`.
    """

    manifest: Manifest
    changes: tuple[Changes, ...] | None
    start: int | None
    weights: Weights
    path: Path | None
    files: Callable[[], Mapping[str, bytes]]
    """Fetches the files beside the weights, by their relative path."""
    edges: int = 0
    """How many edges the changes are of; none if the mirror had the version already."""

    @property
    def version(self) -> int:
        return self.manifest.version

    @property
    def is_one_edge(self) -> bool:
        """No element is in two of the changes."""
        return self.edges <= 1


@dataclass(frozen=True, slots=True)
class Damage:
    """Elements of a tensor that are not what they must be."""

    tensor: str
    elements: int


class Target(Protocol):
    """Whatever serves weights. A follower calls it from one thread at a time."""

    @property
    def engine(self) -> str:
        """What this is, for heartbeats and people."""
        ...

    @property
    def version(self) -> int | None:
        """The version that is live, all of it; None while it is written, after a failure, or if nobody knows."""
        ...

    @property
    def reads_mirror(self) -> bool:
        """Whether it reads the mirror even where it is given changes: the mirror waits for it then."""
        ...

    def require(self, layout: Layout) -> None:
        """MismatchError that names the first difference if weights of this layout do not fit. Touches nothing."""
        ...

    def stage(self, staged: Staged) -> None:
        """Prepare beside the live weights; this may take long."""
        ...

    def commit(self, staged: Staged) -> float:
        """Make what was staged last live; the seconds for which serving was held up."""
        ...

    def scrub(self, weights: Weights, tensors: Sequence[int], *, repair: bool) -> list[Damage]:
        """Compare these tensors, by ordinal, with `weights`, which have the live version; overwrite what differs.

        A target that cannot repair says `version` None afterwards.
        """
        ...
