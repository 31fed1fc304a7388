"""Hearing of a version from the store, where it tells, sooner than the next look would find it."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from deltasync.errors import StoreError
from deltasync.format.keys import parse_version_key
from deltasync.store.protocol import Store
from deltasync.store.watching import Watchable

_log = logging.getLogger(__name__)


@contextmanager
def watching(store: Store, nudge: Callable[[], None]) -> Iterator[None]:
    """During the block, `nudge` is called for every version that the store tells of, in a thread.

    Nothing happens with a store that does not tell, and nothing may depend on it with one that does: its events only
    save time.
    """
    if not isinstance(store, Watchable):
        yield
        return
    stop = threading.Event()
    threading.Thread(target=_watch, args=(store, nudge, stop), name="deltasync-watch", daemon=True).start()
    try:
        yield
    finally:
        # Nobody waits for the thread: it sees the end with the next thing that the store sends.
        stop.set()


def _watch(store: Watchable, nudge: Callable[[], None], stop: threading.Event) -> None:
    try:
        for key in store.watch(stop):
            if not stop.is_set() and parse_version_key(key) is not None:
                nudge()
    except StoreError as error:
        _log.info("the store does not tell of versions, they are only looked for: %s", error)
