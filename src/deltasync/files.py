"""Files that appear whole or not at all: written beside their place, synced to disk, then renamed. Locks, and space."""

import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path

from deltasync.errors import InvalidInputError
from deltasync.format.safetensors import Read

_COPY_BYTES = 1 << 30
_ZEROS_BYTES = 1 << 22
_STAT_BLOCK_BYTES = 512
_LOCK_POLL_S = 0.05
_SYNC_FILE_RANGE_WRITE = 2
_MARK = ".deltasync"
_NO_KERNEL_COPY = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF})
_NO_RESERVATION = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENODEV})
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The codes of an OSError that mean that there is no space."""


def atomic_write(path: Path, chunks: Iterable[bytes | memoryview]) -> int:
    """Write the chunks to a file and return its size. An older file at `path` stays until the new one is on disk."""
    with temporary_beside(path) as temporary:
        size = 0
        with temporary.open("xb") as file:
            for chunk in chunks:
                file.write(chunk)
                size += len(chunk)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    sync_folder(path.parent)
    return size


def require_replaceable(path: Path, is_ours: Callable[[Path], bool], *, what: str) -> None:
    """InvalidInputError if something is at `path` that is not a regular file of ours, and must not be replaced."""
    if path.is_dir():
        raise InvalidInputError(f"{path} is a folder", hint="name a file to write")
    if os.path.lexists(path) and not (stat.S_ISREG(path.lstat().st_mode) and is_ours(path)):
        raise InvalidInputError(f"{path} exists and is not {what} that deltasync wrote", hint="choose another output")


@contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """An unused hidden path in the folder of `path`. Whatever is there at the end of the block is removed."""
    if not path.parent.is_dir():
        raise InvalidInputError(f"{path.parent} is not a folder", hint="create it, or choose another output")
    temporary = path.parent / f".{path.name[:100]}.{secrets.token_hex(6)}.tmp"
    try:
        yield temporary
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        else:
            with suppress(FileNotFoundError):
                temporary.unlink()


@contextmanager
def temporary_folder_beside(path: Path) -> Iterator[Path]:
    """A new hidden folder in the folder of `path`. If it is still there at the end of the block, it is removed.

    It is locked in the meantime by a file inside, which `release_folder` removes. A folder of the same kind whose lock
    is free was left by a process that was killed, and is removed first.
    """
    with temporary_beside(path) as temporary:
        for other in _temporaries_of(path):
            # It may be in a place for all users, and one of theirs.
            with suppress(InvalidInputError, OSError):
                status = other.lstat()
                is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
                if is_ours and _lock_of(other / _MARK).is_file():
                    with locked(other / _MARK):
                        shutil.rmtree(other)
        temporary.mkdir()
        with locked(temporary / _MARK):
            yield temporary


def remove_abandoned_files(path: Path, is_ours: Callable[[Path], bool]) -> None:
    """Remove the temporary files that killed processes left beside `path`, whose lock the caller holds.

    `is_ours` is called with each that has such a name, and says whether its content is what a process would write.
    """
    for other in _temporaries_of(path) if path.parent.is_dir() else ():
        if not other.is_symlink() and other.is_file() and is_ours(other):
            other.unlink()


def _temporaries_of(path: Path) -> list[Path]:
    name = re.compile(rf"\.{re.escape(path.name[:100])}\.[0-9a-f]{{12}}\.tmp", re.ASCII)
    return [other for other in path.parent.iterdir() if name.fullmatch(other.name) is not None]


def release_folder(temporary: Path) -> None:
    """Remove the lock from a folder of `temporary_folder_beside`, which is about to get its name."""
    with suppress(FileNotFoundError):
        _lock_of(temporary / _MARK).unlink()


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents, however many. InvalidInputError if something else is in the way."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        try:
            folder.mkdir(exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise InvalidInputError(f"{folder} is not a folder", hint="choose another place") from error


@contextmanager
def locked(path: Path, *, wait_s: float = 0.0) -> Iterator[None]:
    """Lock `path` against all other users on this machine, in this process and others.

    InvalidInputError if it is still locked after `wait_s` seconds. The lock is an empty file beside `path`, which
    stays. Anything else there is refused and not touched. The block's end releases the lock, and so does the death of
    the process.
    """
    if not path.parent.is_dir():
        raise InvalidInputError(f"{path.parent} is not a folder", hint="create it, or choose another place")
    fd, deadline_s = _open_lock(_lock_of(path)), time.monotonic() + wait_s
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= deadline_s:
                    raise InvalidInputError(
                        f"{path} is used by another process, or twice in this one",
                        hint="stop it, or choose another path",
                    ) from error
            time.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(fd)


def _lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _open_lock(path: Path) -> int:
    """Open or create an empty file. A link is not followed, and nothing is truncated: it may be a file of the user."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    refusal = InvalidInputError(
        f"{path} is not the lock of a deltasync process, which is an empty file",
        hint="choose another path: the lock is beside it",
    )
    try:
        fd = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise refusal from error
        raise
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size:
        os.close(fd)
        raise refusal
    return fd


