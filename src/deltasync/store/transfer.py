"""Large objects, by several connections at once."""

from concurrent.futures import ThreadPoolExecutor

from deltasync.errors import CorruptError
from deltasync.store.protocol import Data, Store

PART_BYTES = 8 << 20


def get_whole(store: Store, key: str, nbytes: int, *, threads: int = 8) -> Data:
    """An object whose size is known, from a manifest: in ranges, each thread its own, into one buffer.

    CorruptError if the object is shorter or longer. What is in it is for the caller to check: an object that is put
    anew meanwhile can give parts of both.
    """
    if nbytes <= PART_BYTES:
        # One byte more than there should be: a longer object gives itself away.
        data = store.get_range(key, 0, nbytes + 1)
        _require_length(key, nbytes, len(data))
        return data
    buffer = bytearray(nbytes)
    view = memoryview(buffer)

    def fetch(offset: int) -> None:
        end = min(offset + PART_BYTES, nbytes)
        part = store.get_range(key, offset, end - offset + (1 if end == nbytes else 0))
        _require_length(key, nbytes, nbytes if len(part) == end - offset else offset + len(part))
        view[offset:end] = part

    offsets = range(0, nbytes, PART_BYTES)
    with ThreadPoolExecutor(min(threads, len(offsets)), thread_name_prefix="deltasync-get") as pool:
        # The first error cancels what has not begun.
        for _ in pool.map(fetch, offsets):
            pass
    return buffer


def _require_length(key: str, nbytes: int, found: int) -> None:
    if found != nbytes:
        has = f"more than {nbytes}" if found > nbytes else f"only {found}"
        hint = "fetch it again; then another version"
        raise CorruptError(f"{key} has {has} bytes, not {nbytes}", rule="payload.size", hint=hint, key=key)
