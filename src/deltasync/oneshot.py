"""diff, apply, digest and inspect: two states and a payload, without a feed or a store.

A state is a dict of NumPy arrays (ml_dtypes for bfloat16 and float8), or the path of a checkpoint: a folder or a single
safetensors file.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deltasync import blocks
from deltasync.checkpoint import copied_checkpoint, open_checkpoint
from deltasync.errors import CorruptError, FormatError, InvalidInputError, MismatchError, NotFoundError
from deltasync.files import reader
from deltasync.format.digest import StateDigest
from deltasync.format.layout import Layout, TensorSpec
from deltasync.format.payload import BlockInfo, Kind, Payload, PayloadHeader, payload_chunks
from deltasync.format.sealed import FORMAT
from deltasync.format.weights import Weights
from deltasync.parallel import Progress, counting

PathLike = str | os.PathLike[str]
State = Mapping[str, np.ndarray] | PathLike
Delta = bytes | bytearray | memoryview | PathLike


def diff(old: State, new: State, *, codec: str = "exp/1", progress: Progress | None = None) -> bytes:
    """The delta that turns `old` into `new`, as the bytes of a payload file.

    `codec` is "exp/1" (smallest) or "coo/1" (plain indices and values). MismatchError names the first tensor whose
    name, type or shape differs.
    """
    return b"".join(diff_chunks(old, new, codec=codec, progress=progress))


def diff_chunks(
    old: State, new: State, *, codec: str = "exp/1", progress: Progress | None = None
) -> Iterator[bytes | memoryview]:
    """The bytes of `diff` as consecutive buffers, to be written to a file."""
    before, after = _weights_of(old, "old"), _weights_of(new, "new")
    before.layout.require_equal(after.layout, ours=_called(old, "old"), theirs=_called(new, "new"))
    total = before.layout.elements
    parent = blocks.digest(before, on_progress=counting(progress, "digest", total))
    encoded = blocks.encode_delta(before, after, codec=codec, on_progress=counting(progress, "encode", total))
    state_digest = sum((block.digest for block in encoded), parent)
    return payload_chunks(PayloadHeader("delta", before.layout, parent, state_digest), encoded)


def apply(
    old: State,
    delta: Delta,
    *,
    out: PathLike | None = None,
    progress: Progress | None = None,
) -> dict[str, np.ndarray]:
    """The state that results when `delta`, the bytes of a payload or its path, is applied to `old`.

    `old` itself does not change.

    Without `out`: a dict of new arrays of the types and shapes of `old`. For a checkpoint path, types that NumPy does
    not have are raw bits (BF16 as uint16, the 8-bit floats as uint8): view them with `.view(ml_dtypes.bfloat16)`.

    With `out`: `old` must be a checkpoint path; a checkpoint of the same structure appears at `out`, whole or not at
    all, and the dict is empty.

    MismatchError if `old` is not the state that the delta was made against. For an anchor the layout must match.
    """
    with open_payload(delta) as payload:
        if out is None:
            before = _weights_of(old, "old")
            _require_parent(before, payload.header, old, progress)
            after = Weights(before.layout, tuple(array.copy() for array in before.arrays))
            _decode_into(after, before, payload, progress)
            if isinstance(old, Mapping):
                bits = {spec.name: array for spec, array in zip(after.layout.tensors, after.arrays, strict=True)}
                return {name: bits[name].view(array.dtype).reshape(array.shape) for name, array in old.items()}
            return {
                spec.name: array.view(_numpy_dtype(spec)).reshape(spec.shape)
                for spec, array in zip(after.layout.tensors, after.arrays, strict=True)
            }
        if isinstance(old, Mapping):
            raise InvalidInputError("with `out`, the old state must be a checkpoint path", hint="leave out `out`")
        checkpoint = open_checkpoint(old)
        _require_parent(checkpoint.weights, payload.header, old, progress)
        with copied_checkpoint(checkpoint, out) as target:
            _decode_into(target, checkpoint.weights, payload, progress)
        return {}


def digest(state: State, *, progress: Progress | None = None) -> StateDigest:
    """The state digest of all names, types, shapes and bits. It finds accidental differences, not malicious ones."""
    weights = _weights_of(state, "")
    return blocks.digest(weights, on_progress=counting(progress, "digest", weights.layout.elements))


@contextmanager
def open_payload(source: Delta) -> Iterator[Payload]:
    """A payload from its bytes, or from a file whose blocks are read as they are needed."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        yield Payload.parse(source)
        return
    path = Path(source)
    if not path.exists():
        raise NotFoundError(f"{path} does not exist", hint="give the file that `deltasync diff` wrote")
    if path.is_dir():
        raise InvalidInputError(f"{path} is a folder, not a delta", hint="give the file that `deltasync diff` wrote")
    with path.open("rb") as file:
        try:
            payload = Payload.open(reader(file.fileno()), os.fstat(file.fileno()).st_size)
        except (CorruptError, FormatError) as error:
            raise error.at(path) from error
        yield payload


