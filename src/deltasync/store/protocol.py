"""The store protocol: seven verbs on objects under keys, and the checks that all adapters share.

Keys are relative to the store's own prefix: ASCII parts joined by `/`, as `format.keys` builds them. Every adapter
translates the errors of its client into those of `deltasync.errors`; `deltasync.testing.StoreConformance` tests
this contract.
"""

import errno
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from deltasync.errors import InvalidInputError
from deltasync.parallel import Closable

Data = bytes | bytearray | memoryview

MAY_PASS = frozenset({
    errno.EAGAIN, errno.EBUSY, errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTDOWN,
    errno.EHOSTUNREACH, errno.EINTR, errno.EIO, errno.EMFILE, errno.ENETDOWN, errno.ENETRESET, errno.ENETUNREACH,
    errno.ENFILE, errno.ENOBUFS, errno.ENOLCK, errno.ENOMEM, errno.ENOTCONN, errno.EPIPE, errno.ESHUTDOWN, errno.ESTALE,
    errno.ETIMEDOUT,
})  # fmt: skip
"""Codes of an OSError after which a retry may help: a disk, a network or a machine that is short of something now."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Optional features of a store."""

    create_if_absent: bool
    """`create` is atomic: exactly one of several concurrent calls wins. Without it, a writer needs a lease."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object of a listing."""

    key: str
    nbytes: int
    modified_unix_s: float
    """The time of the last put, by the store's clock."""


class Store(Closable, Protocol):
    """Objects under keys. Safe to use from several threads at once.

    Reads raise NotFoundError for a missing key. All other failures of the store are StoreErrors with a hint, and with
    `transient` if a retry may help.
    """

    @property
    def url(self) -> str:
        """The location of the store for messages; it never contains a secret."""
        ...

    @property
    def capabilities(self) -> Capabilities: ...

    def put(self, key: str, data: Data) -> None:
        """Write an object, whole or not at all, replacing an older one. Durable on return."""
        ...

    def create(self, key: str, data: Data) -> bool:
        """Write an object unless the key exists; False if it does. Durable on return.

        After a lost response the client may find its own object: on False, compare what is stored before you give up.
        Stores without the capability raise StoreError.
        """
        ...

    def get(self, key: str) -> bytes:
        """The whole object."""
        ...

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """`length` bytes from `offset` on, or fewer where the object ends."""
        ...

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectInfo]:
        """Objects whose key begins with `prefix` and sorts after `after`, in ascending order of their keys.

        Every object that exists from before the call until its end is listed: a listing sees a put at once.
        """
        ...

    def delete(self, key: str) -> None:
        """Remove an object. A missing key is not an error."""
        ...

    def close(self) -> None:
        """Close connections. The store must not be used afterwards."""
        ...


KEY_CHARS_MAX = 512
"""This leaves room for a prefix: S3, Google and Azure allow 1,024 characters in all."""

# What all file systems and buckets allow: no part begins or ends with a dot, or is longer than a file name can be.
_PART = r"[A-Za-z0-9_-](?:[A-Za-z0-9._-]{0,198}[A-Za-z0-9_-])?"
_KEY = re.compile(rf"{_PART}(?:/{_PART})*", re.ASCII)


def is_key(text: str) -> bool:
    """Whether every store can hold an object under this key, and it does not lead out of the store."""
    return len(text) <= KEY_CHARS_MAX and _KEY.fullmatch(text) is not None


def require_key(key: str) -> None:
    """InvalidInputError unless `key` is one."""
    if not is_key(key):
        raise InvalidInputError(
            f"{key!r:.200} is not a valid key",
            hint="use parts of letters, digits, dashes, underscores and dots (not first or last), joined by /",
            key=key,
        )


def require_prefix(prefix: str, after: str | None = None) -> None:
    """InvalidInputError unless a key can begin with `prefix`, and with `after`."""
    for beginning in (prefix, after or ""):
        require_key(f"{beginning}0")


def require_range(key: str, offset: int, length: int) -> None:
    """InvalidInputError if the offset or the length is negative."""
    if offset < 0 or length < 0:
        raise InvalidInputError(
            f"offset and length of a range of {key} must be at least 0, not {offset} and {length}", key=key
        )


def byte_view(data: Data) -> memoryview:
    """The bytes of `data`, without a copy."""
    return memoryview(data).cast("B")
