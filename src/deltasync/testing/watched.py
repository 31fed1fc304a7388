"""A store with a reader that looks after every operation: what it sees is what any replica can see at any time."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from deltasync.store.passing import PassingStore
from deltasync.store.protocol import Data, Store


class WatchedStore(PassingStore):
    """Any store. `look` is called with that store after each put, create and delete, one call at a time.

    Also after one that failed: it may have happened all the same. What `look` raises goes to whoever wrote.
    """

    def __init__(self, store: Store, look: Callable[[Store], None]) -> None:
        super().__init__(store)
        self._look = look
        self._lock = threading.Lock()

    def put(self, key: str, data: Data) -> None:
        with self._watched():
            self._store.put(key, data)

    def create(self, key: str, data: Data) -> bool:
        with self._watched():
            return self._store.create(key, data)

    def delete(self, key: str) -> None:
        with self._watched():
            self._store.delete(key)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        finally:
            with self._lock:
                self._look(self._store)
