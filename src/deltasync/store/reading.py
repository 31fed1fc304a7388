"""Bounded reads of small objects: an object that is too large is refused without being read whole."""

import logging
from collections.abc import Callable
from typing import TypeVar

from deltasync.errors import CorruptError, FormatError
from deltasync.format import limits
from deltasync.store.protocol import Store

logger = logging.getLogger(__name__)
_T = TypeVar("_T")


def get_record(store: Store, key: str) -> bytes:
    """A small record. Of an object that is too large for one, only as much as a reader needs to refuse it."""
    return store.get_range(key, 0, limits.RECORD_BYTES_MAX + 1)


def get_manifest(store: Store, key: str) -> bytes:
    """A manifest, read up to its limit as `get_record` does. Most are short: one range is enough for them."""
    start = get_record(store, key)
    if len(start) <= limits.RECORD_BYTES_MAX:
        return start
    return start + store.get_range(key, len(start), limits.MANIFEST_BYTES_MAX + 1 - len(start))


def with_reread(read: Callable[[], _T]) -> _T:
    """The result of `read`, which is called once more if what arrived is damaged: the wire may be to blame.

    It is not to blame for an object that is too large, which is read once.
    """
    try:
        return read()
    except (CorruptError, FormatError) as error:
        if error.rule is not None and error.rule.endswith(".size"):
            raise
        logger.info("reading it again: %s", error)
        return read()
