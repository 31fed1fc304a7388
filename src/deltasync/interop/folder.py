"""One folder of the exchange format: the change between two versions, in the form of a Hugging Face checkpoint.

`weight_v000007/` has safetensors files with one tensor of bytes for each tensor that changed: its change, compressed
with zstd. The files' metadata has a checksum of each tensor's new bytes. `model.safetensors.index.json` comes last, and
says which version the change leads from and to. A folder whose index names no encoding is a checkpoint.
"""

import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from deltasync.blocks import CutTensors
from deltasync.checkpoint import INDEX_NAME, WHOLE_NAME
from deltasync.errors import CorruptError, DeltasyncError, FormatError, InvalidInputError, MismatchError, NotFoundError
from deltasync.files import read_range, reader, sync_file
from deltasync.format import limits
from deltasync.format.layout import DTYPES, TensorSpec
from deltasync.format.safetensors import header_bytes, read_header
from deltasync.format.sealed import canonical_json, parse_object
from deltasync.format.weights import Bits, Changes, Weights, index_dtype, tensor_parts
from deltasync.parallel import each

Encoding = Literal["xor", "overwrite"]
"""`xor`: the old bytes XOR the new ones. `overwrite`: how many bytes changed, where, and their new values."""

ChecksumFormat = Literal["adler32", "xxh3-128", "blake3"]

SHARD_BYTES = 2 << 30
"""A file ends once its tensors have this size."""

_LEVEL = 1
_NAME = re.compile(r"weight_v([0-9]{6,18})", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,18}", re.ASCII)
_FORMAT_HINT = "deltasync reads deltas of slime's layout: xor or overwrite, zstd, adler32, xxh3-128 or blake3"


@dataclass(frozen=True, slots=True)
class EncodedTensor:
    """The compressed change of one tensor: where it is, and the checksum of the tensor's new bytes."""

    name: str
    file: Path
    begin: int
    end: int
    checksum: str


@dataclass(frozen=True, slots=True)
class DeltaFolder:
    """A folder whose index and headers were read and checked. Nothing is decompressed yet."""

    path: Path
    version: int
    base_version: int
    encoding: Encoding
    checksum_format: ChecksumFormat
    tensors: tuple[EncodedTensor, ...]


def folder_name(version: int) -> str:
    """The name of the folder of a version."""
    return f"weight_v{version:06d}"


def folder_version(path: Path) -> int | None:
    """The version in the name of a folder; None if it has another name."""
    match = _NAME.fullmatch(path.name)
    return None if match is None else int(match[1])


def list_folders(root: Path) -> dict[int, Path]:
    """The folders of versions in `root`, ascending."""
    if not root.is_dir():
        raise NotFoundError(f"{root} is not a folder", hint="give the folder that the trainer writes weight_v… to")
    found = {version: path for path in root.iterdir() if (version := folder_version(path)) is not None}
    return {version: found[version] for version in sorted(found) if found[version].is_dir()}


def open_folder(path: Path) -> DeltaFolder | None:
    """Read the index and the headers of a delta; None if the folder is a checkpoint.

    NotFoundError if the index or a file that it names is not there (yet). CorruptError, FormatError or MismatchError,
    naming the file, if the folder cannot be what its name says.
    """
    metadata, weight_map = _read_index(path)
    if metadata is None or "delta_encoding" not in metadata:
        return None
    encoding = _known(path, metadata, "delta_encoding", get_args(Encoding))
    _known(path, metadata, "compression_format", ("zstd",))
    checksum_format = _known(path, metadata, "checksum_format", get_args(ChecksumFormat))
    for field in ("version", "base_version"):
        value = metadata.get(field)
        if not isinstance(value, str) or _NUMBER.fullmatch(value) is None:
            message = f"{path} has the {field} {value!r:.40}, which is not a number in digits"
            raise FormatError(message, rule="folder.version", key=str(path), hint=_FORMAT_HINT)
    version, base_version = int(metadata["version"]), int(metadata["base_version"])
    if folder_version(path) not in (None, version):
        raise MismatchError(
            f"{path} says that it is version {version}",
            rule="folder.version",
            key=str(path),
            hint=f"give it the name {folder_name(version)}, or write it again",
        )
    if base_version >= version:
        raise MismatchError(
            f"{path} leads from version {base_version} to {version}, but a change must lead to a later version",
            rule="folder.version",
            key=str(path),
            hint="write it again",
        )
    by_file: dict[str, list[str]] = {}
    for tensor, file_name in weight_map.items():
        by_file.setdefault(file_name, []).append(tensor)
    tensors = [t for file_name, names in sorted(by_file.items()) for t in _read_tensors(path / file_name, names)]
    return DeltaFolder(
        path,
        version,
        base_version,
        cast(Encoding, encoding),
        cast(ChecksumFormat, checksum_format),
        tuple(sorted(tensors, key=lambda tensor: tensor.name)),
    )


