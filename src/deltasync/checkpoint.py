"""Hugging Face checkpoints: read, write and map them.

A checkpoint is one safetensors file or a folder of them. Reading maps the files into memory. A checkpoint that is
written appears whole or not at all.
"""

import errno
import mmap
import os
import shutil
import stat
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from deltasync.errors import CorruptError, FormatError, InvalidInputError, NotFoundError
from deltasync.files import (
    FULL,
    copy_file,
    fill_holes,
    read_range,
    release_folder,
    remove_abandoned_files,
    reserve,
    start_writeback,
    sync_file,
    sync_folder,
    temporary_beside,
    temporary_folder_beside,
    write_range,
)
from deltasync.format import limits
from deltasync.format.companions import can_run_code, is_safe_path
from deltasync.format.layout import Layout, TensorSpec
from deltasync.format.safetensors import Entry, Header, header_bytes, read_header
from deltasync.format.sealed import FORMAT, canonical_json, parse_object
from deltasync.format.weights import Bits, Weights

WHOLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_NAME_BYTES_MAX = 255
"""The length of a name that file systems allow."""


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
    index = root / INDEX_NAME
    weight_map: dict[str, str] = {}
    paths = [root]
    # The files of weights are chosen as transformers does it.
    if is_folder and (root / WHOLE_NAME).exists():
        paths = [root / WHOLE_NAME]
    elif is_folder and index.exists():
        weight_map = _read_weight_map(index)
        paths = sorted({root / name for name in weight_map.values()})
    elif is_folder:
        paths = _found_weights(root)
    files = tuple([_read_file(path) for path in paths])
    owners: dict[str, Path] = {}
    for file in files:
        for entry in file.header.entries:
            if entry.name in owners:
                raise CorruptError(
                    f"tensor {entry.name!r:.200} is in {owners[entry.name]} and in {file.path}",
                    rule="checkpoint.duplicate",
                    hint="keep one of the files, or add an index",
                )
            owners[entry.name] = file.path
    # A tensor that the index omits is fine.
    for tensor, name in weight_map.items():
        if owners.get(tensor) != root / name:
            raise CorruptError(
                f"tensor {tensor!r:.200} is not in {root / name}, where {INDEX_NAME} says it is",
                rule="checkpoint.index",
            )
    return Checkpoint(root, is_folder, files, map_files(files, writable=False).weights)


def _found_weights(folder: Path) -> list[Path]:
    """All safetensors files of a folder; NotFoundError if there is none."""
    paths = sorted(p for p in folder.iterdir() if p.suffix == ".safetensors" and p.is_file())
    if not paths:
        pickled = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLES and p.is_file())
        if pickled:
            message = f"{folder} has no .safetensors file, only {', '.join(pickled[:3])}"
            raise NotFoundError(message, hint=_convert_hint(folder))
        raise NotFoundError(f"there is no .safetensors file in {folder}", hint="is this a checkpoint folder?")
    return paths


_PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt"})
_PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02")


def _convert_hint(folder: Path) -> str:
    return (
        "convert it with transformers: AutoModelForCausalLM.from_pretrained("
        f"{str(folder)!r}, dtype='auto').save_pretrained('NEW')"
    )


def weight_files(index: Path) -> list[str]:
    """The names of the files that an index of transformers lists, none of them in another folder."""
    return sorted(set(_read_weight_map(index).values()))


def _read_weight_map(path: Path) -> dict[str, str]:
    size, most = path.stat().st_size, limits.SAFETENSORS_HEADER_BYTES_MAX
    if size > most:
        raise CorruptError(f"{path} has {size} bytes; at most {most} are allowed", rule="checkpoint.index")
    weight_map: Any = parse_object(path.read_bytes(), what=str(path), scope="checkpoint").get("weight_map")

    def is_plain_name(name: object) -> bool:
        if not isinstance(name, str) or name in ("", ".", "..") or len(name.encode()) > _NAME_BYTES_MAX:
            return False
        return not any(c in name for c in ("/", os.sep, "\0"))

    if not isinstance(weight_map, dict) or not weight_map or not all(map(is_plain_name, weight_map.values())):
        raise CorruptError(f"{path} must have a weight_map of tensors to file names", rule="checkpoint.index")
    return weight_map


