"""Hugging Face checkpoints: read, write and map them.

A checkpoint is one safetensors file or a folder of them. Reading maps the files into memory. A checkpoint that is
written appears whole or not at all.
"""

import mmap
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deltasync.errors import CorruptError, FormatError, InvalidInputError, NotFoundError
from deltasync.files import copy_file, reader, sync_file, sync_folder, temporary_beside
from deltasync.format import limits
from deltasync.format.companions import is_safe_path
from deltasync.format.layout import Layout, TensorSpec
from deltasync.format.safetensors import Entry, Header, header_bytes, read_header
from deltasync.format.sealed import canonical_json, parse_object
from deltasync.format.weights import Bits, Weights

WHOLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """One safetensors file of a checkpoint."""

    path: Path
    header: Header


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """An open checkpoint. `weights` are read-only views of the mapped files: what is not touched is not read."""

    path: Path
    is_folder: bool
    files: tuple[CheckpointFile, ...]
    weights: Weights


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """A folder with `model.safetensors`, with an index and its shards, or with any safetensors files; or one file."""
    root = Path(path)
    if not root.exists():
        raise NotFoundError(f"{root} does not exist", hint="give a checkpoint folder or a .safetensors file")
    is_folder = root.is_dir()
    files = tuple(_read_file(p) for p in (_weight_paths(root) if is_folder else [root]))
    if is_folder:
        _check_index(root, files)
    _check_duplicates(files)
    return Checkpoint(root, is_folder, files, map_files(files, writable=False).weights)


def _weight_paths(folder: Path) -> list[Path]:
    """The weight files of a folder, chosen as transformers does."""
    if (folder / WHOLE_NAME).exists():
        return [folder / WHOLE_NAME]
    if (folder / INDEX_NAME).exists():
        return [folder / name for name in sorted(set(_weightmap_files(folder / INDEX_NAME).values()))]
    paths = sorted(p for p in folder.iterdir() if p.suffix == ".safetensors" and p.is_file())
    if not paths:
        raise NotFoundError(f"there is no .safetensors file in {folder}", hint="is this a checkpoint folder?")
    return paths


def _weightmap_files(path: Path) -> dict[str, str]:
    size, most = path.stat().st_size, limits.SAFETENSORS_HEADER_BYTES_MAX
    if size > most:
        raise CorruptError(f"{path} has {size} bytes; at most {most} are allowed", rule="checkpoint.index")
    weight_map: Any = parse_object(path.read_bytes(), what=str(path), scope="checkpoint").get("weight_map")

    def is_plain_name(name: object) -> bool:
        return isinstance(name, str) and name not in ("", ".", "..") and "/" not in name and os.sep not in name

    if not isinstance(weight_map, dict) or not weight_map or not all(map(is_plain_name, weight_map.values())):
        raise CorruptError(f"{path} must have a weight_map of tensors to file names", rule="checkpoint.index")
    return weight_map


def _read_file(path: Path) -> CheckpointFile:
    try:
        with path.open("rb") as file:
            return CheckpointFile(path, read_header(reader(file.fileno()), os.fstat(file.fileno()).st_size))
    except FileNotFoundError as error:
        raise NotFoundError(f"{path} is missing", hint=f"{INDEX_NAME} names it; is the download complete?") from error
    except (CorruptError, FormatError) as error:
        raise error.at(path) from error


def _check_index(folder: Path, files: tuple[CheckpointFile, ...]) -> None:
    """CorruptError if the index names a tensor that its file does not have; tensors that it omits are fine."""
    if [f.path.name for f in files] == [WHOLE_NAME] or not (folder / INDEX_NAME).exists():
        return
    held = {f.path.name: {e.name for e in f.header.entries} for f in files}
    for tensor, file_name in _weightmap_files(folder / INDEX_NAME).items():
        if tensor not in held[file_name]:
            raise CorruptError(
                f"tensor {tensor!r:.200} is not in {folder / file_name}, where {INDEX_NAME} says it is",
                rule="checkpoint.index",
            )


def _check_duplicates(files: tuple[CheckpointFile, ...]) -> None:
    seen: dict[str, Path] = {}
    for file in files:
        for entry in file.header.entries:
            if entry.name in seen:
                raise CorruptError(
                    f"tensor {entry.name!r:.200} is in {seen[entry.name]} and in {file.path}",
                    rule="checkpoint.duplicate",
                    hint="keep one of the files, or add an index",
                )
            seen[entry.name] = file.path


