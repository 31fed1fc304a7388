"""A folder as a store: what is on disk when, what is left behind, and what the file system can refuse."""

import errno
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import LONG_S, join, processes
from support.helpers import few_frames
from support.servers import missing

from deltasync.errors import InvalidInputError, NotFoundError, StoreError
from deltasync.store import local
from deltasync.store.local import LEFTOVER_AGE_S, LocalStore

UNPRIVILEGED_USER = 65534
VERBS = ("put", "create")


def names_below(folder: Path) -> list[str]:
    """All files, hidden ones too."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def raiser(code: int) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


class Recorder:
    """What is asked of the file system, in order: which file or folder is synced, and when a name is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, str]] = []
        fsync, replace, link = os.fsync, os.replace, os.link

        def record_fsync(fd: int) -> None:
            self.calls.append(("sync", self.label(os.readlink(f"/proc/self/fd/{fd}"))))
            fsync(fd)

        def record_replace(source: Path, target: Path) -> None:
            self.calls.append(("name", self.label(target)))
            replace(source, target)

        def record_link(source: Path, target: Path) -> None:
            self.calls.append(("name", self.label(target)))
            link(source, target)

        monkeypatch.setattr(os, "fsync", record_fsync)
        monkeypatch.setattr(os, "replace", record_replace)
        monkeypatch.setattr(os, "link", record_link)

    @staticmethod
    def label(path: str | Path) -> str:
        name = Path(path).name
        return "temporary" if name.startswith(".") else name


@pytest.mark.parametrize("verb", VERBS)
def test_what_can_be_seen_is_on_disk(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    store = LocalStore(tmp_path / "new" / "root")
    getattr(store, verb)("folder/key", b"1")
    # The chain of new folders first, each in the one above it; then the content, the name, and the name on disk.
    chain = [("sync", tmp_path.name), ("sync", "new"), ("sync", "root")]
    each = [("sync", "temporary"), ("name", "key"), ("sync", "folder")]
    assert [call for call in recorder.calls if call in chain + each] == chain + each
    recorder.calls.clear()
    store.put("folder/key", b"2")
    assert recorder.calls == each


@pytest.mark.parametrize("verb", VERBS)
def test_folders_of_other_writers_are_synced_too(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "root" / "folder").mkdir(parents=True)
    recorder = Recorder(monkeypatch)
    getattr(LocalStore(tmp_path / "root"), verb)("folder/key", b"1")
    assert recorder.calls[:2] == [("sync", tmp_path.name), ("sync", "root")]


def test_a_refused_create_syncs_what_it_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    store.put("folder/key", b"1")
    recorder = Recorder(monkeypatch)
    assert store.create("folder/key", b"2") is False
    assert recorder.calls[-1] == ("sync", "folder")


def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "root")
    store.put("folder/key", b"1")
    (tmp_path / "root" / "folder" / "key").unlink()
    (tmp_path / "root" / "folder").rmdir()
    assert list(store.list()) == []
    assert store.create("folder/key", b"2") is True
    assert store.get("folder/key") == b"2"


