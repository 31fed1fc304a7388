"""States of a small model, payloads made from them, and blocks taken apart so that a test can break one rule."""

import hashlib
import inspect
import json
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np

from deltasync.blocks import layout_runs
from deltasync.codecs import planes
from deltasync.format import limits
from deltasync.format.digest import StateDigest, layout_digest
from deltasync.format.layout import DTYPES, Layout, TensorSpec, dtype_of
from deltasync.format.payload import Block, PayloadHeader, write_payload
from deltasync.format.safetensors import header_bytes, parse_header
from deltasync.format.sealed import sealed
from deltasync.format.weights import Bits, Positions, Region, Weights
from deltasync.kernels import rans, reference
from deltasync.kernels.rans import ByteReader, varint

BF16 = np.dtype(ml_dtypes.bfloat16)
State = dict[str, np.ndarray]


def state(seed: int = 0) -> State:
    """A small state of many types, with an empty tensor and a scalar."""
    rng = np.random.default_rng(seed)
    return {
        "embed": rng.standard_normal((64, 32)).astype(BF16),
        "layer.0.up": rng.standard_normal((16, 32)).astype(BF16),
        "layer.0.bias": rng.standard_normal(33).astype(np.float32),
        "layer.0.fp8": rng.standard_normal((5, 7)).astype(ml_dtypes.float8_e4m3fn),
        "packed": rng.integers(0, 255, (9, 3), dtype=np.uint8),
        "counter": np.array(7, np.int64),
        "nothing": np.empty((0, 4), np.float16),
    }


def changed(old: State, *, seed: int = 1, share: float = 0.05) -> State:
    """A copy with some bits flipped in every tensor."""
    rng = np.random.default_rng(seed)
    new = {}
    for name, array in old.items():
        bits = array.copy().reshape(-1).view(np.uint8)
        bits[rng.random(bits.size) < share] ^= 1
        new[name] = bits.view(array.dtype).reshape(array.shape)
    return new


def same_bits(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> bool:
    """Whether names, types, shapes and all bits are equal."""
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and a[n].shape == b[n].shape and a[n].tobytes() == b[n].tobytes() for n in a
    )


def safetensors_bytes(tensors: Mapping[str, np.ndarray], *, pad: int = 0) -> bytes:
    """A safetensors file; `pad` more spaces in the header than needed misalign the data."""
    specs = [TensorSpec(name, dtype_of(a), a.shape) for name, a in tensors.items()]
    text = header_bytes(specs, {"format": "pt"})[8:] + b" " * pad
    return len(text).to_bytes(8, "little") + text + b"".join(a.tobytes() for a in tensors.values())


