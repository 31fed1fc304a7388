"""Seeded mutations: of any bytes, of JSON with its seal made to fit again, of payloads, and of the fields of a block.

Damage by chance is found by a seal or a SHA-256, and the decoders behind them never see it. So most mutations change
one field and compute everything again that guards it, as a hostile writer would.
"""

import hashlib
import json
import random
import re
import zlib
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from support.helpers import ChangesParts, Pieces, SequenceParts

from deltasync.errors import DeltasyncError
from deltasync.format.digest import StateDigest, layout_digest
from deltasync.format.layout import DTYPES, Layout, TensorSpec
from deltasync.format.sealed import SEAL

NUMBERS = (-1, 0, 1, 2, 3, 15, 16, 17, 255, 1 << 16, 1 << 20, (1 << 22) + 1, 1 << 25, (1 << 25) + 1, 1 << 31)
HUGE = (1 << 32, 1 << 48, (1 << 48) + 1, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, 1 << 64, 10**21, 10**40)
TEXTS = ("", "0", "a", "\0", "\x1b[31m", "\u202e", "é", "💥", "..", "/", "a/../b", "C:\\x", "must_understand")
WORDS = (
    "format",
    "kind",
    "version",
    "digest",
    "coo/1",
    "exp/1",
    "abs/1",
    "planes/1",
    "delta",
    "anchor",
    "skip",
    "base",
)
DEEP = "@deep:{}:{}@"
"""A text that `to_json` replaces by lists or objects nested that deeply: Python's own encoder would not write them."""

LONG_BYTES = 32 << 10
"""Longer inputs do not grow any further."""

_DEEP = re.compile(rb'"@deep:([0-9]+):([01])@"')
_BROKEN = (
    b'"a":1,"a":1',
    b"NaN",
    b"1e400",
    b"-0",
    b"1.0",
    b'"\\ud800"',
    b"9" * 5000,
    b"\xff",
    b"[" * 3000,
    b"{" * 3000,
)


