"""Hugging Face Buckets: the real client against a stand-in of the Hub on loopback."""

import os
import random
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from support import processes
from support.hub import PAGE_ENTRIES, Hub

from deltasync.errors import DeltasyncError, InvalidInputError, NotFoundError, StoreError
from deltasync.store import open_store
from deltasync.store.hub import BucketStore, _without_secrets
from deltasync.testing.conformance import StoreConformance

Call = Callable[[BucketStore], object]

PUT: Call = lambda store: store.put("versions/1.json", b"new")  # noqa: E731
GET: Call = lambda store: store.get("a")  # noqa: E731
GET_RANGE: Call = lambda store: store.get_range("a", 0, 3)  # noqa: E731
LIST: Call = lambda store: list(store.list())  # noqa: E731
DELETE: Call = lambda store: store.delete("a")  # noqa: E731
CALLS = {"put": PUT, "get": GET, "get_range": GET_RANGE, "list": LIST, "delete": DELETE}

NOISE = random.Random(0).randbytes(700_000) + bytes(300_000)
"""Several chunks, some that compress."""


@pytest.fixture
def store(standin: Hub) -> BucketStore:
    """A store under a prefix, with an object `a`."""
    found = BucketStore(standin.create_bucket(), "run-1")
    found.put("a", b"first object")
    standin.requests.clear()
    return found


@pytest.mark.e2e
class TestConformance(StoreConformance):
    @pytest.fixture
    def store(self, standin: Hub) -> BucketStore:
        return BucketStore(standin.create_bucket(), "some/prefix")


def failure(call: Call, store: BucketStore, standin: Hub) -> DeltasyncError:
    """The error of a call, which must have a hint and must not contain the token."""
    with pytest.raises(DeltasyncError) as caught:
        call(store)
    assert standin.environment()["HF_TOKEN"] not in "".join(traceback.format_exception(caught.value))
    assert caught.value.hint is not None or isinstance(caught.value, NotFoundError)
    return caught.value


@pytest.mark.parametrize("data", [b"", b"x", NOISE, b"3" * 300_000, bytearray(b"array"), memoryview(b"a view")[2:]])
def test_what_was_put_comes_back(store: BucketStore, data: bytes) -> None:
    store.put("payloads/b", data)
    assert store.get("payloads/b") == bytes(data)
    store.put("payloads/b", b"in its place")
    assert store.get("payloads/b") == b"in its place"


RANGES = [(0, 1), (0, 10**6), (1, 0), (5, 100_000), (650_000, 100_000), (999_990, 100), (10**6, 1), (10**7, 5)]


@pytest.mark.parametrize("ranged", [True, False])
def test_ranges(store: BucketStore, standin: Hub, ranged: bool) -> None:
    store.put("big", NOISE)
    standin.ranged = ranged
    for offset, length in RANGES:
        assert store.get_range("big", offset, length) == NOISE[offset : offset + length], (offset, length)


def test_a_range_is_one_download_of_that_range(store: BucketStore, standin: Hub) -> None:
    store.put("big", NOISE)
    standin.requests.clear()
    store.get_range("big", 10, 20)
    asked = {name: n for name, n in standin.requests.items() if name not in ("plan", "chunks")}
    assert asked == {"resolve": 1, "bridge": 1}


def test_ranges_of_an_empty_object(store: BucketStore) -> None:
    store.put("empty", b"")
    assert [store.get_range("empty", 0, n) for n in (0, 5)] == [b"", b""]


@pytest.mark.parametrize("prefixed", [True, False])
def test_prefixes_keep_feeds_apart(store: BucketStore, standin: Hub, prefixed: bool) -> None:
    standin.prefixed = prefixed
    neighbour, whole = BucketStore("user/feeds", "/run-1-b/"), BucketStore("user/feeds", "")
    neighbour.put("a", b"of the neighbour")
    assert sorted(standin.buckets["user/feeds"]) == ["run-1-b/a", "run-1/a"]
    assert store.get("a") == b"first object"
    assert [[info.key for info in s.list()] for s in (store, neighbour, whole)] == [
        ["a"],
        ["a"],
        ["run-1-b/a", "run-1/a"],
    ]
    assert whole.get("run-1-b/a") == b"of the neighbour"
    assert [s.url for s in (store, neighbour, whole)] == [
        "hf://buckets/user/feeds/run-1",
        "hf://buckets/user/feeds/run-1-b",
        "hf://buckets/user/feeds",
    ]


