"""Find out what a store can do by trying it: does it keep what is put, does it fence writers, what is its time?

Each probe writes and deletes one object under a key that nothing else uses.
"""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from deltasync.errors import NotFoundError, StoreError
from deltasync.format import keys
from deltasync.store.protocol import Store
from deltasync.store.reading import get_record

PATIENCE_S = 1.0
"""How long a probe asks a store again that does not answer, where the caller is not patient itself."""

_READS = 3


@contextmanager
def _probe_key(store: Store, key: str | None = None) -> Iterator[str]:
    """A key that no other process knows, or the given one. Its object is deleted at the end of the block."""
    key = keys.probe_key(secrets.token_hex(16)) if key is None else key
    try:
        yield key
    finally:
        # An object that is left behind is harmless, and this error must not hide the result.
        with suppress(StoreError):
            store.delete(key)


def probe_fencing(store: Store, *, key: str | None = None) -> bool:
    """Whether `create` refuses a key that is taken, and leaves the object as it was.

    `key` is one that nothing else uses; by default a random one. The bytes that are stored decide, so that a lost
    response does not make a good store look bad.
    """
    if not store.capabilities.create_if_absent:
        return False
    with _probe_key(store, key) as key:
        # If it exists, a retry of this call has created it.
        store.create(key, b"first")
        refused = not store.create(key, b"second")
        return refused and _read_back(store, key, b"first", b"second") == b"first"


def probe_put(store: Store) -> None:
    """StoreError unless the store has what was just put into it."""
    with _probe_key(store) as key:
        store.put(key, b"put")
        try:
            stored = _read_back(store, key, b"put")
        except NotFoundError:
            stored = b""
    if stored != b"put":
        raise not_kept(store, "an object that was just put")


def probe_clock(store: Store) -> float:
    """The time by the store's clock, in the seconds of a listing."""
    with _probe_key(store) as key:
        store.put(key, b"clock")
        listed = [item.modified_unix_s for item in store.list(key) if item.key == key]
    if not listed:
        raise not_kept(store, "an object that was just put")
    return listed[0]


def not_kept(store: Store, what: str) -> StoreError:
    """The error of a store that reports a put as done, and does not have the object."""
    return StoreError(
        f"{store.url} does not have {what}, although it reported no error",
        transient=False,
        hint="check its quota and the gateway in front of it; `deltasync.testing.StoreConformance` tests a store",
    )


def _read_back(store: Store, key: str, *written: bytes) -> bytes:
    """What a probe holds. Bytes that were never written may have been damaged on the way, and are read again."""
    for _ in range(_READS - 1):
        stored = get_record(store, key)
        if stored in written:
            return stored
    return get_record(store, key)
