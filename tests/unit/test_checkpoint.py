import gc
import json
import os
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from support.helpers import safetensors_bytes, same_bits, state, write_sharded

from deltasync.checkpoint import Checkpoint, copied_checkpoint, mapped_weights, new_checkpoint, open_checkpoint
from deltasync.errors import CorruptError, DeltasyncError, FormatError, InvalidInputError, NotFoundError
from deltasync.format.safetensors import header_bytes
from deltasync.format.weights import Weights

INDEX = "model.safetensors.index.json"


def holds(checkpoint: Checkpoint, tensors: dict[str, np.ndarray]) -> bool:
    return equal(checkpoint.weights, Weights.of(tensors))


def equal(a: Weights, b: Weights) -> bool:
    return a.layout == b.layout and all(np.array_equal(x, y) for x, y in zip(a.arrays, b.arrays, strict=True))


def test_one_file(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(safetensors_bytes(state()))
    found = open_checkpoint(tmp_path / "m.safetensors")
    assert holds(found, state())
    assert not found.is_folder
    assert found.files[0].header.metadata == {"format": "pt"}


def test_a_file_of_the_library(tmp_path: Path) -> None:
    tensors = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "h": np.ones(3, np.float16)}
    safetensors.numpy.save_file(tensors, tmp_path / "m.safetensors")
    assert holds(open_checkpoint(str(tmp_path / "m.safetensors")), tensors)


def test_folders(tmp_path: Path) -> None:
    write_sharded(tmp_path / "sharded", state(), shards=3)
    assert holds(open_checkpoint(tmp_path / "sharded"), state())
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "model.safetensors").write_bytes(safetensors_bytes(state()))
    (tmp_path / "whole" / "other.safetensors").write_bytes(safetensors_bytes(state(9)))
    assert holds(open_checkpoint(tmp_path / "whole"), state())
    (tmp_path / "sharded" / INDEX).unlink()
    assert holds(open_checkpoint(tmp_path / "sharded"), state())


def test_weights_are_views_that_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(safetensors_bytes(state()))
    weights = open_checkpoint(path).weights
    assert not any(a.flags.writeable for a in weights.arrays if a.size)
    assert not weights.arrays[weights.layout.ordinals["embed"]].flags.owndata


def test_misaligned_tensors_are_copied_and_written_back(tmp_path: Path) -> None:
    tensors = {"odd": np.arange(3, dtype=np.uint8), "x": np.arange(5, dtype=np.float32), "y": np.arange(4, dtype="<u2")}
    path = tmp_path / "m.safetensors"
    path.write_bytes(safetensors_bytes(tensors))
    checkpoint = open_checkpoint(path)
    assert holds(checkpoint, tensors)
    assert all(a.flags.aligned for a in checkpoint.weights.arrays)

    def fill(target: Weights) -> None:
        for array in target.arrays:
            array += array.dtype.type(1)

    with copied_checkpoint(checkpoint, tmp_path / "n.safetensors") as weights:
        fill(weights)
    expected = {n: (a.view(f"<u{a.itemsize}") + 1).astype(f"<u{a.itemsize}").view(a.dtype) for n, a in tensors.items()}
    assert holds(open_checkpoint(tmp_path / "n.safetensors"), expected)
    assert holds(open_checkpoint(path), tensors)


@pytest.mark.parametrize("pad", range(4))
def test_runs_are_written_to_mapped_files(tmp_path: Path, pad: int) -> None:
    """Whether or not a tensor is aligned; what is written by runs and what is written to the arrays is one state."""
    tensors = {**state(), "odd": np.arange(3, dtype=np.uint8), "none": np.empty((0, 2), np.float32)}
    (tmp_path / "m.safetensors").write_bytes(safetensors_bytes(tensors, pad=pad))
    changed = Weights.of({name: np.roll(array, 1) for name, array in tensors.items()})

    def fill(target: Weights) -> None:
        target.copy_from(changed)
        assert equal(target, changed)
        for ordinal, array in enumerate(target.arrays):
            array[:1] += array.dtype.type(1)
            changed.arrays[ordinal][:1] += array.dtype.type(1)
            whole = np.array([[ordinal, 1, len(array) - 1]]) if len(array) > 1 else np.empty((0, 3), np.int64)
            target.write(whole, changed.arrays[ordinal][1:])

    with copied_checkpoint(open_checkpoint(tmp_path / "m.safetensors"), tmp_path / "n.safetensors") as weights:
        fill(weights)
    assert equal(open_checkpoint(tmp_path / "n.safetensors").weights, changed)


