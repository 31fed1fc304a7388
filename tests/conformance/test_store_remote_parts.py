"""Parts of the adapter for buckets that need no server: errors by their words, and listings in any order."""

import errno
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from obstore import exceptions
from support import repeats

from deltasync.errors import NotFoundError, StoreError
from deltasync.store import remote
from deltasync.store.remote import PART_BYTES, RemoteStore, is_not_partial, is_past_the_end, translate

ANSWER = "Generic S3 error: Error performing GET http://host:1/b/k?X-Amz-Signature=secret in 1ms - "
STATUS = ANSWER + "Server returned non-2xx status code: {}: <Error><Code>{}</Code><Message>secret</Message></Error>"
BROKEN = ANSWER + 'HTTP error: error sending request\n\nDebug source:\nHttpError {{ kind: {}, {}: "{}" }}'


@pytest.mark.parametrize(
    ("text", "transient", "said"),
    [
        (STATUS.format("404 Not Found", "NoSuchBucket"), False, "the bucket does not exist"),
        (STATUS.format("403 Forbidden", "AccessDenied"), False, "not allowed (403 AccessDenied)"),
        (STATUS.format("403 Forbidden", "ExpiredToken"), False, "not accepted (403 ExpiredToken)"),
        (STATUS.format("401 Unauthorized", "X"), False, "not accepted (401 X)"),
        (STATUS.format("403 Forbidden", "RequestTimeTooSkewed"), True, "set the clock"),
        (STATUS.format("400 Bad Request", "RequestExpired"), True, "set the clock"),
        (STATUS.format("400 Bad Request", "AuthorizationHeaderMalformed"), False, "AWS_REGION"),
        (ANSWER + "Received redirect without LOCATION, an incorrectly configured region", False, "AWS_REGION"),
        (STATUS.format("507 Insufficient Storage", "XMinioStorageFull"), False, "the store is full"),
        (STATUS.format("403 Forbidden", "QuotaExceeded"), False, "the store is full"),
        (STATUS.format("503 Slow Down", "SlowDown"), True, "503 SlowDown"),
        (STATUS.format("500 Internal", "InternalError"), True, "500 InternalError"),
        (STATUS.format("429 Too Many", "TooMany"), True, "429"),
        (STATUS.format("400 Bad Request", "InvalidArgument"), False, "400 InvalidArgument"),
        (STATUS.format("501 Not Implemented", "NotImplemented"), False, "501 NotImplemented"),
        ("Error performing PUT http://169.254.169.254/latest/api/token in 1ms - timed out", False, "no credentials"),
        (
            BROKEN.format("Connect", "message", "Connection refused"),
            True,
            "http://host:1 cannot be reached: Connection",
        ),
        (BROKEN.format("Timeout", "other", "x"), True, "http://host:1 cannot be reached: no response"),
        (BROKEN.format("Connect", "InvalidCertificate", "x"), False, "AWS_CA_BUNDLE"),
        ("Generic S3 error: cannot open a socket: Too many open files (os error 24)", True, "Too many open files"),
        ("Generic S3 error: cannot read the file: Permission denied (os error 13)", False, "GenericError"),
        ("something else", False, "GenericError"),
    ],
)
def test_errors_by_their_words(text: str, transient: bool, said: str) -> None:
    error = translate(exceptions.GenericError(text), "cannot get k", "k")
    assert isinstance(error, StoreError)
    assert error.transient is transient
    assert said in str(error)
    assert error.hint
    assert "secret" not in str(error)


@pytest.mark.parametrize(("code", "transient"), [(errno.ENETUNREACH, True), (errno.EIO, True), (errno.EACCES, False)])
def test_errors_of_the_system(code: int, transient: bool) -> None:
    error = translate(OSError(code, "the reason"), "cannot get k", "k")
    assert isinstance(error, StoreError)
    assert error.transient is transient


def test_missing_is_not_found_only_if_the_bucket_is_there() -> None:
    assert isinstance(translate(FileNotFoundError("Object at location k not found"), "what", "k"), NotFoundError)
    error = translate(FileNotFoundError(STATUS.format("404 Not Found", "NoSuchBucket")), "what", "k")
    assert isinstance(error, StoreError)
    forgotten = FileNotFoundError(STATUS.format("404 Not Found", "NoSuchUpload"))
    error = translate(forgotten, "what", "k", of_object=False)
    assert isinstance(error, StoreError)
    assert error.transient


