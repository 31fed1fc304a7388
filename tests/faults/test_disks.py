"""A disk that is full, or cannot be written: a clear error, and a feed that still verifies and goes on later."""

import os
from pathlib import Path

import pytest
from known import head_of, manifests, nth, publish, require_clean, require_exact, require_whole
from running import mounted, run
from support.helpers import State

from deltasync.errors import StoreError
from deltasync.store import open_store
from deltasync.store.local import LocalStore

PAGE_BYTES = 4096


def fill(folder: Path, *, free_pages: int) -> Path:
    """A file that leaves just so much room."""
    filler = folder / "filler"
    found = os.statvfs(folder)
    with filler.open("wb") as file:
        file.write(bytes((found.f_bavail - free_pages) * found.f_frsize))
    assert os.statvfs(folder).f_bavail == free_pages
    return filler


@pytest.mark.parametrize("anchor", [False, True], ids=["delta", "delta and late anchor"])
def test_disk_full(tmp_path: Path, anchor: bool) -> None:
    """With ever more room left, so that each write of a publication is the one that does not fit."""
    states: dict[int, State] = {0: nth(0), 1: nth(1)}
    errors = 0
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=512k", "none") as disk:
        store = open_store(disk / "feed")
        for n in states:
            publish(store, n)
        for free_pages in range(8):
            filler = fill(disk, free_pages=free_pages)
            before, head = manifests(store), head_of(store)
            try:
                publish(store, head + 1, anchor=anchor)
            except StoreError as error:
                told = (error.transient, str(error))
                assert told[0] is False
                assert "disk is full" in told[1]
                errors += 1
            require_clean(store)
            assert before.items() <= manifests(store).items()
            assert not [path for path in disk.rglob(".*") if path.is_file()], "nothing is left behind"
            if head_of(store) > head:
                states[head + 1] = nth(head + 1)
            filler.unlink()
        assert errors >= (3 if anchor else 2)
        assert errors < 8, "in the end there was room"
        states[head_of(store) + 1] = nth(head_of(store) + 1)
        publish(store, head_of(store) + 1)
        require_whole(store, states)


def test_read_only(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=512k", "none") as disk:
        store = LocalStore(disk / "feed")
        publish(store, 0)
        assert run("mount", "-o", "remount,ro", disk).returncode == 0
        for fresh in (store, LocalStore(disk / "feed"), LocalStore(disk / "new")):
            with pytest.raises(StoreError, match="read-only") as caught:
                publish(fresh, 1)
            assert not caught.value.transient
            assert caught.value.hint is not None
        require_clean(store)
        require_exact(store, {0: nth(0)})
        assert run("mount", "-o", "remount,rw", disk).returncode == 0
        publish(store, 1)
        require_whole(store, {0: nth(0), 1: nth(1)})