def test_mapped_weights_keep_their_files_open_and_then_close_them(tmp_path: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/dev/fd"))

    # What other tests left for the collector would be closed by the one below.
    gc.collect()
    before = descriptors()
    weights = mapped_weights(Weights.of(state()).layout, tmp_path / "mirror")
    weights.copy_from(Weights.of(state()))
    assert descriptors() > before
    del weights
    gc.collect()
    assert descriptors() == before
    assert holds(open_checkpoint(tmp_path / "mirror"), state())


def test_a_header_that_misaligns_everything(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(safetensors_bytes(state(), pad=3))
    assert holds(open_checkpoint(path), state())


def bump(target: Weights) -> None:
    target.arrays[0][0] ^= target.arrays[0].dtype.type(1)


def test_a_folder_is_copied_with_all_that_belongs_to_it(tmp_path: Path) -> None:
    source, out = tmp_path / "old", tmp_path / "new"
    write_sharded(source, state())
    (source / "sub").mkdir()
    (source / "sub" / "config.json").write_text("{}")
    (source / "empty.txt").write_text("")
    (source / "pytorch_model.bin").write_bytes(b"stale")
    (source / "consolidated.safetensors").write_bytes(b"stale")
    (source / ".git").mkdir()
    (source / ".git" / "HEAD").write_text("x")
    (source / "dangling").symlink_to("nowhere")
    checkpoint = open_checkpoint(source)
    with copied_checkpoint(checkpoint, out) as weights:
        bump(weights)
    found = sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.is_file())
    shards = [f.path.name for f in checkpoint.files]
    assert found == sorted(["config.json", "empty.txt", INDEX, "sub/config.json", *shards])
    assert (out / "config.json").read_text() == (source / "config.json").read_text()
    after = open_checkpoint(out).weights
    assert after.arrays[0][0] == checkpoint.weights.arrays[0][0] ^ 1
    assert all(np.array_equal(a, b) for a, b in zip(after.arrays[1:], checkpoint.weights.arrays[1:], strict=True))
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_links_as_in_the_hub_cache(tmp_path: Path) -> None:
    write_sharded(tmp_path / "plain", state())
    blobs, linked = tmp_path / "blobs", tmp_path / "snap" / "rev"
    blobs.mkdir()
    linked.mkdir(parents=True)
    for i, path in enumerate(sorted((tmp_path / "plain").iterdir())):
        path.rename(blobs / str(i))
        (linked / path.name).symlink_to(Path("../../blobs") / str(i))
    before = {p.name: p.read_bytes() for p in blobs.iterdir()}
    checkpoint = open_checkpoint(linked)
    assert holds(checkpoint, state())
    with copied_checkpoint(checkpoint, tmp_path / "new") as weights:
        bump(weights)
    assert not any(p.is_symlink() for p in (tmp_path / "new").iterdir())
    assert {p.name: p.read_bytes() for p in blobs.iterdir()} == before


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("as_folder", [True, False])
def test_a_failing_callback_leaves_nothing(tmp_path: Path, error: type[BaseException], as_folder: bool) -> None:
    source = tmp_path / ("old" if as_folder else "old.safetensors")
    if as_folder:
        write_sharded(source, state())
    else:
        source.write_bytes(safetensors_bytes(state()))

    def fill(target: Weights) -> None:
        bump(target)
        raise error

    with pytest.raises(error), copied_checkpoint(open_checkpoint(source), tmp_path / "new") as weights:
        fill(weights)
    assert [p.name for p in tmp_path.iterdir()] == [source.name]
    assert holds(open_checkpoint(source), state())


def test_the_output_is_not_there_while_it_is_filled(tmp_path: Path) -> None:
    write_sharded(tmp_path / "old", state())
    seen: list[bool] = []
    with copied_checkpoint(open_checkpoint(tmp_path / "old"), tmp_path / "new"):
        seen.append((tmp_path / "new").exists())
    assert seen == [False]


def test_every_name_is_on_disk_before_the_output_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def note(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    files = {"config.json": b"{}", "a/b/c.json": b"{}"}
    with new_checkpoint(Weights.of(state()).layout, files, tmp_path / "out"):
        pass
    temporary = os.path.dirname(synced[0])
    inside = {os.path.relpath(path, temporary) for path in synced[:-1]}
    assert inside == {".", "a", "a/b", "a/b/c.json", "config.json", "model.safetensors"}
    assert synced[-1] == str(tmp_path)


def test_outputs_that_are_taken(tmp_path: Path) -> None:
    write_sharded(tmp_path / "old", state())
    (tmp_path / "file").write_text("precious")
    folder = open_checkpoint(tmp_path / "old")
    single = open_checkpoint(folder.files[0].path)
    for checkpoint, out in ((folder, "old"), (folder, "file"), (single, "old"), (folder, "no/such/place")):
        with pytest.raises(InvalidInputError) as caught, copied_checkpoint(checkpoint, tmp_path / out) as weights:
            bump(weights)
        assert caught.value.hint
    assert (tmp_path / "file").read_text() == "precious"
    assert holds(open_checkpoint(tmp_path / "old"), state())
    (tmp_path / "empty").mkdir()
    with copied_checkpoint(folder, tmp_path / "empty") as weights:
        bump(weights)
    assert (tmp_path / "empty" / "config.json").exists()


def test_a_single_file_may_replace_itself(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(safetensors_bytes(state()))
    old = open_checkpoint(path)
    with copied_checkpoint(old, path) as weights:
        bump(weights)
    assert holds(old, state()), "the open checkpoint still shows the old file"
    assert not holds(open_checkpoint(path), state())


def break_nothing_there(folder: Path) -> Path:
    return folder / "missing"


def break_no_weights(folder: Path) -> Path:
    for path in folder.glob("model*"):
        path.unlink()
    return folder


def break_shard_missing(folder: Path) -> Path:
    next(folder.glob("*00002-of*.safetensors")).unlink()
    return folder


def break_tensor_missing(folder: Path) -> Path:
    fields = json.loads((folder / INDEX).read_text())
    fields["weight_map"]["ghost"] = next(iter(fields["weight_map"].values()))
    (folder / INDEX).write_text(json.dumps(fields))
    return folder


def break_duplicate(folder: Path) -> Path:
    (folder / INDEX).unlink()
    (folder / "copy.safetensors").write_bytes(next(folder.glob("*.safetensors")).read_bytes())
    return folder


def break_traversal(folder: Path) -> Path:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    return folder


def break_long_name(folder: Path) -> Path:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "x" * 5000}}))
    return folder


