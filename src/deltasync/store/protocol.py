"""The store protocol: seven verbs on objects under keys, and the checks that all adapters share.

Keys are relative to the store's own prefix: ASCII parts joined by `/`, as `format.keys` builds them. Every adapter
translates the errors of its client into those of `deltasync.errors`; `deltasync.testing.StoreConformance` checks these
promises.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from deltasync.errors import InvalidInputError

Data = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a store can do beyond the least."""

    create_if_absent: bool
    """`create` is atomic: of many at once exactly one wins. Without it a feed has one writer, held by a lease."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object of a listing."""

    key: str
    nbytes: int
    modified_unix_s: float
    """When it was last put, by the store's clock."""


class Store(Protocol):
    """Safe to use from several threads at once.

    Errors: NotFoundError for a key that is not there, StoreError (`transient` if trying again may help, a hint in any
    case) for all that the store itself fails at.
    """

    @property
    def url(self) -> str:
        """Where this is, for people: never with a secret in it."""
        ...

    @property
    def capabilities(self) -> Capabilities: ...

    def put(self, key: str, data: Data) -> None:
        """Write an object, whole or not at all, in place of an older one. Durable on return."""
        ...

    def create(self, key: str, data: Data) -> bool:
        """Write an object unless the key is taken; False if it is. Durable on return.

        A response may get lost: whoever is told False must look whether the object is his own.
        Stores without the capability raise StoreError.
        """
        ...

    def get(self, key: str) -> bytes:
        """The whole object."""
        ...

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """`length` bytes from `offset` on; fewer where the object ends before."""
        ...

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectInfo]:
        """Objects whose key begins with `prefix` and sorts behind `after`, in ascending order of their keys.

        Every object that was there before the call and still is will be listed: what was put is seen at once.
        """
        ...

    def delete(self, key: str) -> None:
        """Remove an object. A key that is not there is fine."""
        ...

    def close(self) -> None:
        """Give back connections. Using the store afterwards is an error of the caller."""
        ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


KEY_CHARS_MAX = 512
"""Leaves room for a prefix: S3, Google and Azure take 1,024 in all."""

# The common ground of file systems and buckets: no part begins or ends with a dot, or is longer than a file's name.
_PART = r"[A-Za-z0-9_-](?:[A-Za-z0-9._-]{0,198}[A-Za-z0-9_-])?"
_KEY = re.compile(rf"{_PART}(?:/{_PART})*", re.ASCII)


def is_key(text: str) -> bool:
    """Whether every store can hold an object under this name, and it does not lead out of the store."""
    return len(text) <= KEY_CHARS_MAX and _KEY.fullmatch(text) is not None


def require_key(key: str) -> None:
    """InvalidInputError for what is not a key."""
    if not is_key(key):
        raise InvalidInputError(
            f"{key!r:.200} is not a key",
            hint="use parts of letters, digits, dashes, underscores and dots (not first or last), joined by /",
            key=key,
        )


def require_prefix(prefix: str) -> None:
    """InvalidInputError for what no key can begin with."""
    require_key(f"{prefix}0")


def require_range(key: str, offset: int, length: int) -> None:
    """InvalidInputError for a range that begins before the object, or has less than no bytes."""
    if offset < 0 or length < 0:
        raise InvalidInputError(f"{length} bytes from {offset} on of {key}", hint="neither can be negative", key=key)


def byte_view(data: Data) -> memoryview:
    """The bytes of `data`, not copied."""
    return memoryview(data).cast("B")


class WrapperStore(Store):
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
