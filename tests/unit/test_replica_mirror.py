"""The mirror: what survives a restart, what does not pass for a version, and its folder in shared memory."""

import fcntl
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import LONG_S, processes
from support.feeds import Feed, same_weights
from support.replicas import TorchTarget, follower, long_feed

from deltasync import blocks
from deltasync.checkpoint import create_file, map_files, open_checkpoint
from deltasync.errors import CorruptError, FormatError, InvalidInputError
from deltasync.feed.log import Log
from deltasync.feed.plan import Edge
from deltasync.feed.route import Route
from deltasync.files import locked
from deltasync.format import keys, limits
from deltasync.format.manifest import Manifest
from deltasync.format.payload import Block
from deltasync.format.sealed import sealed
from deltasync.format.weights import Changes, Weights
from deltasync.replica import mirror
from deltasync.replica.mirror import MappedState, MirrorRecord, memory_folder
from deltasync.state import Applied, State
from deltasync.store.patient import WrapperStore
from deltasync.store.protocol import Store
from deltasync.trainer import versions as anchors

SHA = "ab" * 32


def fill(mirror: State, weights: Weights) -> None:
    assert mirror.weights is not None
    fill_weights(mirror.weights, weights)


def fill_weights(target: Weights, weights: Weights) -> None:
    for mine, other in zip(target.arrays, weights.arrays, strict=True):
        mine[:] = other


def advance(mirror: State, feed: Feed, version: int, applied: Applied | None = None) -> None:
    mirror.advance(Route(feed.log, feed.log.read(version)), applied)


def fail_to_write(mirror: State, feed: Feed, version: int) -> None:
    """Begin to overwrite the mirror with a version, and fail."""

    def broken() -> Iterator[Changes]:
        assert mirror.version is None
        raise KeyError
        yield

    with pytest.raises(KeyError):
        mirror.apply(broken(), feed.log.read(version))


def mirror_at(feed: Feed, version: int, path: Path | None) -> State:
    mirror = State() if path is None else MappedState(path)
    advance(mirror, feed, version)
    return mirror


def reopened(path: Path, feed: Feed) -> MappedState:
    mirror = MappedState(path)
    mirror.open(feed.log, Applied())
    assert mirror.weights is not None
    return mirror


@pytest.mark.parametrize("is_mapped", [False, True], ids=["memory", "mapped"])
def test_a_mirror_is_of_no_version_while_it_is_written(is_mapped: bool, tmp_path: Path) -> None:
    feed = Feed.of(2)
    mirror = mirror_at(feed, 0, tmp_path / "mirror" if is_mapped else None)
    assert (mirror.version, mirror.is_sound()) == (0, True)
    fail_to_write(mirror, feed, 1)
    assert (mirror.version, mirror.digest) == (None, None)


def test_what_was_applied() -> None:
    feed = long_feed(4)
    first, second = Applied(), Applied(limit=10**9, start=0, changes=[])
    mirror = State()
    advance(mirror, feed, 0, first)
    assert (first.start, first.changes, first.edges) == (None, None, ["anchor"])
    for version in (1, 2):
        advance(mirror, feed, version, second)
    assert (second.edges, bool(second.changes)) == (["delta", "delta"], True)
    assert second.changed == sum(feed.log.read(version).changed or 0 for version in (1, 2))


def test_too_many_changes_are_given_up() -> None:
    feed = long_feed(4)
    mirror, applied = mirror_at(feed, 0, None), Applied(limit=feed.log.read(1).changed or 0, start=0, changes=[])
    advance(mirror, feed, 1, applied)
    assert applied.changes
    advance(mirror, feed, 2, applied)
    assert applied.changes is None