def test_listing_goes_over_all_pages(store: BucketStore, standin: Hub) -> None:
    info = standin.buckets["user/feeds"]["run-1/a"]
    keys = [f"versions/{n:020d}.json" for n in range(2 * PAGE_ENTRIES + 10)]
    standin.buckets["user/feeds"] |= {f"run-1/{key}": {**info, "path": f"run-1/{key}"} for key in reversed(keys)}
    assert [found.key for found in store.list("versions/")] == keys
    assert standin.requests["tree"] == 3
    assert [found.key for found in store.list("versions/", after=keys[-3])] == keys[-2:]
    assert [found.key for found in store.list("versions/0000000000000000000")] == keys[:10]
    assert next(store.list()).key == "a"
    assert list(store.list("other/")) == []


def test_a_listing_has_size_and_age_and_skips_strays(store: BucketStore, standin: Hub) -> None:
    info = standin.buckets["user/feeds"]["run-1/a"]
    info["uploadedAt"] = "2026-01-02T03:04:05.500Z"
    standin.buckets["user/feeds"]["run-1/.hidden"] = {**info, "path": "run-1/.hidden"}
    (found,) = store.list()
    assert (found.key, found.nbytes, found.modified_unix_s) == ("a", 12, 1767323045.5)


def test_delete(store: BucketStore) -> None:
    store.delete("a")
    store.delete("a")
    assert list(store.list()) == []


def test_no_create(store: BucketStore, standin: Hub) -> None:
    assert not store.capabilities.create_if_absent
    error = failure(lambda s: s.create("b", b""), store, standin)
    assert isinstance(error, StoreError)
    assert not error.transient
    assert not standin.requests


@pytest.mark.parametrize("call", [lambda s: s.get("no/such"), lambda s: s.get_range("no/such", 0, 0)])
def test_a_missing_object(store: BucketStore, standin: Hub, call: Call) -> None:
    error = failure(call, store, standin)
    assert isinstance(error, NotFoundError)
    assert error.key == "no/such"
    assert "no/such in hf://buckets/user/feeds/run-1" in str(error)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_missing_bucket(standin: Hub, call: Call) -> None:
    error = failure(call, BucketStore("user/none", "run-1"), standin)
    assert isinstance(error, StoreError)
    assert not error.transient
    assert "there is no bucket user/none" in str(error)
    assert "hf buckets create user/none" in str(error)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("token", ["hf_wrong", None])
def test_a_wrong_or_missing_token(
    store: BucketStore, standin: Hub, monkeypatch: pytest.MonkeyPatch, call: Call, token: str | None
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    error = failure(call, store, standin)
    assert isinstance(error, StoreError)
    assert not error.transient
    assert "HF_TOKEN" in str(error)
    assert "hf_wrong" not in "".join(traceback.format_exception(error))


@pytest.mark.parametrize("call", [PUT, DELETE])
def test_a_token_that_may_only_read(store: BucketStore, standin: Hub, call: Call) -> None:
    standin.writable = False
    error = failure(call, store, standin)
    assert isinstance(error, StoreError)
    assert not error.transient
    assert "lacks the permission (403)" in str(error)
    assert store.get("a") == b"first object"


@pytest.mark.parametrize("call", [PUT, DELETE])
def test_a_batch_that_fails(store: BucketStore, standin: Hub, call: Call) -> None:
    standin.refused = {"run-1/versions/1.json": "quota is used up", "run-1/a": "quota is used up"}
    error = failure(call, store, standin)
    assert isinstance(error, StoreError)
    assert not error.transient
    assert f"{error.key}: quota is used up" in str(error)
    assert [info.key for info in store.list()] == ["a"]


@pytest.mark.parametrize("call", [PUT, DELETE])
def test_a_server_that_repeats_the_token(store: BucketStore, standin: Hub, call: Call) -> None:
    """`failure` looks for it in the whole traceback."""
    token = standin.environment()["HF_TOKEN"]
    standin.refused = dict.fromkeys(("run-1/versions/1.json", "run-1/a"), f"Bearer {token} has no quota")
    assert "has no quota" in str(failure(call, store, standin))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("nothing secret", "nothing secret"),
        ("token hf_abcDEF123456 is wrong", "token [hidden] is wrong"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer [hidden]"),
        ("at https://user:pass@hub.example/x?sig=1", "at https://hub.example/x"),
        ("my-own-token was refused", "[hidden] was refused"),
    ],
)
def test_secrets_are_hidden(text: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "my-own-token")
    assert _without_secrets(text) == shown