@dataclass(frozen=True, slots=True, eq=False)
class MappedFiles:
    """Mapped files: `copied` holds (file, entry, array) of tensors that are not aligned in their file."""

    weights: Weights
    maps: tuple[mmap.mmap, ...]
    copied: tuple[tuple[mmap.mmap, Entry, Bits], ...]

    def flush(self) -> None:
        """Write everything back to the files."""
        for mapped, entry, array in self.copied:
            mapped[entry.begin : entry.end] = array.tobytes()
        for mapped in self.maps:
            mapped.flush()


def map_files(files: Sequence[CheckpointFile], *, writable: bool) -> MappedFiles:
    """The tensors of safetensors files as views of the mapped files."""
    maps: list[mmap.mmap] = []
    copied: list[tuple[mmap.mmap, Entry, Bits]] = []
    arrays: dict[str, Bits] = {}
    for file in files:
        with file.path.open("r+b" if writable else "rb") as opened:
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
        maps.append(mapped)
        for entry in file.header.entries:
            bits_dtype, elements = entry.dtype.bits_dtype, entry.spec.elements
            # NumPy refuses an empty view at the end of a buffer.
            array = np.frombuffer(mapped, bits_dtype, elements, entry.begin) if elements else np.empty(0, bits_dtype)
            if not array.flags.aligned:
                array = array.copy()
                array.flags.writeable = writable
                copied.append((mapped, entry, array))
            arrays[entry.name] = array
    layout = Layout.of(e.spec for f in files for e in f.header.entries)
    weights = Weights(layout, tuple(arrays[t.name] for t in layout.tensors))
    return MappedFiles(weights, tuple(maps), tuple(copied))


SHARD_BYTES = 5_000_000_000
"""The size at which a new checkpoint is split into files: the default of transformers."""

Fill = Callable[[Weights], None]
"""Overwrites the weights of a checkpoint that is not visible yet."""

_OTHER_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".ckpt"})
_HINT_OUT = "choose an output that does not exist yet"


def write_checkpoint_like(checkpoint: Checkpoint, out: str | os.PathLike[str], fill: Fill) -> None:
    """A copy of `checkpoint` at `out` whose weights `fill` overwrites before it becomes visible.

    `out` appears whole or not at all. Everything else in the folder (configuration, tokenizer) is copied too, but not
    weights that the checkpoint does not consist of, such as the same model in another format: they would be stale.
    """
    target = Path(os.path.abspath(out))
    _require_free(target, is_folder=checkpoint.is_folder)
    with _appearing(target) as temporary:
        if checkpoint.is_folder:
            _copy_folder(checkpoint, temporary)
            copies = [temporary / f.path.name for f in checkpoint.files]
        else:
            copy_file(checkpoint.path, temporary)
            copies = [temporary]
        _fill([CheckpointFile(p, f.header) for p, f in zip(copies, checkpoint.files, strict=True)], fill)


def write_checkpoint(layout: Layout, files: Mapping[str, bytes], out: str | os.PathLike[str], fill: Fill) -> None:
    """A new checkpoint folder at `out` of the given layout, with `files` beside the weights; `fill` gives the weights.

    `out` appears whole or not at all. The weights begin as zeros.
    """
    target = Path(os.path.abspath(out))
    _require_free(target, is_folder=True)
    require_space(target, layout.nbytes)
    with _appearing(target) as temporary:
        temporary.mkdir()
        for name, data in files.items():
            path = temporary / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        _fill([create_file(temporary / name, specs) for name, specs in _named_shards(layout, temporary)], fill)


def companion_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """The files of a checkpoint folder that are not weights, by their relative path."""
    if not checkpoint.is_folder:
        return {}
    files = {}
    for path in _files_below(checkpoint.path):
        name = path.relative_to(checkpoint.path).as_posix()
        if path.suffix not in _OTHER_WEIGHTS and name != INDEX_NAME and is_safe_path(name):
            files[name] = path.read_bytes()
    return files