def write_sharded(folder: Path, tensors: Mapping[str, np.ndarray], *, shards: int = 2) -> None:
    """A checkpoint folder with an index, shards, and files that are not weights."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for i in range(shards):
        name = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {n: a for k, (n, a) in enumerate(tensors.items()) if k % shards == i}
        (folder / name).write_bytes(safetensors_bytes(part))
        weight_map.update(dict.fromkeys(part, name))
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "test"}')


LAYOUT = Layout.of(
    [
        TensorSpec("a", DTYPES["BF16"], (8, 10)),
        TensorSpec("b", DTYPES["BF16"], (40,)),
        TensorSpec("c", DTYPES["F32"], (6,)),
        TensorSpec("none", DTYPES["F32"], (0,)),
    ]
)


def block(codec: str, runs: list[list[int]], changed: int, lanes: tuple[int, int], data: bytes) -> Block:
    return Block(codec, np.array(runs, np.int64), changed, StateDigest(*lanes), data)


def delta_payload() -> bytes:
    """A delta of two blocks whose bytes mean nothing: the container does not look inside."""
    blocks = [
        block("exp/1", [[0, 0, 80], [1, 0, 20]], 5, (3, 4), b"first block"),
        block("abs/1", [[2, 1, 5]], 2, (10, 2**64 - 1), b"second"),
    ]
    parent = StateDigest(7, 8)
    return write_payload(PayloadHeader("delta", LAYOUT, parent, StateDigest(20, 11)), blocks)


def anchor_payload() -> bytes:
    """An anchor of three blocks."""
    blocks = [
        block("planes/1", [[0, 0, 80]], 80, (1, 1), b"x"),
        block("planes/1", [[1, 0, 40]], 40, (2, 2), b"yy"),
        block("planes/1", [[2, 0, 6]], 6, (3, 3), b"zzz"),
    ]
    digest = layout_digest(LAYOUT) + StateDigest(6, 6)
    return write_payload(PayloadHeader("anchor", LAYOUT, None, digest), blocks)


def shard_payload() -> bytes:
    """A part of that anchor."""
    digest = layout_digest(LAYOUT) + StateDigest(2, 2)
    return write_payload(
        PayloadHeader("shard", LAYOUT, None, digest), [block("planes/1", [[1, 0, 40]], 40, (2, 2), b"yy")]
    )


def coo_payload() -> bytes:
    """A `coo/1` delta of two tensors."""
    blocks = [
        block("coo/1", [[0, 0, 80]], 3, (1, 0), np.array([1, 5, 79], "<i4").tobytes() + b"abcdef"),
        block("coo/1", [[2, 0, 6]], 1, (0, 1), np.array([4], "<i4").tobytes() + b"wxyz"),
    ]
    return write_payload(PayloadHeader("delta", LAYOUT, StateDigest.ZERO, StateDigest(1, 1)), blocks)


def resealed(data: bytes, fields: Mapping[str, Any]) -> bytes:
    """A manifest or record with other fields and a seal that fits, as another implementation might have written it."""
    changed = json.loads(data) | dict(fields)
    return sealed({name: value for name, value in changed.items() if name != "sha256"})


class Pieces:
    """A payload taken apart: change the fields, then `build()` it again without any check."""

    def __init__(self, payload: bytes) -> None:
        header = parse_header(payload)
        self.metadata: dict[str, str] = dict(header.metadata)
        self.specs = [e.spec for e in header.entries]
        self.data = {e.name: payload[e.begin : e.end] for e in header.entries}
        self.index: dict[str, Any] = json.loads(zlib.decompress(self.data["deltasync.index"]))
        self.index_bytes: bytes | None = None

    def build(self) -> bytes:
        self.data["deltasync.index"] = (
            zlib.compress(json.dumps(self.index).encode()) if self.index_bytes is None else self.index_bytes
        )
        specs = [
            TensorSpec(s.name, s.dtype, (len(self.data[s.name]),)) if s.dtype.name == "U8" else s for s in self.specs
        ]
        return header_bytes(specs, self.metadata) + b"".join(self.data[s.name] for s in specs)


def mutated(payload: bytes, change: Callable[[Pieces], object]) -> bytes:
    """The payload after `change`."""
    pieces = Pieces(payload)
    change(pieces)
    return pieces.build()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class SequenceParts:
    """A coded sequence, field by field; `extra` is None for plain symbols."""

    lanes_log2: int
    tables: tuple[bytes, ...]
    word_count: int
    states: bytes
    words: bytes
    extra: bytes | None

    @classmethod
    def read(cls, reader: ByteReader, tables: int, *, numbers: bool) -> "SequenceParts":
        lanes_log2 = reader.byte()
        found = tuple(reader.take(reader.byte() + 1) for _ in range(tables))
        word_count = reader.varint()
        states, words = reader.take(4 << lanes_log2), reader.take(2 * word_count)
        return cls(lanes_log2, found, word_count, states, words, reader.take(reader.varint()) if numbers else None)

    def build(self) -> bytes:
        tables = b"".join(bytes((len(t) - 1,)) + t for t in self.tables)
        extra = b"" if self.extra is None else varint(len(self.extra)) + self.extra
        return bytes((self.lanes_log2,)) + tables + varint(self.word_count) + self.states + self.words + extra


@dataclass(frozen=True)
class ChangesParts:
    """A block of `exp/1` (`steps` given) or `abs/1` (`planes` given)."""

    thresholds: bytes
    counts: tuple[int, ...]
    gaps: SequenceParts
    steps: SequenceParts | None
    planes: bytes

    @classmethod
    def read(cls, data: bytes, *, absolute: bool) -> "ChangesParts":
        reader = ByteReader(data)
        thresholds = reader.take(reader.byte() - 1)
        counts = tuple(reader.varint() for _ in range(len(thresholds) + 1))
        used = sum(1 for c in counts if c)
        gaps = SequenceParts.read(reader, used, numbers=True)
        steps = None if absolute else SequenceParts.read(reader, used, numbers=True)
        head = cls(thresholds, counts, gaps, steps, b"")
        return replace(head, planes=data[len(head.build()) :])

    def build(self) -> bytes:
        head = bytes((len(self.thresholds) + 1,)) + self.thresholds + b"".join(map(varint, self.counts))
        return head + self.gaps.build() + (b"" if self.steps is None else self.steps.build()) + self.planes

    def with_gaps(self, **fields: Any) -> bytes:
        """The block with these fields of the coded gaps replaced."""
        return replace(self, gaps=replace(self.gaps, **fields)).build()


def numbers(values: Sequence[int], counts: Sequence[int]) -> SequenceParts:
    """Any numbers as a well-formed sequence."""
    data = rans.encode_buckets(np.array(values, np.uint64), list(counts))
    return SequenceParts.read(ByteReader(data), sum(1 for c in counts if c), numbers=True)


def encode_with(thresholds: Sequence[int], old: Region, positions: Positions, values: Bits) -> tuple[bool, bytes]:
    """What the reference writes when it takes these classes instead of its own choice."""
    with mock.patch.object(reference, "choose", return_value=np.array(thresholds, np.uint8)):
        absolute, data, _ = reference.encode_changes(old, positions, values)
    return absolute, data


def anchor_blocks(weights: Weights) -> list[Block]:
    """All weights as the blocks of an anchor."""
    return [planes.encode(weights, runs) for runs in layout_runs(weights.layout, elements=limits.PLANES_ELEMENTS)]


@contextmanager
def few_frames(count: int = 100) -> Iterator[None]:
    """Only so many frames are left in the block: a function that calls itself for each level of a path fails."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + count)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)
