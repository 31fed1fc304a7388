"""Blocks that a reader must refuse: each breaks one rule inside of a payload that is otherwise sound.

All are made against one small state, from blocks that were right before.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from support.helpers import ChangesParts, encode_with, numbers
from support.strategies import random_bits, random_change

from deltasync.blocks import detect, layout_runs
from deltasync.format import limits
from deltasync.format.digest import StateDigest
from deltasync.format.layout import DTYPES, Layout, TensorSpec
from deltasync.format.payload import Block
from deltasync.format.weights import Changes, Weights
from deltasync.kernels import reference

GAP_ALPHABET = 16 + 2 * (limits.BLOCK_ELEMENTS_LOG2 - 4)
"""Buckets of the largest gap."""

THRESHOLDS = [125, 126]
"""Three classes of the old exponents."""


def states() -> tuple[Weights, Weights]:
    """Weights with exponents up to 127, and bytes, before and after."""
    rng = np.random.default_rng(2)
    layout = Layout.of([TensorSpec("bytes", DTYPES["U8"], (100,)), TensorSpec("weights", DTYPES["BF16"], (20, 15))])
    old = [random_bits(rng, t.dtype, t.elements, "weights") for t in layout.tensors]
    new = [random_change(rng, t.dtype, a, 0.3, "ulp") for t, a in zip(layout.tensors, old, strict=True)]
    return Weights(layout, tuple(old)), Weights(layout, tuple(new))


OLD, NEW = states()


def _changes(name: str) -> Changes:
    ordinal = OLD.layout.ordinals[name]
    [runs] = [runs for runs in layout_runs(OLD.layout) if runs[0, 0] == ordinal]
    [found] = detect(OLD, NEW, runs)
    return found


def good_block(codec: str, name: str = "weights") -> Block:
    """The changes of one tensor in that codec."""
    found = _changes(name)
    assert found.positions is not None
    region, after = OLD.region(found.runs), NEW.region(found.runs)
    digest_delta = StateDigest(*reference.digest_change(region, found.positions, found.values))
    if codec == "planes/1":
        data = reference.encode_planes(after)
    elif codec == "coo/1":
        data = found.positions.astype("<i4").tobytes() + found.values.tobytes()
    else:
        is_float = region.dtype.is_float
        _, data = encode_with(THRESHOLDS if is_float else [], region, found.positions, found.values)
        if codec == "abs/1":
            head = replace(ChangesParts.read(data, absolute=False), steps=None)
            data = head.build() + reference.encode_planes(_flat(found))
    return Block(codec, found.runs, len(found.values), digest_delta, data)


def _flat(changes: Changes) -> reference.Region:
    """The new bits by themselves, in one run."""
    region = NEW.region(changes.runs)
    runs = np.array([[0, 0, len(changes.values)]])
    return reference.Region(region.dtype, (changes.values,), runs, region.keys[:1])


def parts() -> ChangesParts:
    """The good `exp/1` block of the weights, taken apart."""
    return ChangesParts.read(good_block("exp/1").data, absolute=False)


def _prefix(head: bytes) -> bytes:
    """Something else before the coded sequences."""
    return head + parts().gaps.build()


def _gap_at_the_end(more: int) -> bytes:
    """The last changed element of the last class lies `more` past the end of the class."""
    good = parts()
    members = int((OLD.arrays[1] >> 7 & 0xFF >= THRESHOLDS[-1]).sum())
    gaps = [0] * sum(good.counts)
    gaps[-1] = members - good.counts[-1] + more
    return replace(good, gaps=numbers(gaps, good.counts)).build()


def _indices(place: int, value: int) -> bytes:
    block = good_block("coo/1")
    indices = np.frombuffer(block.data, "<i4", block.changed).copy()
    indices[place] = value
    return indices.tobytes() + block.data[4 * block.changed :]


def _first_table(table: bytes) -> bytes:
    return parts().with_gaps(tables=(table, *parts().gaps.tables[1:]))


def _states(value: int) -> bytes:
    return parts().with_gaps(states=value.to_bytes(4, "little"))


def _more_words(count: int) -> bytes:
    gaps = parts().gaps
    words = gaps.words[: 2 * count] if count < 0 else gaps.words + bytes(2 * count)
    return parts().with_gaps(words=words, word_count=gaps.word_count + count)


def _extra(change: Callable[[bytes], bytes]) -> bytes:
    """Gaps so wide that they have extra bits (and go past the end, which a reader sees only after it read them)."""
    wide = numbers([100] * sum(parts().counts), parts().counts)
    assert wide.extra
    return replace(parts(), gaps=replace(wide, extra=change(wide.extra))).build()


@dataclass(frozen=True)
class Negative:
    """`make` gives the bytes of a block of that codec over `tensor`."""

    make: Callable[[], bytes]
    rule: str
    error: str = "corrupt"
    codec: str = "exp/1"
    tensor: str = "weights"


NEGATIVE: dict[str, Negative] = {
    "no-bytes": Negative(lambda: b"", "block.truncated"),
    "cut-in-half": Negative(lambda: good_block("exp/1").data[:40], "block.truncated"),
    "bytes-after": Negative(lambda: good_block("exp/1").data + b"\0", "block.trailing"),
    # the head: classes, thresholds, counts
    "no-class": Negative(lambda: _prefix(b"\0"), "changes.classes"),
    "17-classes": Negative(lambda: _prefix(bytes((17, *range(1, 17), *[0] * 17))), "changes.classes"),
    "classes-of-integers": Negative(lambda: _prefix(b"\2\1\0\0"), "changes.classes", tensor="bytes"),
    "thresholds-descend": Negative(lambda: replace(parts(), thresholds=b"\x7e\x7d").build(), "changes.thresholds"),
    "thresholds-equal": Negative(lambda: replace(parts(), thresholds=b"\x7e\x7e").build(), "changes.thresholds"),
    "threshold-zero": Negative(lambda: replace(parts(), thresholds=b"\x00\x7e").build(), "changes.thresholds"),
    "more-changes-than-elements": Negative(lambda: _prefix(b"\1\xad\2"), "changes.count"),
    "2^35-changes": Negative(lambda: _prefix(b"\1" + b"\xff" * 4 + b"\x7f"), "changes.count"),
    "counts-that-overflow": Negative(lambda: _prefix(b"\3\1\2" + (b"\xff" * 4 + b"\x7f") * 3), "changes.count"),
    "varint-of-6-bytes": Negative(lambda: _prefix(b"\1" + b"\xff" * 5 + b"\1"), "block.varint"),
    "varint-not-minimal": Negative(lambda: _prefix(b"\1\x80\0"), "block.varint"),
    # the coded sequence
    "64-lanes": Negative(lambda: parts().with_gaps(lanes_log2=6), "sequence.lanes"),
    "255-lanes-log2": Negative(lambda: parts().with_gaps(lanes_log2=255), "sequence.lanes"),
    "table-too-large": Negative(lambda: _first_table(bytes([1] * (GAP_ALPHABET + 1))), "table.size"),
    "table-of-256": Negative(lambda: _first_table(bytes([1] * 256)), "table.size"),
    "table-ends-with-zero": Negative(lambda: _first_table(b"\1\1\0"), "table.end"),
    "table-of-nothing": Negative(lambda: _first_table(b"\0"), "table.end"),
    "2^35-words": Negative(lambda: parts().with_gaps(word_count=(1 << 35) - 1), "block.truncated"),
    "state-too-low": Negative(lambda: _states(0xFFFF), "sequence.state"),
    "state-zero": Negative(lambda: _states(0), "sequence.state"),
    "a-word-too-few": Negative(lambda: _more_words(-1), "sequence.words"),
    "no-words": Negative(lambda: parts().with_gaps(words=b"", word_count=0), "sequence.words"),
    "a-word-too-many": Negative(lambda: _more_words(1), "sequence.state"),
    "extra-bits-missing": Negative(lambda: _extra(lambda e: e[:-1]), "sequence.extra"),
    "extra-bits-too-many": Negative(lambda: _extra(lambda e: e + b"\0"), "sequence.extra"),
    "extra-bits-padded": Negative(lambda: _extra(lambda e: e[:-1] + bytes((e[-1] | 0x80,))), "sequence.extra"),
    # what the sequences say
    "rank-one-past-its-class": Negative(lambda: _gap_at_the_end(1), "changes.rank"),
    "rank-far-past-its-class": Negative(lambda: _gap_at_the_end(2**24 - 400), "changes.rank"),
    "other-changes": Negative(
        lambda: replace(parts(), steps=numbers([2] * sum(parts().counts), parts().counts)).build(),
        "block.digest",
        "mismatch",
    ),
    "abs-mode-unknown": Negative(
        lambda: replace(parts(), steps=None, planes=b"\2").build(), "planes.mode", codec="abs/1"
    ),
    "abs-values-missing": Negative(lambda: good_block("abs/1").data[:-1], "block.truncated", codec="abs/1"),
    "abs-values-after": Negative(lambda: good_block("abs/1").data + b"\0", "block.trailing", codec="abs/1"),
    "planes-no-bytes": Negative(lambda: b"", "block.truncated", codec="planes/1"),
    "planes-mode-unknown": Negative(lambda: b"\2" + good_block("planes/1").data[1:], "planes.mode", codec="planes/1"),
    "planes-cut": Negative(lambda: good_block("planes/1").data[:-1], "block.truncated", codec="planes/1"),
    "planes-after": Negative(lambda: good_block("planes/1").data + b"\0", "block.trailing", codec="planes/1"),
    "planes-of-others": Negative(
        lambda: bytes((0, *[1] * 300, 0, *[1] * 300)), "block.digest", "mismatch", codec="planes/1"
    ),
    "coo-not-ascending": Negative(lambda: _indices(1, 0), "coo.indices", codec="coo/1"),
    "coo-twice": Negative(lambda: _indices(1, int(_changes("weights").positions[0])), "coo.indices", codec="coo/1"),
    "coo-negative": Negative(lambda: _indices(0, -1), "coo.indices", codec="coo/1"),
    "coo-past-the-end": Negative(lambda: _indices(-1, 300), "coo.indices", codec="coo/1"),
    "coo-elsewhere": Negative(lambda: _indices(-1, 299), "block.digest", "mismatch", codec="coo/1"),
}


def bad_block(case: Negative) -> Block:
    """The block, with the digest that the good one has."""
    good = good_block(case.codec, case.tensor)
    return Block(good.codec, good.runs, good.changed, good.digest, case.make())
