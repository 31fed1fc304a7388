"""What every adapter asks of its callers: keys that any store can hold, ranges that make sense, plain bytes."""

import re

from deltasync.errors import InvalidInputError
from deltasync.store.protocol import Data

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