def test_a_write_that_fails_loses_the_collected_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They lead to a version that the mirror does not hold: only all weights of a later one will do."""
    feed = long_feed(4)
    mirror, applied = mirror_at(feed, 1, None), Applied(limit=10**9, start=1, changes=[])
    advance(mirror, feed, 2, applied)
    with monkeypatch.context() as patch:
        patch.setattr(blocks, "overwrite_all", lambda target, changes: {}["missing"])
        with pytest.raises(KeyError):
            advance(mirror, feed, 3, applied)
    advance(mirror, feed, 3, applied)
    assert mirror.version == 3
    assert applied.changes is None


def test_a_file_is_found_again_at_its_version(tmp_path: Path) -> None:
    feed, path = Feed.of(3), tmp_path / "mirror"
    mirror_at(feed, 1, path)
    again = reopened(path, feed)
    assert (again.version, again.digest) == (1, feed.log.read(1).digest)
    assert again.weights is not None
    assert same_weights(again.weights, feed.states[1])


def test_a_crash_after_the_last_write_loses_nothing(tmp_path: Path) -> None:
    """The record names the version before and the one being written: the digest decides which it is."""
    feed, path = Feed.of(3), tmp_path / "mirror"
    mirror = mirror_at(feed, 1, path)
    fail_to_write(mirror, feed, 2)
    assert reopened(path, feed).version == 1
    fill(mirror, feed.states[2])
    assert reopened(path, feed).version == 2


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


SPOILED = {
    "a flipped bit": _flip,
    "no record": lambda path: path.with_name("mirror.json").unlink(),
    "a record that was altered": lambda path: path.with_name("mirror.json").write_bytes(
        MirrorRecord(1).to_bytes().replace(b"1", b"2")
    ),
    "a record that a power cut left empty": lambda path: path.with_name("mirror.json").write_bytes(b""),
    "a record that a power cut left as zeros": lambda path: path.with_name("mirror.json").write_bytes(bytes(100)),
    "a record of another version": lambda path: path.with_name("mirror.json").write_bytes(MirrorRecord(0).to_bytes()),
    "a record of a version that is not there": lambda path: path.with_name("mirror.json").write_bytes(
        MirrorRecord(77).to_bytes()
    ),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED.keys())
def test_what_is_not_proved_is_of_no_version(spoil: object, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    feed, path = Feed.of(2), tmp_path / "mirror"
    mirror_at(feed, 1, path)
    assert callable(spoil)
    spoil(path)
    with caplog.at_level(logging.WARNING):
        assert reopened(path, feed).version is None
    assert "rebuilding it" in caplog.text


def test_no_mirror_at_all(tmp_path: Path) -> None:
    mirror = MappedState(tmp_path / "mirror")
    mirror.open(Feed.of(1).log, Applied())
    assert (mirror.weights, mirror.version) == (None, None)


def test_a_mirror_that_is_cut_off_is_replaced(tmp_path: Path) -> None:
    feed, path = Feed.of(1), tmp_path / "mirror"
    mirror_at(feed, 0, path)
    path.write_bytes(path.read_bytes()[:-5])
    path.with_name("mirror.json").unlink()
    again = mirror_at(feed, 0, path)
    assert again.weights is not None
    assert same_weights(again.weights, feed.states[0])


# What is not ours


def a_checkpoint(feed: Feed, path: Path) -> None:
    """Of the very layout of the feed."""
    create_file(path, feed.states[0].layout.tensors)


FOREIGN: dict[str, Callable[[Feed, Path], object]] = {
    "a checkpoint": a_checkpoint,
    "an empty file": lambda feed, path: path.touch(),
    "other bytes": lambda feed, path: path.write_bytes(b"\xff" * 100),
    "a folder": lambda feed, path: path.mkdir(),
    "a FIFO": lambda feed, path: os.mkfifo(path),
    "a link": lambda feed, path: (path.with_name("other").touch(), path.symlink_to("other")),
    "a link to nothing": lambda feed, path: path.symlink_to("nothing"),
    "a file in place of the record": lambda feed, path: path.with_name("mirror.json").write_bytes(b'{"version":1}'),
    "the record of a feed": lambda feed, path: path.with_name("mirror.json").write_bytes(feed.store.get(keys.FEED)),
    "a link in place of the record": lambda feed, path: path.with_name("mirror.json").symlink_to("nothing"),
    "a folder in place of the record": lambda feed, path: path.with_name("mirror.json").mkdir(),
    "a file in place of the lock": lambda feed, path: path.with_name("mirror.lock").write_bytes(b"x"),
}


@pytest.mark.parametrize("make", FOREIGN.values(), ids=FOREIGN.keys())
def test_what_is_not_a_mirror_stays_as_it_is(make: Callable[[Feed, Path], object], tmp_path: Path) -> None:
    feed, path = Feed.of(1), tmp_path / "mirror"
    make(feed, path)
    before = contents(tmp_path)
    with follower(feed.store, TorchTarget(feed.states[0].layout), mirror=path) as replica:
        with pytest.raises(InvalidInputError, match=r"not a mirror|not the record|not the lock") as caught:
            replica.advance()
        assert caught.value.hint
    assert contents(tmp_path) == before


def contents(folder: Path) -> dict[str, object]:
    found = sorted(folder.iterdir())
    return {p.name: p.read_bytes() if p.is_file() else (p.lstat().st_mode, p.lstat().st_ino) for p in found}


def test_files_of_the_user_beside_a_mirror(tmp_path: Path) -> None:
    """The record once went through FILE.tmp."""
    feed, path = Feed.of(2), tmp_path / "mirror"
    path.with_name("mirror.tmp").write_text("precious")
    mirror_at(feed, 1, path)
    assert path.with_name("mirror.tmp").read_text() == "precious"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mirror", "mirror.json", "mirror.tmp"]


def test_what_killed_processes_began_to_write_is_removed(tmp_path: Path) -> None:
    """A mirror and a record that had not got their names yet. Files of the user stay, whatever their names."""
    feed, path = Feed.of(2), tmp_path / "mirror"
    mirror_at(feed, 0, path)
    ours = path.read_bytes()
    for number, data in enumerate((ours, ours[:100], b"")):
        (tmp_path / f".mirror.{number:012x}.tmp").write_bytes(data)
    for number, data in enumerate((MirrorRecord(0).to_bytes(), b"")):
        (tmp_path / f".mirror.json.{number:012x}.tmp").write_bytes(data)
    for name in (
        ".mirror.00000000000a.tmp",
        ".mirror.json.00000000000a.tmp",
        ".mirror.1.tmp",
        ".other.000000000001.tmp",
    ):
        (tmp_path / name).write_text("precious")
    (tmp_path / ".mirror.00000000000b.tmp").symlink_to(path)
    assert reopened(path, feed).version == 0
    left = {".mirror.00000000000a.tmp", ".mirror.json.00000000000a.tmp", ".mirror.1.tmp", ".other.000000000001.tmp"}
    assert {p.name for p in tmp_path.iterdir()} == left | {".mirror.00000000000b.tmp", "mirror", "mirror.json"}
    assert path.read_bytes() == ours


def test_a_mirror_that_lost_its_mark_is_used(tmp_path: Path) -> None:
    """It has a record, which is mark enough."""
    feed, path = Feed.of(2), tmp_path / "mirror"
    weights = feed.states[1]
    create_file(path, sorted(weights.layout.tensors, key=lambda spec: -spec.dtype.width))
    fill_weights(map_files(open_checkpoint(path).files, writable=True).weights, weights)
    path.with_name("mirror.json").write_bytes(MirrorRecord(1).to_bytes())
    assert reopened(path, feed).version == 1
    path.with_name("mirror.json").unlink()
    with pytest.raises(InvalidInputError, match="not a mirror"):
        MappedState(path).open(feed.log, Applied())


def test_the_record_names_the_payloads_of_an_interrupted_anchor(tmp_path: Path) -> None:
    feed, path = Feed.of(1), tmp_path / "mirror"
    edge = Edge(keys.version_key(0), feed.log.read(0))
    sha256 = edge.manifest.payloads[0].sha256
    mirror = mirror_at(feed, 0, path)
    assert mirror.weights is not None
    mirror.weights.arrays[0][:] ^= 1
    path.with_name("mirror.json").write_bytes(MirrorRecord(None, 0, frozenset({sha256})).to_bytes())
    again = reopened(path, feed)
    assert (again.version, again.written(edge)) == (None, {sha256})
    again.discard(Applied())
    again = reopened(path, feed)
    assert (again.version, again.written(edge)) == (None, frozenset())


RECORDS = {
    "another format": (lambda fields: fields | {"format": "deltasync/9"}, FormatError),
    "an unknown field": (lambda fields: fields | {"critical": 1}, None),
    "a version that is no count": (lambda fields: fields | {"version": -1}, CorruptError),
    "applied that is no list": (lambda fields: fields | {"applied": "x"}, CorruptError),
    "applied that is no hash": (lambda fields: fields | {"applied": ["x"]}, CorruptError),
}


@pytest.mark.parametrize(("change", "error"), RECORDS.values(), ids=RECORDS.keys())
def test_records(change: object, error: type[Exception] | None) -> None:
    record = MirrorRecord(3, 4, frozenset({SHA}))
    assert MirrorRecord.from_bytes(record.to_bytes()) == record
    assert callable(change)
    fields = change({"format": "deltasync/1", "version": 3, "writing": 4, "applied": [SHA]})
    if error is None:
        assert MirrorRecord.from_bytes(sealed(fields)) == record
    else:
        with pytest.raises(error):
            MirrorRecord.from_bytes(sealed(fields))


def test_one_process_for_each_file(tmp_path: Path) -> None:
    path = tmp_path / "mirror"
    with locked(path), pytest.raises(InvalidInputError, match="another process") as caught, locked(path):
        pass
    assert caught.value.hint is not None
    with locked(path):
        pass
    with pytest.raises(InvalidInputError, match="not a folder"), locked(tmp_path / "nowhere" / "mirror"):
        pass


class LateStore(WrapperStore):
    """Gives the last payload of a manifest only once `is_ready` is set; notes if that did not happen in time."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        super().__init__(store)
        self.is_ready = threading.Event()
        self.was_in_time = True
        self._late = keys.payload_key(manifest.payloads[-1].sha256)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        if key == self._late and not self.is_ready.wait(LONG_S):
            self.was_in_time = False
        return super().get_range(key, offset, length)


