"""Files that appear whole or not at all, locks, temporary folders and disk space."""

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support import processes
from support.helpers import few_frames

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


# Locks


def make_file(path: Path) -> None:
    path.write_text("precious")


def make_link(path: Path) -> None:
    path.with_name("precious").write_text("precious")
    path.symlink_to("precious")


def make_link_to_nothing(path: Path) -> None:
    path.symlink_to("nothing")


FOREIGN: dict[str, Callable[[Path], object]] = {
    "a file with content": make_file,
    "a link": make_link,
    "a link to nothing": make_link_to_nothing,
    "a folder": Path.mkdir,
    "a FIFO": os.mkfifo,
}


def contents(folder: Path) -> dict[str, object]:
    return {p.name: p.read_bytes() if p.is_file() else p.lstat().st_mode for p in sorted(folder.iterdir())}


@pytest.mark.parametrize("make", FOREIGN.values(), ids=FOREIGN.keys())
def test_what_is_in_the_place_of_a_lock_stays_as_it_is(make: Callable[[Path], object], tmp_path: Path) -> None:
    make(tmp_path / "f.lock")
    before = contents(tmp_path)
    with pytest.raises(InvalidInputError, match=r"f\.lock is not the lock") as caught, files.locked(tmp_path / "f"):
        pass
    assert caught.value.hint
    assert contents(tmp_path) == before


def test_an_empty_file_is_locked_and_stays_empty(tmp_path: Path) -> None:
    (tmp_path / "f.lock").touch()
    with files.locked(tmp_path / "f"):
        assert (tmp_path / "f.lock").read_bytes() == b""
    assert names(tmp_path) == ["f.lock"]


def test_a_wait_for_a_lock_ends(tmp_path: Path) -> None:
    with files.locked(tmp_path / "f"):
        since = time.monotonic()
        with pytest.raises(InvalidInputError, match="another process"), files.locked(tmp_path / "f", wait_s=0.2):
            pass
        assert 0.2 <= time.monotonic() - since < 10


def test_a_lock_that_is_released_in_time(tmp_path: Path) -> None:
    with ExitStack() as held:
        held.enter_context(files.locked(tmp_path / "f"))
        threading.Timer(0.2, held.close).start()
        with files.locked(tmp_path / "f", wait_s=60):
            pass


# Folders


def test_a_folder_however_deep(tmp_path: Path) -> None:
    deep = tmp_path / "/".join(["d"] * 200)
    with few_frames():
        files.make_folder(deep)
        assert deep.is_dir()
        files.make_folder(deep)


@pytest.mark.parametrize("make", [make_file, make_link, make_link_to_nothing, os.mkfifo])
def test_something_in_the_way_of_a_folder(make: Callable[[Path], object], tmp_path: Path) -> None:
    make(tmp_path / "f")
    for path in (tmp_path / "f", tmp_path / "f" / "below" / "it"):
        with pytest.raises(InvalidInputError, match="is not a folder"):
            files.make_folder(path)


_WRITER = """
import sys, time
from pathlib import Path
from deltasync.files import temporary_folder_beside
with temporary_folder_beside(Path(sys.argv[1])) as folder:
    (folder / "large").write_bytes(b"large")
    print(folder, flush=True)
    time.sleep(600)
"""


def test_a_temporary_folder_of_a_killed_process_is_removed_by_the_next(tmp_path: Path) -> None:
    out = tmp_path / "out"
    foreign = [tmp_path / ".out.0123456789ab.tmp", tmp_path / ".out.ba9876543210.tmp"]
    foreign[0].mkdir()
    (foreign[0] / "precious").touch()
    foreign[1].symlink_to(".out.0123456789ab.tmp")
    with processes.running([sys.executable, "-c", _WRITER, out], stdout=subprocess.PIPE) as writer:
        left = Path(writer.stdout.readline().strip())
        with files.temporary_folder_beside(out) as ours:
            assert left.is_dir(), "it is in use"
            assert ours.is_dir()
        assert not ours.exists()
        processes.kill(writer)
    assert (left / "large").exists()
    with files.temporary_folder_beside(out) as ours:
        assert not left.exists()
        files.release_folder(ours)
        ours.rename(out)
    assert names(tmp_path) == [".out.0123456789ab.tmp", ".out.ba9876543210.tmp", "out"]
    assert names(out) == []
    assert (foreign[0] / "precious").exists()


# Space


@pytest.mark.parametrize("code", [None, errno.EOPNOTSUPP, errno.EINVAL], ids=["reserved", "not supported", "invalid"])
def test_space_is_allocated(code: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        assert code is not None
        raise OSError(code, os.strerror(code))

    if code is not None:
        monkeypatch.setattr(files.os, "posix_fallocate", fail)
    monkeypatch.setattr(files, "_ZEROS_BYTES", 4096)
    with (tmp_path / "f").open("wb") as file:
        file.write(b"header")
        file.flush()
        files.reserve(file.fileno(), 1_000_001)
    data = (tmp_path / "f").read_bytes()
    assert data == b"header" + bytes(1_000_001 - 6)
    assert (tmp_path / "f").stat().st_blocks * 512 >= 1_000_001


def test_an_error_of_a_reservation_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(files.os, "posix_fallocate", fail)
    with (tmp_path / "f").open("wb") as file, pytest.raises(OSError, match="full"):
        files.reserve(file.fileno(), 100)


def test_holes_are_filled(tmp_path: Path) -> None:
    path = tmp_path / "f"
    with path.open("wb") as file:
        file.truncate(1 << 20)
    assert path.stat().st_blocks == 0
    with path.open("r+b") as file:
        files.fill_holes(file.fileno())
    assert path.stat().st_blocks * 512 >= 1 << 20
    assert path.read_bytes() == bytes(1 << 20)
