"""A store that passes everything on to another: what wrappers begin with, and change in part."""

from collections.abc import Iterator

from deltasync.store.protocol import Capabilities, Data, ObjectInfo, Store


class PassingStore:
    """Does what `store` does, and is called what it is called."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def capabilities(self) -> Capabilities:
        return self._store.capabilities

    def put(self, key: str, data: Data) -> None:
        self._store.put(key, data)

    def create(self, key: str, data: Data) -> bool:
        return self._store.create(key, data)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        return self._store.get_range(key, offset, length)

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectInfo]:
        return self._store.list(prefix, after=after)

    def delete(self, key: str) -> None:
        self._store.delete(key)

    def close(self) -> None:
        self._store.close()
