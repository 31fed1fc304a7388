"""Anchors: when one is due, and writing one from the shadow while the shadow advances to later versions.

The bits that later versions replace are kept until the anchor is written. No second copy of the weights is needed, and
no delta waits for an anchor.
"""

import logging
import threading
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace

from deltasync.errors import InvalidInputError
from deltasync.feed.plan import Plan
from deltasync.format.manifest import Manifest
from deltasync.observe import tell
from deltasync.parallel import Pool
from deltasync.past import Past
from deltasync.state import State
from deltasync.trainer.events import AnchorProgress, CommittedVersion, Observer
from deltasync.trainer.versions import VersionWriter

logger = logging.getLogger(__name__)


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


class Anchors:
    """Decides when an anchor is due and writes it in a worker thread. All state is guarded by the shadow's lock."""

    def __init__(
        self,
        versions: VersionWriter,
        shadow: State,
        policy: AnchorPolicy,
        *,
        backlog: AnchorBacklog | None = None,
        observer: Observer | None = None,
    ) -> None:
        self._versions = versions
        self._shadow = shadow
        self._policy = policy
        self._observer = observer
        self._pool = Pool(1, "deltasync-anchor")
        self._idle = threading.Condition(shadow.lock)
        self._is_requested = False
        self._backlog = AnchorBacklog() if backlog is None else backlog
        self._settled = False, AnchorBacklog()
        """The request and the backlog that the anchor in progress settles: both come back if it fails."""

    def request(self) -> None:
        """Give the next version an anchor, whatever the policy says."""
        with self._shadow.lock:
            self._is_requested = True

    def is_due(self, manifest: Manifest) -> bool:
        """Whether the version that was just committed should get an anchor. Called once for each version."""
        with self._shadow.lock:
            self._backlog = self._backlog.after(manifest)
            if manifest.kind == "anchor":
                self._is_requested = False
            if self._shadow.pasts or not (self._is_requested or self._policy.is_due(**asdict(self._backlog))):
                return False
            self._settled = self._is_requested, self._backlog
            self._is_requested = False
            self._backlog = AnchorBacklog(self._backlog.anchor_bytes)
            return True

    def begin(self, manifest: Manifest) -> None:
        """Write an anchor of the version at which the shadow is. Called with its lock held."""
        past = self._shadow.past()
        self._shadow.pasts.append(past)
        done = self._pool.submit(self._versions.add_anchor, manifest, past, progress=AnchorProgress(manifest.version))
        self._pool.submit(self._finish, past, done)

    def start(self) -> None:
        """Start the worker thread."""
        self._pool.start()

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Wait until no anchor is being written; False on timeout."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._shadow.pasts, timeout_s)

    def close(self) -> None:
        """Wait for an anchor that is being written."""
        self._pool.shutdown()

    def _finish(self, past: Past, done: "Future[CommittedVersion]") -> None:
        error = done.exception()
        with self._shadow.lock:
            self._shadow.pasts.remove(past)
            if error is None:
                self._backlog = replace(self._backlog, anchor_bytes=done.result().manifest.nbytes)
            else:
                was_requested, backlog = self._settled
                self._is_requested = self._is_requested or was_requested
                self._backlog = backlog.plus(self._backlog)
            self._idle.notify_all()
        if error is not None:
            # The feed is complete without it.
            logger.error("the anchor was not written, the next version gets one: %s", error)
        else:
            tell(self._observer, done.result().event())
