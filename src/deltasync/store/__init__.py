"""Object stores that hold feeds, opened from a path or a URL."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from deltasync.errors import InvalidInputError
from deltasync.store.account import KINDS
from deltasync.store.local import LocalStore
from deltasync.store.memory import memory_store
from deltasync.store.protocol import Store

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://", re.ASCII)
_FORMS = (
    "a path",
    "file:///path",
    "memory://name",
    "s3://bucket/prefix",
    "gs://bucket/prefix",
    "az://container/prefix",
    "hf://buckets/namespace/name/prefix",
)


Feed = str | os.PathLike[str] | Store
"""A feed, as every call takes it: a URL, a path, or a store that the caller has opened."""


@contextmanager
def opened(feed: Feed) -> Iterator[Store]:
    """The store of a feed, closed at the end of the block; a store that the caller has opened stays open."""
    if not isinstance(feed, str | os.PathLike):
        yield feed
        return
    store = open_store(feed)
    try:
        yield store
    finally:
        store.close()


def open_store(url: str | os.PathLike[str]) -> Store:
    """The store at a path or URL. This reads the configuration of the account, and sends no request.

    Credentials are never part of the URL: they come from the environment (docs/stores.md). A store is a context manager
    that closes itself.
    """
    if not isinstance(url, str):
        return LocalStore(url)
    scheme = _SCHEME.match(url)
    if scheme is None:
        if url.strip() == "":
            raise InvalidInputError("the store has no name", hint=f"use {', '.join(_FORMS)}")
        return LocalStore(Path(url).expanduser())
    name = scheme[1].lower()
    if name == "file":
        return LocalStore(_file_path(url))
    if name == "memory":
        return memory_store(url[scheme.end() :])
    if name in KINDS:
        # Imported here, like BucketStore below: a feed in a folder needs no client of a cloud.
        from deltasync.store.remote import open_remote

        return open_remote(url)
    if name == "hf":
        return _open_buckets(url)
    raise InvalidInputError(f"{name}:// is not a kind of store", hint=f"use {', '.join(_FORMS)}")


def _file_path(url: str) -> Path:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/") or parts.query or parts.fragment:
        raise InvalidInputError(
            f"{url!r:.200} names no absolute path", hint="use file:///absolute/path, or a plain path"
        )
    return Path(unquote(parts.path))


def _open_buckets(url: str) -> Store:
    kind, _, rest = url.partition("://")[2].partition("/")
    namespace, _, rest = rest.partition("/")
    name, _, prefix = rest.partition("/")
    if kind != "buckets" or not namespace or not name:
        raise InvalidInputError(f"{url!r:.200} names no bucket", hint="use hf://buckets/namespace/name/prefix")
    from deltasync.store.hub import BucketStore

    return BucketStore(f"{namespace}/{name}", prefix.strip("/"))