def is_payload(path: Path) -> bool:
    """Whether a file is a payload of deltasync, by its header."""
    try:
        with open_payload(path):
            return True
    except (CorruptError, FormatError):
        return False


def _require_parent(before: Weights, header: PayloadHeader, old: State, progress: Progress | None) -> None:
    if header.kind == "shard":
        raise InvalidInputError(
            "this payload is one shard of an anchor, not a delta or a whole anchor",
            hint="use `deltasync restore` on the feed",
        )
    before.layout.require_equal(header.layout, ours=_called(old, "old"), theirs="the delta")
    if header.parent_digest is None:
        return
    old_digest = blocks.digest(before, on_progress=counting(progress, "digest", before.layout.elements))
    if old_digest != header.parent_digest:
        raise MismatchError(
            f"{_called(old, 'old')} has the digest {old_digest}, but the delta was made against {header.parent_digest}",
            rule="payload.parent",
            hint="apply it to the state that it was made against",
        )


def _decode_into(target: Weights, before: Weights, payload: Payload, progress: Progress | None) -> None:
    blocks.decode_into(
        target,
        before,
        payload.blocks(),
        relative=payload.header.kind == "delta",
        on_progress=counting(progress, "apply", sum(info.elements for info in payload.block_infos)),
    )


def _weights_of(state: State, role: str) -> Weights:
    if not isinstance(state, Mapping):
        return open_checkpoint(state).weights
    for name, array in state.items():
        where = f"tensor {name!r:.200} of the {role} state" if role else f"tensor {name!r:.200}"
        if not isinstance(name, str) or any("\ud800" <= c <= "\udfff" for c in name):
            raise InvalidInputError(f"the name of {where} must be a str that UTF-8 can encode")
        if not isinstance(array, np.ndarray):
            raise InvalidInputError(
                f"{where} must be a NumPy array, not {type(array).__qualname__}", hint="convert it with numpy.asarray"
            )
        if array.dtype.byteorder == ">":
            raise InvalidInputError(f"{where} must be little-endian, not big-endian", hint="convert it with astype")
    return Weights.of(state)


def _called(state: State, role: str) -> str:
    return f"the {role} state" if isinstance(state, Mapping) else f"{os.fspath(state)}"


def _numpy_dtype(spec: TensorSpec) -> np.dtype[Any]:
    name = spec.dtype.name
    if name == "BOOL":
        return np.dtype(np.bool_)
    if name in ("BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0"):
        return np.dtype(spec.dtype.bits_dtype)
    return np.dtype(f"<{name[0].lower()}{spec.dtype.width}")


@dataclass(frozen=True, slots=True)
class CodecSummary:
    """All blocks of one codec."""

    codec: str
    blocks: int
    elements: int
    changed: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class BlockSummary:
    """One block: `first` is where it begins (tensor name, flat index), `tensors` the number that it covers."""

    codec: str
    first: tuple[str, int]
    tensors: int
    elements: int
    changed: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """One tensor. `changed` is None where it shares a block with others: the index counts changes by block."""

    spec: TensorSpec
    blocks: int
    changed: int | None


@dataclass(frozen=True, slots=True)
class LayerSummary:
    """The tensors of one layer. `changed` is None where one of its blocks has elements of other layers, too."""

    name: str
    tensors: int
    elements: int
    changed: int | None


_LAYER = re.compile(r"(?:.*?\.)?[0-9]+(?=\.)")


def layer_name(tensor: str) -> str:
    """The layer that a tensor belongs to: its name up to the first number, or else without its last part."""
    numbered = _LAYER.match(tensor)
    return numbered[0] if numbered is not None else tensor.rpartition(".")[0] or tensor


@dataclass(frozen=True, slots=True)
class Inspection:
    """Summary of a checked payload. The bytes of its blocks are not read."""

    kind: Kind
    layout: Layout
    parent_digest: StateDigest | None
    digest: StateDigest
    nbytes: int
    codecs: tuple[CodecSummary, ...]
    blocks: tuple[BlockSummary, ...]
    tensors: tuple[TensorSummary, ...]
    layers: tuple[LayerSummary, ...] = ()

    @property
    def changed(self) -> int:
        return sum(b.changed for b in self.blocks)

    @property
    def bits_per_changed(self) -> float | None:
        """Bits of the whole file for each changed element; None if nothing changed."""
        return 8 * self.nbytes / self.changed if self.changed else None

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "kind": self.kind,
            "layout_sha256": self.layout.sha256,
            "parent_digest": None if self.parent_digest is None else self.parent_digest.hex,
            "digest": self.digest.hex,
            "bytes": self.nbytes,
            "elements": self.layout.elements,
            "changed": self.changed,
            "bits_per_changed": self.bits_per_changed,
            "codecs": [_counts(c) for c in self.codecs],
            "blocks": [{"first": list(b.first), "tensors": b.tensors, **_counts(b)} for b in self.blocks],
            "tensors": [
                {
                    "name": t.spec.name,
                    "dtype": t.spec.dtype.name,
                    "shape": list(t.spec.shape),
                    "blocks": t.blocks,
                    "changed": t.changed,
                }
                for t in self.tensors
            ],
            "layers": [
                {"name": y.name, "tensors": y.tensors, "elements": y.elements, "changed": y.changed}
                for y in self.layers
            ],
        }