def _read_index(path: Path) -> tuple[dict[str, Any] | None, dict[str, str]]:
    """The metadata and the files by tensor; None and nothing for a checkpoint of one file, which has no index."""
    index = path / INDEX_NAME
    try:
        size, most = index.stat().st_size, limits.SAFETENSORS_HEADER_BYTES_MAX
        if size > most:
            raise CorruptError(f"{index} has {size} bytes; at most {most} are allowed", rule="folder.index")
        fields = parse_object(index.read_bytes(), what=str(index), scope="folder")
    except FileNotFoundError as error:
        if (path / WHOLE_NAME).exists():
            return None, {}
        raise NotFoundError(
            f"{path} is not complete: there is no {INDEX_NAME} in it",
            key=str(path),
            hint="wait until the trainer has written it",
        ) from error
    metadata: Any = fields.get("metadata", {})
    weight_map: Any = fields.get("weight_map")
    are_objects = isinstance(metadata, dict) and isinstance(weight_map, dict)
    if not are_objects or not all(
        isinstance(name, str) and name.endswith(".safetensors") and Path(name).name == name and "\0" not in name
        for name in weight_map.values()
    ):
        raise CorruptError(f"{index} must have metadata and a weight_map of tensors to files", rule="folder.index")
    return metadata, weight_map


def _known(path: Path, metadata: dict[str, Any], field: str, known: tuple[str, ...]) -> str:
    value = metadata.get(field)
    if value not in known:
        message = f"{path} has the {field} {value!r:.40}, which is none of {', '.join(known)}"
        raise FormatError(message, rule=f"folder.{field}", key=str(path), hint=_FORMAT_HINT)
    return cast(str, value)


def _read_tensors(file: Path, names: list[str]) -> Iterator[EncodedTensor]:
    try:
        with file.open("rb") as opened:
            header = read_header(reader(opened.fileno()), file.stat().st_size)
    except FileNotFoundError as error:
        raise NotFoundError(
            f"{file.parent} is not complete: {file.name} is missing",
            key=str(file),
            hint="wait until the trainer has written it",
        ) from error
    except DeltasyncError as error:
        raise error.at(file) from error
    entries = {entry.name: entry for entry in header.entries}
    for name in names:
        entry, checksum = entries.get(name), header.metadata.get(name)
        if entry is None or entry.dtype.name != "U8":
            raise CorruptError(f"{file} has no bytes for tensor {name!r:.200}", rule="folder.tensor", key=str(file))
        if checksum is None:
            raise CorruptError(f"{file} has no checksum of {name!r:.200}", rule="folder.checksum", key=str(file))
        yield EncodedTensor(name, file, entry.begin, entry.end, checksum)


# From folder to changes