def _read_file(path: Path) -> CheckpointFile:
    try:
        with path.open("rb") as file:
            read, size = partial(read_range, file.fileno()), os.fstat(file.fileno()).st_size
            start = read(0, _START_BYTES)
            header = read_header(read, size)
    except (FileNotFoundError, IsADirectoryError) as error:
        problem = "is missing" if isinstance(error, FileNotFoundError) else "is a folder, not a file"
        raise NotFoundError(f"{path} {problem}", hint=f"{INDEX_NAME} names it; is the download complete?") from error
    except (CorruptError, FormatError) as error:
        if start[8:] == b"{":
            raise error.at(path) from error
        is_pickle = path.suffix in _PICKLES or start.startswith(_PICKLE_STARTS)
        raise CorruptError(
            f"{path} is not a safetensors file: {error.message}",
            rule=error.rule,
            hint=_convert_hint(path.parent) if is_pickle else "give a checkpoint folder or a .safetensors file",
            key=str(path),
        ) from error
    if header.metadata.get("format") == FORMAT:
        raise InvalidInputError(
            f"{path} is a {header.metadata.get('kind', 'payload')} of deltasync, not a checkpoint",
            hint="`deltasync apply` makes a checkpoint from a delta",
            key=str(path),
        )
    return CheckpointFile(path, header)


_START_BYTES = 9
"""A safetensors file begins with the length of its header and a brace."""


@dataclass(frozen=True)
class FileWeights(Weights):
    """Weights in mapped files that may be written.

    Runs of elements are written by the system: that costs less than to touch pages of the mapping for the first time.
    `places` has the descriptor of each tensor's file and where it begins there; None for one that is a copy.
    `is_synced_soon`: the system starts to write to disk at once, while other elements are computed.
    """

    places: tuple[tuple[int, int] | None, ...]
    is_synced_soon: bool = False

    def write_run(self, ordinal: int, first: int, bits: Bits) -> None:
        place = self.places[ordinal]
        if place is None:
            super().write_run(ordinal, first, bits)
        else:
            fd, begin = place
            write_range(fd, begin + first * bits.itemsize, bits.view(np.uint8).data)
            if self.is_synced_soon:
                start_writeback(fd, begin + first * bits.itemsize, bits.nbytes)


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


def map_files(files: Sequence[CheckpointFile], *, writable: bool, is_synced_soon: bool = False) -> MappedFiles:
    """The tensors of safetensors files as views of the mapped files. Those to be written get space for their holes."""
    maps: list[mmap.mmap] = []
    copied: list[tuple[mmap.mmap, Entry, Bits]] = []
    specs: list[TensorSpec] = []
    arrays: dict[str, Bits] = {}
    places: dict[str, tuple[int, int] | None] = {}
    with ExitStack() as opened:
        for file in files:
            fd = os.open(file.path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
            opened.callback(os.close, fd)
            if writable:
                fill_holes(fd)
            mapped = mmap.mmap(fd, 0, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
            maps.append(mapped)
            for entry in file.header.entries:
                specs.append(entry.spec)
                bits_dtype, elements = entry.dtype.bits_dtype, specs[-1].elements
                # NumPy refuses an empty view at the end of a buffer.
                array = (
                    np.frombuffer(mapped, bits_dtype, elements, entry.begin) if elements else np.empty(0, bits_dtype)
                )
                places[entry.name] = (fd, entry.begin) if array.flags.aligned else None
                if not array.flags.aligned:
                    array = array.copy()
                    array.flags.writeable = writable
                    copied.append((mapped, entry, array))
                arrays[entry.name] = array
        layout = Layout.of(specs)
        in_order = tuple([arrays[t.name] for t in layout.tensors])
        if not writable:
            return MappedFiles(Weights(layout, in_order), tuple(maps), tuple(copied))
        weights = FileWeights(layout, in_order, tuple([places[t.name] for t in layout.tensors]), is_synced_soon)
        # The files stay open for as long as the weights are used.
        weakref.finalize(weights, opened.pop_all().close).atexit = False
    return MappedFiles(weights, tuple(maps), tuple(copied))


SHARD_BYTES = 5_000_000_000
"""The size at which a new checkpoint is split into files: the default of transformers."""

_OTHER_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".ckpt"})
_HINT_OUT = "choose an output that does not exist yet"
_HINT_SPACE = "free some space, or choose another output"