@pytest.mark.parametrize("first", ["put", "get"])
@pytest.mark.parametrize("is_empty", [False, True], ids=["gone", "an empty folder"])
def test_a_root_that_is_gone_is_not_made_again(first: str, is_empty: bool, tmp_path: Path) -> None:
    """Its file system was unmounted: a new feed must not begin in the folder below."""
    root, away = tmp_path / "root", tmp_path / "away"
    LocalStore(root).put("folder/key", b"1")
    store = LocalStore(root)
    if first == "put":
        store.put("folder/key", b"1")
    assert store.get("folder/key") == b"1"
    root.rename(away)
    if is_empty:
        root.mkdir()
    for call in (
        lambda: store.put("folder/new", b"1"),
        lambda: store.create("folder/new", b"1"),
        lambda: store.get("folder/key"),
        lambda: store.get_range("folder/key", 0, 1),
        lambda: list(store.list()),
        lambda: list(store.list("folder/")),
    ):
        with pytest.raises(StoreError, match="was there and is gone") as caught:
            call()
        assert caught.value.transient
        assert "mounted" in (caught.value.hint or "")
    assert names_below(tmp_path) == ["away/folder/key"]
    if is_empty:
        root.rmdir()
    away.rename(root)
    assert store.get("folder/key") == b"1"
    store.put("folder/new", b"2")


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("folder", ["known", "new"])
@pytest.mark.parametrize("is_empty", [False, True], ids=["gone", "an empty folder"])
def test_a_root_that_goes_during_a_write_is_not_made_again(
    verb: str, folder: str, is_empty: bool, tmp_path: Path
) -> None:
    root, away = tmp_path / "root", tmp_path / "away"

    class MovedStore(LocalStore):
        """Its folder is moved away right after the store has found it."""

        def _require_root(self) -> None:
            super()._require_root()
            if self._root_inode is not None and not away.exists():
                root.rename(away)
                if is_empty:
                    root.mkdir()

    LocalStore(root).put("known/key", b"1")
    store = MovedStore(root)
    assert store.get("known/key") == b"1"
    with pytest.raises(StoreError, match="was there and is gone") as caught:
        getattr(store, verb)(f"{folder}/new", b"2")
    assert caught.value.transient
    assert sorted(path.name for path in tmp_path.iterdir()) == (["away", "root"] if is_empty else ["away"])
    assert not is_empty or not list(root.iterdir()), "nothing is written in its place"
    assert names_below(away) == ["known/key"]


def test_a_root_that_goes_after_a_write_began_is_a_failure_that_may_pass(tmp_path: Path) -> None:
    root, away = tmp_path / "root", tmp_path / "away"

    class MovedStore(LocalStore):
        def _prepare(self, folder: Path) -> None:
            super()._prepare(folder)
            root.rename(away)

    for call in (LocalStore.put, LocalStore.create):
        with pytest.raises(StoreError, match="was there and is gone") as caught:
            call(MovedStore(root), "folder/key", b"1")
        assert caught.value.transient
        away.rename(root)


def test_a_root_that_was_replaced_is_used(tmp_path: Path) -> None:
    """A feed that was restored from a copy."""
    store = LocalStore(tmp_path / "root")
    store.put("folder/key", b"1")
    (tmp_path / "root").rename(tmp_path / "before")
    LocalStore(tmp_path / "root").put("folder/key", b"2")
    assert store.get("folder/key") == b"2"
    with pytest.raises(NotFoundError):
        store.get("folder/other")
    store.put("folder/other", b"3")
    assert [info.key for info in store.list()] == ["folder/key", "folder/other"]


def test_a_new_root_reads_as_empty(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "root")
    for _ in range(2):
        assert list(store.list()) == []
        with pytest.raises(NotFoundError):
            store.get("key")
    store.put("key", b"1")
    assert store.get("key") == b"1"


def test_what_is_not_a_file_is_not_an_object(tmp_path: Path) -> None:
    """To open a FIFO waits for its other end."""
    store = LocalStore(tmp_path)
    store.put("folder/key", b"1")
    os.mkfifo(tmp_path / "folder" / "fifo")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "folder" / "socket"))
        for name in ("fifo", "socket"):
            for call in (
                store.get,
                lambda key: store.get_range(key, 0, 10),
            ):
                with pytest.raises(NotFoundError):
                    call(f"folder/{name}")
        assert [info.key for info in store.list()] == ["folder/key"]


def test_odd_paths(tmp_path: Path) -> None:
    deep = tmp_path / "/".join(["d"] * 200)
    with few_frames():
        LocalStore(deep).put("key", b"1")
        assert LocalStore(deep).get("key") == b"1"
    (tmp_path / "nothing").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    for odd in (tmp_path / "nothing", tmp_path / "loop", tmp_path / ("n" * 300), tmp_path / "/".join(["d" * 200] * 30)):
        for path in (odd, odd / "below"):
            with pytest.raises(StoreError) as caught:
                LocalStore(path).put("key", b"1")
            assert caught.value.hint
    with pytest.raises(InvalidInputError, match="cannot be a path"):
        LocalStore("a\0b")


