"""Buckets: what a real S3 server answers, and the messages that a user gets."""

import os
import pickle
import secrets
import sys
import traceback
from collections.abc import Callable, Iterator

import obstore
import pytest
from support import processes, servers
from support.servers import Proxy, proxied

from deltasync.errors import DeltasyncError, InvalidInputError, NotFoundError, StoreError
from deltasync.feed.fetch import get_whole
from deltasync.store import open_store, remote
from deltasync.store.protocol import Store
from deltasync.store.remote import PART_BYTES, RemoteStore

pytestmark = pytest.mark.e2e

VERBS: dict[str, Callable[[Store], object]] = {
    "put": lambda store: store.put("key", b"1"),
    "put large": lambda store: store.put("key", bytes(PART_BYTES + 1)),
    "create": lambda store: store.create("key", b"1"),
    "get": lambda store: store.get("key"),
    "get range": lambda store: store.get_range("key", 0, 1),
    "get nothing": lambda store: store.get_range("key", 0, 0),
    "list": lambda store: list(store.list("folder/")),
    "delete": lambda store: store.delete("key"),
}


@pytest.fixture
def store(seaweed: servers.Server) -> Store:
    return open_store(seaweed.url(secrets.token_hex(8)))


@pytest.fixture
def proxy(seaweed: servers.Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with proxied(seaweed) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


def failure(call: Callable[[], object], kind: type[DeltasyncError]) -> DeltasyncError:
    """The error of a call, which has a hint and holds no secret in any form."""
    with pytest.raises(kind) as caught:
        call()
    shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value) + repr(vars(caught.value))
    for secret in (servers.ADMIN_SECRET, servers.READER_SECRET, "wrong-secret", "wrong-token", "Signature="):
        assert secret not in shown
    assert "Debug source" not in shown
    return caught.value


