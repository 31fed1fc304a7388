"""What deltasync asks of a store, and no more: seven verbs on objects under keys.

Keys are relative to the store's own prefix: ASCII, parts joined by `/`, as `format.keys` builds them. Every adapter
turns its client's errors into those of `deltasync.errors`; `testing.conformance` checks that it keeps these promises.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

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
