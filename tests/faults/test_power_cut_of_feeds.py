"""A power cut on a local disk: what had been committed is there when the machine comes back, and it is whole."""

import errno
import os
import random
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from known import head_of, manifests, nth, publish, require_clean, require_exact
from running import mounted, publishing, run
from support import repeats
from support.servers import missing

from deltasync.errors import DeltasyncError, StoreError
from deltasync.store.local import LocalStore

CUTS = repeats(8, soak=50)
IMAGE_BYTES = 24 << 20


# --- a real disk, seen from outside -----------------------------------------------------------------------------------


@contextmanager
def disk(folder: Path) -> Iterator[tuple[Path, Path, str]]:
    """A file that is a disk, where it is mounted, and the name of its loop device."""
    image = folder / "disk"
    with image.open("wb") as file:
        file.truncate(IMAGE_BYTES)
    done = run("mkfs.ext4", "-q", "-F", "-b", "1024", "-N", "8000", image) if shutil.which("mkfs.ext4") else None
    if done is None or done.returncode != 0:
        missing("mkfs.ext4 is not here, or fails")
    with mounted(folder / "mounted", "-o", "loop", image) as at:
        yield image, at, Path(run("findmnt", "-n", "-o", "SOURCE", at).stdout.strip()).name


def cut_power(image: Path, device: str, copy: Path) -> None:
    """What is on the disk at one moment, as a copy: one during which nothing was written. Nothing is flushed for it."""
    counters = Path("/sys/block", device, "stat")

    def written() -> list[str]:
        # Writes done, merged, sectors; and requests under way.
        fields = counters.read_text().split()
        return [*fields[4:7], fields[8]]

    for _ in range(2000):
        before = written()
        shutil.copyfile(image, copy)
        if before[-1] == "0" and written() == before:
            return
        time.sleep(0.003)
    pytest.fail("the disk was never quiet for as long as a copy takes")


def losses(folder: Path, *options: str, cuts: int) -> list[str]:
    """Publish on a disk, cut the power at many moments, and look what each copy has lost."""
    copies: dict[Path, int] = {}
    rng = random.Random(1)
    with disk(folder) as (image, at, device):
        url = (at / "feed").as_uri()
        with publishing(url, folder / "output", *options) as publisher:
            pid = publisher.start()
            for i in range(cuts):
                began_s = time.monotonic()
                publisher.await_version(publisher.committed() + 1)
                time.sleep(rng.uniform(0.0, 1.0) * (time.monotonic() - began_s))
                with publisher.paused(pid):
                    copies[folder / f"cut-{i}"] = publisher.committed()
                    cut_power(image, device, folder / f"cut-{i}")
    return [loss for copy, committed in copies.items() if (loss := loss_of(copy, committed)) is not None]


def loss_of(copy: Path, committed: int) -> str | None:
    """Mount the copy, as a machine does that comes back, and hold the feed against what was committed."""
    with mounted(copy.with_suffix(".mounted"), "-o", "loop", copy) as at:
        store = LocalStore(at / "feed")
        try:
            head = head_of(store)
            assert head >= committed, f"version {committed} was committed, the head is {head}"
            require_clean(store)
            require_exact(store, {version: nth(version) for version in range(head + 1)})
            # And a publisher goes on.
            publish(store, head + 1)
            require_exact(store, {head + 1: nth(head + 1)})
        except (AssertionError, DeltasyncError) as error:
            return f"{copy.name}: {error!s:.500}"
    return None


@pytest.mark.e2e
@pytest.mark.soak
def test_every_committed_version_survives(tmp_path: Path) -> None:
    assert losses(tmp_path, cuts=CUTS) == []


@pytest.mark.e2e
def test_without_syncing_it_would_not(tmp_path: Path) -> None:
    """Shows that the test above can fail: a publisher whose fsync does nothing loses versions."""
    assert losses(tmp_path, "--no-sync", cuts=5)


