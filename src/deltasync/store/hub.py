"""Hugging Face Buckets: objects as files of a bucket on the Hub, through the Hub's own client (extra `hf`).

A bucket has no create-if-absent: `create` is refused, and a feed has a single writer, which holds a lease. The client
retries five times with back-off after connection errors and the statuses 408, 429 and 5xx. Therefore nothing is retried
here, and an operation that fails with `transient` has failed six times.
"""

import errno
import importlib
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from deltasync.errors import InvalidInputError, NotFoundError, StoreError
from deltasync.store.protocol import (
    Capabilities,
    Data,
    ObjectInfo,
    Store,
    is_key,
    require_key,
    require_prefix,
    require_range,
)

if TYPE_CHECKING:
    from huggingface_hub import HfApi

RANGE_TIMEOUT_S = 120.0
"""The time without any byte after which a ranged read fails. The client has no timeout for its other requests."""

_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_BUCKET_ID = re.compile(rf"{_NAME}/{_NAME}", re.ASCII)
_TRANSFER_STATUS = re.compile(r"HTTP status (?:client|server) error \(([0-9]{3})\b", re.ASCII)
_TRANSFER_DISK_FULL = f"(os error {errno.ENOSPC})"
_TRANSFER_NO_CACHE = tuple(f"(os error {n})" for n in (errno.EACCES, errno.ENOENT, errno.ENOTDIR, errno.EROFS))
_URL_QUERY = re.compile(r"\?[^\s)'\"]+")
_URL_USER = re.compile(r"//[^/\s@]+@")
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{6,}|(?<=Bearer )\S+", re.ASCII)
_HIDDEN = "[hidden]"
_LOG_DEST = "HF_XET_LOG_DEST"
_importing = threading.Lock()
_LATER = "the Hub or the network is failing, and the client has retried for a while already: retry later"


def open_bucket(url: str) -> "BucketStore":
    """The store at a URL such as `hf://buckets/namespace/name/prefix`."""
    # Messages do not repeat the URL, which may contain a token.
    if any(character in url for character in "@?#"):
        raise InvalidInputError(
            "an hf:// URL must not have a user, a query or a fragment",
            hint="use hf://buckets/namespace/name/prefix; the token comes from HF_TOKEN or `hf auth login`",
        )
    kind, _, rest = url.partition("://")[2].partition("/")
    namespace, _, rest = rest.partition("/")
    name, _, prefix = rest.partition("/")
    if kind != "buckets" or not namespace or not name:
        raise InvalidInputError("the hf:// URL names no bucket", hint="use hf://buckets/namespace/name/prefix")
    return BucketStore(f"{namespace}/{name}", prefix.strip("/"))