@pytest.mark.parametrize(
    ("verb", "call"), [("put", "fsync"), ("put", "replace"), ("create", "fsync"), ("create", "link")]
)
def test_a_failure_leaves_what_was_there(verb: str, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    store.put("folder/old", b"old")
    before = names_below(tmp_path)
    monkeypatch.setattr(os, call, raiser(errno.EIO))
    with pytest.raises(StoreError) as caught:
        getattr(store, verb)("folder/old" if verb == "put" else "folder/new", b"new")
    monkeypatch.undo()
    assert not caught.value.transient
    assert "disk" in (caught.value.hint or "")
    assert names_below(tmp_path) == before
    assert store.get("folder/old") == b"old"


def test_a_lost_reply_to_a_link_is_no_conflict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def link_and_ask_again(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", link_and_ask_again)
    store = LocalStore(tmp_path)
    assert store.create("key", b"1") is True
    assert store.create("key", b"1") is False
    assert names_below(tmp_path) == ["key"]


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK])
def test_without_hard_links_a_rename_that_refuses_to_replace(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", raiser(code))
    store = LocalStore(tmp_path)
    won: list[int] = []
    barrier = threading.Barrier(8)

    def race(racer: int) -> None:
        barrier.wait(LONG_S)
        if store.create("key", str(racer).encode()):
            won.append(racer)

    threads = [threading.Thread(target=race, args=[racer]) for racer in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        join(thread)
    assert [store.get("key")] == [str(racer).encode() for racer in won]
    assert names_below(tmp_path) == ["key"]


def test_with_neither_a_create_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", raiser(errno.EPERM))
    monkeypatch.setattr(local, "_RENAME_NOREPLACE", 1 << 20)
    with pytest.raises(StoreError, match="neither hard links nor exclusive renames"):
        LocalStore(tmp_path).create("key", b"1")
    assert names_below(tmp_path) == []


def test_leftovers_of_killed_writers(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    old, young, foreign = ".key.0123456789ab.tmp", ".key.ba9876543210.tmp", ".nfs0001"
    for name in (old, young, foreign):
        (folder / name).write_bytes(b"half")
        age_s = 60.0 if name == young else LEFTOVER_AGE_S + 60
        os.utime(folder / name, (time.time() - age_s,) * 2)
    store = LocalStore(tmp_path)
    assert list(store.list()) == []
    store.put("folder/key", b"1")
    assert [info.key for info in store.list()] == ["folder/key"]
    assert names_below(folder) == sorted([young, foreign, "key"])


def test_strange_files_are_not_listed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a/key", b"1")
    for name in ("a b", "ä", "a/x y", ".DS_Store", "a/~", "lost+found"):
        (tmp_path / name).write_bytes(b"")
    assert [info.key for info in store.list()] == ["a/key"]


def test_a_file_deleted_during_a_listing_is_passed_over(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for key in ("a", "b", "c"):
        store.put(key, b"1")
    listing = store.list()
    assert next(listing).key == "a"
    store.delete("b")
    assert [info.key for info in listing] == ["c"]


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A small file system in memory."""
    if os.geteuid() != 0:
        missing("mounting needs root")
    folder.mkdir()
    done = processes.run(["mount", "-t", "tmpfs", "-o", options, "none", folder])
    if done.returncode != 0:
        missing(f"cannot mount a file system here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        processes.run(["umount", folder], check=True)


@pytest.mark.parametrize("verb", VERBS)
def test_disk_full(verb: str, tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "size=1m") as root:
        store = LocalStore(root / "store")
        store.put("folder/old", b"old")
        with pytest.raises(StoreError, match="No space left") as caught:
            getattr(store, verb)("folder/new", bytes(2_000_000))
        assert not caught.value.transient
        assert "free some space" in (caught.value.hint or "")
        assert names_below(root) == ["store/folder/old"]
        assert store.get("folder/old") == b"old"
        getattr(store, verb)("folder/new", bytes(1000))


@pytest.mark.parametrize("verb", [*VERBS, "delete"])
def test_read_only(verb: str, tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "size=1m") as root:
        store = LocalStore(root / "store")
        store.put("folder/old", b"old")
        processes.run(["mount", "-o", "remount,ro", root], check=True)
        for reader in (store, LocalStore(root / "store")):
            with pytest.raises(StoreError, match="read-only") as caught:
                getattr(reader, verb)("folder/old", *([b"new"] if verb != "delete" else []))
            assert not caught.value.transient
            assert reader.get("folder/old") == b"old"
        with pytest.raises(StoreError, match="read-only"):
            LocalStore(root / "other").put("key", b"1")


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which only root can")
def test_no_permission() -> None:
    # Not below tmp_path, which others cannot enter.
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        check_no_permission(Path(name) / "store")


def check_no_permission(root: Path) -> None:
    store = LocalStore(root)
    store.put("folder/old", b"old")
    store.put("secret/old", b"old")
    (root / "secret").chmod(0o700)
    calls = [
        lambda: store.put("folder/old", b"new"),
        lambda: store.create("folder/new", b"new"),
        lambda: LocalStore(root).create("other/new", b"new"),
        lambda: store.delete("folder/old"),
        lambda: store.get("secret/old"),
        lambda: list(store.list("secret/")),
    ]
    os.seteuid(UNPRIVILEGED_USER)
    try:
        assert store.get("folder/old") == b"old"
        for call in calls:
            with pytest.raises(StoreError, match="Permission denied") as caught:
                call()
            assert not caught.value.transient
            assert "owner" in (caught.value.hint or "")
    finally:
        os.seteuid(0)
    assert names_below(root) == ["folder/old", "secret/old"]


def test_something_else_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = LocalStore(tmp_path)
    store.put("folder/key", b"1")
    for call in (
        lambda: LocalStore(tmp_path / "file").put("key", b"1"),
        lambda: LocalStore(tmp_path / "file" / "store").create("key", b"1"),
        lambda: store.put("folder/key/below", b"1"),
        lambda: store.put("folder", b"1"),
    ):
        with pytest.raises(StoreError, match="another place") as caught:
            call()
        assert not caught.value.transient
    assert store.create("folder", b"1") is False
    for key in ("folder", "file/below", "folder/key/below"):
        with pytest.raises(NotFoundError):
            store.get(key)
        store.delete(key)
    assert [info.key for info in store.list()] == ["file", "folder/key"]
    assert list(LocalStore(tmp_path / "file").list()) == []


PASSING = (
    "EAGAIN", "EBUSY", "ECONNREFUSED", "ECONNRESET", "EHOSTDOWN", "EHOSTUNREACH", "EIO", "EMFILE", "ENETDOWN",
    "ENETUNREACH", "ENFILE", "ENOBUFS", "ENOLCK", "ENOMEM", "ENOTCONN", "ESTALE", "ETIMEDOUT",
)  # fmt: skip
PASSING_FOR_WRITES = ("EAGAIN", "EBUSY", "EHOSTDOWN", "EMFILE", "ENFILE", "ESTALE", "ETIMEDOUT")
LASTING = ("EACCES", "EDQUOT", "EFBIG", "EINVAL", "ENAMETOOLONG", "ENOSPC", "EPERM", "EROFS")


@pytest.mark.parametrize(
    ("code", "transient"),
    [*((getattr(errno, name), True) for name in PASSING), *((getattr(errno, name), False) for name in LASTING)],
    ids=[*PASSING, *LASTING],
)
def test_errors_of_the_file_system(code: int, transient: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    store.put("folder/key", b"1")
    monkeypatch.setattr(os, "fsync", raiser(code))
    monkeypatch.setattr(os, "pread", raiser(code))
    monkeypatch.setattr(os, "scandir", raiser(code))
    found: list[bool] = []
    for call in (
        lambda: store.put("folder/key", b"2"),
        lambda: store.get_range("folder/key", 0, 1),
        lambda: list(store.list()),
    ):
        with pytest.raises(StoreError) as caught:
            call()
        assert os.strerror(code) in str(caught.value)
        assert caught.value.hint
        found.append(caught.value.transient)
    # What a sync that failed has left on disk is not known: only a read can be repeated in any case.
    assert found == [code in {getattr(errno, name) for name in PASSING_FOR_WRITES}, transient, transient]
