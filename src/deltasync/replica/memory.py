"""Private folders in shared memory, for mirrors and stages that several processes of one host map.

Shared memory is a place where any user of the machine can create files, so nothing that is found there is trusted: only
a folder that belongs to this user and is closed to all others is entered, and no link is followed.
"""

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from deltasync.errors import InvalidInputError
from deltasync.files import locked

_WAIT_S = 60.0
"""How long a start waits for others of this user, which hold the lock while they remove what killed processes left."""


@contextmanager
def memory_folder(parent: Path | None = None) -> Iterator[Path]:
    """A new private folder, which is removed at the end of the block.

    It is in shared memory where the system has that, unless a `parent` is given. What killed processes of this user
    have left there is removed first: a mirror is as large as the model, and a second one would fill the memory.
    """
    place = _shared_memory() if parent is None else parent
    home = _home(place)
    with ExitStack() as held:
        with locked(home / "folders", wait_s=_WAIT_S):
            _remove_abandoned(home)
            folder = Path(tempfile.mkdtemp(dir=home))
            held.enter_context(locked(folder / "used"))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _home(place: Path) -> Path:
    """The folder of this user in a place that is open to all. If another user has taken its name, it gets another."""
    for home in (place / _name(), *sorted(place.glob(f"{_name()}.*"))):
        if _is_private(home):
            return home
    try:
        (place / _name()).mkdir(mode=0o700)
    except FileExistsError:
        return Path(tempfile.mkdtemp(prefix=f"{_name()}.", dir=place))
    return place / _name()


def _name() -> str:
    return f"deltasync-{os.geteuid()}"


def _is_private(path: Path) -> bool:
    """Whether this is a folder, not a link to one, that belongs to this user and that no other user can enter."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and status.st_mode & 0o077 == 0


def _remove_abandoned(home: Path) -> None:
    """Remove the folders of processes that have ended: the system has released their locks."""
    for folder in home.iterdir():
        if _is_private(folder) and (folder / "used.lock").is_file():
            with suppress(InvalidInputError), locked(folder / "used"):
                shutil.rmtree(folder, ignore_errors=True)


def _shared_memory() -> Path:
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else Path(tempfile.gettempdir())
