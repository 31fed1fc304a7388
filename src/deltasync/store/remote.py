"""Objects in a bucket of S3, Google or Azure, or of any server that speaks one of these: through obstore.

Every request moves about one part: larger objects are put in several parts at once, and read part by part, so that one
time-out is right for all. To read a large object with many connections, ask for ranges (`transfer.get_whole`).
"""

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import obstore
from obstore import exceptions
from obstore.store import AzureStore, GCSStore, S3Store

from deltasync.errors import InvalidInputError, NotFoundError, StoreError
from deltasync.store.account import KINDS, read_account
from deltasync.store.protocol import (
    Capabilities,
    Data,
    ObjectInfo,
    Store,
    byte_view,
    is_key,
    require_key,
    require_prefix,
    require_range,
)
from deltasync.store.remote_errors import CLIENT_ERRORS, is_not_partial, is_past_the_end, translate

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import ObjectStore, RetryConfig

PART_BYTES = 8 << 20
PARTS_MAX = 9_000
"""S3 takes 10,000 parts: parts of objects over 70 GB are larger."""
PUT_CONNECTIONS = 8

LEAST_BYTES_PER_S = 256 << 10
"""A request that is slower than this, besides a minute for the store to think, is given up and made again."""

# About ten seconds in all: it outlives a dropped connection, a throttled moment, a server that starts again. Longer is
# for the caller to decide, who is told that the error is transient: a publisher waits, a command gives up.
RETRIES = 7
_BACKOFF = {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=5), "base": 2}

_CLIENTS: dict[str, type[S3Store] | type[GCSStore] | type[AzureStore]] = {
    "s3": S3Store,
    "gs": GCSStore,
    "az": AzureStore,
}

Connect = Callable[[float], "ObjectStore"]

# The threads of obstore's runtime belong to the process that made the first request, and a fork does not copy them.
_runtime_pid: int | None = None


