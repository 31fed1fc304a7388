"""Checkpoints that appear whole or not at all: a copy with other weights, or a new one from a layout."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from deltasync.checkpoint import INDEX_NAME, WHOLE_NAME, Checkpoint, CheckpointFile, map_files
from deltasync.errors import InvalidInputError
from deltasync.files import copy_file, reader, sync_file, sync_folder, temporary_beside
from deltasync.format.companions import is_safe_path
from deltasync.format.layout import Layout, TensorSpec, canonical_json
from deltasync.format.safetensors import header_bytes, read_header
from deltasync.format.weights import Weights

SHARD_BYTES = 5_000_000_000
"""Where a new checkpoint is split, as transformers does by default."""

Fill = Callable[[Weights], None]
"""Overwrites the weights of a checkpoint that nobody can see yet."""

_OTHER_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".ckpt"})
_HINT_OUT = "choose an output that does not exist yet"


def write_checkpoint_like(checkpoint: Checkpoint, out: str | os.PathLike[str], fill: Fill) -> None:
    """A copy of `checkpoint` at `out` whose weights `fill` overwrites in place, before anybody can see it.

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
    found = {}
    for path in _files_below(checkpoint.path):
        name = path.relative_to(checkpoint.path).as_posix()
        if path.suffix not in _OTHER_WEIGHTS and name != INDEX_NAME and is_safe_path(name):
            found[name] = path.read_bytes()
    return found


def require_space(target: Path, nbytes: int) -> None:
    """InvalidInputError if the disk cannot take that much more."""
    folder = next(p for p in (target, *target.parents) if p.exists())
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise InvalidInputError(
            f"{target} needs {nbytes} bytes, {free} are free there", hint="free some space, or choose another output"
        )


@contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """A hidden place beside `target` that takes its name once the block has ended well and all is on disk."""
    with temporary_beside(target) as temporary:
        yield temporary
        _sync(temporary)
        try:
            os.replace(temporary, target)
        except OSError as error:
            raise InvalidInputError(f"cannot put the output at {target}: {error.strerror}", hint=_HINT_OUT) from error
    sync_folder(target.parent)


def _fill(files: list[CheckpointFile], fill: Fill) -> None:
    mapped = map_files(files, writable=True)
    fill(mapped.weights)
    mapped.flush()


def _named_shards(layout: Layout, folder: Path) -> list[tuple[str, list[TensorSpec]]]:
    """Names and tensors of the files; more than one get an index, as transformers reads it."""
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
    """A new safetensors file of zeros, as far as the file system can without writing them."""
    with path.open("xb") as file:
        head = header_bytes(specs, {"format": "pt"})
        file.write(head)
        file.truncate(len(head) + sum(spec.nbytes for spec in specs))
    with path.open("rb") as file:
        return CheckpointFile(path, read_header(reader(file.fileno()), os.fstat(file.fileno()).st_size))


def _require_free(target: Path, *, is_folder: bool) -> None:
    if is_folder:
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise InvalidInputError(f"{target} exists and is not an empty folder", hint=_HINT_OUT)
    elif target.is_dir():
        raise InvalidInputError(f"{target} is a folder, but the checkpoint is one file", hint="name a file")


def _copy_folder(checkpoint: Checkpoint, target: Path) -> None:
    ours = {f.path.name for f in checkpoint.files}
    # Listed before the first folder is made: the output may lie inside the source.
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
    """All files in a folder, links to files included, hidden folders left out; or the one file."""
    if path.is_file():
        yield path
        return
    for folder, names, file_names in os.walk(path):
        names[:] = sorted(n for n in names if not n.startswith("."))
        yield from (p for name in sorted(file_names) if (p := Path(folder, name)).is_file())
