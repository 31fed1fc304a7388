"""Keys, ranges and prefixes that every store refuses."""

from pathlib import Path

import pytest

from deltasync.errors import InvalidInputError
from deltasync.store import open_store
from deltasync.store.local import LocalStore
from deltasync.store.memory import MemoryStore
from deltasync.store.protocol import KEY_CHARS_MAX, is_key

S3 = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret-value"}
GOOD_KEYS = ["a", "a/b", "a.b", "a..b", "-", "_", "A-Z_0.9/x", "n" * 200, "/".join(["x" * 63] * 8)]
BAD_KEYS = [
    "", "/", "/a", "a/", "a//b", ".", "..", "a/..", "../a", "a/../b", ".hidden", "a/.hidden", "a.", "a./b", "a b",
    "a\\b", "ä", "a\n", "a\0b", "a%2fb", "a?b", "a#b", "C:", "n" * 201, "x/" * 256 + "x",
]  # fmt: skip


def test_keys() -> None:
    assert [key for key in GOOD_KEYS if not is_key(key)] == []
    assert [key for key in BAD_KEYS if is_key(key)] == []
    assert max(len(key) for key in GOOD_KEYS) <= KEY_CHARS_MAX


@pytest.mark.parametrize("key", BAD_KEYS)
def test_bad_keys_are_refused_by_every_verb(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in S3.items():
        monkeypatch.setenv(name, value)
    for store in (LocalStore(tmp_path / "store"), MemoryStore(), open_store("s3://bucket/prefix")):
        for call in (
            lambda s: s.put(key, b""),
            lambda s: s.create(key, b""),
            lambda s: s.get(key),
            lambda s: s.get_range(key, 0, 1),
            lambda s: s.delete(key),
        ):
            with pytest.raises(InvalidInputError):
                call(store)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, -1)])
def test_ranges_are_not_negative(offset: int, length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in S3.items():
        monkeypatch.setenv(name, value)
    for store in (LocalStore(tmp_path), MemoryStore(), open_store("s3://bucket/prefix")):
        with pytest.raises(InvalidInputError):
            store.get_range("key", offset, length)


@pytest.mark.parametrize("prefix", ["..", "../", "/", "a//", ".", "a/.", "a b"])
def test_bad_prefixes_are_refused(prefix: str, tmp_path: Path) -> None:
    for store in (LocalStore(tmp_path / "store"), MemoryStore()):
        for call in (lambda s: s.list(prefix), lambda s: s.list(after=prefix)):
            with pytest.raises(InvalidInputError):
                call(store)
