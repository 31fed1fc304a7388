"""When a version gets an anchor."""

import threading
from dataclasses import asdict, dataclass, replace

from deltasync.errors import InvalidInputError
from deltasync.feed.plan import Plan
from deltasync.format.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorPolicy:
    """An anchor is due when the deltas since the last one have `bytes_ratio` times its size, or after `versions`."""

    bytes_ratio: float | None = 1.0
    versions: int | None = None

    def __post_init__(self) -> None:
        if (self.bytes_ratio is not None and self.bytes_ratio <= 0) or (
            self.versions is not None and self.versions < 1
        ):
            raise InvalidInputError(
                f"bytes_ratio must be above 0 and versions at least 1, not {self.bytes_ratio} and {self.versions}",
                hint="use None to leave a rule out",
            )

    def is_due(self, *, delta_bytes: int, anchor_bytes: int, versions: int) -> bool:
        """Whether a new anchor is due after deltas of `delta_bytes` in so many versions."""
        by_bytes = self.bytes_ratio is not None and delta_bytes >= self.bytes_ratio * anchor_bytes
        return by_bytes or (self.versions is not None and versions >= self.versions)


@dataclass(frozen=True, slots=True)
class AnchorBacklog:
    """The size of the last anchor, and what was committed since."""

    anchor_bytes: int = 0
    delta_bytes: int = 0
    versions: int = 0

    @classmethod
    def of(cls, plan: Plan) -> "AnchorBacklog":
        """From the plan of a late joiner, which leads to the head."""
        first = plan.edges[0]
        return cls(_anchor_bytes(first.manifest), plan.nbytes - first.nbytes, len(plan.edges) - 1)

    def after(self, manifest: Manifest) -> "AnchorBacklog":
        """The backlog after one more version."""
        if manifest.kind != "delta":
            return AnchorBacklog(_anchor_bytes(manifest))
        return AnchorBacklog(self.anchor_bytes, self.delta_bytes + manifest.nbytes, self.versions + 1)

    def plus(self, later: "AnchorBacklog") -> "AnchorBacklog":
        """The sum of this backlog and of what was committed later."""
        return replace(self, delta_bytes=self.delta_bytes + later.delta_bytes, versions=self.versions + later.versions)


def _anchor_bytes(manifest: Manifest) -> int:
    """The size of an anchor. A base has none, so it is estimated: about 1.3 bytes for an element of two."""
    return manifest.nbytes if manifest.kind == "anchor" else manifest.elements * 4 // 3


class AnchorSchedule:
    """Counts what was committed since the last anchor. Several threads may use it at once."""

    def __init__(self, policy: AnchorPolicy | None = None, backlog: AnchorBacklog | None = None) -> None:
        self._policy = AnchorPolicy() if policy is None else policy
        self._backlog = AnchorBacklog() if backlog is None else backlog
        self._lock = threading.Lock()
        self._is_requested = False
        self._is_writing = False
        self._settled = False, AnchorBacklog()
        """The request and the backlog that the anchor in progress settles: both come back if it fails."""

    def request(self) -> None:
        """Give the next version an anchor, whatever the policy says."""
        with self._lock:
            self._is_requested = True

    def is_due(self, manifest: Manifest) -> bool:
        """Whether the version that was just committed should get an anchor. Called once for each version."""
        with self._lock:
            self._backlog = self._backlog.after(manifest)
            if manifest.kind == "anchor":
                self._is_requested = False
            if self._is_writing or not (self._is_requested or self._policy.is_due(**asdict(self._backlog))):
                return False
            self._settled = self._is_requested, self._backlog
            self._is_requested = False
            self._backlog = AnchorBacklog(self._backlog.anchor_bytes)
            return True

    def begin(self) -> None:
        """An anchor is being written: until it is finished, no other one is due."""
        with self._lock:
            self._is_writing = True

    def finish(self, anchor: Manifest | None) -> None:
        """The anchor was written; None if it was not, and is still due."""
        with self._lock:
            self._is_writing = False
            if anchor is not None:
                self._backlog = replace(self._backlog, anchor_bytes=anchor.nbytes)
            else:
                was_requested, backlog = self._settled
                self._is_requested = self._is_requested or was_requested
                self._backlog = backlog.plus(self._backlog)