def break_null_in_name(folder: Path) -> Path:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "x\0.safetensors"}}))
    return folder


def break_shard_is_a_folder(folder: Path) -> Path:
    (folder / "shard").mkdir()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "shard"}}))
    return folder


def break_index_json(folder: Path) -> Path:
    (folder / INDEX).write_text("{")
    return folder


def break_index_map(folder: Path) -> Path:
    (folder / INDEX).write_text('{"weight_map": []}')
    return folder


def break_truncated(folder: Path) -> Path:
    path = next(folder.glob("*00001-of*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    return folder


def break_dtype(folder: Path) -> Path:
    path = next(folder.glob("*00001-of*.safetensors"))
    path.write_bytes(path.read_bytes().replace(b'"BF16"', b'"F4  "'))
    return folder


BAD = [
    (break_nothing_there, NotFoundError, None, "missing"),
    (break_no_weights, NotFoundError, None, "old"),
    (break_shard_missing, NotFoundError, None, "model-00002-of-00002.safetensors"),
    (break_tensor_missing, CorruptError, "checkpoint.index", "ghost"),
    (break_duplicate, CorruptError, "checkpoint.duplicate", "copy.safetensors"),
    (break_traversal, CorruptError, "checkpoint.index", INDEX),
    (break_long_name, CorruptError, "checkpoint.index", INDEX),
    (break_null_in_name, CorruptError, "checkpoint.index", INDEX),
    (break_shard_is_a_folder, NotFoundError, None, "shard is a folder"),
    (break_index_json, CorruptError, "checkpoint.json", INDEX),
    (break_index_map, CorruptError, "checkpoint.index", INDEX),
    (break_truncated, CorruptError, "safetensors.truncated", "model-00001-of-00002.safetensors"),
    (break_dtype, FormatError, "dtype", "model-00001-of-00002.safetensors"),
]


@pytest.mark.parametrize(("break_it", "error", "rule", "named"), BAD, ids=[b[0].__name__ for b in BAD])
def test_refused(tmp_path: Path, break_it: object, error: type[DeltasyncError], rule: str | None, named: str) -> None:
    write_sharded(tmp_path / "old", state())
    with pytest.raises(DeltasyncError, match=named) as caught:
        open_checkpoint(break_it(tmp_path / "old"))  # type: ignore[operator]
    assert (type(caught.value), caught.value.rule) == (error, rule)


ODD_FILES: dict[str, dict[str, bytes]] = {
    "a file that is also a folder": {"a": b"1", "a/b": b"2"},
    "a folder that is also a file": {"a/b": b"2", "a": b"1"},
    "a folder with the name of the weights": {"model.safetensors/x": b"1"},
    "a folder with the name of the index": {"model.safetensors.index.json/x": b"1"},
    "many levels": {"/".join(["d"] * 1500): b"1"},
    "a long name": {"n" * 300: b"1"},
}


@pytest.mark.parametrize("files", ODD_FILES.values(), ids=ODD_FILES.keys())
def test_paths_that_leave_no_place_for_a_file(files: dict[str, bytes], tmp_path: Path) -> None:
    refused = pytest.raises(CorruptError, match="cannot be a file beside the weights")
    with refused as caught, new_checkpoint(Weights.of(state()).layout, files, tmp_path / "out"):
        pass
    assert caught.value.rule == "files.path"
    assert list(tmp_path.iterdir()) == []


def test_a_new_checkpoint_has_space_for_all_of_its_weights(tmp_path: Path) -> None:
    """Pages without space behind them end the process by a signal once they are written."""
    layout = Weights.of({"w": np.zeros(1 << 20, np.float32)}).layout
    seen: list[int] = []

    def fill(weights: Weights) -> None:
        seen.extend(path.stat().st_blocks * 512 for path in tmp_path.rglob("model.safetensors"))

    with new_checkpoint(layout, {}, tmp_path / "out") as weights:
        fill(weights)
    assert seen[0] >= layout.nbytes
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["model.safetensors"]


def test_a_sparse_source_has_space_in_its_copy(tmp_path: Path) -> None:
    source = tmp_path / "sparse.safetensors"
    with source.open("wb") as file:
        head = header_bytes(Weights.of({"w": np.zeros(1 << 20, np.float32)}).layout.tensors, {})
        file.write(head)
        file.truncate(len(head) + (1 << 22))
    seen: list[int] = []
    fill = lambda weights: seen.extend(p.stat().st_blocks * 512 for p in tmp_path.glob(".*.tmp"))  # noqa: E731
    with copied_checkpoint(open_checkpoint(source), tmp_path / "out.safetensors") as weights:
        fill(weights)
    assert seen[0] >= 1 << 22


def test_helpers_distinguish_states() -> None:
    assert same_bits(state(), state())
    assert not same_bits(state(), state(1))
