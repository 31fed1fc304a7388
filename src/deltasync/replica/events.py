"""What a follower reports: each advance of its target, its counters, and its status."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from deltasync.format.manifest import Kind
from deltasync.observe import shown, total


@dataclass(frozen=True, slots=True)
class Seconds:
    """Time by phase. `fetch` is the time that decoding waited for; `pause` is how long `commit` held up serving."""

    plan: float = field(default=0.0, metadata=shown(is_phase=True))
    fetch: float = field(default=0.0, metadata=shown(is_phase=True))
    decode: float = field(default=0.0, metadata=shown(is_phase=True))
    stage: float = field(default=0.0, metadata=shown(is_phase=True))
    commit: float = field(default=0.0, metadata=shown(is_phase=True))
    pause: float = field(default=0.0, metadata=shown(span="pause_s", tracker="pause_s"))

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

    from_version: int | None = field(metadata=shown(span="from_version"))
    version: int
    edges: tuple[Kind, ...] = field(metadata=shown(span="edges"))
    nbytes: int = field(metadata=shown(span="fetched_bytes", tracker="bytes"))
    changed: int | None = field(metadata=shown(span="changed"))
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
    """Counters since the follower was created."""

    moves: int = field(default=0, metadata=total("moves", "Times that the target became another version."))
    nbytes: int = field(default=0, metadata=total("fetched_bytes", "Bytes of the payloads that were fetched."))
    refetched: int = field(
        default=0, metadata=total("refetched", "Payloads that arrived damaged and were fetched again.")
    )
    rerouted: int = field(default=0, metadata=total("rerouted", "Edges that could not be used."))
    rebuilt: int = field(default=0, metadata=total("rebuilt", "Mirrors that had other bits than their version."))
    scrubbed: int = field(
        default=0, metadata=total("scrubbed_elements", "Elements that were compared with the mirror.")
    )
    damaged: int = field(default=0, metadata=total("damaged_elements", "Elements that differed from the mirror."))
    repaired: int = field(
        default=0, metadata=total("repaired_elements", "Elements that differed and were overwritten.")
    )
    failures: int = field(default=0, metadata=total("failures", "Moves that failed."))
    heartbeat_failures: int = field(
        default=0, metadata=total("heartbeat_failures", "Heartbeats that could not be written.")
    )
    retries: int = field(default=0, metadata=total("retries", "Reads of the store that were made again."))


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
    version: int | None = field(metadata=shown("version", "The version that is live."))
    head: int | None = field(metadata=shown("head", "The newest version of the feed that was seen."))
    lag: int | None = field(metadata=shown("lag", "Versions between the two."))
    mirror: int | None
    pinned: int | None
    is_paused: bool
    is_following: bool = field(metadata=shown("following", "1 while the feed is followed."))
    last: Advance | None
    error: str | None
    counts: Counts = field(default_factory=Counts)
    proved_version: int | None = None
    proved_unix_s: int | None = None
    scrubbed_unix_s: int | None = None
    unseen_elements: int = 0
    stale_s: float | None = field(
        default=None,
        metadata=shown("stale_seconds", "Seconds since the live version was found to be the newest."),
    )
    heartbeat_problem: str | None = None
    polled_s: float | None = field(
        default=None, metadata=shown("poll_age_seconds", "Seconds since the store last answered a poll.")
    )
    seconds: Seconds = field(
        default_factory=Seconds, metadata=total("move_seconds", "Time of all moves, by phase.", label="phase")
    )
