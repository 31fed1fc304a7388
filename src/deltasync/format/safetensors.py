"""The safetensors container: a strict reader of its header, and a writer.

A file is an 8-byte little-endian length, a JSON header of that length, and the tensors' bytes without holes.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from deltasync.errors import CorruptError, FormatError
from deltasync.format import limits
from deltasync.format.layout import DTYPES, DType, TensorSpec
from deltasync.format.sealed import is_count, parse_object

Read = Callable[[int, int], bytes]
"""`read(offset, length)` returns exactly that range of a file, and less only where the file ends."""

_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file; `begin` and `end` are offsets in the file."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header: `entries` in file order cover the data section exactly."""

    entries: tuple[Entry, ...]
    metadata: dict[str, str]
    data_begin: int


def parse_header(data: bytes | memoryview) -> Header:
    """The header of a whole file in memory."""
    view = memoryview(data).cast("B")
    return read_header(lambda offset, length: bytes(view[offset : offset + length]), len(view))


def read_header(read: Read, size: int) -> Header:
    """The header of a file of `size` bytes; CorruptError names the broken rule, FormatError an unknown type."""
    length = int.from_bytes(read_exactly(read, 0, _LENGTH_BYTES), "little")
    if length > limits.SAFETENSORS_HEADER_BYTES_MAX:
        most = limits.SAFETENSORS_HEADER_BYTES_MAX
        raise CorruptError(f"the header has {length} bytes; at most {most} are allowed", rule="safetensors.header_size")
    data_begin = _LENGTH_BYTES + length
    if data_begin > size:
        raise CorruptError(
            f"the header ends at byte {data_begin}, but the file has {size}", rule="safetensors.truncated"
        )
    text = read_exactly(read, _LENGTH_BYTES, length)
    if text[:1] != b"{":
        raise CorruptError("the header must begin with {", rule="safetensors.json")
    fields = parse_object(text, what="the safetensors header", scope="safetensors")
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CorruptError("__metadata__ must be an object of strings", rule="safetensors.metadata")
    entries = [_entry(name, value, data_begin) for name, value in fields.items()]
    entries.sort(key=attrgetter("begin", "end"))
    at = data_begin
    for entry in entries:
        if entry.begin != at:
            problem = "begins after a hole" if entry.begin > at else "overlaps the one before it"
            raise CorruptError(f"tensor {entry.name!r:.200} {problem}", rule="safetensors.offsets")
        at = entry.end
    if at > size:
        raise CorruptError(f"the tensors end at byte {at}, but the file has {size}", rule="safetensors.truncated")
    if at < size:
        raise CorruptError(f"the file has {size - at} bytes after its last tensor", rule="safetensors.trailing")
    return Header(tuple(entries), metadata, data_begin)


def header_bytes(tensors: Iterable[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """Length and header of a file that holds `tensors` in the order given; the data section begins on 8 bytes."""
    fields: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    end = 0
    for spec in tensors:
        begin, end = end, end + spec.nbytes
        fields[spec.name] = {"dtype": spec.dtype.name, "shape": list(spec.shape), "data_offsets": [begin, end]}
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def read_exactly(read: Read, offset: int, length: int) -> bytes:
    """A range of a file; CorruptError if the file ends before it does."""
    data = read(offset, length)
    if len(data) != length:
        raise CorruptError(f"the file ends before byte {offset + length}", rule="safetensors.truncated")
    return data


def _entry(name: str, value: Any, data_begin: int) -> Entry:
    match value:
        case {"dtype": str(dtype_name), "shape": list(shape), "data_offsets": [begin, end]}:
            pass
        case _:
            raise CorruptError(
                f"tensor {name!r:.200} must have dtype, shape and data_offsets", rule="safetensors.entry"
            )
    dtype = DTYPES.get(dtype_name)
    if dtype is None:
        raise FormatError(
            f"tensor {name!r:.200} has the element type {dtype_name!r:.40}, which is not supported",
            rule="dtype",
            hint=f"supported: {', '.join(DTYPES)}",
        )
    if len(shape) > limits.DIMENSIONS_MAX or not all(is_count(d, most=limits.ELEMENTS_MAX) for d in shape):
        raise CorruptError(
            f"tensor {name!r:.200} has the shape {shape!r:.80}, not up to {limits.DIMENSIONS_MAX} whole numbers",
            rule="safetensors.shape",
        )
    if not is_count(begin, most=limits.COUNT_MAX) or not is_count(end, most=limits.COUNT_MAX) or begin > end:
        raise CorruptError(
            f"tensor {name!r:.200} has the offsets {begin!r:.40} and {end!r:.40}, not ascending whole numbers",
            rule="safetensors.offsets",
        )
    needed = math.prod(shape) * dtype.width
    if end - begin != needed:
        raise CorruptError(
            f"tensor {name!r:.200} has {end - begin} bytes; its type and shape need {needed}", rule="safetensors.size"
        )
    return Entry(name, dtype, tuple(shape), data_begin + begin, data_begin + end)