def require_space(target: Path, nbytes: int) -> None:
    """InvalidInputError if the disk has less free space than that."""
    folder = next(p for p in (target, *target.parents) if p.exists())
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise InvalidInputError(
            f"{target} needs {nbytes} bytes, but only {free} are free there",
            hint="free some space, or choose another output",
        )


@contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """A hidden path beside `target` that is synced and renamed to it when the block ends without an error."""
    with temporary_beside(target) as temporary:
        yield temporary
        _sync(temporary)
        try:
            os.replace(temporary, target)
        except OSError as error:
            raise InvalidInputError(
                f"the output cannot be renamed to {target}: {error.strerror}", hint=_HINT_OUT
            ) from error
    sync_folder(target.parent)


def _fill(files: list[CheckpointFile], fill: Fill) -> None:
    mapped = map_files(files, writable=True)
    fill(mapped.weights)
    mapped.flush()


def _named_shards(layout: Layout, folder: Path) -> list[tuple[str, list[TensorSpec]]]:
    """The names and tensors of the files; writes the index of transformers if there are several."""
    shards: list[list[TensorSpec]] = [[]]
    for spec in layout.tensors:
        if shards[-1] and sum(s.nbytes for s in shards[-1]) + spec.nbytes > SHARD_BYTES:
            shards.append([])
        shards[-1].append(spec)
    if len(shards) == 1:
        return [(WHOLE_NAME, shards[0])]
    named = [(f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors", specs) for i, specs in enumerate(shards)]
    weight_map = {spec.name: name for name, specs in named for spec in specs}
    (folder / INDEX_NAME).write_bytes(
        canonical_json({"metadata": {"total_size": layout.nbytes}, "weight_map": weight_map})
    )
    return named


def create_file(path: Path, specs: Sequence[TensorSpec]) -> CheckpointFile:
    """A new safetensors file of zeros, sparse where the file system can do that."""
    with path.open("xb") as file:
        head = header_bytes(specs, {"format": "pt"})
        file.write(head)
        file.truncate(len(head) + sum(spec.nbytes for spec in specs))
    return _read_file(path)


def _require_free(target: Path, *, is_folder: bool) -> None:
    if is_folder:
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise InvalidInputError(f"{target} exists and is not an empty folder", hint=_HINT_OUT)
    elif target.is_dir():
        raise InvalidInputError(f"{target} is a folder, but the checkpoint is one file", hint="give the path of a file")


def _copy_folder(checkpoint: Checkpoint, target: Path) -> None:
    ours = {f.path.name for f in checkpoint.files}
    # Listed before the output folder is made, which may lie inside the source.
    sources = [
        path
        for path in _files_below(checkpoint.path)
        if path.suffix not in _OTHER_WEIGHTS or (path.parent == checkpoint.path and path.name in ours)
    ]
    target.mkdir()
    for source in sources:
        copy = target / source.relative_to(checkpoint.path)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy_file(source, copy)


def _sync(path: Path) -> None:
    files = list(_files_below(path))
    for file in files:
        sync_file(file)
    for folder in {file.parent for file in files if file != path}:
        sync_folder(folder)


def _files_below(path: Path) -> Iterator[Path]:
    """All files below a folder, including links to files, without hidden folders; or the file itself."""
    if path.is_file():
        yield path
        return
    for folder, names, file_names in os.walk(path):
        names[:] = sorted(n for n in names if not n.startswith("."))
        yield from (p for name in sorted(file_names) if (p := Path(folder, name)).is_file())


def mapped_weights(layout: Layout, path: Path) -> Weights:
    """The writable weights in the file at `path`; a file that is missing or has another layout is replaced by zeros.

    The caller has to prove which version the bits are of.
    """
    if mapped_layout(path) != layout:
        require_space(path, layout.nbytes)
        with temporary_beside(path) as temporary:
            # Widest first, so that every tensor is aligned and can be mapped.
            create_file(temporary, sorted(layout.tensors, key=lambda spec: -spec.dtype.width))
            temporary.replace(path)
    return map_files(open_checkpoint(path).files, writable=True).weights


def mapped_layout(path: Path) -> Layout | None:
    """The layout of the file at `path`; None if it cannot be read."""
    try:
        return open_checkpoint(path).weights.layout
    except (CorruptError, FormatError, NotFoundError):
        return None
