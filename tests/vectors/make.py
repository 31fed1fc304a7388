"""Makes the golden vectors: states, payloads, and manifest.json, which says what belongs together.

    python tests/vectors/make.py

Run it only when the format changes on purpose. What it writes is then the new truth: look at the difference first.
The states are checkpoints; a positive vector says which payload leads from `old` to `new`, a negative one with which
error a reader must refuse the payload.
"""

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE))

from negative import NEGATIVE, OLD, bad_block  # noqa: E402
from support.helpers import anchor_blocks  # noqa: E402
from support.strategies import Look, Move, random_bits, random_change, special_bits  # noqa: E402

from deltasync import blocks  # noqa: E402
from deltasync.format.layout import (  # noqa: E402
    DTYPES,
    Layout,
    TensorSpec,
)
from deltasync.format.payload import (  # noqa: E402
    Block,
    Payload,
    PayloadHeader,
    write_payload,
)
from deltasync.format.safetensors import header_bytes  # noqa: E402
from deltasync.format.weights import Weights  # noqa: E402


@dataclass(frozen=True)
class Pair:
    """A state of one element type, and how it changes."""

    dtype: str
    elements: int
    share: float
    look: Look
    move: Move

    def states(self) -> tuple[Weights, Weights]:
        dtype, rng = DTYPES[self.dtype], np.random.default_rng(self.elements)
        sizes = {"a": (self.elements // 10, 10), "b": (37,), "empty": (0, 4), "scalar": ()}
        layout = Layout.of(TensorSpec(name, dtype, shape) for name, shape in sizes.items())
        old = [random_bits(rng, dtype, t.elements, self.look) for t in layout.tensors]
        new = [random_change(rng, dtype, a, self.share, self.move) for a in old]
        return Weights(layout, tuple(old)), Weights(layout, tuple(new))


DELTAS: dict[str, tuple[Pair, list[str]]] = {
    **{
        f"{name.lower()}-steps": (Pair(name, 600, 0.06, "weights", "ulp"), ["exp/1", "coo/1"])
        for name in ("BF16", "F16", "F32", "F8_E4M3", "F8_E5M2", "U8", "I16", "I32", "F64")
    },
    **{
        f"{name.lower()}-values": (Pair(name, 400, 0.15, "weights", "replace"), ["abs/1"])
        for name in ("BF16", "F32", "I32", "I64")
    },
    **{
        f"{name.lower()}-dense": (Pair(name, 400, 1.0, "weights", "replace"), ["planes/1"])
        for name in ("BF16", "F16", "F32", "F8_E5M2")
    },
    "f16-special": (Pair("F16", 500, 0.3, "special", "special"), ["abs/1", "coo/1"]),
    "u8-all": (Pair("U8", 600, 1.0, "uniform", "ulp"), ["exp/1"]),
    "bf16-same": (Pair("BF16", 100, 0.0, "weights", "ulp"), ["exp/1", "coo/1"]),
}
"""Name to the states, and the codecs that all blocks of a delta must come out in."""


def mixed() -> tuple[Weights, Weights]:
    """All element types in one state, each with its boundary values, that are all there before and after."""
    layout = Layout.of(TensorSpec(f"t.{name}", d, (len(special_bits(d)),)) for name, d in DTYPES.items())
    old = tuple(special_bits(t.dtype) for t in layout.tensors)
    return Weights(layout, old), Weights(layout, tuple(np.roll(a, 1) for a in old))


def optimizer_step() -> tuple[Weights, Weights]:
    """Steps as training makes them, more of them where weights are small: several classes, several lanes."""
    dtype, rng = DTYPES["BF16"], np.random.default_rng(7)
    layout = Layout.of([TensorSpec("w", dtype, (70, 100))])
    old = random_bits(rng, dtype, 7000, "weights")
    exponents = (old >> 7 & 0xFF).astype(int)
    new = old.copy()
    new[rng.random(7000) < 2.0 ** (122 - exponents)] += np.uint16(1)
    return Weights(layout, (old,)), Weights(layout, (new,))


def write_state(name: str, weights: Weights) -> str:
    path = HERE / "states" / f"{name}.safetensors"
    data = header_bytes(weights.layout.tensors, {}) + b"".join(a.tobytes() for a in weights.arrays)
    path.write_bytes(data)
    return str(path.relative_to(HERE))


def write_vector(name: str, header: PayloadHeader, found: list[Block]) -> str:
    path = HERE / "payloads" / f"{name}.safetensors"
    path.write_bytes(write_payload(header, found))
    return str(path.relative_to(HERE))


def described(payload: str) -> list[dict[str, Any]]:
    """The blocks of a payload as its index must list them."""
    return [
        {
            "codec": b.codec,
            "runs": b.runs.tolist(),
            "changed": b.changed,
            "digest": b.digest.hex,
            "sha256": b.sha256,
            "bytes": b.nbytes,
        }
        for b in Payload.parse((HERE / payload).read_bytes()).block_infos
    ]


def vector(name: str, old: Weights | None, new: Weights, codec: str, paths: tuple[str, str]) -> dict[str, Any]:
    """One positive vector: a delta, or an anchor if there is nothing old."""
    parent = None if old is None else blocks.digest(old)
    found = anchor_blocks(new) if old is None else blocks.encode_delta(old, new, codec=codec)
    digest = blocks.digest(new)
    payload = write_vector(name, PayloadHeader("delta" if old else "anchor", new.layout, parent, digest), found)
    return {
        "name": name,
        "codec": codec,
        "old": paths[0],
        "new": paths[1],
        "payload": payload,
        "parent_digest": None if parent is None else parent.hex,
        "digest": digest.hex,
        "blocks": described(payload),
    }


def positive() -> list[dict[str, Any]]:
    made = []
    for name, (pair, codecs) in DELTAS.items():
        old, new = pair.states()
        paths = write_state(f"{name}-old", old), write_state(f"{name}-new", new)
        for codec in codecs:
            asked = "coo/1" if codec == "coo/1" else "exp/1"
            entry = vector(f"{name}-{codec[:-2]}", old, new, asked, paths)
            assert {b["codec"] for b in entry["blocks"]} <= {codec}, (name, codec, entry["blocks"])
            made.append(entry)
        if name.endswith("-steps"):
            made.append(vector(f"{name}-anchor", None, new, "planes/1", paths))
    for name, (old, new) in (("mixed", mixed()), ("bf16-classes", optimizer_step())):
        paths = write_state(f"{name}-old", old), write_state(f"{name}-new", new)
        made.extend(vector(f"{name}-{codec[:-2]}", old, new, codec, paths) for codec in ("exp/1", "coo/1"))
        made.append(vector(f"{name}-anchor", None, new, "planes/1", paths))
    return made


def negative() -> list[dict[str, Any]]:
    path, made = write_state("negative-old", OLD), []
    parent = blocks.digest(OLD)
    for name, case in NEGATIVE.items():
        block = bad_block(case)
        header = PayloadHeader("delta", OLD.layout, parent, parent + block.digest)
        payload = write_vector(f"bad-{name}", header, [block])
        made.append({"name": name, "old": path, "payload": payload, "error": case.error, "rule": case.rule})
    return made


def main() -> None:
    for folder in ("states", "payloads"):
        shutil.rmtree(HERE / folder, ignore_errors=True)
        (HERE / folder).mkdir()
    manifest = {"positive": positive(), "negative": negative()}
    lists = (f' "{name}": [\n  ' + ",\n  ".join(map(json.dumps, made)) + "\n ]" for name, made in manifest.items())
    (HERE / "manifest.json").write_text("{\n" + ",\n".join(lists) + "\n}\n")
    files = [p for p in HERE.rglob("*.*") if p.suffix in (".safetensors", ".json")]
    print(f"{len(files)} files, {sum(p.stat().st_size for p in files)} bytes")


if __name__ == "__main__":
    main()