def reserve(fd: int, size: int) -> None:
    """Extend an open file with zeros to `size` bytes, and allocate disk space for all of it.

    A write through a mapping of the file then cannot fail for lack of space, which would end the process by a signal.
    OSError with a code of `FULL` if there is too little.
    """
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, size)
            return
        except OSError as error:
            if error.errno not in _NO_RESERVATION:
                raise
    zeros = bytes(_ZEROS_BYTES)
    at = os.fstat(fd).st_size
    while at < size:
        at += os.pwrite(fd, memoryview(zeros)[: size - at], at)


def fill_holes(fd: int) -> None:
    """Allocate disk space for what is only a hole in an open file, so that a mapping of it can be written."""
    status = os.fstat(fd)
    if status.st_blocks * _STAT_BLOCK_BYTES < status.st_size:
        reserve(fd, status.st_size)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file, or what a link points to, inside the kernel, which shares its disk blocks where it can."""
    with source.open("rb") as reader, target.open("xb") as writer:
        if _copy_in_kernel(reader.fileno(), writer.fileno()):
            return
    shutil.copyfile(source, target)


def sync_file(path: Path) -> None:
    """Wait until the content of a file is on disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path, *, dir_fd: int | None = None) -> None:
    """Wait until the names in a folder are on disk, where the system can do that. `path` may be below an open one."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY, dir_fd=dir_fd)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network file systems do this by themselves and have no such call.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(fd)


def reader(fd: int) -> Read:
    """A function that reads ranges of an open file."""
    return partial(read_range, fd)


def read_range(fd: int, offset: int, length: int) -> bytes:
    """`length` bytes of an open file from `offset` on, or fewer where the file ends."""
    chunks, left = [], length
    while left:
        # Linux reads at most 2 GiB at once.
        chunk = os.pread(fd, left, offset + length - left)
        if not chunk:
            break
        chunks.append(chunk)
        left -= len(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def write_range(fd: int, offset: int, data: memoryview) -> None:
    """Write all bytes to an open file, from `offset` on."""
    while data:
        # Linux writes at most 2 GiB at once.
        done = os.pwrite(fd, data, offset)
        data, offset = data[done:], offset + done


def start_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Have the system begin to write a part of an open file to disk, where it can, without waiting for it.

    This is only about time: what must be on disk is synced later.
    """
    call = getattr(_libc(), "sync_file_range", None)
    if call is not None:
        call(fd, ctypes.c_int64(offset), ctypes.c_int64(nbytes), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _copy_in_kernel(source: int, target: int) -> bool:
    if not hasattr(os, "copy_file_range"):
        return False
    copied = 0
    while True:
        try:
            done = os.copy_file_range(source, target, _COPY_BYTES)
        except OSError as error:
            if copied == 0 and error.errno in _NO_KERNEL_COPY:
                return False
            raise
        if done == 0:
            # Some file systems return 0 for files whose size they do not know beforehand.
            return copied == os.fstat(source).st_size and copied > 0
        copied += done
