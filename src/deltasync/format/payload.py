"""The payload: a safetensors file that holds an index and the bytes of blocks.

Any safetensors reader opens it. Coded blocks are U8 tensors, one after another, so that each is one range of the
file. A `coo/1` payload holds plain `{name}.indices` and `{name}.values` instead.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from deltasync.errors import CorruptError, FormatError
from deltasync.format import limits
from deltasync.format.digest import StateDigest, layout_digest
from deltasync.format.index import COO, PLANES, BlockRecord, decode_index, encode_index, require_disjoint
from deltasync.format.layout import DTYPES, DType, Layout, TensorSpec
from deltasync.format.safetensors import Header, Read, header_bytes, read_exactly, read_header
from deltasync.format.sealed import FORMAT, is_decimal
from deltasync.format.weights import Buffer, Runs

INDEX_NAME = "deltasync.index"
Kind = Literal["delta", "anchor", "shard"]
"""A shard covers some of the elements of an anchor; its digest counts the others as zero."""

Range = tuple[int, int]
"""First byte, and the byte after the last."""

_KINDS: dict[str, Kind] = {"delta": "delta", "anchor": "anchor", "shard": "shard"}
_PREFIX_BYTES = 64 << 10
_U8 = DTYPES["U8"]
_OURS = FORMAT.partition("/")[0] + "/"


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """One block with its bytes. `digest` is the sum of key * (new - old) over it (old is 0 in an anchor)."""

    codec: str
    runs: Runs
    changed: int
    digest: StateDigest
    data: Buffer


@dataclass(frozen=True, slots=True, eq=False)
class BlockInfo(BlockRecord):
    """One block and where its bytes lie in the file: one range, or two for `coo/1` (indices, values)."""

    ranges: tuple[Range, ...]

    @property
    def nbytes(self) -> int:
        return sum(end - begin for begin, end in self.ranges)


@dataclass(frozen=True, slots=True)
class PayloadHeader:
    """What a payload is a change of. An anchor and its shards have no parent.

    A delta may be one of several that lead from one parent to one version, each made by a rank of the trainer: its
    `digest` is that of the parent with this change alone. In a feed, `version` makes payloads of equal content differ:
    no two versions ever share one, so that what only an old version needs can be deleted at any time.
    """

    kind: Kind
    layout: Layout
    parent_digest: StateDigest | None
    digest: StateDigest
    version: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """A checked payload whose blocks are read on demand, each verified against its SHA-256.

    `whole` has all bytes of a payload that is in memory and has the SHA-256 that a manifest promises: its blocks are
    not copied, and not verified again.
    """

    header: PayloadHeader
    block_infos: tuple[BlockInfo, ...]
    nbytes: int
    read: Read
    whole: memoryview | None = None

    @classmethod
    def parse(cls, data: Any, *, known: Layout | None = None, is_proved: bool = False) -> "Payload":
        """From a buffer (bytes, memoryview, mmap) that holds the whole file and outlives the payload.

        `is_proved`: the file has the SHA-256 that it should have.
        """
        view = memoryview(data).cast("B")
        payload = cls.open(lambda offset, length: bytes(view[offset : offset + length]), len(view), known=known)
        return replace(payload, whole=view) if is_proved else payload

    @classmethod
    def open(cls, read: Read, nbytes: int, *, known: Layout | None = None) -> "Payload":
        """From ranges of a file of `nbytes` bytes: one small read, and a second if header and index are long.

        `known` is a layout that it probably has, which is then not built again.
        """
        read_once = _with_prefix(read, nbytes)
        header = read_header(read_once, nbytes)
        kind = _checked_metadata(header.metadata)
        index = next((e for e in header.entries if e.name == INDEX_NAME), None)
        if index is None:
            raise CorruptError(f"the payload lacks the tensor {INDEX_NAME}", rule="payload.tensors")
        if index.end - index.begin > limits.INDEX_BYTES_MAX:
            # It is not larger than what it decompresses to, which is checked as it decompresses.
            raise CorruptError(
                f"the index has {index.end - index.begin} bytes; at most {limits.INDEX_BYTES_MAX} are allowed",
                rule="index.size",
            )
        layout, records = decode_index(read_exactly(read_once, index.begin, index.end - index.begin), known)
        parsed = PayloadHeader(
            kind=kind,
            layout=layout,
            parent_digest=StateDigest.from_hex(header.metadata["parent_digest"]) if kind == "delta" else None,
            digest=StateDigest.from_hex(header.metadata["digest"]),
            version=None if (version := header.metadata.get("version")) is None else int(version),
        )
        _check_consistent(parsed, records)
        for name, expected in _metadata(parsed, records).items():
            if header.metadata[name] != expected:
                rule = "payload.layout" if name == "layout_sha256" else "payload.totals"
                raise CorruptError(
                    f"{name} in the metadata is {header.metadata[name]:.80}, but the index says {expected}", rule=rule
                )
        return cls(parsed, _located(layout, records, header), nbytes, read)

    def block(self, i: int) -> Block:
        """Block `i`; CorruptError if its bytes do not have the SHA-256 that the index names."""
        info = self.block_infos[i]
        if self.whole is not None and len(info.ranges) == 1:
            begin, end = info.ranges[0]
            return Block(info.codec, info.runs, info.changed, info.digest, self.whole[begin:end])
        data = b"".join(read_exactly(self.read, begin, end - begin) for begin, end in info.ranges)
        return check_block(info, data)

    def blocks(self) -> Iterator[Block]:
        """All blocks, in order."""
        return (self.block(i) for i in range(len(self.block_infos)))


def check_block(record: BlockRecord, data: bytes) -> Block:
    """The block whose bytes were fetched by its ranges; CorruptError if their SHA-256 is another."""
    if hashlib.sha256(data).hexdigest() != record.sha256:
        raise CorruptError("the bytes of a block do not have its SHA-256", rule="block.sha256")
    return Block(record.codec, record.runs, record.changed, record.digest, data)


def write_payload(header: PayloadHeader, blocks: Sequence[Block]) -> bytes:
    """The whole file; equal input gives equal bytes."""
    return b"".join(payload_chunks(header, blocks))


def payload_chunks(header: PayloadHeader, blocks: Sequence[Block]) -> Iterator[bytes | memoryview]:
    """The file as consecutive buffers, without a second copy of the blocks. Refuses what a reader would refuse."""
    records = tuple(
        BlockRecord(b.codec, b.runs, b.changed, b.digest, hashlib.sha256(b.data).hexdigest()) for b in blocks
    )
    _check_consistent(header, records)
    index = encode_index(header.layout, records)
    tensors = _tensors(header.layout, records)
    specs = []
    for tensor in tensors:
        size = len(index) if tensor.block is None else len(blocks[tensor.block].data)
        specs.append(TensorSpec(tensor.name, tensor.dtype, (size if tensor.length is None else tensor.length,)))
    yield header_bytes(specs, {**_metadata(header, records), "format": FORMAT})
    for tensor, spec in zip(tensors, specs, strict=True):
        if tensor.block is None:
            yield index
        else:
            data = memoryview(blocks[tensor.block].data)
            yield data[len(data) - spec.nbytes :] if tensor.is_tail else data[: spec.nbytes]


class _HasRuns(Protocol):
    @property
    def runs(self) -> Runs: ...


_B = TypeVar("_B", bound=_HasRuns)


def grouped(blocks: Iterable[_B], *, enough: int | None = None) -> Iterator[list[_B]]:
    """Neighbouring blocks, one group for each payload: it ends once its size is `enough`, or it has too many runs.

    The size of a block is that of its bytes; before it is encoded, it is the number of its elements.
    """
    group: list[_B] = []
    held = runs = 0
    for block in blocks:
        if group and runs + len(block.runs) > limits.RUNS_MAX:
            yield group
            group, held, runs = [], 0, 0
        group.append(block)
        held += len(block.data) if isinstance(block, Block) else int(block.runs[:, 2].sum())
        runs += len(block.runs)
        if enough is not None and held >= enough:
            yield group
            group, held, runs = [], 0, 0
    if group:
        yield group


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One tensor of the file: the index (`block` is None), a block, or one half of a `coo/1` block."""

    name: str
    dtype: DType
    length: int | None
    block: int | None
    is_tail: bool = False