def test_a_delta_is_decoded_while_its_last_payload_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of it is written before all of it has come."""
    feed = Feed.of(1)
    manifest = feed.delta(ranks=3)
    mirror = mirror_at(feed, 0, None)
    store = LateStore(feed.store, manifest)
    assert mirror.weights is not None
    before = Weights(mirror.weights.layout, tuple(array.copy() for array in mirror.weights.arrays))
    decode = blocks.decode_block

    def noted(old: Weights, block: Block, *, relative: bool) -> list[Changes]:
        decoded = decode(old, block, relative=relative)
        assert store.is_ready.is_set() or same_weights(old, before)
        store.is_ready.set()
        return decoded

    monkeypatch.setattr(blocks, "decode_block", noted)
    mirror.advance(Route(Log(store), manifest))
    assert store.was_in_time
    assert same_weights(mirror.weights, feed.states[1])


@pytest.mark.parametrize("is_mapped", [False, True], ids=["memory", "mapped"])
def test_an_anchor_is_written_while_its_last_shard_arrives(
    is_mapped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mirror is of no version until all of it has come and was proved."""
    monkeypatch.setattr(limits, "PLANES_ELEMENTS", 256)
    monkeypatch.setattr(anchors, "SHARD_ELEMENTS", 512)
    feed = Feed.of(1)
    manifest = feed.log.read(0)
    assert len(manifest.payloads) > 2
    store = LateStore(feed.store, manifest)
    mirror = MappedState(tmp_path / "mirror") if is_mapped else State()
    restore_block, versions = blocks.restore_block, []

    def noted(weights: Weights, block: Block) -> None:
        restore_block(weights, block)
        versions.append(mirror.version)
        store.is_ready.set()

    monkeypatch.setattr(blocks, "restore_block", noted)
    digest = blocks.digest
    monkeypatch.setattr(blocks, "digest", lambda weights, **how: (versions.append(mirror.version), digest(weights))[1])
    mirror.advance(Route(Log(store), manifest))
    assert store.was_in_time
    assert set(versions) == {None}
    assert mirror.version == 0
    assert mirror.weights is not None
    assert same_weights(mirror.weights, feed.states[0])


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