def open_remote(url: str) -> "RemoteStore":
    """The store at a URL such as `s3://bucket/prefix`, with the account that the environment and ~/.aws describe."""
    parts = urlsplit(url)
    scheme = parts.scheme.lower()
    # What is wrong with such a URL may be the secret in it: it is not repeated.
    if parts.password is not None or parts.query or parts.fragment:
        raise InvalidInputError(
            f"a {scheme}:// URL with more than a place in it",
            hint=f"use {scheme}://bucket/prefix; keys come from the environment",
        )
    names = [name for name in parts.path.split("/") if name]
    if not parts.netloc or any(name in (".", "..") for name in names):
        raise InvalidInputError(f"{url!r:.200} names no bucket", hint=f"use {scheme}://bucket/prefix")
    place = "/".join([f"{scheme}://{parts.netloc}", *names])
    kind = KINDS[scheme]
    account = read_account(kind)

    def connect(timeout_s: float) -> "ObjectStore":
        # Requests are signed once: those that are made again must be younger than the signature.
        retry: RetryConfig = {
            "max_retries": RETRIES,
            "backoff": _BACKOFF,  # type: ignore[typeddict-item]
            "retry_timeout": timedelta(seconds=timeout_s + 60),
        }
        options: Any = {**account.client_options, "timeout": timedelta(seconds=timeout_s)}
        config: Any = account.config
        try:
            return _CLIENTS[kind].from_url(place, config=config, client_options=options, retry_config=retry)
        except (*CLIENT_ERRORS, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise InvalidInputError(
                f"cannot open {place}: {reason}", hint="see docs/stores.md for the settings"
            ) from None

    store = RemoteStore(place, connect)
    # Settings that make no sense are refused now, not at the first request.
    store._client(0)
    return store


class RemoteStore(Store):
    """A prefix of a bucket. `connect` gives a client for requests that may take so many seconds."""

    def __init__(self, url: str, connect: Connect) -> None:
        self._url = url
        self._connect = connect
        self._clients: dict[int, ObjectStore] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"RemoteStore({self._url!r})"

    def __reduce__(self) -> tuple[Callable[[str], "RemoteStore"], tuple[str]]:
        """Only the URL travels to another process: it looks up the account there."""
        return open_remote, (self._url,)

    @property
    def url(self) -> str:
        return self._url

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(create_if_absent=True)

    def put(self, key: str, data: Data) -> None:
        require_key(key)
        view = byte_view(data)
        part = max(PART_BYTES, -(-len(view) // PARTS_MAX))
        many = len(view) > part
        with self._errors("put", key):
            obstore.put(
                self._client(part), key, view, use_multipart=many, chunk_size=part, max_concurrency=PUT_CONNECTIONS
            )  # fmt: skip

    def create(self, key: str, data: Data) -> bool:
        """As one request of any size, since parts have no condition. Made again, it can meet its own write: False."""
        require_key(key)
        view = byte_view(data)
        with self._errors("create", key):
            try:
                obstore.put(self._client(len(view)), key, view, mode="create", use_multipart=False)
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
                return False
        return True

    def get(self, key: str) -> bytes:
        require_key(key)
        for _ in range(3):
            with self._errors("get", key):
                try:
                    return self._get_parts(key)
                except exceptions.PreconditionError:
                    # Replaced while it was read.
                    continue
        raise StoreError(
            f"{key} in {self._url} changes faster than it can be read", transient=True, hint="try again", key=key
        )

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        require_key(key)
        require_range(key, offset, length)
        with self._errors("get", key):
            # No request asks for nothing, but a missing object must be noticed.
            return self._fetch(key, offset, offset + max(length, 1))[0][:length]

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectInfo]:
        require_prefix(prefix)
        require_prefix("" if after is None else after)
        # Collected first: SeaweedFS lists folder by folder, where `a/b` is before `a-b`.
        with self._errors("list", prefix):
            found = list(self._listed(prefix, "" if after is None else after))
        return iter(sorted(found, key=lambda info: info.key))

    def delete(self, key: str) -> None:
        require_key(key)
        try:
            with self._errors("delete", key):
                obstore.delete(self._client(0), key)
        except NotFoundError:
            pass

    def close(self) -> None:
        with self._lock:
            self._clients.clear()

    def _client(self, nbytes: int) -> "ObjectStore":
        """A client whose time-out allows for a request of so many bytes: by powers of two, nearly always the first."""
        size_class = min(nbytes // (2 * PART_BYTES), 1 << 10).bit_length()
        with self._lock:
            if size_class not in self._clients:
                self._clients[size_class] = self._connect(60 + (2 * PART_BYTES << size_class) / LEAST_BYTES_PER_S)
            return self._clients[size_class]

    def _get_parts(self, key: str) -> bytes:
        first, total, etag = self._fetch(key, 0, PART_BYTES)
        parts = [first]
        for start in range(PART_BYTES, total, PART_BYTES):
            parts.append(self._fetch(key, start, min(start + PART_BYTES, total), etag)[0])
        return first if len(parts) == 1 else b"".join(parts)

    def _fetch(self, key: str, start: int, end: int, etag: str | None = None) -> tuple[bytes, int, str | None]:
        """The bytes in a range, as far as there are any; the size of the object; what tells it from its successors."""
        client = self._client(end - start)
        options: GetOptions = {"range": (start, end)}
        if etag is not None:
            options["if_match"] = etag
        try:
            found = obstore.get(client, key, options=options)
            return found.bytes().to_bytes(), found.meta["size"], found.meta["e_tag"]
        except exceptions.GenericError as error:
            if is_past_the_end(error):
                return b"", 0, None
            if not is_not_partial(error):
                raise
        found = obstore.get(client, key)
        whole = found.bytes().to_bytes()
        return whole[start:end], len(whole), None

    def _listed(self, prefix: str, after: str) -> Iterator[ObjectInfo]:
        """What the server lists from about the right place on, filtered: it may not know our kind of prefix."""
        folder, slash, beginning = prefix.rpartition("/")
        folder += slash
        pages = obstore.list(self._client(0), folder or None, offset=_safe_offset(folder, beginning, after))
        for page in pages:
            for meta in page:
                key = meta["path"]
                # Contiguous in both orders, by name and folder by folder: the names that begin as the prefix ends.
                name = key[len(folder) :].partition("/")[0]
                if name > beginning and not name.startswith(beginning):
                    return
                if key.startswith(prefix) and key > after and is_key(key):
                    yield ObjectInfo(key, meta["size"], meta["last_modified"].timestamp())

    @contextmanager
    def _errors(self, verb: str, key: str) -> Iterator[None]:
        global _runtime_pid  # noqa: PLW0603
        if _runtime_pid is None:
            _runtime_pid = os.getpid()
        elif _runtime_pid != os.getpid():
            raise InvalidInputError(
                f"{self._url} is used in a fork of the process that used such a store before, where it would hang",
                hint='start processes with multiprocessing.get_context("spawn"), or open stores only in the children',
                key=key,
            )
        try:
            yield
        except CLIENT_ERRORS as error:
            # Not chained: the client's own words may hold a signed request.
            what = f"cannot {verb} {key or 'objects'} in {self._url}"
            raise translate(error, what, key, of_object=verb in ("get", "delete")) from None


def _safe_offset(folder: str, beginning: str, after: str) -> str | None:
    """A key to let the server begin behind: before all that are wanted, in order of names and folder by folder.

    The two orders differ only behind `-` and `.`, which sort before `/`: a name is cut there. One letter less, and it
    names no folder with wanted keys in it: SeaweedFS begins behind a whole folder.
    """
    start = beginning
    if after.startswith(folder):
        start = max(start, after[len(folder) :])
    name = re.split(r"[-./]", start, maxsplit=1)[0][:-1]
    return None if name == "" else folder + name