class Mutator:
    """All mutations of one run draw from one generator, so that a seed gives the same inputs again."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def one_in(self, n: int) -> bool:
        return self.random.randrange(n) == 0

    def bytes(self, data: bytes, others: Callable[[], bytes]) -> bytes:
        """One to four changes of any bytes; `others` gives another input to splice with."""
        out = bytearray(data)
        for _ in range(self.random.randint(1, 4)):
            at = self.random.randrange(len(out) + 1)
            match self.random.randrange(7):
                case 0 if out:
                    out[at % len(out)] ^= 1 << self.random.randrange(8)
                case 1 if out:
                    out[at % len(out)] = self.random.choice((0, 1, 0x7F, 0x80, 0xFF, self.random.randrange(256)))
                case 2:
                    out[at:at] = self.random.randbytes(self.random.choice((1, 2, 4, 8)))
                case 3:
                    del out[at : at + self.random.choice((1, 2, 8, 64, len(out)))]
                case 4:
                    size = self.random.choice((1, 2, 4, 8))
                    number = self.random.choice((*NUMBERS, *HUGE)) % (1 << (8 * size))
                    out[at : at + size] = number.to_bytes(size, "little")
                case 5:
                    out[at:at] = out[at : at + self.random.choice((1, 8, 64))] * self.random.choice((1, 2, 50))
                case _:
                    other = others()
                    out[at:] = other[self.random.randrange(len(other) + 1) :]
        return bytes(out)

    def json(self, value: Any) -> Any:
        """A copy in which one to three places hold something else, or are gone, doubled, swapped or renamed."""
        copy = json.loads(json.dumps(value))
        for _ in range(self.random.choice((1, 1, 1, 2, 3))):
            places = [(copy, key) for key in _keys(copy)]
            for parent, key in places:
                places.extend((parent[key], inner) for inner in _keys(parent[key]))
                if len(places) > 2000:
                    break
            if not places:
                return self.scalar(copy)
            parent, key = self.random.choice(places)
            match self.random.randrange(8):
                case 0:
                    del parent[key]
                case 1:
                    other, place = self.random.choice(places)
                    # A copy, so that no value becomes a part of itself; the place may be gone since.
                    found = other.get(place) if isinstance(other, dict) else None
                    parent[key] = json.loads(json.dumps(found))
                case 2 if isinstance(parent, dict):
                    parent[self.text()] = parent.pop(key) if self.one_in(2) else self.scalar(None)
                case 3 if isinstance(parent, list):
                    parent[key:key] = [parent[key]] * self.random.choice((1, 2, 40))
                case 4 if isinstance(parent, dict):
                    parent["must_understand"] = self.random.choice(([], ["x"], [key], "x", {}, [1], None))
                case 5:
                    parent[key] = DEEP.format(self.random.choice((10, 500, 950, 960, 970, 980, 985, 990, 5000)), 0)
                    if self.one_in(2):
                        parent[key] = DEEP.format(self.random.randint(900, 1000), self.random.randrange(2))
                case _:
                    parent[key] = self.scalar(parent[key])
        return copy

    def scalar(self, value: Any) -> Any:
        """Something that is not `value`, of the same type more often than not."""
        kind = self.random.randrange(10)
        if kind == 0:
            return self.random.choice((None, True, False, [], {}, [None], {"a": 1}, [[]], 0.5))
        if type(value) is int and kind < 8:
            near = (value + 1, value - 1, value * 2, -value, value << 32)
            return self.random.choice((*near, *NUMBERS, *HUGE))
        if isinstance(value, str) and kind < 8:
            at = self.random.randrange(len(value) + 1)
            cut = (
                value[:at],
                value[:at] + self.random.choice(TEXTS) + value[at:],
                value.upper(),
                value + "0",
                value[1:],
            )
            return self.random.choice((*cut, value[:64] * 200, self.text()))
        return self.random.choice((self.text(), self.random.choice(NUMBERS), self.random.choice(HUGE)))

    def text(self) -> str:
        if self.one_in(4):
            return self.random.choice(("a" * 5000, "/" * 40_000, "a/" * 40, "é" * 200, "\0" * 300))
        return self.random.choice((*TEXTS, *WORDS, str(self.random.choice(HUGE))))

    def sealed(self, data: bytes, others: Callable[[], bytes]) -> bytes:
        """A sealed object: usually with other fields and a seal that fits, sometimes with any bytes changed."""
        return self.json_text(data, others, write=reseal)

    def json_text(
        self, data: bytes, others: Callable[[], bytes], *, write: "Callable[[Any], bytes] | None" = None
    ) -> bytes:
        """A JSON text, usually with other fields; `write` is how an object is written."""
        if self.one_in(8) or len(data) > LONG_BYTES:
            return self.bytes(data, others)
        try:
            values = json.loads(data)
        except (ValueError, RecursionError):
            return self.bytes(data, others)
        if self.one_in(10):
            return self.broken_json(data)
        try:
            changed = self.json(values)
            is_plain = write is None or not isinstance(changed, dict) or self.one_in(20)
            return to_json(changed) if is_plain or write is None else write(changed)
        except RecursionError:
            # It is nested deeply already.
            return self.bytes(data, others)

    def broken_json(self, data: bytes) -> bytes:
        """The text with something at a comma or a colon that JSON, or this format, does not allow."""
        places = [m.end() for m in re.finditer(rb"[,:{\[]", data)] or [0]
        at = self.random.choice(places)
        return data[:at] + self.random.choice(_BROKEN) + (b"," if self.one_in(2) else b"") + data[at:]

    def payload(self, data: bytes, others: Callable[[], bytes]) -> bytes:
        """A payload with something else in its metadata, index, tensors or blocks, and what guards them made to fit."""
        if self.one_in(8) or len(data) > LONG_BYTES:
            return self.bytes(data, others)
        try:
            pieces = Pieces(data)
        except (DeltasyncError, ValueError, KeyError, RecursionError, zlib.error):
            return self.bytes(data, others)
        try:
            for _ in range(self.random.choice((1, 1, 2))):
                self._change(pieces)
        except RecursionError:
            return self.bytes(data, others)
        if not self.one_in(4):
            refit(pieces)
        try:
            pieces.index_bytes = zlib.compress(to_json(pieces.index), 1)
            return pieces.build()
        except (ValueError, KeyError, AttributeError, RecursionError):
            return self.bytes(data, others)

    def _change(self, pieces: Pieces) -> None:
        blocks = [spec.name for spec in pieces.specs if spec.name != "deltasync.index"]
        match self.random.randrange(6):
            case 0:
                pieces.metadata = {str(k): f"{v!s:.3000}" for k, v in _object(self.json(pieces.metadata)).items()}
            case 1:
                i = self.random.randrange(len(pieces.specs))
                self._change_spec(pieces, i)
            case 2 if blocks:
                name = self.random.choice(blocks)
                pieces.data[name] = self.bytes(pieces.data[name], lambda: self.random.choice([*pieces.data.values()]))
            case 3 if blocks:
                name = self.random.choice(blocks)
                absolute = b"abs/1" in json.dumps(pieces.index).encode()
                pieces.data[name] = self.block(pieces.data[name], absolute=absolute)
            case _:
                pieces.index = _object(self.json(pieces.index))

    def _change_spec(self, pieces: Pieces, i: int) -> None:
        spec = pieces.specs[i]
        match self.random.randrange(4):
            case 0:
                pieces.specs[i] = replace(spec, dtype=self.random.choice(list(DTYPES.values())))
            case 1:
                pieces.specs[i] = replace(spec, shape=(*spec.shape, self.random.choice(NUMBERS)))
            case 2:
                pieces.specs.insert(i, TensorSpec(self.text(), DTYPES["U8"], (3,)))
                pieces.data[pieces.specs[i].name] = b"abc"
            case _:
                del pieces.specs[i]

    def block(self, data: bytes, *, absolute: bool) -> bytes:
        """A block of changes with one field of one of its sequences changed; any bytes where it cannot be read."""
        try:
            parts = ChangesParts.read(data, absolute=absolute)
        except (DeltasyncError, ValueError, IndexError):
            return self.bytes(data, lambda: data)
        match self.random.randrange(6):
            case 0:
                counts = list(parts.counts)
                counts[self.random.randrange(len(counts))] = abs(self.random.choice((*NUMBERS, sum(counts))))
                parts = replace(parts, counts=tuple(counts))
            case 1:
                parts = replace(parts, thresholds=self.bytes(parts.thresholds, lambda: b"\1\2\3")[:20])
            case 2 if parts.planes:
                parts = replace(parts, planes=self.bytes(parts.planes, lambda: data))
            case 3 | 4 if parts.steps is not None:
                parts = replace(parts, steps=self._sequence(parts.steps))
            case _:
                parts = replace(parts, gaps=self._sequence(parts.gaps))
        try:
            return parts.build()
        except ValueError:
            return self.bytes(data, lambda: data)

    def _sequence(self, parts: SequenceParts) -> SequenceParts:
        name = self.random.choice(fields(parts)).name
        value = getattr(parts, name)
        if isinstance(value, bytes):
            return replace(parts, **{name: self.bytes(value, lambda: value)})
        if name == "tables" and value:
            tables = [t if self.one_in(2) else self.bytes(t, lambda: b"\1\1")[:256] or b"\1" for t in value]
            return replace(parts, tables=tuple(tables))
        if isinstance(value, int):
            near = self.random.choice((value + 1, value - 1, 0, 5, 6, 31, 255, 1 << 20))
            return replace(parts, **{name: abs(near) % 256 if name == "lanes_log2" else abs(near)})
        return parts


def to_json(value: Any) -> bytes:
    """Canonical JSON, with what DEEP stands for written out."""

    def nested(match: re.Match[bytes]) -> bytes:
        depth, is_object = int(match[1]), match[2] == b"1"
        return b'{"a":' * depth + b"1" + b"}" * depth if is_object else b"[" * depth + b"]" * depth

    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return _DEEP.sub(nested, text.encode(errors="surrogatepass"))


def reseal(values: dict[str, Any]) -> bytes:
    """The object with the seal that fits its fields, whatever they are."""
    unsealed = {name: value for name, value in values.items() if name != SEAL}
    return to_json({**unsealed, SEAL: hashlib.sha256(to_json(unsealed)).hexdigest()})


def refit(pieces: Pieces) -> None:
    """Make the hashes and totals of a payload fit what it holds, as far as that can be read."""
    index = pieces.index
    try:
        blocks = [block for block in index["blocks"] if isinstance(block, dict)]
        named = [f"deltasync.block.{i:08d}" for i in range(len(blocks))]
        layout = Layout.from_json(index.get("layout"))
        if not all(name in pieces.data for name in named):
            # The blocks of a plain payload have two tensors each, named after their tensor.
            tensors = [layout.tensors[block["runs"][0][0]].name for block in blocks]
            held = [pieces.data[f"{name}.indices"] + pieces.data[f"{name}.values"] for name in tensors]
        else:
            held = [pieces.data[name] for name in named]
        for block, data in zip(blocks, held, strict=True):
            block["sha256"] = hashlib.sha256(data).hexdigest()
        is_delta = "parent_digest" in pieces.metadata
        start = StateDigest.from_hex(pieces.metadata["parent_digest"]) if is_delta else layout_digest(layout)
        digest = sum((StateDigest.from_hex(block["digest"]) for block in blocks), start)
        pieces.metadata.update(
            layout_sha256=layout.sha256,
            elements=str(layout.elements),
            changed=str(sum(block["changed"] for block in blocks)),
            digest=digest.hex,
        )
    except (DeltasyncError, ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return


def _keys(value: Any) -> list[Any]:
    return list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
