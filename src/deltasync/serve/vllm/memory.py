"""Folders in shared memory, for what workers map. What a killed server left there is removed by the next one."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from deltasync.errors import InvalidInputError
from deltasync.files import locked


@contextmanager
def memory_folder(parent: Path | None = None) -> Iterator[Path]:
    """A new folder that nobody else may look into; it is gone at the end of the block.

    It is in shared memory where there is such a thing, unless a `parent` is given.
    """
    place = _shared() if parent is None else parent
    # A killed server cannot clean up, and its mirror is as large as the model: a second one would fill the memory.
    prefix = f"deltasync-{os.getuid()}"
    with ExitStack() as held:
        with locked(place / prefix, wait=True):
            _sweep(place, prefix)
            folder = Path(tempfile.mkdtemp(prefix=f"{prefix}-", dir=place))
            held.enter_context(locked(_user(folder)))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _sweep(place: Path, prefix: str) -> None:
    """Remove folders whose process is gone: a lock is given back by the system."""
    for found in place.glob(f"{prefix}-*/"):
        with suppress(InvalidInputError), locked(_user(found)):
            shutil.rmtree(found, ignore_errors=True)


def _user(folder: Path) -> Path:
    return folder / "used"


def _shared() -> Path:
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else Path(tempfile.gettempdir())