def decode_folder(folder: DeltaFolder, weights: Weights) -> list[Changes]:
    """The changes of a folder for `weights`, which hold the version that it leads from and are not changed.

    Every tensor is compared with its checksum: MismatchError if one differs, because the folder is damaged or was made
    from other weights. Memory is needed for the changes, and for a few whole tensors at a time.
    """
    for tensor in folder.tensors:
        if tensor.name not in weights.layout.ordinals:
            raise MismatchError(
                f"{folder.path} has tensor {tensor.name!r:.200}, which is not in the feed",
                rule="folder.layout",
                key=str(folder.path),
                hint="the feed was begun with another checkpoint than the trainer was",
            )
    _require_modules(folder.checksum_format)

    def decode(tensor: EncodedTensor) -> tuple[int, NDArray[np.unsignedinteger], Bits]:
        ordinal = weights.layout.ordinals[tensor.name]
        old = weights.arrays[ordinal]
        with tensor.file.open("rb") as file:
            compressed = read_range(file.fileno(), tensor.begin, tensor.end - tensor.begin)
        place = f"{tensor.file}: tensor {tensor.name!r:.200}"
        if folder.encoding == "xor":
            data = _decompress(compressed, place, least=old.nbytes, most=old.nbytes)
            new = np.frombuffer(data, old.dtype) ^ old
            indices = np.flatnonzero(new != old)
        else:
            new = old.copy()
            data = _decompress(compressed, place, least=4, most=4 + 5 * old.nbytes)
            count = int.from_bytes(data[:4], "little")
            if len(data) != 4 + 5 * count:
                raise CorruptError(f"{place} has {len(data)} bytes for {count} changed ones", rule="folder.size")
            positions = np.frombuffer(data, "<u4", count, 4)
            if count and not ((positions[1:] > positions[:-1]).all() and int(positions[-1]) < old.nbytes):
                message = f"{place} has positions that do not ascend inside the tensor"
                raise CorruptError(message, rule="folder.positions")
            new.view(np.uint8)[positions] = np.frombuffer(data, np.uint8, count, 4 + 4 * count)
            indices = np.unique(positions // old.itemsize)
            indices = indices[new[indices] != old[indices]]
        found = checksum(folder.checksum_format, new)
        if found != tensor.checksum:
            origin = "the trainer began with other weights than the feed"
            raise MismatchError(
                f"{place} has the {folder.checksum_format} {found} after version {folder.version}, but the trainer "
                f"wrote {tensor.checksum:.64}",
                rule="folder.checksum",
                key=str(tensor.file),
                hint=f"the file is damaged, or {origin}; nothing was published",
            )
        return ordinal, indices.astype(index_dtype(weights.layout, ordinal)), new[indices]

    cut = CutTensors(weights.layout)
    for ordinal, indices, values in each(decode, folder.tensors):
        cut.add(ordinal, indices, values)
    return cut.blocks()


def _decompress(compressed: bytes, place: str, *, least: int, most: int) -> bytes:
    """Decompress what must have a size between these bounds. No more than `most` is allocated."""
    zstandard = _module("zstandard")
    try:
        promised = zstandard.frame_content_size(compressed)
        if promised > most:
            raise CorruptError(f"{place} would have {promised} bytes; at most {most} fit", rule="folder.size")
        # 0 would mean: without a limit.
        data: bytes = zstandard.ZstdDecompressor().decompress(
            compressed, max_output_size=max(1, most), allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise CorruptError(f"{place} cannot be decompressed: {error}", rule="folder.zstd") from error
    if not least <= len(data) <= most:
        raise CorruptError(f"{place} has {len(data)} bytes; the tensor needs {least}", rule="folder.size")
    return data


# From changes to folder


TensorDelta = tuple[TensorSpec, NDArray[np.integer], Bits, Bits]
"""The change of one tensor: where, its bits there before, and all of its bits now."""


def write_files(
    folder: Path,
    deltas: Iterable[TensorDelta],
    *,
    version: int,
    base_version: int,
    encoding: Encoding,
    checksum_format: ChecksumFormat,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write the files of a delta and its index into an empty folder, synced to disk; returns their size.

    A file is held in memory until it is written.
    """
    _require_modules(checksum_format)
    shards: list[list[str]] = []
    held: dict[str, tuple[bytes, str]] = {}
    size = 0

    def write_shard() -> None:
        specs = [TensorSpec(name, DTYPES["U8"], (len(data),)) for name, (data, _) in held.items()]
        path = folder / _part_name(len(shards))
        with path.open("xb") as file:
            file.write(header_bytes(specs, {name: checksum for name, (_, checksum) in held.items()}))
            for data, _ in held.values():
                file.write(data)
        sync_file(path)
        shards.append(list(held))
        held.clear()

    def encode(delta: TensorDelta) -> tuple[str, bytes, str]:
        spec, indices, before, after = delta
        changed = before ^ after[indices]
        if encoding == "xor":
            diff = np.zeros_like(after)
            diff[indices] = changed
            data = diff.tobytes()
        else:
            width = after.itemsize
            if after.nbytes > 1 << 32:
                raise InvalidInputError(f"{spec} has more than 4 GiB, where overwrite has no positions", hint="use xor")
            where = indices.astype(np.int64)[:, None] * width + np.arange(width)
            positions = where[changed.view(np.uint8).reshape(-1, width) != 0].astype("<u4")
            values = after.view(np.uint8)[positions]
            data = len(positions).to_bytes(4, "little") + positions.tobytes() + values.tobytes()
        compressed: bytes = _module("zstandard").ZstdCompressor(level=_LEVEL).compress(data)
        return spec.name, compressed, checksum(checksum_format, after)

    for name, data, digest in each(encode, deltas):
        held[name] = data, digest
        size += len(data)
        if sum(len(other) for other, _ in held.values()) >= shard_bytes:
            write_shard()
    if held:
        write_shard()
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        file_name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        (folder / _part_name(i)).rename(folder / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    metadata = {
        "version": f"{version:06d}",
        "base_version": f"{base_version:06d}",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": checksum_format,
    }
    index = canonical_json({"metadata": metadata, "weight_map": weight_map})
    (folder / INDEX_NAME).write_bytes(index)
    sync_file(folder / INDEX_NAME)
    return size + len(index)


def _part_name(number: int) -> str:
    return f"part-{number:05d}.safetensors"


def checksum(checksum_format: ChecksumFormat, bits: Bits) -> str:
    """The checksum of a tensor's bytes in hexadecimal digits."""
    data = bits.view(np.uint8).data if bits.nbytes else b""
    if checksum_format == "adler32":
        return f"{zlib.adler32(data):08x}"
    if checksum_format == "xxh3-128":
        return cast(str, _module("xxhash").xxh3_128(data).hexdigest())
    hasher: Callable[..., Any] = _module("blake3").blake3
    return cast(str, hasher(data).hexdigest())


def tensor_deltas(after: Weights, replaced: Iterable[Changes]) -> Iterator[TensorDelta]:
    """What changed, tensor by tensor, from the bits that were replaced."""
    parts: dict[int, list[tuple[NDArray[np.unsignedinteger], Bits]]] = {}
    for changes in replaced:
        for ordinal, indices, before in tensor_parts(after.layout, changes):
            parts.setdefault(ordinal, []).append((indices, before))
    for ordinal in sorted(parts):
        found = sorted(parts.pop(ordinal), key=lambda part: int(part[0][0]))
        indices, before = np.concatenate([at for at, _ in found]), np.concatenate([bits for _, bits in found])
        yield after.layout.tensors[ordinal], indices, before, after.arrays[ordinal]


_CHECKSUM_MODULES = {"adler32": (), "xxh3-128": ("xxhash",), "blake3": ("blake3",)}


def _require_modules(checksum_format: ChecksumFormat) -> None:
    for name in ("zstandard", *_CHECKSUM_MODULES[checksum_format]):
        _module(name)


def _module(name: str) -> Any:
    """A package of the extra, imported when it is first needed."""
    try:
        return import_module(name)
    except ImportError as error:
        raise InvalidInputError(
            f"folders of deltas need the package {name}", hint='pip install "deltasync[interop]"'
        ) from error
