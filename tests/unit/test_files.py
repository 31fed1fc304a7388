from collections.abc import Iterator
from pathlib import Path

import pytest

from deltasync import files
from deltasync.errors import CorruptError, InvalidInputError
from deltasync.format.safetensors import read_exactly


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_write_and_replace(tmp_path: Path) -> None:
    path = tmp_path / "f"
    assert files.atomic_write(path, [b"ab", memoryview(b"cd")]) == 4
    assert path.read_bytes() == b"abcd"
    files.atomic_write(path, iter([b"new"]))
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["f"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OSError])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")

    def chunks() -> Iterator[bytes]:
        yield b"half"
        raise error

    with pytest.raises(error):
        files.atomic_write(path, chunks())
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["f"]


def test_content_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(files.os, "fsync", lambda fd: order.append("sync"))
    replace = files.os.replace
    monkeypatch.setattr(files.os, "replace", lambda a, b: (order.append("rename"), replace(a, b)))
    files.atomic_write(tmp_path / "f", [b"x"])
    assert order == ["sync", "rename", "sync"]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="no-such"):
        files.atomic_write(tmp_path / "no-such" / "f", [b"x"])


@pytest.mark.parametrize("in_kernel", [True, False])
@pytest.mark.parametrize("size", [0, 1, 5000])
def test_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_kernel: bool, size: int) -> None:
    if not in_kernel:
        monkeypatch.delattr(files.os, "copy_file_range", raising=False)
    (tmp_path / "real").write_bytes(bytes(range(256)) * 20 if size == 5000 else b"x" * size)
    (tmp_path / "link").symlink_to("real")
    files.copy_file(tmp_path / "link", tmp_path / "copy")
    assert not (tmp_path / "copy").is_symlink()
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "real").read_bytes()


def test_ranges(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"0123456789")
    with (tmp_path / "f").open("rb") as file:
        read = files.reader(file.fileno())
        assert read(2, 3) == b"234"
        assert read(10, 0) == b""
        assert read(8, 3) == b"89"
        with pytest.raises(CorruptError) as caught:
            read_exactly(read, 8, 3)
        assert caught.value.rule == "safetensors.truncated"
