"""Objects as files in a folder, on a local disk or a shared file system: the default, without any server.

An object is written under a hidden name, synced, and then given its name by a rename (`put`) or a hard link (`create`);
the folder is synced last. An object is therefore whole whenever it is visible, and survives a power cut.
"""

import ctypes
import errno
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from deltasync.errors import InvalidInputError, NotFoundError, StoreError
from deltasync.files import atomic_write, read_range, sync_folder, temporary_beside
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

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_NO_HARD_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
_NO_EXCLUSIVE_RENAME = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})


def claim(temporary: Path, path: Path) -> bool:
    """Give the file at `temporary` the name `path` unless it is taken; whether it worked. One of many callers wins.

    This uses a hard link, which is atomic on network file systems too, or else a rename that refuses to replace. A
    file system that has neither raises OSError (EOPNOTSUPP): a check before a rename would let two writers win.
    """
    try:
        os.link(temporary, path)
    except FileExistsError:
        return _is_same_file(temporary, path)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        return _rename_if_free(temporary, path)
    return True


def _is_same_file(temporary: Path, path: Path) -> bool:
    """Whether the link is our own: an NFS client that lost the reply repeats the request and finds its own link."""
    try:
        return os.path.samefile(temporary, path)
    except FileNotFoundError:
        return False


def _rename_if_free(temporary: Path, path: Path) -> bool:
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), str(path))
    old, new = os.fsencode(temporary), os.fsencode(path)
    if renameat2(_AT_FDCWD, old, _AT_FDCWD, new, ctypes.c_uint(_RENAME_NOREPLACE)) == 0:
        return True
    code = ctypes.get_errno()
    if code == errno.EEXIST:
        # If there is nothing left to rename, a repeated request found its own rename.
        return not temporary.exists()
    if code in _NO_EXCLUSIVE_RENAME:
        code = errno.EOPNOTSUPP
    raise OSError(code, os.strerror(code), str(path))


LEFTOVER_AGE_S = 86_400.0
"""Hidden files of killed writers are removed when they are older than this."""

_GONE = "the folder was there and is gone"
_LEFTOVER = re.compile(r"\..+\.[0-9a-f]{12}\.tmp", re.ASCII)
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
# After other errors of a write it is not known what is on disk, and a read of it proves nothing: the system reads what
# it could not write from memory.
_WRITE_MAY_PASS = MAY_PASS & {
    errno.EAGAIN, errno.EBUSY, errno.EHOSTDOWN, errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.ETIMEDOUT
}  # fmt: skip
_HINTS = {
    errno.ENOSPC: "the disk is full: free some space, then retry",
    errno.EDQUOT: "the quota is used up: free some space or raise it, then retry",
    errno.EFBIG: "the file system or the limits of this process do not allow files this large",
    errno.EROFS: "the file system is mounted read-only: a feed can be followed there, not published",
    errno.EACCES: "this user lacks the permission: check the owner and the mode of the folder",
    errno.EPERM: "this user lacks the permission: check the owner and the mode of the folder",
    errno.ENOTDIR: "a file is where a folder should be: choose another place",
    errno.EISDIR: "a folder is where an object should be: choose another place",
    errno.EEXIST: "something else has this name: choose another place",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.EOPNOTSUPP: "this file system has neither hard links nor exclusive renames: choose another one",
    errno.ESTALE: "check that its file system is mounted; if it was removed on purpose, restart this process",
    errno.EMFILE: "too many open files: raise the limit (ulimit -n)",
    errno.ENFILE: "too many open files on this machine: raise the limit (fs.file-max)",
    errno.EIO: "the disk or the connection to it failed: check the system's log, then retry",
}


