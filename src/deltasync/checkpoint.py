"""Hugging Face checkpoints: one safetensors file, or a folder of them, mapped into memory and never parsed twice."""

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deltasync.errors import CorruptError, FormatError, NotFoundError
from deltasync.files import reader
from deltasync.format import limits
from deltasync.format.layout import Layout
from deltasync.format.safetensors import Entry, Header, read_header
from deltasync.format.strict_json import parse_object
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
    """The safetensors files of a folder, found in the order in which transformers looks for them."""
    if (folder / WHOLE_NAME).exists():
        return [folder / WHOLE_NAME]
    if (folder / INDEX_NAME).exists():
        return [folder / name for name in sorted(set(_weightmap_files(folder / INDEX_NAME).values()))]
    found = sorted(p for p in folder.iterdir() if p.suffix == ".safetensors" and p.is_file())
    if not found:
        raise NotFoundError(f"there is no .safetensors file in {folder}", hint="is this a checkpoint folder?")
    return found


def _weightmap_files(path: Path) -> dict[str, str]:
    if path.stat().st_size > limits.SAFETENSORS_HEADER_BYTES_MAX:
        raise CorruptError(f"{path} is too large", rule="checkpoint.index")
    found: Any = parse_object(path.read_bytes(), what=str(path), scope="checkpoint").get("weight_map")
    if not isinstance(found, dict) or not found or not all(_is_plain_name(name) for name in found.values()):
        raise CorruptError(f"{path} has no weight_map of file names", rule="checkpoint.index")
    return found


def _is_plain_name(name: object) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and "/" not in name and os.sep not in name


def _read_file(path: Path) -> CheckpointFile:
    try:
        with path.open("rb") as file:
            return CheckpointFile(path, read_header(reader(file.fileno()), os.fstat(file.fileno()).st_size))
    except FileNotFoundError as error:
        raise NotFoundError(f"{path} is missing", hint=f"{INDEX_NAME} names it; is the download complete?") from error
    except (CorruptError, FormatError) as error:
        raise type(error)(f"{path}: {error.message}", rule=error.rule, hint=error.hint) from error


def _check_index(folder: Path, files: tuple[CheckpointFile, ...]) -> None:
    """CorruptError if the index names a tensor that its file does not have. The files have the last word."""
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
    """Mapped files: `copied` holds (file, entry, array) of tensors whose place in the file is not aligned."""

    weights: Weights
    maps: tuple[mmap.mmap, ...]
    copied: tuple[tuple[mmap.mmap, Entry, Bits], ...]

    def flush(self) -> None:
        """Hand everything that was written to the file system."""
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
            # NumPy has no views of nothing at the end of a buffer.
            array = np.frombuffer(mapped, bits_dtype, elements, entry.begin) if elements else np.empty(0, bits_dtype)
            if not array.flags.aligned:
                array = array.copy()
                array.flags.writeable = writable
                copied.append((mapped, entry, array))
            arrays[entry.name] = array
    layout = Layout.of(e.spec for f in files for e in f.header.entries)
    weights = Weights(layout, tuple(arrays[t.name] for t in layout.tensors))
    return MappedFiles(weights, tuple(maps), tuple(copied))