def inspect(payload: Delta, *, old: State | None = None, progress: Progress | None = None) -> Inspection:
    """Summarize a payload, given as its bytes or its path. Every rule that needs no weights is checked.

    The index counts changes by block. With `old`, the state that a delta was made against, the changes are decoded and
    counted for each tensor and layer.
    """
    with open_payload(payload) as opened:
        header, infos = opened.header, opened.block_infos
        counts = None if old is None else _count_changes(opened, old, progress)
    layout = header.layout
    by_codec: dict[str, list[BlockInfo]] = {}
    block_counts = [0] * len(layout.tensors)
    blocks_found = []
    for info in infos:
        by_codec.setdefault(info.codec, []).append(info)
        touched = np.unique(info.runs[:, 0]).tolist()
        for ordinal in touched:
            block_counts[ordinal] += 1
        first = (layout.tensors[int(info.runs[0, 0])].name, int(info.runs[0, 1]))
        blocks_found.append(BlockSummary(info.codec, first, len(touched), info.elements, info.changed, info.nbytes))
    changed = _changed_by([spec.name for spec in layout.tensors], infos, counts)
    names = [layer_name(spec.name) for spec in layout.tensors]
    changed_layers = _changed_by(names, infos, counts)
    sizes: dict[str, list[int]] = {}
    for spec, name in zip(layout.tensors, names, strict=True):
        sizes.setdefault(name, []).append(spec.elements)

    def by_number(name: str) -> list[tuple[bool, int, str]]:
        return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in name.split(".")]

    return Inspection(
        kind=header.kind,
        layout=layout,
        parent_digest=header.parent_digest,
        digest=header.digest,
        nbytes=opened.nbytes,
        codecs=tuple(
            CodecSummary(
                codec,
                len(group),
                sum(i.elements for i in group),
                sum(i.changed for i in group),
                sum(i.nbytes for i in group),
            )
            for codec, group in sorted(by_codec.items())
        ),
        blocks=tuple(blocks_found),
        tensors=tuple(
            TensorSummary(spec, count, changed[spec.name])
            for spec, count in zip(layout.tensors, block_counts, strict=True)
        ),
        layers=tuple(
            LayerSummary(name, len(sizes[name]), sum(sizes[name]), changed_layers[name])
            for name in sorted(sizes, key=by_number)
        ),
    )


def _count_changes(payload: Payload, old: State, progress: Progress | None) -> list[int]:
    """The number of changed elements of each tensor, by decoding a delta."""
    if payload.header.kind != "delta":
        hint = "leave the older state out"
        raise InvalidInputError(f"this payload is of kind {payload.header.kind}, which has no older state", hint=hint)
    before = _weights_of(old, "old")
    _require_parent(before, payload.header, old, progress)
    counts = [0] * len(before.layout.tensors)
    count = counting(progress, "decode", sum(info.elements for info in payload.block_infos))
    for changes in blocks.decode(before, payload.blocks(), on_progress=count):
        positions = changes.positions
        if positions is None:
            # All elements of the block are given: those that differ have changed.
            positions = np.flatnonzero(before.region(changes.runs).gather() != changes.values).astype(np.uint32)
        ends = np.searchsorted(positions, np.cumsum(changes.runs[:, 2]))
        for ordinal, found in zip(changes.runs[:, 0].tolist(), np.diff(ends, prepend=0).tolist(), strict=True):
            counts[ordinal] += found
    return counts


def _changed_by(
    groups: Sequence[str], infos: Sequence[BlockInfo], counts: Sequence[int] | None
) -> dict[str, int | None]:
    """The changes of each group of tensors: `groups` has that of each tensor, `counts` the changes, if they are known.

    Without counts, None where a block has changes and elements of several groups.
    """
    changed: dict[str, int | None] = dict.fromkeys(groups, 0)
    if counts is not None:
        for name, count in zip(groups, counts, strict=True):
            changed[name] = (changed[name] or 0) + count
        return changed
    for info in infos:
        touched = {groups[ordinal] for ordinal in info.runs[:, 0].tolist()}
        for name in touched:
            before = changed[name]
            is_known = before is not None and (len(touched) == 1 or info.changed == 0)
            changed[name] = before + info.changed if before is not None and is_known else None
    return changed


def _counts(summary: CodecSummary | BlockSummary) -> dict[str, Any]:
    return {
        "codec": summary.codec,
        **({"blocks": summary.blocks} if isinstance(summary, CodecSummary) else {}),
        "elements": summary.elements,
        "changed": summary.changed,
        "bytes": summary.nbytes,
    }