class LocalStore(Store):
    """A folder. The first write creates it; until then it reads as empty.

    A folder that was there and is gone, as one whose file system was unmounted, does neither: StoreError.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if "\0" in os.fspath(path):
            raise InvalidInputError(f"{os.fspath(path)!r:.200} cannot be a path", hint="leave out the null character")
        self._root = Path(os.path.abspath(path))
        self._root_inode: int | None = None
        self._prepared: set[Path] = set()

    def __repr__(self) -> str:
        return f"LocalStore({str(self._root)!r})"

    @property
    def url(self) -> str:
        return self._root.as_uri()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(create_if_absent=True)

    def put(self, key: str, data: Data) -> None:
        path = self._path(key)
        with self._errors("put", key), self._prepared_folder(path.parent):
            atomic_write(path, [byte_view(data)])

    def create(self, key: str, data: Data) -> bool:
        path = self._path(key)
        with self._errors("create", key), self._prepared_folder(path.parent):
            with temporary_beside(path) as temporary:
                with temporary.open("xb") as file:
                    file.write(byte_view(data))
                    file.flush()
                    os.fsync(file.fileno())
                won = claim(temporary, path)
            # Also for the loser, which will read what the winner may not have synced yet.
            sync_folder(path.parent)
        return won

    def get(self, key: str) -> bytes:
        path = self._path(key)
        with self._errors("get", key), self._absence(key), _open_file(path) as file:
            return file.readall()

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        require_range(key, offset, length)
        path = self._path(key)
        with self._errors("get", key), self._absence(key), _open_file(path) as file:
            wanted = max(0, min(length, os.fstat(file.fileno()).st_size - offset))
            return read_range(file.fileno(), offset, wanted)

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectInfo]:
        require_prefix(prefix)
        require_prefix("" if after is None else after)
        # No key is empty, so all keys sort after "".
        return self._walk(prefix.rpartition("/")[0], prefix, "" if after is None else after)

    def delete(self, key: str) -> None:
        path = self._path(key)
        with self._errors("delete", key), suppress(*_ABSENT):
            path.unlink()
            sync_folder(path.parent)

    def close(self) -> None:
        """Nothing is kept open."""

    def _path(self, key: str) -> Path:
        require_key(key)
        return self._root / key

    @contextmanager
    def _prepared_folder(self, folder: Path) -> Iterator[None]:
        """Have a folder for what is written in the block. OSError that may pass if it is gone in the middle of that."""
        try:
            self._require_root()
            if folder not in self._prepared or not folder.is_dir():
                self._prepare(folder)
            yield
        except (FileNotFoundError, InvalidInputError) as error:
            raise OSError(errno.ESTALE, _GONE) from error

    def _prepare(self, folder: Path) -> None:
        """Create the folder and its parents durably, once: nothing here removes a folder.

        A folder that exists may have been created by another writer a moment ago, so it is synced as well.
        """
        if self._root_inode is None:
            _make_folder(self._root)
        else:
            _sync_existing(self._root.parent)
        # Inside the folder that was found, wherever it is by now: if it is moved away, none is made in its place.
        root = os.open(self._root, getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            inode = os.fstat(root).st_ino
            if self._root_inode not in (None, inode):
                raise OSError(errno.ESTALE, _GONE)
            inside = folder.relative_to(self._root)
            for path in (path for path in (*reversed(inside.parents), inside) if path.parts):
                _make_folder_in(root, path)
        finally:
            os.close(root)
        _remove_leftovers(folder)
        self._prepared.add(folder)
        self._root_inode = inode

    def _require_root(self) -> None:
        """OSError if the folder was there and is gone, or is another one that is empty: the one below a mount."""
        if self._root_inode is None or (inode := _inode(self._root)) == self._root_inode:
            return
        if inode is None or not any(self._root.iterdir()):
            raise OSError(errno.ESTALE, _GONE)
        self._root_inode = inode

    def _walk(self, folder: str, prefix: str, after: str) -> Iterator[ObjectInfo]:
        """The objects below a folder (its key, without the last slash), in the order of their whole keys."""
        with self._errors("list", folder):
            entries = _entries(self._root / folder)
            if not entries:
                self._require_root()
        start = f"{folder}/" if folder else ""
        # The keys below a folder `a` begin with `a/`: it sorts after `a-b` and `a.b`, and before `a0`.
        for name, entry in entries:
            key = start + name
            if name.endswith("/"):
                inside = key.startswith(prefix) or prefix.startswith(key)
                if inside and (key > after or after.startswith(key)):
                    yield from self._walk(key[:-1], prefix, after)
            elif key.startswith(prefix) and key > after and is_key(key):
                with self._errors("list", key):
                    try:
                        status = entry.stat()
                    except FileNotFoundError:
                        # It was deleted after its folder was read.
                        continue
                if stat.S_ISREG(status.st_mode):
                    yield ObjectInfo(key, status.st_size, status.st_mtime)

    @contextmanager
    def _errors(self, verb: str, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            transient = error.errno in (MAY_PASS if verb in ("get", "list") else _WRITE_MAY_PASS)
            otherwise = "retry" if transient else "check the system's log, the disk and the mount"
            raise StoreError(
                f"cannot {verb} {key or 'objects'} in {self._root}: {error.strerror}",
                transient=transient,
                hint=_HINTS.get(error.errno or 0, otherwise),
                key=key,
            ) from error

    @contextmanager
    def _absence(self, key: str) -> Iterator[None]:
        try:
            yield
        except _ABSENT as error:
            self._require_root()
            raise NotFoundError(f"there is no {key} in {self._root}", key=key) from error
        if self._root_inode is None:
            self._root_inode = _inode(self._root)


def _open_file(path: Path) -> FileIO:
    """Open an object. Anything but a file counts as absent; to open a FIFO does not wait for its other end."""
    try:
        file = FileIO(os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0)), "rb")
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise FileNotFoundError(errno.ENOENT, "it is a socket", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise FileNotFoundError(errno.ENOENT, "it is not a file", str(path))
    return file


def _inode(path: Path) -> int | None:
    try:
        return os.stat(path).st_ino
    except _ABSENT:
        return None


def _make_folder(path: Path) -> None:
    """Create a folder and its missing parents, and wait until their names are on disk."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)
    if not missing:
        _sync_existing(path.parent)


def _make_folder_in(root: int, path: Path) -> None:
    """Create a folder below an open one, and wait until its name is on disk."""
    try:
        os.mkdir(path, dir_fd=root)
    except OSError:
        # Which error a system reports for a folder that exists is its choice.
        with suppress(FileNotFoundError):
            if stat.S_ISDIR(os.stat(path, dir_fd=root).st_mode):
                _sync_existing(path.parent, dir_fd=root)
                return
        raise
    sync_folder(path.parent, dir_fd=root)


def _sync_existing(path: Path, *, dir_fd: int | None = None) -> None:
    """Sync a folder that this process has not created: it may be one that this user may not read."""
    with suppress(PermissionError):
        sync_folder(path, dir_fd=dir_fd)


def _remove_leftovers(folder: Path) -> None:
    now = time.time()
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _LEFTOVER.fullmatch(entry.name) is not None and now - entry.stat().st_mtime > LEFTOVER_AGE_S:
                os.unlink(entry.path)


def _entries(folder: Path) -> list[tuple[str, os.DirEntry[str]]]:
    """The entries of a folder that are not hidden, sorted; the names of folders end with a slash."""
    try:
        with os.scandir(folder) as entries:
            shown = [entry for entry in entries if not entry.name.startswith(".")]
            return sorted(((f"{e.name}/" if e.is_dir() else e.name, e) for e in shown), key=lambda pair: pair[0])
    except (FileNotFoundError, NotADirectoryError):
        return []
