"""A power cut, on a real file system: what a store in a folder has confirmed is whole on disk."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import processes
from support.servers import missing

from deltasync.store.local import LocalStore

pytestmark = pytest.mark.e2e

ROUNDS = 16


@contextmanager
def loop_mounted(image: Path, folder: Path) -> Iterator[Path]:
    folder.mkdir(exist_ok=True)
    done = processes.run(["mount", "-o", "loop", image, folder])
    if done.returncode != 0:
        missing(f"cannot mount an image here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        processes.run(["umount", folder], check=True)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    if shutil.which("mkfs.ext4") is None:
        missing("there is no mkfs.ext4 here")
    path = tmp_path / "disk.img"
    with path.open("wb") as file:
        file.truncate(64 << 20)
    processes.run(["mkfs.ext4", "-q", "-F", path], check=True)
    return path


def test_what_was_confirmed_survives_a_power_cut(image: Path, tmp_path: Path) -> None:
    """The image is copied while it is mounted: the copy has what has reached the disk, and nothing else."""
    confirmed: dict[str, bytes] = {}
    cut = tmp_path / "cut.img"
    with loop_mounted(image, tmp_path / "live") as live:
        store = LocalStore(live / "new" / "store")
        for n in range(ROUNDS):
            # New folders and known ones, new objects and replaced ones, small and large.
            data = bytes([n + 1]) * (300_000 if n % 4 > 1 else 40)
            key = f"folder-{n % 3}/{n // 3}" if n % 2 else "replaced/key"
            if n % 2:
                assert store.create(key, data)
            else:
                store.put(key, data)
            confirmed[key] = data
            shutil.copyfile(image, cut)
            with loop_mounted(cut, tmp_path / "after") as after:
                survived = LocalStore(after / "new" / "store")
                assert {info.key: survived.get(info.key) for info in survived.list()} == confirmed
