"""Files that appear whole or not at all: written beside their place, synced to disk, then renamed."""

import errno
import os
import secrets
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from deltasync.errors import InvalidInputError
from deltasync.format.safetensors import Read

_COPY_BYTES = 1 << 30
_NO_KERNEL_COPY = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF})


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
def locked(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Lock `path` against all other users on this machine, in this process and others.

    InvalidInputError if it is locked already; with `wait`, wait for it instead. The lock is a file beside `path`, which
    stays. The block's end releases it, and so does the death of the process.
    """
    if sys.platform == "win32":
        yield
        return
    import fcntl

    if not path.parent.is_dir():
        raise InvalidInputError(f"{path.parent} is not a folder", hint="create it, or choose another place")
    with path.with_name(f"{path.name}.lock").open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InvalidInputError(
                f"{path} is used by another process, or twice in this one", hint="stop it, or choose another path"
            ) from error
        yield


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


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on disk, where the system can do that."""
    if os.name == "nt":
        return
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
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