class BucketStore(Store):
    """The files of a bucket below a prefix. HF_TOKEN and HF_ENDPOINT are read at each call."""

    def __init__(self, bucket_id: str, prefix: str) -> None:
        if _BUCKET_ID.fullmatch(bucket_id) is None:
            raise InvalidInputError(f"{bucket_id!r:.200} is not the id of a bucket", hint="use namespace/name")
        folder = prefix.strip("/")
        if folder:
            require_prefix(f"{folder}/")
        self._bucket_id = bucket_id
        self._root = f"{folder}/" if folder else ""

    def __repr__(self) -> str:
        return f"BucketStore({self._bucket_id!r}, {self._root!r})"

    @property
    def url(self) -> str:
        return f"hf://buckets/{self._bucket_id}/{self._root}".rstrip("/")

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(create_if_absent=False)

    def put(self, key: str, data: Data) -> None:
        require_key(key)
        api = _api()
        with self._errors("put", key):
            # The client accepts `bytes` only.
            content = data if isinstance(data, bytes) else bytes(data)
            api.batch_bucket_files(self._bucket_id, add=[(content, self._root + key)])

    def create(self, key: str, data: Data) -> bool:
        raise StoreError(
            f"cannot create {key} in {self.url}: a bucket has no create-if-absent",
            transient=False,
            hint="let one writer put it under a lease, or use the Hub's S3 gateway (docs/stores.md)",
            key=key,
        )

    def get(self, key: str) -> bytes:
        require_key(key)
        api = _api()
        with self._errors("get", key), tempfile.TemporaryDirectory(prefix="deltasync-") as folder:
            # The client downloads to files only.
            target = Path(folder, "object")
            api.download_bucket_files(self._bucket_id, [(self._root + key, target)], raise_on_missing_files=True)
            return target.read_bytes()

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        require_key(key)
        require_range(key, offset, length)
        api = _api()
        from huggingface_hub.utils import (  # type: ignore[attr-defined]
            build_hf_headers,
            hf_raise_for_status,
            http_stream_backoff,
        )

        # HTTP cannot request zero bytes, but a missing key must be noticed.
        headers = {"Range": f"bytes={offset}-{offset + max(length, 1) - 1}", "Accept-Encoding": "identity"}
        request = http_stream_backoff(
            "GET",
            f"{api.endpoint}/buckets/{self._bucket_id}/resolve/{quote(self._root + key, safe='')}",
            headers={**build_hf_headers(library_name=api.library_name), **headers},
            timeout=RANGE_TIMEOUT_S,
        )
        with self._errors("get", key), request as response:
            if response.status_code == 404 and response.headers.get("X-Error-Code") != "RepoNotFound":
                raise self._not_found(key)
            if response.status_code == 416:
                return b""
            if response.status_code >= 400:
                response.read()
            hf_raise_for_status(response)
            # A server may ignore the range and send the whole file: it is read up to the end of the range.
            start, content, at = 0 if response.status_code == 206 else offset, bytearray(), 0
            for chunk in response.iter_bytes():
                content += memoryview(chunk)[max(0, start - at) : max(0, start + length - at)]
                at += len(chunk)
                if at >= start + length:
                    break
        return bytes(content)

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectInfo]:
        require_prefix(prefix, after)
        api = _api()
        below = self._root + prefix
        with self._errors("list", prefix):
            entries = list(api.list_bucket_tree(self._bucket_id, below if below else None, recursive=True))
        infos = []
        for entry in entries:
            key = entry.path.removeprefix(self._root)
            if entry.type != "file" or not entry.path.startswith(below) or not is_key(key):
                continue
            if after is None or key > after:
                # A file of unknown age counts as new, so that it is not pruned as old.
                modified = time.time() if entry.uploaded_at is None else entry.uploaded_at.timestamp()
                infos.append(ObjectInfo(key, entry.size, modified))
        # The Hub promises no order.
        return iter(sorted(infos, key=lambda info: info.key))

    def delete(self, key: str) -> None:
        require_key(key)
        api = _api()
        from huggingface_hub.errors import BucketBatchError

        with self._errors("delete", key):
            try:
                api.batch_bucket_files(self._bucket_id, delete=[self._root + key])
            except BucketBatchError:
                # A retry gets this error too if the first request went through.
                if any(api.get_bucket_paths_info(self._bucket_id, [self._root + key])):
                    raise

    def close(self) -> None:
        """The client's connections belong to the whole process."""

    def _not_found(self, key: str) -> NotFoundError:
        return NotFoundError(f"there is no {key} in {self.url}", key=key)

    @contextmanager
    def _errors(self, verb: str, key: str) -> Iterator[None]:
        """Translate the errors of the client, of its HTTP library and of its transfers."""
        from huggingface_hub.errors import EntryNotFoundError, HTTPError  # type: ignore[attr-defined]

        try:
            with _quiet:
                yield
        except EntryNotFoundError:
            raise self._not_found(key) from None
        except (HTTPError, OSError, RuntimeError, ValueError) as error:
            # Not chained: the client's message may hold a token or a signed URL.
            raise self._store_error(error, f"cannot {verb} {key or 'objects'} in {self.url}", key) from None

    def _store_error(self, error: Exception, what: str, key: str) -> StoreError:
        from huggingface_hub.errors import BucketBatchError, HfHubHTTPError, OfflineModeIsEnabled

        def permanent(reason: str, hint: str) -> StoreError:
            return StoreError(f"{what}: {reason}", transient=False, hint=hint, key=key)

        lines = str(error).strip().splitlines()
        text = _without_secrets(lines[0]) if lines else type(error).__name__
        # The transfer library has the status only in its message.
        match = _TRANSFER_STATUS.search(str(error))
        status = None if match is None else int(match[1])
        if isinstance(error, HfHubHTTPError):
            status = error.response.status_code
            if error.server_message:
                text = f"{_without_secrets(' '.join(error.server_message.split()))} ({status})"
        # A transfer that failed after it got its token: the bucket exists.
        is_about_content = not isinstance(error, HfHubHTTPError) and "-token" not in str(error)
        if isinstance(error, BucketBatchError):
            reasons = "; ".join(f"{f.get('path')}: {f.get('error')}" for f in error.failures)
            return permanent(f"the Hub refused {_without_secrets(reasons)}", "see the reason from the Hub")
        if isinstance(error, OfflineModeIsEnabled):
            return permanent("the client is offline", "unset HF_HUB_OFFLINE")
        if getattr(error, "errno", None) == errno.ENOSPC or _TRANSFER_DISK_FULL in text:
            return permanent("the local disk is full", "free some space where TMPDIR and HF_HOME are, then retry")
        if text.startswith("I/O error") and text.endswith(_TRANSFER_NO_CACHE):
            return permanent(f"the client cannot write its cache: {text}", "set HF_HOME to a writable folder")
        if status == 401:
            return permanent("the token is missing or wrong (401)", "set HF_TOKEN, or log in with `hf auth login`")
        if status == 403:
            return permanent(f"the token lacks the permission (403): {text}", "use a token with access to this bucket")
        if status == 404 and not is_about_content:
            return permanent(
                f"there is no bucket {self._bucket_id}, or the token may not see it",
                f"check the name, or create it with `hf buckets create {self._bucket_id} --private`",
            )
        if status is not None and status not in (408, 429) and status < 500:
            return permanent(text, "check HF_ENDPOINT, and that huggingface_hub is up to date")
        return StoreError(f"{what}: {text}", transient=True, hint=_LATER, key=key)


