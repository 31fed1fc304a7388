"""What a publisher does for its feed in threads of its own, beside its publications: prune it, and write skips."""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress

from deltasync.errors import DeltasyncError
from deltasync.format.manifest import Manifest
from deltasync.observe import tell
from deltasync.parallel import Pool
from deltasync.store.protocol import Store
from deltasync.trainer.events import Observer
from deltasync.upkeep.compact import Compactor
from deltasync.upkeep.prune import Pruner, Retention

logger = logging.getLogger(__name__)


def start_pruning(store: Store, retention: Retention, *, observer: Observer | None = None) -> Callable[[], None]:
    """Prune about every `retention.every_s` seconds. The result stops it, and waits for a deletion that has begun.

    Publications do not wait for it, and it never fails them: an error is logged, and the next run tries again.
    """
    pruner, stop, pool = Pruner(store, retention), threading.Event(), Pool(1, "deltasync-prune")
    tell(observer, "pruner", pruner.upkeep, method="maintains")
    reported: str | None = None

    def run() -> None:
        if stop.wait(retention.every_s):
            return
        found, stay = pruner.run(is_stopping=stop.is_set)
        if len(found.keys) > len(stay):
            logger.info(
                "pruned %s: %d objects, %d bytes of payloads; versions from %d on stay",
                store.url,
                len(found.keys) - len(stay),
                found.payload_bytes,
                found.floor,
            )

    def go_on(done: "Future[None]") -> None:
        """Report an error, and begin the next run. The same error is reported once, until a run succeeds."""
        nonlocal reported
        error = done.exception()
        if error is not None and str(error) != reported:
            trace = None if isinstance(error, DeltasyncError) else error
            logger.error("cannot prune %s, trying again: %s", store.url, error, exc_info=trace)
        reported = None if error is None else str(error)
        if not stop.is_set():
            # The pool is shut down if it was stopped just now.
            with suppress(RuntimeError):
                pool.submit(run).add_done_callback(go_on)

    def close() -> None:
        stop.set()
        pool.shutdown()

    pool.start()
    pool.submit(run).add_done_callback(go_on)
    return close


class SkipWriter:
    """Writes the skips of a feed in a worker thread. It needs memory for the weights of one version."""

    def __init__(
        self, store: Store, levels: Sequence[int], *, retry_s: float, observer: Observer | None = None
    ) -> None:
        self._stop = threading.Event()
        self._compactor = Compactor(store, levels=levels, retry_s=retry_s, stop=self._stop)
        tell(observer, "compactor", self._compactor.upkeep, method="maintains")
        self._lowest = levels[0]
        self._pool = Pool(1, "deltasync-skips")
        self._lock = threading.Lock()
        self._is_due = False

    def start(self) -> None:
        """Start the worker thread."""
        self._pool.start()

    def note(self, manifest: Manifest) -> None:
        """A version was committed. This only wakes the worker thread, if a skip can end at the version."""
        if manifest.version % self._lowest:
            return
        with self._lock:
            is_waiting, self._is_due = self._is_due, True
        if not is_waiting:
            self._pool.submit(self._advance).add_done_callback(self._report)

    def close(self) -> None:
        """Stop at the next read of the feed: a skip that is being put is finished."""
        self._stop.set()
        self._pool.shutdown()

    def _advance(self) -> None:
        with self._lock:
            self._is_due = False
        try:
            for skip in self._compactor.advance():
                logger.info("a skip leads from version %s to %d", skip.parent, skip.version)
        except (DeltasyncError, MemoryError) as error:
            # The feed is complete without it.
            if not self._stop.is_set():
                logger.warning("no skip was written, the next versions get one: %s", error)

    def _report(self, done: "Future[None]") -> None:
        """Report an error that was not expected: nothing else reads the result."""
        error = done.exception()
        if error is not None:
            logger.warning("no skip was written, the next versions get one: %s", error, exc_info=error)
