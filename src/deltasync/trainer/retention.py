"""Prune a feed beside its publisher, in a thread of its own."""

import logging
import threading
from concurrent.futures import Future
from contextlib import suppress

from deltasync.errors import DeltasyncError
from deltasync.feed.prune import Pruner, Retention
from deltasync.parallel import Pool
from deltasync.store.protocol import Store

logger = logging.getLogger(__name__)


class BackgroundPruner:
    """Prunes about every `retention.every_s` seconds until `close`.

    Publications do not wait for it, and it never fails them: an error is logged, and the next run tries again.
    """

    def __init__(self, store: Store, retention: Retention) -> None:
        self._url = store.url
        self._pruner = Pruner(store, retention)
        self._every_s = retention.every_s
        self._stop = threading.Event()
        self._pool = Pool(1, "deltasync-prune")
        self._reported: str | None = None
        self._pool.start()
        self._pool.submit(self._run).add_done_callback(self._continue)

    def close(self) -> None:
        """Stop before the next deletion, and wait for that."""
        self._stop.set()
        self._pool.shutdown()

    def _run(self) -> None:
        if self._stop.wait(self._every_s):
            return
        pruning, stay = self._pruner.run(is_stopping=self._stop.is_set)
        if len(pruning.keys) > len(stay):
            logger.info(
                "pruned %s: %d objects, %d bytes of payloads; versions from %d on stay",
                self._url,
                len(pruning.keys) - len(stay),
                pruning.payload_bytes,
                pruning.floor,
            )

    def _continue(self, done: "Future[None]") -> None:
        """Report an error, and begin the next run. The same error is reported once, until a run succeeds."""
        error = done.exception()
        if error is not None and str(error) != self._reported:
            trace = None if isinstance(error, DeltasyncError) else error
            logger.error("cannot prune %s, trying again: %s", self._url, error, exc_info=trace)
        self._reported = None if error is None else str(error)
        if not self._stop.is_set():
            # The pool is shut down if `close` was called just now.
            with suppress(RuntimeError):
                self._pool.submit(self._run).add_done_callback(self._continue)