@contextmanager
def copied_checkpoint(checkpoint: Checkpoint, out: str | os.PathLike[str]) -> Iterator[Weights]:
    """The weights of a copy of `checkpoint`, to be overwritten in the block. The copy appears at `out` after it.

    `out` appears whole or not at all. Everything else in the folder (configuration, tokenizer) is copied too, but not
    weights that the checkpoint does not consist of, such as the same model in another format: they would be stale.
    """
    target = Path(os.path.abspath(out))
    # Listed before the output folder is made, which may lie inside the source.
    sources = _copied_files(checkpoint) if checkpoint.is_folder else []
    with _appearing(target, is_folder=checkpoint.is_folder) as temporary:
        if checkpoint.is_folder:
            _copy_folder(checkpoint, sources, temporary)
            copies = [temporary / f.path.name for f in checkpoint.files]
        else:
            copy_file(checkpoint.path, temporary)
            copies = [temporary]
        copied = [CheckpointFile(p, f.header) for p, f in zip(copies, checkpoint.files, strict=True)]
        mapped = map_files(copied, writable=True, is_synced_soon=True)
        yield mapped.weights
        mapped.flush()


@contextmanager
def new_checkpoint(layout: Layout, files: Mapping[str, bytes], out: str | os.PathLike[str]) -> Iterator[Weights]:
    """The weights of a new checkpoint folder, zeros to be overwritten in the block. The folder appears after it.

    `out` appears whole or not at all, with `files` beside the weights.
    """
    target = Path(os.path.abspath(out))
    require_space(target, layout.nbytes)
    with _appearing(target, is_folder=True) as temporary:
        with _room(target, layout.nbytes):
            for name, data in files.items():
                write_companion(temporary, name, data)
            created = [create_file(temporary / name, specs) for name, specs in _named_shards(layout, temporary)]
        mapped = map_files(created, writable=True, is_synced_soon=True)
        yield mapped.weights
        mapped.flush()


_DEPTH_MAX = 64
_NO_SUCH_PATH = frozenset({errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG})


def write_companion(folder: Path, name: str, data: bytes) -> None:
    """Write a file beside the weights. CorruptError if the others, or the weights, leave no place for its path."""
    *parents, _ = name.split("/")
    reason = None
    if len(parents) >= _DEPTH_MAX:
        reason = f"it has more than {_DEPTH_MAX} parts"
    elif any(part.endswith((".safetensors", INDEX_NAME)) for part in parents):
        reason = "one of its folders has the name of a file of weights"
    else:
        try:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        except OSError as error:
            if error.errno not in _NO_SUCH_PATH:
                raise
            reason = error.strerror
    if reason is not None:
        raise CorruptError(f"{name!r:.200} cannot be a file beside the weights: {reason}", rule="files.path")


def companion_files(checkpoint: Checkpoint, *, trust_code: bool = False) -> dict[str, bytes]:
    """The files of a checkpoint folder that are not weights, by their relative path.

    Files that can run code when a folder is loaded, such as `modeling.py`, are left out without `trust_code`.
    """
    if not checkpoint.is_folder:
        return {}
    files = {}
    for path in _files_below(checkpoint.path):
        name = path.relative_to(checkpoint.path).as_posix()
        is_wanted = trust_code or not can_run_code(name)
        if path.suffix not in _OTHER_WEIGHTS and name != INDEX_NAME and is_wanted and is_safe_path(name):
            files[name] = path.read_bytes()
    return files


def require_space(target: Path, nbytes: int) -> None:
    """InvalidInputError if the disk has less free space than that."""
    folder = next(p for p in (target, *target.parents) if p.exists())
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise InvalidInputError(
            f"{target} needs {nbytes} bytes, but only {free} are free there",
            hint=_HINT_SPACE,
        )


