"""What a payload says about itself, without the weights that it applies to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deltasync.format.digest import StateDigest
from deltasync.format.layout import Layout, TensorSpec
from deltasync.format.payload import FORMAT, BlockInfo, Kind, Payload
from deltasync.oneshot import Delta, open_payload


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
    """One block: `first` is where it begins (tensor name, flat index), `tensors` how many it touches."""

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
        }


def inspect(payload: Delta) -> Inspection:
    """Summarise a payload, given as its bytes or its path. Every rule that needs no weights is checked."""
    with open_payload(payload) as opened:
        return _summary(opened)


def _summary(payload: Payload) -> Inspection:
    header, infos = payload.header, payload.block_infos
    return Inspection(
        kind=header.kind,
        layout=header.layout,
        parent_digest=header.parent_digest,
        digest=header.digest,
        nbytes=payload.nbytes,
        codecs=_codecs(infos),
        blocks=tuple(_block(header.layout, info) for info in infos),
        tensors=_tensors(header.layout, infos),
    )


def _codecs(infos: Sequence[BlockInfo]) -> tuple[CodecSummary, ...]:
    by_codec: dict[str, list[BlockInfo]] = {}
    for info in infos:
        by_codec.setdefault(info.codec, []).append(info)
    return tuple(
        CodecSummary(
            codec,
            len(group),
            sum(i.elements for i in group),
            sum(i.changed for i in group),
            sum(i.nbytes for i in group),
        )
        for codec, group in sorted(by_codec.items())
    )


def _block(layout: Layout, info: BlockInfo) -> BlockSummary:
    ordinal, start, _ = info.runs[0].tolist()
    touched = len(set(info.runs[:, 0].tolist()))
    first = (layout.tensors[ordinal].name, start)
    return BlockSummary(info.codec, first, touched, info.elements, info.changed, info.nbytes)


def _tensors(layout: Layout, infos: Sequence[BlockInfo]) -> tuple[TensorSummary, ...]:
    counts: list[int] = [0] * len(layout.tensors)
    changed: list[int | None] = [0] * len(layout.tensors)
    for info in infos:
        touched = set(info.runs[:, 0].tolist())
        for ordinal in touched:
            counts[ordinal] += 1
            before = changed[ordinal]
            shared = before is None or (len(touched) > 1 and info.changed > 0)
            changed[ordinal] = None if shared or before is None else before + info.changed
    return tuple(TensorSummary(*row) for row in zip(layout.tensors, counts, changed, strict=True))


def _counts(summary: CodecSummary | BlockSummary) -> dict[str, Any]:
    return {
        "codec": summary.codec,
        **({"blocks": summary.blocks} if isinstance(summary, CodecSummary) else {}),
        "elements": summary.elements,
        "changed": summary.changed,
        "bytes": summary.nbytes,
    }