@pytest.mark.parametrize(("offset", "length"), [(0, 1), (0, 1000), (999, 2), (2500, 3000)])
def test_a_server_that_ignores_ranges_is_read_up_to_their_end(
    store: BucketStore, monkeypatch: pytest.MonkeyPatch, offset: int, length: int
) -> None:
    sent = []

    def chunks() -> Iterator[bytes]:
        while True:
            sent.append(1000)
            yield bytes((len(sent) - 1) % 251 for _ in range(1000))

    @contextmanager
    def answer(*_: object, **__: object) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(status_code=200, headers={}, iter_bytes=chunks)

    monkeypatch.setattr("huggingface_hub.utils.http_stream_backoff", answer)
    monkeypatch.setattr("huggingface_hub.utils.hf_raise_for_status", lambda response: None)
    expected = bytes(at // 1000 % 251 for at in range(offset, offset + length))
    assert store.get_range("a", offset, length) == expected
    assert sum(sent) < offset + length + 2000


ROUTES = {
    "put": ("token", "xorb", "shard", "batch"),
    "get": ("paths", "resolve", "token", "plan", "chunks"),
    "get_range": ("resolve", "bridge"),
    "list": ("tree",),
    "delete": ("batch",),
}
ALL_ROUTES = [(verb, route) for verb, routes in ROUTES.items() for route in routes]


@pytest.mark.parametrize(("verb", "route"), ALL_ROUTES)
@pytest.mark.parametrize("status", [503, None])
def test_a_passing_fault_is_not_seen(
    store: BucketStore, standin: Hub, verb: str, route: str, status: int | None
) -> None:
    standin.fail(route, status=status)
    CALLS[verb](store)
    assert standin.requests[route] >= 2
    assert (verb == "delete") == ("a" not in [info.key for info in store.list()])


@pytest.mark.parametrize(("verb", "route"), ALL_ROUTES)
@pytest.mark.parametrize("status", [500, 429])
def test_a_lasting_fault_is_transient(store: BucketStore, standin: Hub, verb: str, route: str, status: int) -> None:
    standin.fail(route, status=status, times=1000)
    error = failure(CALLS[verb], store, standin)
    assert isinstance(error, StoreError)
    assert error.transient
    assert standin.requests[route] >= 6
    standin.faults.clear()
    assert store.get("a") == b"first object"


@pytest.mark.parametrize(("verb", "route"), [pair for pair in ALL_ROUTES if pair[1] != "chunks"])
def test_a_refusal_is_not_transient(store: BucketStore, standin: Hub, verb: str, route: str) -> None:
    standin.fail(route, status=400, times=1000)
    error = failure(CALLS[verb], store, standin)
    assert isinstance(error, StoreError)
    assert not error.transient
    assert standin.requests[route] == 1


@pytest.mark.parametrize("call", [PUT, DELETE])
def test_a_lost_response_is_not_seen(store: BucketStore, standin: Hub, call: Call) -> None:
    standin.fail("batch", status=None, after=True)
    call(store)
    assert standin.requests["batch"] == 2
    assert [info.key for info in store.list()] == (["a", "versions/1.json"] if call is PUT else [])


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_no_server_answers(store: BucketStore, standin: Hub, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    # Bound, but not listening.
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}/")
        error = failure(call, store, standin)
    assert isinstance(error, StoreError)
    assert error.transient


def test_lost_content_is_not_a_missing_bucket(store: BucketStore, standin: Hub) -> None:
    standin.cas.files.clear()
    error = failure(GET, store, standin)
    assert isinstance(error, StoreError)
    assert not error.transient
    assert "no bucket" not in str(error)


@pytest.mark.parametrize(
    "raised",
    [
        RuntimeError("Task error: File reconstruction error: IO Error: No space left on device (os error 28)"),
        OSError(28, "No space left on device"),
    ],
)
def test_a_full_disk(store: BucketStore, standin: Hub, monkeypatch: pytest.MonkeyPatch, raised: Exception) -> None:
    def fill(*_: object, **__: object) -> None:
        raise raised

    # What the client raised where the temporary folder was a file system of 200 kB.
    monkeypatch.setattr(huggingface_hub.HfApi, "download_bucket_files", fill)
    error = failure(GET, store, standin)
    assert isinstance(error, StoreError)
    assert not error.transient
    assert "TMPDIR" in str(error)


def test_offline(store: BucketStore, standin: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    error = failure(LIST, store, standin)
    assert isinstance(error, StoreError)
    assert not error.transient
    assert "HF_HUB_OFFLINE" in str(error)


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for call in CALLS.values():
        with pytest.raises(StoreError, match=r"deltasync\[hf\]"):
            call(BucketStore("user/feeds", ""))


def test_urls(standin: Hub) -> None:
    store = open_store("hf://buckets/user/feeds/runs/1/")
    assert isinstance(store, BucketStore)
    assert store.url == "hf://buckets/user/feeds/runs/1"
    assert not standin.requests


@pytest.mark.parametrize(
    ("bucket_id", "prefix"),
    [("feeds", ""), ("user/", ""), ("user/a/b", ""), ("user/..", ""), ("u?/b", ""), ("user/b", "a/../b"), ("u/b", "ä")],
)
def test_names_that_are_refused(bucket_id: str, prefix: str) -> None:
    with pytest.raises(InvalidInputError):
        BucketStore(bucket_id, prefix)


def test_a_bucket_that_the_client_made(standin: Hub) -> None:
    api = huggingface_hub.HfApi(endpoint=standin.url)
    bucket_id = api.create_bucket("user/new", private=True, exist_ok=True).bucket_id
    api.create_bucket("user/new", private=True, exist_ok=True)
    store = BucketStore(bucket_id, "run")
    store.put("a", b"1")
    assert store.get("a") == b"1"


def test_many_threads(store: BucketStore) -> None:
    def round_trip(n: int) -> bool:
        data = n.to_bytes(8, "little") * 1000
        store.put(f"payloads/{n}", data)
        return store.get(f"payloads/{n}") == data and store.get_range(f"payloads/{n}", 8, 8) == data[:8]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(round_trip, range(24)))
    assert len(list(store.list("payloads/"))) == 24


def test_no_progress_bars_of_the_client(store: BucketStore, capfd: pytest.CaptureFixture[str]) -> None:
    before = huggingface_hub.utils.are_progress_bars_disabled()
    store.put("big", NOISE)
    store.get("big")
    assert capfd.readouterr() == ("", "")
    assert huggingface_hub.utils.are_progress_bars_disabled() == before


UNWRITABLE = """
import sys
from deltasync.errors import StoreError
from deltasync.store import open_store

with open_store(sys.argv[1]) as store:
    print(store.get_range("a", 0, 5))
    for call in (lambda: store.put("b", b"new"), lambda: store.get("a")):
        try:
            call()
        except StoreError as error:
            print(error.transient, error.hint)
"""


@pytest.mark.parametrize("has_log", [False, True])
def test_no_folder_for_the_client_to_write_to(store: BucketStore, standin: Hub, tmp_path: Path, has_log: bool) -> None:
    # A folder that nobody can make, not even root: its parent is a file.
    (tmp_path / "file").touch()
    environment = {**os.environ, "HF_HOME": str(tmp_path / "file" / "home")}
    log = tmp_path / "log"
    done = processes.run(
        [sys.executable, "-c", UNWRITABLE, store.url],
        env={**environment, "HF_XET_LOG_DEST": str(log)} if has_log else environment,
    )
    refused = "False set HF_HOME to a writable folder"
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["b'first'", refused, refused]
    assert log.exists() == has_log
