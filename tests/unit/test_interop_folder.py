"""Folders of deltas, written and read by `deltasync.interop`; other people's code is in tests/e2e/test_interop.py."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from support import LONG_S
from support.changes import by_tensor
from support.helpers import State, changed, safetensors_bytes, same_bits, state, write_sharded

import deltasync
from deltasync.checkpoint import INDEX_NAME, open_checkpoint
from deltasync.errors import CorruptError, DeltasyncError, FormatError, InvalidInputError, MismatchError
from deltasync.feed.log import Log
from deltasync.format.weights import Weights
from deltasync.interop import Exporter, Importer
from deltasync.interop.folder import (
    ChecksumFormat,
    Encoding,
    checksum,
    decode_folder,
    open_folder,
    tensor_deltas,
    write_files,
)
from deltasync.store.memory import MemoryStore
from deltasync.trainer.capture import capture

ENCODINGS: tuple[Encoding, ...] = ("xor", "overwrite")
CHECKSUMS: tuple[ChecksumFormat, ...] = ("adler32", "xxh3-128", "blake3")


def states(count: int) -> list[State]:
    """One step apart, the second without any change."""
    found = [state(), state()]
    while len(found) < count:
        found.append(changed(found[-1], seed=len(found)))
    return found[:count]


def write_delta(
    root: Path, version: int, old: State, new: State, encoding: Encoding = "xor", sums: ChecksumFormat = "adler32"
) -> Path:
    """A folder as slime writes it."""
    path = root / f"weight_v{version:06d}"
    path.mkdir(parents=True)
    before, after = Weights.of(old), Weights.of(new)
    write_files(
        path,
        tensor_deltas(after, capture(after, before)),
        version=version,
        base_version=version - 1,
        encoding=encoding,
        checksum_format=sums,
        shard_bytes=200,
    )
    return path


def import_all(importer: Importer) -> list[int]:
    versions = []
    while (publication := importer.advance()) is not None:
        versions.append(publication.wait(LONG_S).version)
    return versions


def restored(feed: Any, out: Path, version: int | None = None) -> State:
    shutil.rmtree(out, ignore_errors=True)
    deltasync.restore(feed, out, version=version, files=False)
    return read(out)


def read(path: Path) -> State:
    """The bits of a checkpoint, with the types of `state`."""
    weights, like = open_checkpoint(path).weights, state()
    return {
        spec.name: array.copy().view(like[spec.name].dtype).reshape(like[spec.name].shape)
        for spec, array in zip(weights.layout.tensors, weights.arrays, strict=True)
    }


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("sums", CHECKSUMS)
def test_folders_become_versions_bit_by_bit(tmp_path: Path, encoding: Encoding, sums: ChecksumFormat) -> None:
    steps, store = states(5), MemoryStore()
    write_sharded(tmp_path / "base", steps[0])
    for i in range(1, 5):
        write_delta(tmp_path / "run", i, steps[i - 1], steps[i], encoding, sums)
    with Importer(tmp_path / "run", store, base=tmp_path / "base") as importer:
        assert import_all(importer) == [0, 1, 2, 3, 4]
        assert importer.version == 4
    for i, expected in enumerate(steps):
        assert same_bits(restored(store, tmp_path / "out", i), expected)
        assert Log(store).read(i).step == i
    assert Log(store).read(1).changed == 0
    assert deltasync.verify(store, deep=True).is_clean


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_what_is_exported_imports_to_the_same_bits(tmp_path: Path, encoding: Encoding) -> None:
    steps, store, copy = states(5), MemoryStore(), MemoryStore()
    for i, tensors in enumerate(steps):
        write_sharded(tmp_path / f"c{i}", tensors)
        deltasync.publish(store, tmp_path / f"c{i}")
    folders = tmp_path / "folders"
    with Exporter(store, folders, encoding=encoding) as exporter:
        exported = [exporter.advance() for _ in range(6)]
    assert [None if e is None else (e.version, e.base_version) for e in exported] == [
        (0, None), (1, 0), (2, 1), (3, 2), (4, 3), None,
    ]  # fmt: skip
    assert same_bits(read(folders / "weight_v000000"), steps[0])
    assert (folders / "weight_v000000" / "config.json").exists()
    with Importer(folders, copy, base=folders / "weight_v000000") as importer:
        assert import_all(importer) == [0, 1, 2, 3, 4]
    assert [Log(copy).read(i).digest for i in range(5)] == [Log(store).read(i).digest for i in range(5)]


def test_an_import_continues_where_another_process_ended(tmp_path: Path) -> None:
    steps, store, run = states(5), MemoryStore(), tmp_path / "run"
    write_sharded(tmp_path / "base", steps[0])
    for i in (1, 2):
        write_delta(run, i, steps[i - 1], steps[i])
    with Importer(run, store, base=tmp_path / "base") as importer:
        assert import_all(importer) == [0, 1, 2]
    for i in (3, 4):
        write_delta(run, i, steps[i - 1], steps[i])
    # What was imported may be gone, and the base is not needed again.
    shutil.rmtree(run / "weight_v000001")
    with Importer(run, store) as importer:
        assert import_all(importer) == [3, 4]
    assert same_bits(restored(store, tmp_path / "out"), steps[4])


def test_a_trainer_that_begins_again_needs_a_restart(tmp_path: Path) -> None:
    steps, store, run = states(5), MemoryStore(), tmp_path / "run"
    write_sharded(tmp_path / "base", steps[0])
    for i in (1, 2):
        write_delta(run, i, steps[i - 1], steps[i])
    with Importer(run, store, base=tmp_path / "base") as importer:
        import_all(importer)
    shutil.rmtree(run)
    other = changed(steps[0], seed=99)
    write_delta(run, 1, steps[0], other)
    with pytest.raises(MismatchError, match="--restart"), Importer(run, store) as importer:
        importer.advance()
    write_delta(run, 2, other, steps[4])
    with pytest.raises(MismatchError, match="not the folder that was imported"), Importer(run, store) as importer:
        importer.advance()
    with Importer(run, store, base=tmp_path / "base", restart=True) as importer:
        assert import_all(importer) == [3, 4, 5]
    for version, expected in ((2, steps[2]), (3, steps[0]), (4, other), (5, steps[4])):
        assert same_bits(restored(store, tmp_path / "out", version), expected)


def test_a_folder_may_be_a_whole_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, store, run = states(4), MemoryStore(), tmp_path / "run"
    write_sharded(run / "weight_v000001", steps[0])
    write_delta(run, 2, steps[0], steps[2])
    write_sharded(run / "weight_v000004", steps[3])
    with Importer(run, store) as importer:
        assert importer.advance() is None
        assert "may still be written" in str(importer.waiting_for)
        monkeypatch.setattr(Importer, "_unchanged_s", lambda *_: 60.0)
        assert import_all(importer) == [0, 1, 2]
    for version, expected in enumerate((steps[0], steps[2], steps[3])):
        assert same_bits(restored(store, tmp_path / "out", version), expected)


def test_a_folder_that_is_not_complete_is_waited_for(tmp_path: Path) -> None:
    steps, store, run = states(3), MemoryStore(), tmp_path / "run"
    write_sharded(tmp_path / "base", steps[0])
    written = write_delta(tmp_path / "elsewhere", 1, steps[0], steps[2])
    partial = run / written.name
    partial.mkdir(parents=True)
    with Importer(run, store, base=tmp_path / "base") as importer:
        assert import_all(importer) == [0]
        files = sorted(written.iterdir(), key=lambda path: path.name == INDEX_NAME)
        for missing in (INDEX_NAME, files[0].name):
            for file in files:
                if file.name != missing:
                    shutil.copy(file, partial)
            assert importer.advance() is None
            assert missing in str(importer.waiting_for)
            (partial / INDEX_NAME).unlink(missing_ok=True)
            (partial / files[0].name).unlink(missing_ok=True)
        for file in files:
            shutil.copy(file, partial)
        assert import_all(importer) == [1]
    assert same_bits(restored(store, tmp_path / "out"), steps[2])


# What is refused


def edit_index(folder: Path, **metadata: Any) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    index["metadata"] |= metadata
    (folder / INDEX_NAME).write_text(json.dumps(index))


def edit_map(folder: Path, weight_map: dict[str, str]) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    (folder / INDEX_NAME).write_text(json.dumps({**index, "weight_map": weight_map}))


def replace_tensor(folder: Path, data: bytes, name: str = "embed", sums: str | None = None) -> None:
    """One file with one tensor in place of all others."""
    for file in folder.glob("*.safetensors"):
        file.unlink()
    header = {"__metadata__": {} if sums == "" else {name: sums or "00000000"}}
    header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}
    text = json.dumps(header).encode()
    (folder / "one.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    edit_map(folder, {name: "one.safetensors"})


def flip_checksum(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[-1]
    data = file.read_bytes()
    at = data.index(b'":"', data.index(b"__metadata__")) + 3
    file.write_bytes(data[:at] + (b"0" if data[at : at + 1] != b"0" else b"1") + data[at + 1 :])


def truncate(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:-1])


def compressed(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


def overwrite_positions(folder: Path, *, count: int) -> None:
    """Positions that do not ascend, in a folder that says that it has `count` of them."""
    positions = np.array([3, 2], "<u4").tobytes() + b"\1\2"
    replace_tensor(folder, compressed(count.to_bytes(4, "little") + positions))
    edit_index(folder, delta_encoding="overwrite")


def name_in_wrong_file(folder: Path) -> None:
    edit_map(folder, {"zzz": min(folder.glob("*.safetensors")).name})


def floats(folder: Path) -> None:
    (folder / "one.safetensors").write_bytes(safetensors_bytes({"embed": np.zeros(2, np.float32)}))
    edit_map(folder, {"embed": "one.safetensors"})


EMBED_BYTES = 64 * 32 * 2

REFUSED: dict[str, tuple[Callable[[Path], object], type[DeltasyncError], str]] = {
    "wrong checksum": (flip_checksum, MismatchError, "folder.checksum"),
    "no checksum": (
        lambda f: replace_tensor(f, compressed(bytes(EMBED_BYTES)), sums=""),
        CorruptError,
        "folder.checksum",
    ),
    "cut file": (truncate, CorruptError, "safetensors.truncated"),
    "another base": (lambda f: edit_index(f, base_version="000000"), MismatchError, "folder.order"),
    "another version": (lambda f: edit_index(f, version="000009"), MismatchError, "folder.version"),
    "backwards": (lambda f: edit_index(f, base_version="000002"), MismatchError, "folder.version"),
    "version is no number": (lambda f: edit_index(f, version="run-v000002"), FormatError, "folder.version"),
    "unknown encoding": (lambda f: edit_index(f, delta_encoding="xor2"), FormatError, "folder.delta_encoding"),
    "other compression": (lambda f: edit_index(f, compression_format="lz4"), FormatError, "folder.compression_format"),
    "unknown checksum": (lambda f: edit_index(f, checksum_format="md5"), FormatError, "folder.checksum_format"),
    "another checksum": (lambda f: edit_index(f, checksum_format="blake3"), MismatchError, "folder.checksum"),
    "other tensors": (lambda f: replace_tensor(f, compressed(b"x"), name="other"), MismatchError, "folder.layout"),
    "too short": (lambda f: replace_tensor(f, compressed(b"x")), CorruptError, "folder.size"),
    "too long": (lambda f: replace_tensor(f, compressed(bytes(EMBED_BYTES + 1))), CorruptError, "folder.size"),
    "not zstd": (lambda f: replace_tensor(f, b"plain bytes"), CorruptError, "folder.zstd"),
    "more after it": (lambda f: replace_tensor(f, compressed(bytes(EMBED_BYTES)) + b"x"), CorruptError, "folder.zstd"),
    "bad positions": (lambda f: overwrite_positions(f, count=2), CorruptError, "folder.positions"),
    "bad count": (lambda f: overwrite_positions(f, count=9), CorruptError, "folder.size"),
    "file elsewhere": (lambda f: edit_map(f, {"embed": "../x.safetensors"}), CorruptError, "folder.index"),
    "tensor not in its file": (name_in_wrong_file, CorruptError, "folder.tensor"),
    "index is no JSON": (lambda f: (f / INDEX_NAME).write_text("{"), CorruptError, "folder.json"),
    "tensors that are no bytes": (floats, CorruptError, "folder.tensor"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_folder_is_refused_before_anything_is_published(tmp_path: Path, case: str) -> None:
    steps, store, run = states(4), MemoryStore(), tmp_path / "run"
    write_sharded(tmp_path / "base", steps[0])
    write_delta(run, 1, steps[0], steps[2])
    damage, kind, rule = REFUSED[case]
    damaged = write_delta(run, 2, steps[2], steps[3])
    damage(damaged)
    with Importer(run, store, base=tmp_path / "base") as importer:
        assert [importer.advance().wait(LONG_S).version for _ in range(2)] == [0, 1]  # type: ignore[union-attr]
        objects = {item.key for item in store.list("")}
        with pytest.raises(kind) as error:
            importer.advance()
        assert error.value.rule == rule
        assert type(error.value) is kind
        assert {item.key for item in store.list("")} == objects
        # The same importer takes the folder once it is whole.
        shutil.rmtree(damaged)
        write_delta(run, 2, steps[2], steps[3])
        assert import_all(importer) == [2]
    assert same_bits(restored(store, tmp_path / "out"), steps[3])


def test_weights_that_are_not_those_of_the_trainer_fail_the_checksums(tmp_path: Path) -> None:
    steps, store, run = states(4), MemoryStore(), tmp_path / "run"
    write_sharded(tmp_path / "base", steps[0])
    write_delta(run, 1, steps[2], steps[3])
    with Importer(run, store, base=tmp_path / "base") as importer:
        importer.advance()
        with pytest.raises(MismatchError, match="began with other weights"):
            importer.advance()
    assert Log(store).require_head().version == 0


def test_a_gap_and_a_missing_base_are_refused(tmp_path: Path) -> None:
    steps, run = states(4), tmp_path / "run"
    write_sharded(tmp_path / "base", steps[0])
    write_delta(run, 2, steps[2], steps[3])
    with Importer(run, MemoryStore()) as importer, pytest.raises(MismatchError, match="--base CHECKPOINT"):
        importer.advance()
    with Importer(run, MemoryStore(), base=tmp_path / "base") as importer:
        importer.advance()
        with pytest.raises(MismatchError, match="put weight_v000001 back"):
            importer.advance()


def test_a_feed_of_another_origin_is_not_imported_to(tmp_path: Path) -> None:
    store, run = MemoryStore(), tmp_path / "run"
    write_sharded(tmp_path / "base", state())
    write_delta(run, 1, state(), changed(state()))
    deltasync.publish(store, tmp_path / "base")
    with Importer(run, store) as importer, pytest.raises(InvalidInputError, match="not imported from a folder"):
        importer.advance()
    with Importer(run, store, base=tmp_path / "base", restart=True) as importer:
        assert import_all(importer) == [1, 2]


@pytest.mark.parametrize("sums", CHECKSUMS)
def test_no_memory_is_taken_for_a_size_that_a_folder_only_promises(tmp_path: Path, sums: ChecksumFormat) -> None:
    write_sharded(tmp_path / "base", state())
    folder = write_delta(tmp_path / "run", 1, state(), changed(state()), sums=sums)
    # A frame of a few bytes whose header promises 2^62 bytes.
    replace_tensor(folder, b"\x28\xb5\x2f\xfd\xe0" + (1 << 62).to_bytes(8, "little") + b"\x01\x00\x00")
    with Importer(tmp_path / "run", MemoryStore(), base=tmp_path / "base") as importer:
        importer.advance()
        with pytest.raises(CorruptError, match="4611686018427387904 bytes"):
            importer.advance()


# Export


def publish_steps(store: Any, tmp_path: Path, steps: list[State], *, first: int = 0) -> None:
    for i, tensors in enumerate(steps[first:], first):
        write_sharded(tmp_path / f"c{i}", tensors)
        deltasync.publish(store, tmp_path / f"c{i}", anchor=i == 2)


def apply_folders(root: Path) -> State:
    """The weights at the end of the folders, the first of which is a checkpoint."""
    first, *rest = sorted(root.iterdir())
    weights = open_checkpoint(first).weights
    found = Weights(weights.layout, tuple(array.copy() for array in weights.arrays))
    for path in rest:
        folder = open_folder(path)
        assert folder is not None
        for name, (indices, values) in by_tensor(found.layout, decode_folder(folder, found)).items():
            found.arrays[found.layout.ordinals[name]][indices] = values
    like = state()
    return {
        spec.name: array.view(like[spec.name].dtype).reshape(like[spec.name].shape)
        for spec, array in zip(found.layout.tensors, found.arrays, strict=True)
    }


def test_an_export_continues_after_the_last_folder(tmp_path: Path) -> None:
    steps, store, root = states(6), MemoryStore(), tmp_path / "folders"
    publish_steps(store, tmp_path, steps[:3])
    with Exporter(store, root) as exporter:
        assert [exporter.advance() is None for _ in range(4)] == [False, False, False, True]
    publish_steps(store, tmp_path, steps, first=3)
    with Exporter(store, root) as exporter:
        versions = [exported.version for exported in iter(exporter.advance, None)]
    assert versions == [3, 4, 5]
    assert same_bits(apply_folders(root), steps[5])


def test_an_export_goes_on_where_a_delta_is_lost(tmp_path: Path) -> None:
    steps, store, root = states(6), MemoryStore(), tmp_path / "folders"
    publish_steps(store, tmp_path, steps)
    lost = Log(store).read(2)
    with Exporter(store, root) as exporter:
        exporter.advance()
        for ref in lost.payloads:
            store.delete(f"payloads/{ref.sha256}.safetensors")
        versions = [(e.version, e.base_version) for e in iter(exporter.advance, None)]
    assert versions == [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4)]
    assert same_bits(apply_folders(root), steps[5])


def test_an_export_starts_at_the_version_that_is_given(tmp_path: Path) -> None:
    steps, store, root = states(5), MemoryStore(), tmp_path / "folders"
    publish_steps(store, tmp_path, steps)
    with Exporter(store, root, start=3) as exporter:
        assert [e.base_version for e in iter(exporter.advance, None)] == [None, 3]
    assert same_bits(read(root / "weight_v000003"), steps[3])


def test_an_export_touches_no_folder_that_is_not_its_own(tmp_path: Path) -> None:
    steps, store, root = states(3), MemoryStore(), tmp_path / "folders"
    publish_steps(store, tmp_path, steps)
    write_delta(root, 1, steps[0], steps[2])
    with Exporter(store, root) as exporter, pytest.raises(InvalidInputError, match="not written by `deltasync export`"):
        exporter.advance()
    shutil.rmtree(root)
    other = MemoryStore()
    publish_steps(other, tmp_path, [changed(tensors, seed=7) for tensors in steps])
    with Exporter(other, root) as exporter:
        exporter.advance()
    with Exporter(store, root) as exporter, pytest.raises(MismatchError, match="another feed"):
        exporter.advance()


@pytest.mark.parametrize(
    ("sums", "text", "expected"),
    [
        ("adler32", b"Wikipedia", "11e60398"),
        ("adler32", b"", "00000001"),
        ("xxh3-128", b"", "99aa06d3014798d86001c324468d497f"),
        ("blake3", b"", "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"),
    ],
)
def test_checksums_are_written_as_others_write_them(sums: ChecksumFormat, text: bytes, expected: str) -> None:
    assert checksum(sums, np.frombuffer(text, np.uint8)) == expected


def test_an_export_does_not_write_bits_that_a_version_does_not_have(tmp_path: Path) -> None:
    steps, store, root = states(4), MemoryStore(), tmp_path / "folders"
    publish_steps(store, tmp_path, steps)
    with Exporter(store, root) as exporter:
        exporter.advance()
        weights = exporter._state.require_weights()
        weights.arrays[weights.layout.ordinals["embed"]][7] ^= 1
        assert [exported.version for exported in iter(exporter.advance, None)] == [1, 2, 3]
    assert same_bits(apply_folders(root), steps[3])
