"""What users write to name a store."""

import sys
from pathlib import Path

import pytest
from support import processes

from deltasync.errors import InvalidInputError
from deltasync.store import open_store
from deltasync.store.local import LocalStore
from deltasync.store.memory import MemoryStore

S3 = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret-value"}
AZURE = {"AZURE_STORAGE_ACCOUNT_NAME": "account", "AZURE_STORAGE_ACCOUNT_KEY": "c2VjcmV0LXZhbHVl"}


@pytest.mark.parametrize(
    ("url", "environment", "shown"),
    [
        ("s3://bucket", S3, "s3://bucket"),
        ("s3://bucket/", S3, "s3://bucket"),
        ("S3://Bucket/Run 1//x/", S3, "s3://Bucket/Run 1/x"),
        ("s3a://bucket/a/b", S3, "s3a://bucket/a/b"),
        ("gs://bucket/a", {"GOOGLE_SKIP_SIGNATURE": "true"}, "gs://bucket/a"),
        ("az://container/a", AZURE, "az://container/a"),
        ("azure://container/a", AZURE, "azure://container/a"),
        ("abfss://container@account.dfs.core.windows.net/a", AZURE, "abfss://container@account.dfs.core.windows.net/a"),
        ("memory://", {}, "memory://"),
        ("memory://name", {}, "memory://name"),
        ("file:///some/folder", {}, "file:///some/folder"),
        ("file://localhost/some/fo%20lder", {}, "file:///some/fo%20lder"),
        ("/some/folder", {}, "file:///some/folder"),
    ],
)
def test_urls(url: str, environment: dict[str, str], shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert open_store(url).url == shown


def test_plain_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("a/b", "./a/b", Path("a/b"), "~/a/b", tmp_path / "a" / "b"):
        store = open_store(path)
        assert isinstance(store, LocalStore)
        assert store.url == (tmp_path / "a" / "b").as_uri()
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("path", ["~/a", "~no-such-user/a"])
def test_no_home_to_find_a_path_in(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A container may run as a user that its system does not know.
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    with pytest.raises(InvalidInputError, match="there is no such home") as caught:
        open_store(path)
    assert caught.value.hint == "set HOME, or give the whole path"


def test_memory_stores_have_names() -> None:
    first, same, other, anonymous = (open_store(f"memory://{name}") for name in ("test-x", "test-x", "test-y", ""))
    first.put("key", b"1")
    assert same.get("key") == b"1"
    assert list(other.list()) == list(anonymous.list()) == list(MemoryStore().list()) == []


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("ftp://host/x", "ftp:// is not a kind of store"),
        ("http://host/x", "s3://bucket/prefix"),
        ("", "has no name"),
        ("  ", "has no name"),
        ("file://host/x", "names no absolute path"),
        ("file://x", "names no absolute path"),
        ("file:///x?y", "names no absolute path"),
        ("s3://", "names no bucket"),
        ("s3:///prefix", "names no bucket"),
        ("s3://bucket/../other", "names no bucket"),
        ("az://container", "Account must be specified"),
        ("hf://models/a/b", "hf://buckets/namespace/name/prefix"),
        ("hf://buckets/a", "hf://buckets/namespace/name/prefix"),
    ],
)
def test_what_names_no_store(url: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in S3.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidInputError) as caught:
        list(open_store(url).list())
    assert said in str(caught.value)
    assert caught.value.hint


ALMOST = [
    ("s3:/bucket/run", "s3://bucket/run"),
    ("s3//bucket/run", "s3://bucket/run"),
    ("s3:bucket", "s3://bucket"),
    ("S3:/Bucket", "s3://Bucket"),
    (" s3://bucket", "s3://bucket"),
    ("gs:/bucket", "gs://bucket"),
    ("gs//bucket", "gs://bucket"),
    ("az:/container", "az://container"),
    ("hf:/buckets/a/b", "hf://buckets/a/b"),
    ("file:/data/feed", "file:///data/feed"),
    ("memory:/name", "memory://name"),
    ("s4://bucket", "s3://bucket"),
    ("s33:/bucket", "s3://bucket"),
    ("gcs://bucket", "gs://bucket"),
    ("mem://name", "memory://name"),
    (Path("s3://bucket/run"), "'s3://bucket/run'"),
]


@pytest.mark.parametrize(("url", "meant"), ALMOST, ids=str)
def test_what_is_almost_a_url_is_no_folder(url: str | Path, meant: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        open_store(url)
    assert f"did you mean {meant}?" in str(caught.value).replace("the string ", "")


@pytest.mark.parametrize(
    "path", ["./s3:/x", "s3/x", "feeds//run", "files//x", "run:1", "run:/x", "C:/x", "s3", "hf.d//x"]
)
def test_folders_may_have_odd_names(path: str) -> None:
    assert isinstance(open_store(path), LocalStore)


@pytest.mark.parametrize(
    "url",
    [
        "s3:/key:secret-value@bucket/x",
        "s4://key:secret-value@bucket/x",
        "s3//bucket/x?X-Amz-Signature=secret-value",
        "s3://key:secret-value@bucket/x",
        "s3://bucket/x?X-Amz-Signature=secret-value",
        "hf://secret-value@buckets/user/feeds",
        "hf://user:secret-value@buckets/user/feeds",
        "hf://buckets/user/feeds?token=secret-value",
        "hf://buckets/user/feeds#secret-value",
        "hf://secret-value/user/feeds",
        "file://user:secret-value@host/x",
        "file:///x?token=secret-value",
    ],
)
def test_a_secret_in_a_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        open_store(url)
    assert "secret-value" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "environment"),
    [
        ("az://container/x", {"AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_STORAGE_ACCOUNT_KEY": "secret-value!"}),
        ("az://container/x", {"AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_STORAGE_SAS_KEY": "secret-value"}),
        ("gs://bucket/x", {"GOOGLE_SERVICE_ACCOUNT_KEY": "secret-value"}),
        ("gs://bucket/x", {"GOOGLE_SERVICE_ACCOUNT": "/no/such/file"}),
        ("s3://bucket/x", {"AWS_ACCESS_KEY_ID": "secret-value"}),
        ("s3://bucket/x", {**S3, "AWS_CA_BUNDLE": "/dev/null"}),
        ("s3://bucket/x", {**S3, "AWS_SKIP_SIGNATURE": "perhaps"}),
        ("s3://bucket/x", {**S3, "AWS_ENDPOINT_URL": "127.0.0.1:9000"}),
    ],
)
def test_settings_that_make_no_sense(url: str, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidInputError) as caught:
        open_store(url)
    assert caught.value.hint
    assert "secret-value" not in str(caught.value)


def test_feeds_in_folders_need_no_client_of_a_cloud() -> None:
    code = "import sys, deltasync.store; sys.exit('obstore' in sys.modules or 'huggingface_hub' in sys.modules)"
    processes.run([sys.executable, "-c", code], check=True)
