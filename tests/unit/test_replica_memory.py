"""Folders in shared memory: private, gone at the end, and swept once their process is dead."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import processes

from deltasync.errors import InvalidInputError
from deltasync.files import locked
from deltasync.replica import mirror
from deltasync.replica.mirror import memory_folder

_HOLDER = """
import sys, time
from pathlib import Path
from deltasync.replica.mirror import memory_folder
with memory_folder(Path(sys.argv[1])) as folder:
    (folder / "mirror.safetensors").write_bytes(b"large")
    print(folder, flush=True)
    time.sleep(600)
"""


def homes(place: Path) -> set[Path]:
    return {path for path in place.iterdir() if path.is_dir() and not path.is_symlink()}


def folders(place: Path) -> set[Path]:
    return {path for home in homes(place) if os.access(home, os.R_OK) for path in home.iterdir() if path.is_dir()}


def test_each_has_its_own(tmp_path: Path) -> None:
    with memory_folder(tmp_path) as one, memory_folder(tmp_path) as two:
        assert folders(tmp_path) == {one, two}
        # No other user may look at weights, or write what a server is to become.
        assert {path.stat().st_mode & 0o077 for path in (one, two, *homes(tmp_path))} == {0}
    assert folders(tmp_path) == set()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no folder in shared memory")
def test_in_shared_memory_by_default() -> None:
    with memory_folder() as folder:
        assert Path("/dev/shm") in folder.parents
    assert not folder.exists()


def test_what_a_killed_process_left_is_swept(tmp_path: Path) -> None:
    with processes.running([sys.executable, "-c", _HOLDER, tmp_path], stdout=subprocess.PIPE) as holder:
        held = Path(holder.stdout.readline().strip())
        with memory_folder(tmp_path) as ours:
            assert folders(tmp_path) == {held, ours}
        processes.kill(holder)
    assert folders(tmp_path) == {held}
    with memory_folder(tmp_path) as ours:
        assert folders(tmp_path) == {ours}


# Neighbours: /dev/shm is open to every user of the machine.

NEIGHBOUR = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user, which only root can")


@pytest.fixture
def precious(tmp_path: Path) -> Iterator[Path]:
    """A file of the user who starts a replica, elsewhere. No neighbour can have it changed."""
    path = tmp_path / "precious"
    path.write_text("precious")
    yield path
    assert path.read_text() == "precious"


def of_neighbour(path: Path) -> None:
    os.chown(path, NEIGHBOUR, NEIGHBOUR, follow_symlinks=False)


def a_link_in_place_of_the_old_lock(place: Path, precious: Path) -> None:
    (place / f"deltasync-{os.geteuid()}.lock").symlink_to(precious)


def a_link_in_place_of_the_home(place: Path, precious: Path) -> None:
    (place / "elsewhere").mkdir(mode=0o700)
    (place / "elsewhere" / "folders.lock").symlink_to(precious)
    (place / f"deltasync-{os.geteuid()}").symlink_to("elsewhere")


def a_home_of_the_neighbour(place: Path, precious: Path) -> None:
    home = place / f"deltasync-{os.geteuid()}"
    home.mkdir(mode=0o700)
    (home / "folders.lock").symlink_to(precious)
    of_neighbour(home)


def a_home_that_all_can_enter(place: Path, precious: Path) -> None:
    home = place / f"deltasync-{os.geteuid()}"
    home.mkdir()
    home.chmod(0o777)
    (home / "folders.lock").symlink_to(precious)


def a_file_in_place_of_the_home(place: Path, precious: Path) -> None:
    (place / f"deltasync-{os.geteuid()}").write_text("x")


def a_folder_to_be_swept(place: Path, precious: Path) -> None:
    """It looks like one that a killed process left, but belongs to the neighbour."""
    folder = place / f"deltasync-{os.geteuid()}-x"
    folder.mkdir(mode=0o700)
    (folder / "used.lock").touch()
    (folder / "all").symlink_to(precious.parent)
    of_neighbour(folder)


NEIGHBOURS = [
    a_link_in_place_of_the_old_lock,
    a_link_in_place_of_the_home,
    a_home_of_the_neighbour,
    a_home_that_all_can_enter,
    a_file_in_place_of_the_home,
    a_folder_to_be_swept,
]


@as_root
@pytest.mark.parametrize("act", NEIGHBOURS)
def test_a_hostile_neighbour(act: Callable[[Path, Path], None], tmp_path: Path, precious: Path) -> None:
    place = tmp_path / "shm"
    place.mkdir()
    place.chmod(0o1777)
    act(place, precious)
    before = {path: path.lstat() for path in place.rglob("*")}
    with memory_folder(place) as one, memory_folder(place) as two:
        assert one.parent == two.parent, "processes of one user find each other's folders"
        assert (one.parent.stat().st_uid, one.parent.stat().st_mode & 0o077) == (os.geteuid(), 0)
        assert one.parent not in before
    assert {path for path in before if not os.path.lexists(path)} == set()


@as_root
def test_a_lock_of_a_neighbour_does_not_hold_up_a_start(tmp_path: Path) -> None:
    """The neighbour locks the file that earlier releases waited for."""
    old = tmp_path / f"deltasync-{os.geteuid()}.lock"
    old.touch()
    of_neighbour(old)
    with old.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with memory_folder(tmp_path) as folder:
            assert folder.is_dir()


def test_the_wait_for_others_of_the_same_user_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "_START_S", 0.2)
    with memory_folder(tmp_path) as folder:
        pass
    is_refused = pytest.raises(InvalidInputError, match="another process")
    with locked(folder.parent / "folders"), is_refused as caught, memory_folder(tmp_path):
        pass
    assert caught.value.hint
