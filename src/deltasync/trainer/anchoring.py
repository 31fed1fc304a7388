"""Write anchors from the shadow while the shadow advances to later versions.

The bits that later versions replace are kept until the anchor is written. No second copy of the weights is needed, and
no delta waits for an anchor.
"""

import logging
import threading
from concurrent.futures import Future

from deltasync.format.manifest import Manifest
from deltasync.observe import tell
from deltasync.parallel import Pool
from deltasync.past import Past
from deltasync.state import State
from deltasync.trainer.events import AnchorProgress, CommittedVersion, Observer
from deltasync.trainer.versions import VersionWriter

logger = logging.getLogger(__name__)


class Anchors:
    """Writes anchors in a worker thread. All state is guarded by the shadow's lock."""

    def __init__(
        self,
        versions: VersionWriter,
        shadow: State,
        *,
        observer: Observer | None = None,
    ) -> None:
        self._versions = versions
        self._shadow = shadow
        self._observer = observer
        self._pool = Pool(1, "deltasync-anchor")
        self._idle = threading.Condition(shadow.lock)

    def begin(self, manifest: Manifest) -> None:
        """Write an anchor of the version at which the shadow is. Called with its lock held."""
        past = self._shadow.past()
        self._shadow.pasts.append(past)
        self._versions.schedule.begin()
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
            self._versions.schedule.finish(None if error is not None else done.result().manifest)
            self._idle.notify_all()
        if error is not None:
            # The feed is complete without it.
            logger.error("the anchor was not written, the next version gets one: %s", error)
        else:
            tell(self._observer, done.result().event())