@pytest.mark.parametrize("verb", VERBS)
def test_missing_bucket(seaweed: servers.Server, verb: str) -> None:
    store = open_store("s3://no-such-bucket/feed")
    error = failure(lambda: VERBS[verb](store), StoreError)
    assert "the bucket does not exist" in str(error)
    assert "create it" in str(error)
    assert not error.transient


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    "given",
    [
        {"AWS_ACCESS_KEY_ID": "wrong-key"},
        {"AWS_SECRET_ACCESS_KEY": "wrong-secret"},
        {"AWS_ACCESS_KEY_ID": "wrong-key", "AWS_SESSION_TOKEN": "wrong-token"},
    ],
    ids=["key", "secret", "token"],
)
def test_wrong_credentials(
    seaweed: servers.Server, verb: str, given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    error = failure(lambda: VERBS[verb](open_store(seaweed.url("feed"))), StoreError)
    assert "the credentials are not accepted (403 " in str(error)
    assert "check the keys" in str(error)
    assert not error.transient


def test_no_permission_to_write(seaweed: servers.Server, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("key", b"1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", servers.READER_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", servers.READER_SECRET)
    reader = open_store(store.url)
    for verb in ("put", "put large", "create", "delete"):
        error = failure(lambda verb=verb: VERBS[verb](reader), StoreError)
        assert "not allowed (403 AccessDenied)" in str(error)
        assert "to publish write" in str(error)
        assert not error.transient
    assert reader.get("key") == b"1"
    assert [info.key for info in reader.list()] == ["key"]


@pytest.mark.parametrize("verb", VERBS)
def test_not_reachable(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = f"http://127.0.0.1:{servers.free_port()}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret")
    monkeypatch.setattr(remote, "RETRIES", 1)
    error = failure(lambda: VERBS[verb](open_store("s3://bucket/feed")), StoreError)
    assert f"{endpoint} cannot be reached: Connection refused" in str(error)
    assert error.transient


def test_missing_container(azurite: servers.Server) -> None:
    for verb in VERBS:
        error = failure(lambda verb=verb: VERBS[verb](open_store("az://no-such-container/feed")), StoreError)
        assert "the bucket does not exist" in str(error)
        assert not error.transient


def test_wrong_key_of_azure(azurite: servers.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "d3Jvbmctc2VjcmV0")
    for verb in VERBS:
        error = failure(lambda verb=verb: VERBS[verb](open_store(azurite.url("feed"))), StoreError)
        assert "the credentials are not accepted" in str(error)


def test_no_secret_in_any_form(seaweed: servers.Server, store: Store) -> None:
    store.put("key", b"1")
    for form in (repr(store), str(store), store.url, pickle.dumps(store).decode("latin-1")):
        assert servers.ADMIN_SECRET not in form
        assert servers.ADMIN_KEY not in form
    again = pickle.loads(pickle.dumps(store))
    assert isinstance(again, RemoteStore)
    assert again.get("key") == b"1"


def test_a_profile_is_enough(seaweed: servers.Server, tmp_path_factory: pytest.TempPathFactory) -> None:
    """As a user has it: nothing in the environment but the name of a profile."""
    home = tmp_path_factory.mktemp("home")
    (home / ".aws").mkdir()
    (home / ".aws" / "config").write_text(f"[profile lab]\nregion = us-east-1\nendpoint_url = {seaweed.endpoint}\n")
    (home / ".aws" / "credentials").write_text(
        f"[lab]\naws_access_key_id = {servers.ADMIN_KEY}\naws_secret_access_key = {servers.ADMIN_SECRET}\n"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    code = (
        f"from deltasync.store import open_store\ns = open_store({seaweed.url('profile')!r})\n"
        "s.put('key', b'1'); print(s.get('key'))"
    )
    done = processes.run([sys.executable, "-c", code], env={**clean, "HOME": str(home), "AWS_PROFILE": "lab"})
    assert done.stdout == "b'1'\n", done.stderr


def test_large_objects_are_put_in_parts_but_created_in_one(store: Store) -> None:
    data = secrets.token_bytes(2 * PART_BYTES + 1)
    store.put("put", data)
    assert store.create("created", data) is True
    assert store.create("created", data) is False
    assert isinstance(store, RemoteStore)
    etags = {key: obstore.head(store._client(0), key)["e_tag"] for key in ("put", "created")}
    assert etags["put"].endswith('-3"')
    assert "-" not in etags["created"]
    for key in etags:
        assert store.get(key) == data
        assert get_whole(store, key, len(data)) == data


def test_one_request_each(seaweed: servers.Server, proxy: Proxy) -> None:
    store = open_store(seaweed.url(secrets.token_hex(8)))
    for verb, method in (
        ("create", "PUT"),
        ("put", "PUT"),
        ("get", "GET"),
        ("get range", "GET"),
        ("list", "GET"),
        ("delete", "DELETE"),
    ):
        proxy.seen.clear()
        VERBS[verb](store)
        assert proxy.seen == [method], verb
    with pytest.raises(NotFoundError):
        store.get("key")
    assert proxy.seen[1:] == ["GET"]


@pytest.mark.parametrize("how", ["503", "cut", "refuse", "drop"])
def test_what_can_be_repeated_is_repeated(seaweed: servers.Server, proxy: Proxy, how: str) -> None:
    store = open_store(seaweed.url(secrets.token_hex(8)))
    for call, given in (
        (lambda: store.put("key", b"1"), None),
        (lambda: store.get("key"), b"1"),
        (lambda: store.get_range("key", 0, 1), b"1"),
        (lambda: [info.key for info in store.list()], ["key"]),
        (lambda: store.delete("key"), None),
        (lambda: store.delete("key"), None),
    ):
        proxy.lose = [how]
        assert call() == given
        assert proxy.lose == []


@pytest.mark.parametrize("how", ["503", "cut"])
def test_a_create_made_again_meets_its_own_write(seaweed: servers.Server, proxy: Proxy, how: str) -> None:
    store = open_store(seaweed.url(secrets.token_hex(8)))
    proxy.lose = [how]
    assert store.create("key", b"mine") is False
    assert store.get("key") == b"mine"


def test_a_store_that_stays_away_is_transient(
    seaweed: servers.Server, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "RETRIES", 2)
    store = open_store(seaweed.url(secrets.token_hex(8)))
    proxy.lose = ["503"] * 3
    error = failure(lambda: store.put("key", b"1"), StoreError)
    assert error.transient
    assert "503" in str(error)
    assert proxy.seen == ["PUT"] * 3


def test_an_object_replaced_while_it_is_read_is_read_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(store, RemoteStore)
    old, new = bytes(2 * PART_BYTES), b"n" * (2 * PART_BYTES)
    store.put("key", old)
    fetch, fetched = RemoteStore._fetch, []

    def replace_after_the_first(self: RemoteStore, *args: object) -> object:
        found = fetch(self, *args)
        fetched.append(args)
        if len(fetched) == 1:
            store.put("key", new)
        return found

    monkeypatch.setattr(RemoteStore, "_fetch", replace_after_the_first)
    assert store.get("key") == new


FORK = """
import os, sys
from deltasync.errors import InvalidInputError
from deltasync.store import open_store

early = open_store({url!r})
if sys.argv[1] == "used":
    early.put("key", b"1")
if os.fork() == 0:
    refused = 0
    for store in (early, open_store({url!r})):
        try:
            print(store.get("key"), flush=True)
        except InvalidInputError as error:
            refused += "spawn" in str(error)
    os._exit(10 + refused)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.parametrize(("before", "printed"), [("used", "12\n"), ("unused", "b'1'\nb'1'\n10\n")])
def test_a_forked_process_gets_an_error_and_does_not_hang(store: Store, before: str, printed: str) -> None:
    store.put("key", b"1")
    code = [sys.executable, "-W", "ignore", "-c", FORK.format(url=store.url), before]
    done = processes.run(code)
    assert done.stdout == printed, done.stderr


def test_a_gateway_that_answers_a_range_with_the_whole(rclone: servers.Server) -> None:
    store = open_store(rclone.url(secrets.token_hex(8)))
    data = secrets.token_bytes(PART_BYTES + 10)
    for key, content in (("small", data[:10]), ("large", data)):
        store.put(key, content)
        assert store.get(key) == content
        assert store.get_range(key, 3, len(data)) == content[3:]
        assert get_whole(store, key, len(content)) == content


def test_names_that_are_no_keys_are_passed_over(seaweed: servers.Server, store: Store) -> None:
    assert isinstance(store, RemoteStore)
    store.put("key", b"1")
    for name in ("a b", ".hidden", "x/.y"):
        obstore.put(store._client(0), name, b"")
    assert [info.key for info in store.list()] == ["key"]


def test_without_credentials_the_error_says_what_is_missing(
    seaweed: servers.Server, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    failure(lambda: open_store(seaweed.url("x")), InvalidInputError)
    # The role of an instance is asked for, of a server that knows of none.
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "false")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", proxy.endpoint)
    error = failure(lambda: open_store(seaweed.url("x")).get("key"), StoreError)
    assert "there are no credentials" in str(error)
    assert proxy.seen == ["PUT"]
