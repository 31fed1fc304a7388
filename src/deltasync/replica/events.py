"""What a follower tells: every move of a target to another version, and how it stands."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from deltasync.format.manifest import Kind


@dataclass(frozen=True, slots=True)
class Seconds:
    """Time by phase. `fetch` is what decoding waited for; `pause` is the part of `commit` that held up serving."""

    plan: float = 0.0
    fetch: float = 0.0
    decode: float = 0.0
    stage: float = 0.0
    commit: float = 0.0
    pause: float = 0.0

    def facts(self) -> dict[str, str]:
        """For a heartbeat."""
        return {f"{name}_s": f"{value:.4f}" for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class Advance:
    """A target became another version. `changed` counts the elements that were overwritten; None: all weights.

    `edges` are the kinds of the manifests that led there, `nbytes` what was fetched for them. Both are empty if the
    mirror had the version already.
    """

    from_version: int | None
    version: int
    edges: tuple[Kind, ...]
    nbytes: int
    changed: int | None
    seconds: Seconds

    def __str__(self) -> str:
        s = self.seconds
        came = "from nothing" if self.from_version is None else f"from version {self.from_version}"
        changed = "all weights" if self.changed is None else f"{self.changed} elements"
        edges = "1 edge" if len(self.edges) == 1 else f"{len(self.edges)} edges"
        return (
            f"version {self.version} is live, {came}: {changed}, {edges}, {self.nbytes} bytes; "
            f"plan {s.plan:.3f} s, fetch {s.fetch:.3f} s, decode {s.decode:.3f} s, stage {s.stage:.3f} s, "
            f"commit {s.commit:.3f} s, pause {s.pause:.4f} s"
        )


Observer = Callable[[Advance], None]


@dataclass(slots=True)
class Counts:
    """What happened since the follower was made.

    `moves`: how often the target became a version. `nbytes`: what was fetched for that.
    `refetched`: payloads that came damaged and were fetched again. `rerouted`: edges that turned out to be of no use.
    `rebuilt`: mirrors that had other bits than their version. `scrubbed`: elements compared with the mirror, `damaged`
    of them were different, `repaired` of those overwritten.
    """

    moves: int = 0
    nbytes: int = 0
    refetched: int = 0
    rerouted: int = 0
    rebuilt: int = 0
    scrubbed: int = 0
    damaged: int = 0
    repaired: int = 0


@dataclass(frozen=True, slots=True)
class Status:
    """How a follower stands. `version` is what the target has live; `lag` counts the versions after it."""

    replica: str
    version: int | None
    head: int | None
    lag: int | None
    mirror: int | None
    pinned: int | None
    is_paused: bool
    is_following: bool
    last: Advance | None
    error: str | None
    counts: Counts = field(default_factory=Counts)
