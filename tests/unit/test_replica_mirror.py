"""The mirror: what survives a restart, and what does not pass for a version."""

import logging
from contextlib import suppress
from pathlib import Path

import pytest
from support.feeds import Feed, same_weights

from deltasync.errors import CorruptError, FormatError, InvalidInputError
from deltasync.files import locked
from deltasync.format.sealed import sealed
from deltasync.format.weights import Weights
from deltasync.replica.mirror import Mirror, MirrorRecord

SHA = "ab" * 32


def fill(mirror: Mirror, weights: Weights) -> None:
    for mine, other in zip(mirror.weights.arrays, weights.arrays, strict=True):
        mine[:] = other


def mirror_at(feed: Feed, version: int, path: Path | None) -> Mirror:
    mirror = Mirror.new(feed.states[version].layout, path)
    with mirror.becoming(version, feed.log.read(version).digest):
        fill(mirror, feed.states[version])
    return mirror


def reopened(path: Path, feed: Feed) -> Mirror:
    found = Mirror.reopened(path, feed.log)
    assert found is not None
    return found


@pytest.mark.parametrize("is_mapped", [False, True], ids=["memory", "mapped"])
def test_a_mirror_is_of_no_version_while_it_is_written(is_mapped: bool, tmp_path: Path) -> None:
    feed = Feed.of(2)
    mirror = mirror_at(feed, 0, tmp_path / "mirror" if is_mapped else None)
    assert (mirror.version, mirror.is_sound()) == (0, True)
    with suppress(KeyError), mirror.becoming(1, feed.log.read(1).digest):
        assert mirror.version is None
        raise KeyError
    assert (mirror.version, mirror.digest, mirror.torn_for) == (None, None, 1)


def test_a_file_is_found_again_at_its_version(tmp_path: Path) -> None:
    feed, path = Feed.of(3), tmp_path / "mirror"
    mirror_at(feed, 1, path)
    again = reopened(path, feed)
    assert (again.version, again.digest) == (1, feed.log.read(1).digest)
    assert same_weights(again.weights, feed.states[1])


def test_a_crash_after_the_last_write_loses_nothing(tmp_path: Path) -> None:
    """The record names the version before and the one being written: the digest tells which it is."""
    feed, path = Feed.of(3), tmp_path / "mirror"
    mirror = mirror_at(feed, 1, path)
    with suppress(KeyError), mirror.becoming(2, feed.log.read(2).digest):
        raise KeyError
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
    "a record that was altered": lambda path: path.with_name("mirror.json").write_bytes(b'{"version":1}'),
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
    assert "built anew" in caplog.text


@pytest.mark.parametrize("content", [None, b"", b"\xff" * 100], ids=["missing", "empty", "other"])
def test_no_mirror_at_all(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "mirror").write_bytes(content)
    assert Mirror.reopened(tmp_path / "mirror", Feed.of(1).log) is None


def test_an_interrupted_anchor_is_noted(tmp_path: Path) -> None:
    feed, path = Feed.of(2), tmp_path / "mirror"
    mirror = mirror_at(feed, 0, path)
    with suppress(KeyError), mirror.becoming(1, feed.log.read(1).digest):
        mirror.weights.arrays[0][:] = 0
        mirror.note_applied(SHA)
        raise KeyError
    again = reopened(path, feed)
    assert (again.version, again.torn_for, again.applied) == (None, 1, {SHA})
    again.give_up()
    again = reopened(path, feed)
    assert (again.version, again.torn_for, again.applied) == (None, None, frozenset())


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
