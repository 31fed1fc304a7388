"""Safetensors files of raw bits: written tensor by tensor without a copy, read back as unsigned integers."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from benchmarks.bits import ELEMENT_TYPES, UNSIGNED, Bits
from benchmarks.data.pair import Pair, make_pair

WEIGHTS_NAME = "model.safetensors"
HEADER_ALIGNMENT = 8


def write_checkpoint(path: Path, tensors: Mapping[str, Bits], *, dtype: str) -> None:
    """Write one state as a safetensors file; the file appears whole or not at all."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, bits in tensors.items():
        span = [offset, offset + bits.nbytes]
        header[name] = {"dtype": dtype, "shape": list(bits.shape), "data_offsets": span}
        offset += bits.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for bits in tensors.values():
            file.write(np.ascontiguousarray(bits).data)
    os.replace(partial, path)


def read_checkpoint(path: Path) -> tuple[str, dict[str, Bits]]:
    """Read a state whose tensors have one type: its safetensors name, and the bits in the order of the file."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    kinds = {entry["dtype"] for entry in header.values()}
    if len(kinds) != 1:
        raise ValueError(f"{path.name}: expected tensors of one type, found {sorted(kinds)}")
    dtype = str(kinds.pop())
    unsigned = np.dtype(UNSIGNED[ELEMENT_TYPES[dtype].width])
    data = np.fromfile(path, np.uint8, offset=8 + size)
    tensors: dict[str, Bits] = {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = entry["data_offsets"]
        tensors[name] = data[first:last].view(unsigned).reshape(entry["shape"])
    return dtype, tensors


def write_pair(pair: Pair, folder: Path) -> tuple[Path, Path]:
    """Write a pair as two checkpoint folders, `old` and `new`, of one `model.safetensors` each; return both."""
    for side, tensors in (("old", pair.old), ("new", pair.new)):
        write_checkpoint(folder / side / WEIGHTS_NAME, tensors, dtype=pair.kind.name)
    return folder / "old", folder / "new"


def read_pair(name: str, old: Path, new: Path) -> Pair:
    """Read two safetensors files as a pair; the tensors of `new` take the order of `old`."""
    dtype, before = read_checkpoint(old)
    other, after = read_checkpoint(new)
    if dtype != other or before.keys() != after.keys():
        raise ValueError(f"{name}: the two files differ in names or types")
    return make_pair(name, dtype, before, {tensor: after[tensor] for tensor in before})
