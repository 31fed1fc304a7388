"""What a follower reports: each advance of its target, its counters, and its status."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from deltasync.format.manifest import Kind


@dataclass(frozen=True, slots=True)
class Seconds:
    """Time by phase. `fetch` is the time that decoding waited for; `pause` is how long `commit` held up serving."""

    plan: float = 0.0
    fetch: float = 0.0
    decode: float = 0.0
    stage: float = 0.0
    commit: float = 0.0
    pause: float = 0.0

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(**{name: value + getattr(other, name) for name, value in asdict(self).items()})

    def facts(self) -> dict[str, str]:
        """As fields of a heartbeat."""
        return {f"{name}_s": f"{value:.4f}" for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class Advance:
    """A target advanced to another version. `changed` counts the overwritten elements; None means all weights.

    `edges` are the kinds of the manifests that were applied, `nbytes` the bytes that were fetched for them: none and 0
    if the mirror had the version already. `committed_unix_s` is when the version was committed, by the trainer's clock.
    """

    from_version: int | None
    version: int
    edges: tuple[Kind, ...]
    nbytes: int
    changed: int | None
    seconds: Seconds
    committed_unix_s: int | None = None

    def __str__(self) -> str:
        s = self.seconds
        origin = "from nothing" if self.from_version is None else f"from version {self.from_version}"
        edges = f"{len(self.edges)} edge{'' if len(self.edges) == 1 else 's'}"
        changed = "all weights" if self.changed is None else f"{self.changed} elements"
        return (
            f"version {self.version} is live, {origin}: {changed}, {edges}, {self.nbytes} bytes; "
            f"plan {s.plan:.3f} s, fetch {s.fetch:.3f} s, decode {s.decode:.3f} s, stage {s.stage:.3f} s, "
            f"commit {s.commit:.3f} s, pause {s.pause:.4f} s"
        )


Observer = Callable[[Advance], None]


@dataclass(slots=True)
class Counts:
    """Counters since the follower was created.

    `moves`: advances of the target. `nbytes`: bytes fetched for them. `refetched`: payloads that arrived damaged and
    were fetched again. `rerouted`: edges that could not be used. `rebuilt`: mirrors that had other bits than their
    version. `scrubbed`: elements compared with the mirror; `damaged` of them differed, `repaired` were overwritten.
    `failures`: advances that failed. `heartbeat_failures`: heartbeats that could not be written. `retries`: reads of
    the store that were made again.
    """

    moves: int = 0
    nbytes: int = 0
    refetched: int = 0
    rerouted: int = 0
    rebuilt: int = 0
    scrubbed: int = 0
    damaged: int = 0
    repaired: int = 0
    failures: int = 0
    heartbeat_failures: int = 0
    retries: int = 0


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a follower. `version` is live in the target; `lag` counts the versions after it.

    `proved_version` was the live version when all live weights were last read back and found equal, at
    `proved_unix_s`. `scrubbed_unix_s`: when the last round of the scrub over all weights was complete.
    `unseen_elements`: how many live elements that depend on the weights no scrub has compared; nothing is proved then.
    `error`: what the last advance failed with, or following ended with; None after a success. `stale_s`: seconds since
    a poll found `version` to be the one to serve, the newest or the pinned one; None if no poll has.
    `heartbeat_problem`: why heartbeats do not serve their purpose, if they do not: no right to write them, or another
    follower with the same name. `polled_s`: seconds since the store last answered a poll; None if it never has.
    `seconds`: the time of all advances so far, by phase.
    """

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
    proved_version: int | None = None
    proved_unix_s: int | None = None
    scrubbed_unix_s: int | None = None
    unseen_elements: int = 0
    stale_s: float | None = None
    heartbeat_problem: str | None = None
    polled_s: float | None = None
    seconds: Seconds = field(default_factory=Seconds)
