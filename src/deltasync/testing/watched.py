"""A store with a reader that looks after every operation: what it sees is what any replica can see at any time."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from deltasync.store.protocol import Capabilities, Data, ObjectInfo, Store


class WatchedStore:
    """Any store. `look` is called with that store after each put, create and delete, one call at a time.

    Also after one that failed: it may have happened all the same. What `look` raises goes to whoever wrote.
    """

    def __init__(self, store: Store, look: Callable[[Store], None]) -> None:
        self._store = store
        self._look = look
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def capabilities(self) -> Capabilities:
        return self._store.capabilities

    def put(self, key: str, data: Data) -> None:
        with self._watched():
            self._store.put(key, data)

    def create(self, key: str, data: Data) -> bool:
        with self._watched():
            return self._store.create(key, data)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        return self._store.get_range(key, offset, length)

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectInfo]:
        return self._store.list(prefix, after=after)

    def delete(self, key: str) -> None:
        with self._watched():
            self._store.delete(key)

    def close(self) -> None:
        self._store.close()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        finally:
            with self._lock:
                self._look(self._store)
