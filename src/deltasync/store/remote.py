"""Objects in a bucket of S3, Google or Azure, or of any server that speaks one of these protocols, through obstore.

Every request transfers about one part: larger objects are put in several concurrent parts and read part by part, so
that one timeout fits all requests. To read a large object over many connections, read ranges (`feed.fetch.get_whole`).
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

from deltasync.errors import DeltasyncError, InvalidInputError, NotFoundError, StoreError
from deltasync.store.account import KINDS, read_account
from deltasync.store.protocol import (
    MAY_PASS,
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

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import ObjectStore, RetryConfig

PART_BYTES = 8 << 20
PARTS_MAX = 9_000
"""S3 allows 10,000 parts, so the parts of objects over 70 GB are larger."""
PUT_CONNECTIONS = 8

LEAST_BYTES_PER_S = 256 << 10
"""A request that is slower than this, plus a minute, times out and is retried."""

# About ten seconds in all: long enough for a dropped connection, throttling or a restart of the server. The error is
# then transient, and the caller decides whether to go on: a publisher retries, a command fails.
RETRIES = 7
_BACKOFF = {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=5), "base": 2}

_CLIENTS: dict[str, type[S3Store] | type[GCSStore] | type[AzureStore]] = {
    "s3": S3Store,
    "gs": GCSStore,
    "az": AzureStore,
}

Connect = Callable[[float], "ObjectStore"]

CLIENT_ERRORS = (exceptions.BaseError, OSError)

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,80})</Code>|\(code: ([A-Za-z0-9]{1,80})\)")
_ORIGIN = re.compile(r"performing [A-Z]+ (https?://[^/?\s@]+)")
_REASON = re.compile(r'(?:message|error): "([^"]{1,200})"')
_OS_ERROR = re.compile(r"(?:\(os error |\[Errno )(\d{1,4})[)\]]")
_BROKEN = re.compile(r"kind: (?:Connect|Request|Timeout|Interrupted|Decode|Body)\b|error decoding response body")

_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|specified (?:container|bucket) does not exist")
_NO_LOGIN = re.compile(r"/latest/api/token|/latest/meta-data|computeMetadata|metadata/identity")
_WRONG_LOGIN = frozenset({
    "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "InvalidSecurity",
    "AuthenticationFailed", "AuthorizationFailure", "InvalidAuthenticationInfo", "NoAuthenticationInformation",
})  # fmt: skip
_WRONG_REGION = re.compile(r"AuthorizationHeaderMalformed|PermanentRedirect|incorrectly configured region")
_WRONG_CLOCK = frozenset({"RequestTimeTooSkewed", "RequestExpired"})
_MAY_PASS = frozenset({"408", "409", "429", "500", "502", "503", "504"})
_FULL = frozenset(
    {"507", "QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "InsufficientAccountPermissions"}
)

_HINT_LOGIN = "check the keys in the environment or the profile, and that they belong to this endpoint"

# The threads of obstore's runtime belong to the process of the first request; a fork does not copy them.
_runtime_pid: int | None = None


def open_remote(url: str) -> "RemoteStore":
    """The store at a URL such as `s3://bucket/prefix`, with the account that the environment and ~/.aws describe."""
    parts = urlsplit(url)
    scheme = parts.scheme.lower()
    # Such a URL may contain a secret, so the message does not repeat it.
    if parts.password is not None or parts.query or parts.fragment:
        raise InvalidInputError(
            f"a {scheme}:// URL must not have a password, a query or a fragment",
            hint=f"use {scheme}://bucket/prefix; keys come from the environment",
        )
    names = [name for name in parts.path.split("/") if name]
    if not parts.netloc or any(name in (".", "..") for name in names):
        raise InvalidInputError(f"the {scheme}:// URL names no bucket", hint=f"use {scheme}://bucket/prefix")
    place = "/".join([f"{scheme}://{parts.netloc}", *names])
    kind = KINDS[scheme]
    account = read_account(kind)

    def connect(timeout_s: float) -> "ObjectStore":
        # Requests are signed once, so retries must end before the signature expires.
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
    # Invalid settings are refused now, not at the first request.
    store._client(0)
    return store


class RemoteStore(Store):
    """A prefix of a bucket. `connect` returns a client with the given timeout in seconds."""

    def __init__(self, url: str, connect: Connect) -> None:
        self._url = url
        self._connect = connect
        self._clients: dict[int, ObjectStore] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"RemoteStore({self._url!r})"

    def __reduce__(self) -> tuple[Callable[[str], "RemoteStore"], tuple[str]]:
        """Only the URL is pickled: the other process reads the account from its own environment."""
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
        """One request of any size, since parts cannot be conditional. A retry may find its own object: then False."""
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
                    first, total, etag = self._fetch(key, 0, PART_BYTES)
                    starts = range(PART_BYTES, total, PART_BYTES)
                    rest = [self._fetch(key, at, min(at + PART_BYTES, total), etag)[0] for at in starts]
                    return b"".join((first, *rest)) if rest else first
                except exceptions.PreconditionError:
                    # The object was replaced while it was read.
                    continue
        raise StoreError(
            f"{key} in {self._url} was replaced each time while it was read", transient=True, hint="retry", key=key
        )

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        require_key(key)
        require_range(key, offset, length)
        with self._errors("get", key):
            # No request can ask for zero bytes, but a missing object must be noticed.
            return self._fetch(key, offset, offset + max(length, 1))[0][:length]

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectInfo]:
        require_prefix(prefix, after)
        # Collected and sorted: SeaweedFS lists folder by folder, with `a/b` before `a-b`.
        with self._errors("list", prefix):
            infos = list(self._listed(prefix, "" if after is None else after))
        return iter(sorted(infos, key=lambda info: info.key))

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
        """A client whose timeout fits a request of `nbytes`. Most requests share the first one."""
        size_class = min(nbytes // (2 * PART_BYTES), 1 << 10).bit_length()
        with self._lock:
            if size_class not in self._clients:
                self._clients[size_class] = self._connect(60 + (2 * PART_BYTES << size_class) / LEAST_BYTES_PER_S)
            return self._clients[size_class]

    def _fetch(self, key: str, start: int, end: int, etag: str | None = None) -> tuple[bytes, int, str | None]:
        """The bytes of a range, up to the end of the object; the size of the object; its ETag."""
        client = self._client(end - start)
        options: GetOptions = {"range": (start, end)}
        if etag is not None:
            options["if_match"] = etag
        try:
            result = obstore.get(client, key, options=options)
            return result.bytes().to_bytes(), result.meta["size"], result.meta["e_tag"]
        except exceptions.GenericError as error:
            if is_past_the_end(error):
                return b"", 0, None
            if not is_not_partial(error):
                raise
        # The server sends the whole object: it is read up to the end of the range, and only the range is kept.
        whole, content, at = obstore.get(client, key), bytearray(), 0
        for chunk in whole.stream():
            content += memoryview(chunk)[max(0, start - at) : max(0, end - at)]
            at += len(chunk)
            if at >= end:
                break
        return bytes(content), whole.meta["size"], None

    def _listed(self, prefix: str, after: str) -> Iterator[ObjectInfo]:
        """List from a safe offset on and filter: a server may only know prefixes that are whole folders."""
        folder, slash, beginning = prefix.rpartition("/")
        folder += slash
        pages = obstore.list(self._client(0), folder or None, offset=_safe_offset(folder, beginning, after))
        for page in pages:
            for meta in page:
                key = meta["path"]
                # In both orders, by name and folder by folder, the names that begin with `beginning` are contiguous.
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
            # Not chained: the client's message may hold a signed request.
            what = f"cannot {verb} {key or 'objects'} in {self._url}"
            raise translate(error, what, key, of_object=verb in ("get", "delete")) from None


def _safe_offset(folder: str, beginning: str, after: str) -> str | None:
    """An offset that is before all wanted keys, both in order of names and folder by folder.

    The two orders differ only after `-` and `.`, which sort before `/`: the name is cut there. One more letter is
    dropped, so that it is not a folder with wanted keys: SeaweedFS starts after a whole folder.
    """
    start = beginning
    if after.startswith(folder):
        start = max(start, after[len(folder) :])
    name = re.split(r"[-./]", start, maxsplit=1)[0][:-1]
    return None if name == "" else folder + name


# obstore has few error classes, and has the status and the code of a response only in its message: it is parsed here.
# Only the status, the code and the reason are passed on, because the rest may hold parts of a signed request.


def is_past_the_end(error: Exception) -> bool:
    """Whether a range began after the end of the object."""
    text = _message(error)
    return _first_group(_STATUS, text) == "416" or "Wanted range starting at" in text


def is_not_partial(error: Exception) -> bool:
    """Whether the server sent the whole object instead of a range, as some gateways do if the range covers it."""
    return "non-partial response" in _message(error)


def translate(error: Exception, what: str, key: str, *, of_object: bool = True) -> DeltasyncError:
    """The error to raise; `what` begins its message. `of_object`: the operation is on an object that may be missing."""
    if of_object and isinstance(error, FileNotFoundError) and _NO_BUCKET.search(str(error)) is None:
        return NotFoundError(f"{what}: it does not exist", key=key)

    def failure(reason: str, hint: str, *, transient: bool = False) -> StoreError:
        return StoreError(f"{what}: {reason}", transient=transient, hint=hint, key=key)

    whole, text = str(error), _message(error)
    status, code = _first_group(_STATUS, text), _first_group(_CODE, text)
    detail = " ".join(part for part in (status, code) if part is not None)
    # The store refused the request: wrong bucket, credentials, region, clock or permission.
    if _NO_BUCKET.search(text) is not None:
        return failure("the bucket does not exist", "create it, or correct its name and the endpoint")
    if _NO_LOGIN.search(text) is not None:
        return failure("there are no credentials", "set them in the environment, or in a profile (docs/stores.md)")
    if status == "507" or code in _FULL:
        return failure(f"the store is full ({detail})", "free some space or raise the quota, then go on")
    if code in _WRONG_CLOCK:
        # After a sleep the clock is late until it is set, and a request that slept is too old: both pass.
        return failure(f"the clocks disagree ({detail})", "set the clock of this machine, then retry", transient=True)
    if _WRONG_REGION.search(text) is not None:
        return failure(f"the bucket is in another region ({detail})", "set AWS_REGION to the bucket's region")
    if code in _WRONG_LOGIN or status == "401" or isinstance(error, exceptions.UnauthenticatedError):
        return failure(f"the credentials are not accepted ({detail})", _HINT_LOGIN)
    if status == "403" or code == "AccessDenied" or isinstance(error, exceptions.PermissionDeniedError):
        return failure(f"not allowed ({detail})", "to follow needs read and list, to publish write and delete as well")
    if status is not None:
        # Throttling, conflicts and server errors pass; an upload that the server has lost can be repeated.
        transient = status in _MAY_PASS or code == "NoSuchUpload"
        hint = "retry" if transient else "check that the endpoint speaks the protocol of S3, Google or Azure"
        return failure(f"the store answered {detail}", hint, transient=transient)
    # There was no response: the connection or the client failed.
    said = _first_group(_REASON, whole)
    if "InvalidCertificate" in whole:
        return failure("its certificate is not trusted", "name that of its authority in AWS_CA_BUNDLE")
    if _BROKEN.search(whole) is not None:
        where = _first_group(_ORIGIN, whole) or "the store"
        reason = f"{where} cannot be reached: {said or 'no response'}"
        return failure(reason, "check the endpoint and the network, then retry", transient=True)
    number = _first_group(_OS_ERROR, whole)
    if number is not None and int(number) in MAY_PASS:
        hint = "check the network and the limits of this machine, then retry"
        return failure(os.strerror(int(number)), hint, transient=True)
    return failure(said or type(error).__name__, "check the URL and the settings of the store")


def _message(error: Exception) -> str:
    return str(error).partition("\n\nDebug source:")[0]


def _first_group(pattern: re.Pattern[str], text: str) -> str | None:
    """What the pattern captures where it is found first."""
    match = pattern.search(text)
    return None if match is None else next(group for group in match.groups() if group is not None)
