"""Blocks taken apart and put together again without any check, so that tests can break one rule at a time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np

from deltasync.format.changes import Positions
from deltasync.format.weights import Bits, Region
from deltasync.kernels import classes, reference, sequence
from deltasync.kernels.wire import ByteReader, varint


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
    data = sequence.encode_buckets(np.array(values, np.uint64), list(counts))
    return SequenceParts.read(ByteReader(data), sum(1 for c in counts if c), numbers=True)


def encode_with(thresholds: Sequence[int], old: Region, positions: Positions, values: Bits) -> tuple[bool, bytes]:
    """What the reference writes when it takes these classes instead of its own choice."""
    with mock.patch.object(classes, "choose", return_value=np.array(thresholds, np.uint8)):
        absolute, data, _ = reference.encode_changes(old, positions, values)
    return absolute, data
