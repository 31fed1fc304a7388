"""Objects in the memory of this process, for tests and experiments."""

import threading
import time
from collections.abc import Callable, Iterator

from deltasync.errors import NotFoundError
from deltasync.store.protocol import Capabilities, Data, ObjectInfo, Store, require_key, require_prefix, require_range


class MemoryStore(Store):
    """A dict with a lock. It copies what is put, and keeps no buffer of a caller."""

    def __init__(self, name: str = "", *, clock: Callable[[], float] = time.time) -> None:
        self._url = f"memory://{name}"
        self._clock = clock
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[bytes, float]] = {}

    def __repr__(self) -> str:
        return f"MemoryStore({self._url!r})"

    @property
    def url(self) -> str:
        return self._url

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(create_if_absent=True)

    def put(self, key: str, data: Data) -> None:
        require_key(key)
        copied = bytes(data)
        with self._lock:
            self._objects[key] = (copied, self._clock())

    def create(self, key: str, data: Data) -> bool:
        require_key(key)
        copied = bytes(data)
        with self._lock:
            if key in self._objects:
                return False
            self._objects[key] = (copied, self._clock())
            return True

    def get(self, key: str) -> bytes:
        require_key(key)
        with self._lock:
            found = self._objects.get(key)
        if found is None:
            raise NotFoundError(f"there is no {key} in {self._url}", key=key)
        return found[0]

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        require_range(key, offset, length)
        return self.get(key)[offset : offset + length]

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectInfo]:
        require_prefix(prefix, after)
        with self._lock:
            found = [
                ObjectInfo(key, len(data), modified)
                for key, (data, modified) in self._objects.items()
                if key.startswith(prefix) and (after is None or key > after)
            ]
        return iter(sorted(found, key=lambda info: info.key))

    def delete(self, key: str) -> None:
        require_key(key)
        with self._lock:
            self._objects.pop(key, None)

    def close(self) -> None:
        """There is nothing to close: a store that has a name keeps its objects."""


_named: dict[str, MemoryStore] = {}
_named_lock = threading.Lock()


def memory_store(name: str) -> MemoryStore:
    """The store of that name in this process, the same one each time; a new one if the name is empty."""
    if name == "":
        return MemoryStore()
    with _named_lock:
        return _named.setdefault(name, MemoryStore(name))