def _api() -> "HfApi":
    """A client for one call. HF_ENDPOINT is read here, because the client reads it only when it is imported."""
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise StoreError(
            "hf:// needs the package huggingface_hub", transient=False, hint="pip install 'deltasync[hf]'"
        ) from error
    _import_transfers()
    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/")
    return HfApi(endpoint=endpoint if endpoint else None, library_name="deltasync")


def _import_transfers() -> None:
    """Import the client's transfer library, which opens its log when it is imported.

    Where it cannot write its log, it would log to standard output instead, between what we print there. Then its log is
    dropped, unless HF_XET_LOG_DEST says where it goes.
    """
    from huggingface_hub import constants

    with _importing:
        if "hf_xet" in sys.modules:
            return
        drop = False
        if _LOG_DEST not in os.environ:
            folder = Path(constants.HF_XET_CACHE, "logs")
            try:
                folder.mkdir(parents=True, exist_ok=True)
                # Only a file that is created tells: permissions do not stop root, and a file system may be read-only.
                tempfile.TemporaryFile(dir=folder).close()
            except OSError:
                drop = True
        if drop:
            os.environ[_LOG_DEST] = os.devnull
        try:
            # The client works without it where it is not installed.
            with suppress(ImportError):
                importlib.import_module("hf_xet")
        finally:
            if drop:
                del os.environ[_LOG_DEST]


def _without_secrets(text: str) -> str:
    """The text without tokens, without the user in URLs, and without their queries, which may be signed."""
    token = os.environ.get("HF_TOKEN", "").strip()
    text = text.replace(token, _HIDDEN) if token else text
    return _URL_QUERY.sub("", _URL_USER.sub("//", _TOKEN.sub(_HIDDEN, text)))


class _Quiet:
    """Disables the client's progress bars while our calls run. The switch is global to the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = 0
        self._switched = False

    def __enter__(self) -> None:
        from huggingface_hub import constants
        from huggingface_hub.utils import (  # type: ignore[attr-defined]
            are_progress_bars_disabled,
            disable_progress_bars,
        )

        with self._lock:
            if self._calls == 0 and constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
                self._switched = not are_progress_bars_disabled()
                if self._switched:
                    disable_progress_bars()
            self._calls += 1

    def __exit__(self, *_: object) -> None:
        from huggingface_hub.utils import enable_progress_bars  # type: ignore[attr-defined]

        with self._lock:
            self._calls -= 1
            if self._calls == 0 and self._switched:
                self._switched = False
                enable_progress_bars()


_quiet = _Quiet()