def test_ranges_by_their_words() -> None:
    past = [
        STATUS.format("416 Range Not Satisfiable", "InvalidRange"),
        "Wanted range starting at 5, but object was only 5",
    ]
    for text in past:
        assert is_past_the_end(exceptions.GenericError(text))
        assert not is_not_partial(exceptions.GenericError(text))
    assert is_not_partial(exceptions.GenericError("Received non-partial response when range requested"))
    assert not is_past_the_end(exceptions.GenericError(STATUS.format("503 Slow Down", "x416")))


def test_time_outs_scale_with_the_size() -> None:
    asked: list[float] = []
    store = RemoteStore("s3://bucket", asked.append)  # type: ignore[arg-type,return-value]
    for nbytes in (0, 1, PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES, 100 * PART_BYTES, 1 << 40, 1 << 62):
        store._client(nbytes)
    assert asked == sorted(asked)
    assert len(asked) == 4
    assert asked[0] == 60 + 2 * PART_BYTES / remote.LEAST_BYTES_PER_S
    assert asked[2] > 100 * PART_BYTES / remote.LEAST_BYTES_PER_S


def by_name(keys: list[str], offset: str) -> list[str]:
    """As S3 says: by the bytes of the key, all behind the offset."""
    return sorted(key for key in keys if key > offset)


def by_folder(keys: list[str], offset: str) -> list[str]:
    """As SeaweedFS does: folder by folder, and behind the offset as an entry of its folder, with all that is below."""
    start = offset.split("/")
    return sorted((key for key in keys if key.split("/")[: len(start)] > start), key=lambda key: key.split("/"))


def without_offset(keys: list[str], offset: str) -> list[str]:
    """As Azurite does."""
    return sorted(keys)


names = st.sampled_from(["a", "a-", "a-b", "a.b", "a.b-c", "ab", "aa", "b", "b-", "ba", "bb.a"])
keys = st.sets(st.lists(names, min_size=1, max_size=3).map("/".join), min_size=5, max_size=30)


@pytest.mark.parametrize("server", [by_name, by_folder, without_offset])
@pytest.mark.soak
@settings(max_examples=repeats(100, soak=3000))
@given(found=keys, data=st.data())
def test_listings_of_any_server_come_out_in_order(server: Any, found: set[str], data: st.DataObject) -> None:
    # No key is a folder of another.
    kept = sorted(key for key in found if not any(other.startswith(f"{key}/") for other in found))
    beginnings = [key[:end] for key in kept for end in range(len(key) + 1) if remote.is_key(f"{key[:end]}0")]
    prefix = data.draw(st.sampled_from(beginnings))
    after = data.draw(st.sampled_from([None, *beginnings]))

    def serve(_: object, folder: str | None, *, offset: str | None) -> Iterator[list[dict[str, Any]]]:
        inside = [key for key in kept if key.startswith("" if folder is None else folder)]
        listed = server(inside, "" if offset is None else offset)
        yield from ([{"path": key, "size": 0, "last_modified": datetime.now(UTC)}] for key in listed)

    store = RemoteStore("s3://bucket", lambda _: None)  # type: ignore[arg-type,return-value]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("obstore.list", serve)
        listed = [info.key for info in store.list(prefix, after=after)]
    assert listed == [key for key in kept if key.startswith(prefix) and (after is None or key > after)]


class WholeObject:
    """The answer of a server that ignores ranges: an object without end, of which `sent` bytes were read."""

    def __init__(self) -> None:
        self.sent = 0
        self.meta = {"size": 1 << 60, "e_tag": None}

    def stream(self) -> Iterator[bytes]:
        while True:
            self.sent += 1000
            yield bytes((self.sent // 1000 - 1) % 251 for _ in range(1000))


@pytest.mark.parametrize(("offset", "length"), [(0, 1), (0, 1000), (999, 2), (2500, 3000), (5000, 0)])
def test_a_server_that_ignores_ranges_is_read_up_to_their_end(
    offset: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = WholeObject()

    def get(client: object, key: str, *, options: object = None) -> WholeObject:
        if options is not None:
            raise exceptions.GenericError("Received non-partial response when range requested")
        return whole

    monkeypatch.setattr("deltasync.store.remote.obstore.get", get)
    store = RemoteStore("s3://bucket", lambda _: None)  # type: ignore[arg-type,return-value]
    expected = bytes(at // 1000 % 251 for at in range(offset, offset + length))
    assert store.get_range("key", offset, length) == expected
    assert whole.sent < offset + length + 2000
