"""Give a finished file its name unless the name is taken: the atomic step of a create on a file system."""

import ctypes
import errno
import os
from pathlib import Path

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_NO_HARD_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
_NO_EXCLUSIVE_RENAME = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})


def claim(temporary: Path, path: Path) -> bool:
    """Whether `path` is now the file that was written at `temporary`. Of many at once exactly one wins.

    By a hard link, which network file systems do atomically too; else by a rename that refuses to replace. A file
    system that has neither raises OSError (EOPNOTSUPP): looking first and renaming then would let two writers win.
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
    """An NFS client that lost the reply asks again, and is told that its own link exists."""
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
        # Our own rename, asked for twice, if there is nothing left to rename.
        return not temporary.exists()
    if code in _NO_EXCLUSIVE_RENAME:
        code = errno.EOPNOTSUPP
    raise OSError(code, os.strerror(code), str(path))