@contextmanager
def _room(target: Path, nbytes: int) -> Iterator[None]:
    """InvalidInputError if the disk becomes full in the block: others may take the space that was free before."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise InvalidInputError(
            f"{target} needs {nbytes} bytes, and there is not enough space: {error.strerror}", hint=_HINT_SPACE
        ) from error


@contextmanager
def _appearing(target: Path, *, is_folder: bool) -> Iterator[Path]:
    """A hidden path beside `target` that is synced and renamed to it when the block ends without an error.

    InvalidInputError if something is at `target` that must not be replaced.
    """
    if is_folder and target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise InvalidInputError(f"{target} exists and is not an empty folder", hint=_HINT_OUT)
    if not is_folder and target.is_dir():
        raise InvalidInputError(f"{target} is a folder, but the checkpoint is one file", hint="give the path of a file")
    with (temporary_folder_beside if is_folder else temporary_beside)(target) as temporary:
        yield temporary
        if is_folder:
            release_folder(temporary)
            for folder, _, names in os.walk(temporary):
                for name in names:
                    sync_file(Path(folder, name))
                sync_folder(Path(folder))
        else:
            sync_file(temporary)
        try:
            os.replace(temporary, target)
        except OSError as error:
            raise InvalidInputError(
                f"the output cannot be renamed to {target}: {error.strerror}", hint=_HINT_OUT
            ) from error
    sync_folder(target.parent)


def _named_shards(layout: Layout, folder: Path) -> list[tuple[str, list[TensorSpec]]]:
    """The names and tensors of the files; writes the index of transformers if there are several."""
    shards: list[list[TensorSpec]] = [[]]
    nbytes = 0
    for spec in layout.tensors:
        if shards[-1] and nbytes + spec.nbytes > SHARD_BYTES:
            shards.append([])
            nbytes = 0
        shards[-1].append(spec)
        nbytes += spec.nbytes
    if len(shards) == 1:
        return [(WHOLE_NAME, shards[0])]
    named = [(f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors", specs) for i, specs in enumerate(shards)]
    weight_map = {spec.name: name for name, specs in named for spec in specs}
    (folder / INDEX_NAME).write_bytes(
        canonical_json({"metadata": {"total_size": layout.nbytes}, "weight_map": weight_map})
    )
    return named


def create_file(
    path: Path, specs: Sequence[TensorSpec], *, metadata: Mapping[str, str] | None = None
) -> CheckpointFile:
    """A new safetensors file of zeros, with space for all of them. OSError if there is too little."""
    with path.open("xb") as file:
        head = header_bytes(specs, {"format": "pt", **({} if metadata is None else metadata)})
        file.write(head)
        file.flush()
        reserve(file.fileno(), len(head) + sum(spec.nbytes for spec in specs))
    return _read_file(path)


def _copied_files(checkpoint: Checkpoint) -> list[Path]:
    ours = {f.path.name for f in checkpoint.files}
    return [
        path
        for path in _files_below(checkpoint.path)
        if path.suffix not in _OTHER_WEIGHTS or (path.parent == checkpoint.path and path.name in ours)
    ]


def _copy_folder(checkpoint: Checkpoint, sources: Sequence[Path], target: Path) -> None:
    for source in sources:
        copy = target / source.relative_to(checkpoint.path)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy_file(source, copy)


def _files_below(path: Path) -> Iterator[Path]:
    """All files below a folder, including links to files, without hidden folders."""
    for folder, names, file_names in os.walk(path):
        names[:] = sorted(n for n in names if not n.startswith("."))
        yield from (p for name in sorted(file_names) if (p := Path(folder, name)).is_file())


_MAPPED = {"deltasync": "mapped"}
_MAPPED_START = b'{"__metadata__":{"deltasync":"mapped"'
"""The beginning of the header of a file that `mapped_weights` created, after its length."""


def require_mapped(path: Path) -> None:
    """InvalidInputError, which leaves it as it is, if something is at `path` that `mapped_weights` has not created."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    if stat.S_ISREG(status.st_mode) and _has_mapped_mark(path):
        return
    raise InvalidInputError(
        f"{path} exists and is not a mirror or a shadow that deltasync created",
        hint="choose a path that does not exist yet, or remove what is there",
    )


def _has_mapped_mark(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(8 + len(_MAPPED_START))[8:] == _MAPPED_START


def mapped_weights(layout: Layout, path: Path) -> Weights:
    """The writable weights in the file at `path`; a file that is missing or has another layout is replaced by zeros.

    The caller holds the lock of the path, and has checked with `require_mapped` that the file may be replaced. It has
    to prove which version the bits are of. What a killed process began to write beside it is removed.
    """
    remove_abandoned_files(path, lambda other: not other.stat().st_size or _has_mapped_mark(other))
    if mapped_layout(path) != layout:
        require_space(path, layout.nbytes)
        with temporary_beside(path) as temporary, _room(path, layout.nbytes):
            # Widest first, so that every tensor is aligned and can be mapped.
            specs = sorted(layout.tensors, key=lambda spec: -spec.dtype.width)
            create_file(temporary, specs, metadata=_MAPPED)
            temporary.replace(path)
    return map_files(open_checkpoint(path).files, writable=True).weights


def mapped_layout(path: Path) -> Layout | None:
    """The layout of the file at `path`; None if it cannot be read."""
    try:
        return open_checkpoint(path).weights.layout
    except (CorruptError, FormatError, NotFoundError):
        return None
