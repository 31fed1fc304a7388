"""In the API server: the followers of the server, as its control routes see them."""

import logging
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from deltasync.errors import DeltasyncError
from deltasync.observe import registered
from deltasync.parallel import lower_priority
from deltasync.replica.events import follower_metrics
from deltasync.replica.follower import Follower
from deltasync.replica.target import Target
from deltasync.vllm.settings import SyncMode

logger = logging.getLogger(__name__)

_NICENESS = 10


class Replica:
    """The follower of one server with its target. The methods that return a dictionary answer a route.

    `ready_s`: in `pull` mode, how long ago the live version may have been the newest one; None sets no bound.
    `has_metrics`: add the metrics of the follower to those of the server, which has room for one.
    `on_refused`: called in the thread that follows if it ends with an error, which no retry can fix.
    """

    def __init__(
        self,
        follower: Follower,
        target: Target,
        *,
        way: SyncMode,
        ready_s: float | None = None,
        has_metrics: bool = True,
        on_refused: Callable[[DeltasyncError], None] = lambda error: None,
    ) -> None:
        self.follower = follower
        self._target = target
        self._way: SyncMode = way
        self._ready_s = ready_s
        self._has_metrics = has_metrics
        self._on_refused = on_refused
        self._thread: threading.Thread | None = None
        self._unregister_metrics: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Add the metrics to those of the server, and begin what runs in the background.

        In `pull` mode it follows the feed; in `push` mode it proves the version that the target started with.
        """
        if self._has_metrics:
            try:
                self._unregister_metrics = registered(follower_metrics(self.follower.status))
            except ImportError:
                logger.info("prometheus-client is not installed: the server has no metrics of deltasync")
        if self._way == "pull" or self._target.version is not None:
            work = self._follow if self._way == "pull" else self._prove
            self._thread = threading.Thread(target=work, name="deltasync-follow", daemon=True)
            self._thread.start()

    def _follow(self) -> None:
        # Where cores are few, generation goes before decoding. A thread inherits the priority of its parent.
        lower_priority(_NICENESS)
        try:
            self.follower.follow()
        except DeltasyncError as error:
            logger.error("the feed is refused, and no longer followed: %s", error)
            self._on_refused(error)

    def _prove(self) -> None:
        """Prove the version that the target started with. Without that, it is live but not known to be."""
        try:
            self.follower.advance(to=self._target.version)
        except DeltasyncError as error:
            logger.error("the version that the server started with is not proved: %s", error)

    def close(self) -> None:
        """Finish the move in progress, stop, and release the feed and the mirror."""
        self._unregister_metrics()
        self.follower.stop()
        if self._thread is not None:
            self._thread.join()
        self.follower.close()

    @property
    def is_ready(self) -> bool:
        """Whether a version is live and, in `pull` mode, followed within the bound. Never blocks."""
        status = self.follower.status()
        if status.version is None or self._way == "push":
            return status.version is not None
        is_recent = self._ready_s is None or (status.stale_s is not None and status.stale_s < self._ready_s)
        return status.is_following and is_recent

    def status(self) -> dict[str, Any]:
        status = asdict(self.follower.status())
        return {**status, "engine": self._target.engine, "way": self._way, "is_ready": self.is_ready}

    def advance(self, to: int | None) -> dict[str, Any]:
        moved = self.follower.advance(to=to)
        return {"version": self._target.version, "moved": None if moved is None else asdict(moved)}

    def scrub(self, *, repair: bool) -> dict[str, Any]:
        damages = self.follower.scrub(repair=repair)
        return {
            "version": self._target.version,
            "damaged": [asdict(damage) for damage in damages],
            "unseen_elements": self._target.unseen_elements,
        }