# --- the order of calls, on any machine -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """`sync`: what is at `inode` is on disk, with that many bytes. `name`: `inode` got the name `path`. `mkdir`."""

    kind: str
    inode: int
    nbytes: int = 0
    path: Path = Path()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Every call that matters for what is on disk, in order."""
    seen: list[Call] = []

    def spy(name: str, note: Any) -> None:
        real = getattr(os, name)

        def spied(*args: Any, **options: Any) -> Any:
            noted = note(*args, **options) if name != "mkdir" else None
            result = real(*args, **options)
            seen.append(note(*args, **options) if noted is None else noted)
            return result

        monkeypatch.setattr(os, name, spied)

    spy("fsync", lambda fd: Call("sync", os.fstat(fd).st_ino, os.fstat(fd).st_size))
    for name in ("replace", "link"):
        spy(name, lambda old, new: Call("name", os.stat(old).st_ino, os.stat(old).st_size, Path(new)))

    def made(path: Path, *mode: int, dir_fd: int | None = None) -> Call:
        above = Path() if dir_fd is None else Path(os.readlink(f"/proc/self/fd/{dir_fd}"))
        return Call("mkdir", os.stat(above / path).st_ino, 0, above / path)

    spy("mkdir", made)
    return seen


def test_the_order_of_syncs(calls: list[Call], tmp_path: Path) -> None:
    checkpoints = [publish(LocalStore(tmp_path / "warm-up"), n).version for n in range(3)]
    assert checkpoints == [0, 1, 2]
    calls.clear()
    store = LocalStore(tmp_path / "deep" / "feed")
    for n in range(3):
        publish(store, n, anchor=n == 2)
    names = [i for i, call in enumerate(calls) if call.kind == "name"]
    assert len(names) >= 3 * 2 + len(["feed.json", "late anchor", "its payload"])
    for i, following in zip(names, [*names[1:], len(calls)], strict=True):
        call = calls[i]
        content = Call("sync", call.inode, call.nbytes)
        folder = call.path.parent.stat().st_ino
        assert content in calls[:i], f"{call.path} has its name before its content is on disk"
        # The next object may be the manifest that names this one: it must not be there first.
        synced = [later.inode for later in calls[i:following] if later.kind == "sync"]
        assert folder in synced, f"the name {call.path} is not on disk when the next object is written"
    for i, call in enumerate(calls):
        if call.kind == "mkdir" and call.path.is_relative_to(tmp_path / "deep"):
            first = next(j for j in names if calls[j].path.is_relative_to(call.path))
            parent = call.path.parent.stat().st_ino
            synced = [later.inode for later in calls[i:first] if later.kind == "sync"]
            assert parent in synced, f"the folder {call.path} is not on disk when something is put into it"
    made = {call.path.name for call in calls if call.kind == "mkdir"}
    assert {"deep", "feed", "versions", "payloads", "anchors"} <= made


def test_a_sync_that_fails_at_any_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The disk says at last that it could not write: no commit, a clear error, and a feed that verifies."""
    real = os.fsync
    plan = SimpleNamespace(count=0, failing=None)

    def fsync(fd: int) -> None:
        plan.count += 1
        if plan.count == plan.failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    store = LocalStore(tmp_path / "feed")
    publish(store, 0)
    plan.count = 0
    publish(store, 1)
    needed, reported = plan.count, 0
    for failing in range(1, needed + 1):
        head, before = head_of(store), manifests(store)
        plan.count, plan.failing = 0, failing
        try:
            publish(store, head + 1)
        except StoreError as error:
            reported += error.hint is not None
        assert head_of(store) in (head, head + 1)
        assert before.items() <= manifests(store).items()
        require_clean(store)
    assert reported == needed - 2, "only the removal of the two probes may fail without an error"
    plan.failing = None
    head = head_of(store)
    publish(store, head + 1)
    require_exact(store, {version: nth(version) for version in range(head + 2)})
