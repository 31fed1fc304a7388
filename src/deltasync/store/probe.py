"""Does a store keep its promise that of two creates one is refused? Some servers take the condition and ignore it."""

import secrets
from contextlib import suppress

from deltasync.errors import StoreError
from deltasync.format import keys
from deltasync.store.protocol import Data, Store

_TRIES = 3


def probe_fencing(store: Store) -> bool:
    """Whether `create` refuses a key that is taken, and leaves the object as it was. Writes and deletes one object.

    A lost response does not make a good store look bad: what counts is which bytes stay.
    """
    if not store.capabilities.create_if_absent:
        return False
    key = keys.probe_key(secrets.token_hex(16))
    try:
        # Nobody else knows the key: if it is taken, it was taken by this very call, made twice.
        _create(store, key, b"first")
        refused = not _create(store, key, b"second")
        return refused and store.get(key) == b"first"
    finally:
        # What stays behind is harmless, and must not hide the answer.
        with suppress(StoreError):
            store.delete(key)


def _create(store: Store, key: str, data: Data) -> bool:
    """Until the store answers: from a request that nobody answered nothing can be learned."""
    for _ in range(_TRIES - 1):
        try:
            return store.create(key, data)
        except StoreError as error:
            if not error.transient:
                raise
    return store.create(key, data)