def _tensors(layout: Layout, records: Sequence[BlockRecord]) -> list[_Tensor]:
    """The tensors that a payload must have, in file order."""
    index = _Tensor(INDEX_NAME, _U8, None, None)
    if not any(r.codec == COO for r in records):
        return [index, *(_Tensor(f"deltasync.block.{i:08d}", _U8, None, i) for i in range(len(records)))]
    halves = []
    for i, record in enumerate(records):
        spec = layout.tensors[int(record.runs[0, 0])]
        halves.append(_Tensor(f"{spec.name}.indices", DTYPES[f"I{8 * index_dtype(spec).itemsize}"], record.changed, i))
        halves.append(_Tensor(f"{spec.name}.values", spec.dtype, record.changed, i, is_tail=True))
    # Widest first keeps every tensor aligned to its own width, which zero-copy readers need.
    return [*sorted(halves, key=lambda t: (-t.dtype.width, t.is_tail, t.block)), index]


def _with_prefix(read: Read, nbytes: int) -> Read:
    """`read` with the first bytes of the file fetched once: most headers and indices lie inside."""
    prefix = read_exactly(read, 0, min(nbytes, _PREFIX_BYTES))

    def read_cached(offset: int, length: int) -> bytes:
        end = min(offset + length, nbytes)
        return prefix[offset:end] if end <= len(prefix) else read(offset, end - offset)

    return read_cached


def index_dtype(spec: TensorSpec) -> np.dtype[np.signedinteger]:
    """The type of `{name}.indices`: 4 bytes while every position fits."""
    return np.dtype("<i4" if spec.elements < 1 << 31 else "<i8")


