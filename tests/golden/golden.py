"""Compares text with the files in `expected/`, or writes them; fixed weights; rules for what differs between runs."""

import difflib
import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from support.helpers import State

from deltasync import AnchorPolicy, PublisherOptions

EXPECTED = Path(__file__).parent / "expected"
IS_WRITING = os.environ.get("DELTASYNC_GOLDEN") == "write"


def check(name: str, text: str) -> None:
    """The text is that of the file, or becomes it."""
    path = EXPECTED / name
    if IS_WRITING:
        path.write_text(text)
        return
    wanted = path.read_text() if path.exists() else ""
    if text != wanted:
        diff = difflib.unified_diff(wanted.splitlines(), text.splitlines(), "expected", "found", lineterm="", n=2)
        raise AssertionError(f"{path.name} differs; tests/golden/README.md says what to do\n" + "\n".join(diff))


def check_json(name: str, value: Any) -> None:
    check(name, json.dumps(value, indent=1, sort_keys=True, default=str) + "\n")


# Weights


SHAPES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "embed.weight": (ml_dtypes.bfloat16, (48, 16)),
    "layers.0.up.weight": (ml_dtypes.bfloat16, (16, 24)),
    "layers.0.bias": (np.float32, (33,)),
    "layers.0.half": (np.float16, (5, 7)),
    "layers.0.fp8": (ml_dtypes.float8_e4m3fn, (9, 7)),
    "layers.0.packed": (np.uint8, (9, 3)),
    "counter": (np.int64, ()),
    "nothing": (np.float16, (0, 4)),
}


def noise(about: str, count: int) -> np.ndarray:
    """Fixed bytes, on every machine and with every release of NumPy."""
    return np.frombuffer(hashlib.shake_256(about.encode()).digest(count), np.uint8)


def fixed_state(step: int = 0) -> State:
    """The weights of a step, of many types, with an empty tensor and a scalar. Each step flips some low bits."""
    return {name: _tensor(name, dtype, shape, step) for name, (dtype, shape) in SHAPES.items()}


def _tensor(name: str, dtype: Any, shape: tuple[int, ...], step: int) -> np.ndarray:
    kind = np.dtype(dtype)
    count = int(np.prod(shape))
    whole = noise(name, 2 * count).view("<u2").astype(np.float32)
    # Sums and quotients of powers of two: exact, and about as large as weights are.
    values = (whole - 32768) / 65536 if kind.itemsize > 1 or kind.kind != "u" else whole // 256
    bits = np.ascontiguousarray(values.astype(kind)).reshape(-1).view(f"<u{kind.itemsize}").copy()
    for earlier in range(1, step + 1):
        bits[noise(f"{name} {earlier}", count) < 16] ^= 1
    return bits.view(kind).reshape(shape)


def fixed_tensors(step: int = 0) -> dict[str, torch.Tensor]:
    """The same as tensors of torch."""
    types = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}
    tensors = {}
    for name, array in fixed_state(step).items():
        dtype = types.get(array.dtype.name) or getattr(torch, array.dtype.name)
        tensor = tensors[name] = torch.empty(array.shape, dtype=dtype)
        if array.size:
            tensor.view(-1).view(torch.uint8).copy_(torch.from_numpy(array.reshape(-1).view(np.uint8).copy()))
    return tensors


FILES = {"config.json": b'{"model_type": "golden"}', "tokenizer/vocab.txt": b"a\nb\n"}

ON_REQUEST = AnchorPolicy(bytes_ratio=None)
"""No anchors but the first and those that are asked for: others come when a thread has the time."""


def options(**given: Any) -> PublisherOptions:
    return PublisherOptions(**{"anchors": ON_REQUEST, "wait": True, "files": FILES, **given})


def stored(data: bytes, *level: Any, **options: Any) -> bytes:
    """What `zlib.compress` may return as well, whichever build of zlib there is: the data, uncompressed."""
    pieces = [data[i : i + 65535] for i in range(0, len(data), 65535)] or [b""]
    out = b"\x78\x01"
    for i, piece in enumerate(pieces):
        size = len(piece).to_bytes(2, "little")
        out += bytes([i == len(pieces) - 1]) + size + bytes(255 - byte for byte in size) + piece
    return out + zlib.adler32(data).to_bytes(4, "big")


# What differs between runs


class Labels:
    """Names for what is random or a hash: `id#1`, `payload#2`, in the order in which they are first seen."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, str], str] = {}
        self._counts: dict[str, int] = {}

    def of(self, kind: str, value: str) -> str:
        if (kind, value) not in self._names:
            self._counts[kind] = self._counts.get(kind, 0) + 1
            self._names[kind, value] = f"{kind}#{self._counts[kind]}"
        return self._names[kind, value]

    def ids(self, text: str) -> str:
        """The text with labels for ids of writers, feeds and followers: 16 random hexadecimal digits."""
        return re.sub(r"(?<![0-9a-f])[0-9a-f]{16}(?![0-9a-f])", lambda found: self.of("id", found[0]), text)


TIMES = (
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "<time>"),
    (r'("(?:\w+_)?unix_m?s": )"?[0-9.]+"?', r'\1"<time>"'),
)
DURATIONS = (
    (r'("(?:seconds|\w+_s|plan|fetch|decode|stage|commit|pause)": )[0-9.e-]+', r'\1"<s>"'),
    (r"(?<![\w.])\d[\d.,]* (?:ms|s|min|h|d)(?: \d+ (?:s|min|h))?(?!\w)", "<duration>"),
    (r"under <duration>", "<duration>"),
)


def without(text: str, rules: Iterable[tuple[str, str]]) -> str:
    for pattern, replacement in rules:
        text = re.sub(pattern, replacement, text)
    return text