def _located(layout: Layout, records: Sequence[BlockRecord], header: Header) -> tuple[BlockInfo, ...]:
    tensors = _tensors(layout, records)
    ranges: list[list[Range]] = [[] for _ in records]
    for tensor, entry in zip(tensors, header.entries, strict=False):
        fits = len(entry.shape) == 1 and tensor.length in (None, entry.shape[0])
        if tensor.name != entry.name or tensor.dtype != entry.dtype or not fits:
            wanted = f"{tensor.name}: {tensor.dtype.name}[{'n' if tensor.length is None else tensor.length}]"
            raise CorruptError(
                f"a tensor of the payload must be {wanted:.200}, not {entry.spec!s:.200}", rule="payload.tensors"
            )
        if tensor.block is not None:
            # The indices of a block come before its values, wherever both are in the file.
            ranges[tensor.block].insert(len(ranges[tensor.block]) if tensor.is_tail else 0, (entry.begin, entry.end))
    if len(tensors) != len(header.entries):
        raise CorruptError(f"the payload has {len(header.entries)} tensors, not {len(tensors)}", rule="payload.tensors")
    return tuple(
        BlockInfo(r.codec, r.runs, r.changed, r.digest, r.sha256, tuple(own))
        for r, own in zip(records, ranges, strict=True)
    )


def _metadata(header: PayloadHeader, records: Iterable[BlockRecord]) -> dict[str, str]:
    """The entries of `__metadata__` that follow from the index."""
    fields = {
        "kind": header.kind,
        "layout_sha256": header.layout.sha256,
        "digest": header.digest.hex,
        "elements": str(header.layout.elements),
        "changed": str(sum(r.changed for r in records)),
    }
    if header.parent_digest is not None:
        fields["parent_digest"] = header.parent_digest.hex
    if header.version is not None:
        fields["version"] = str(header.version)
    return fields


def _checked_metadata(metadata: dict[str, str]) -> Kind:
    """The kind of the payload; CorruptError or FormatError unless the metadata fits it."""
    name = metadata.get("format")
    if name is None or not name.startswith(_OURS):
        # Checkpoints of transformers have the format "pt".
        hint = "give a file that `deltasync diff` wrote, or a payload of a feed"
        raise FormatError("this is a checkpoint, not a delta", rule="payload.format", hint=hint)
    if name != FORMAT:
        message = f"the format of the payload is {name!r:.80}; this release reads {FORMAT!r}"
        raise FormatError(message, rule="payload.format", hint="upgrade deltasync")
    kind = metadata.get("kind")
    if kind is None:
        raise CorruptError("__metadata__ lacks kind", rule="payload.metadata")
    known = _KINDS.get(kind)
    if known is None:
        raise FormatError(
            f"{kind!r:.80} is not a kind of payload that this release knows",
            rule="payload.kind",
            hint="upgrade deltasync",
        )
    needed = ["layout_sha256", "digest", "elements", "changed", *(["parent_digest"] if kind == "delta" else [])]
    missing = [name for name in needed if name not in metadata]
    if missing or (kind != "delta" and "parent_digest" in metadata):
        message = (
            f"lacks {', '.join(missing)}"
            if missing
            else f"has a parent_digest, but a payload of kind {kind} has no parent"
        )
        raise CorruptError(f"__metadata__ {message}", rule="payload.metadata")
    if not all(is_decimal(metadata.get(name, "0")) for name in ("elements", "changed", "version")):
        raise CorruptError(
            "elements, changed and version in __metadata__ must be decimal numbers", rule="payload.metadata"
        )
    return known


def _check_consistent(header: PayloadHeader, records: Sequence[BlockRecord]) -> None:
    """CorruptError unless the blocks fit each other and the header."""
    layout = header.layout
    if (header.kind == "delta") != (header.parent_digest is not None):
        raise CorruptError("a delta must have a parent, and an anchor and its shards must not", rule="payload.metadata")
    codecs, all_runs = set(), []
    digest = layout_digest(layout) if header.parent_digest is None else header.parent_digest
    for record in records:
        codecs.add(record.codec)
        all_runs.append(record.runs)
        digest += record.digest
    if header.kind != "delta" and not codecs <= {PLANES}:
        raise CorruptError(
            f"the blocks of a payload of kind {header.kind} must be {PLANES}, not {', '.join(sorted(codecs))}",
            rule="payload.anchor",
        )
    if COO in codecs:
        if len(codecs) > 1:
            raise CorruptError(f"a payload must not mix {COO} with other codecs", rule="payload.mixed")
        for i, record in enumerate(records):
            tensor, start, count = record.runs[0].tolist()
            if len(record.runs) != 1 or (start, count) != (0, layout.tensors[tensor].elements):
                raise CorruptError(f"block {i} of {COO} must cover one whole tensor", rule="block.coo")
    require_disjoint(all_runs, layout)
    if header.kind == "anchor" and sum(r.elements for r in records) != layout.elements:
        raise CorruptError("the blocks of an anchor must cover every element", rule="payload.cover")
    if digest != header.digest:
        raise CorruptError(
            "the digests of the blocks do not add up to the digest of the payload", rule="payload.digest"
        )
