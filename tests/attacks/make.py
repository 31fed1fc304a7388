"""Makes the hostile payloads: files that a reader must refuse, each for one reason.

    python tests/attacks/make.py

Files that are large, or become large when read, are not kept: bombs.py makes them for each test. Blocks that are bad
inside of a sound payload are golden vectors, in tests/vectors.
"""

import json
import shutil
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE.parent / "vectors"))

from negative import NEW, OLD, good_block  # noqa: E402
from support.helpers import Pieces, anchor_blocks, mutated  # noqa: E402

from deltasync import blocks  # noqa: E402
from deltasync.format.digest import StateDigest  # noqa: E402
from deltasync.format.layout import (  # noqa: E402
    DTYPES,
    Layout,
    TensorSpec,
)
from deltasync.format.payload import (  # noqa: E402
    Block,
    PayloadHeader,
    write_payload,
)
from deltasync.format.weights import Weights  # noqa: E402

Change = Callable[[Pieces], object]


@dataclass(frozen=True)
class Attack:
    """`stage` says where it is refused: when the file is opened, or only when it is applied."""

    data: bytes
    error: str
    rule: str
    stage: str = "inspect"


def delta(codec: str = "exp/1") -> bytes:
    """A sound delta of the state that all attacks are applied to: tensors `bytes` and `weights`."""
    parent = blocks.digest(OLD)
    found = [good_block(codec, name) for name in ("bytes", "weights")]
    digest = sum((b.digest for b in found), parent)
    return write_payload(PayloadHeader("delta", OLD.layout, parent, digest), found)


DELTA, PLAIN = delta(), delta("coo/1")


def container(header: str | bytes, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A safetensors file of any header, with any length in its first bytes."""
    text = header if isinstance(header, bytes) else header.encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def tensor(**fields: Any) -> bytes:
    """A file of one tensor, with some fields of its entry replaced."""
    entry = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4], **fields}
    return container(json.dumps({"x": entry}), b"1234")


def on_index(change: Callable[[dict[str, Any]], object]) -> bytes:
    return mutated(DELTA, lambda p: change(p.index))


def block_field(name: str, value: Any, i: int = 1) -> bytes:
    return on_index(lambda index: index["blocks"][i].update({name: value}))


def layout_entry(*entry: Any, i: int = 0) -> bytes:
    return on_index(lambda index: index["layout"].__setitem__(i, list(entry)))


def raw_index(data: bytes) -> bytes:
    def change(p: Pieces) -> None:
        p.index_bytes = data

    return mutated(DELTA, change)


def metadata(**fields: str) -> bytes:
    return mutated(DELTA, lambda p: p.metadata.update(fields))


def runs_of_a_giant(runs: list[list[int]], elements: int) -> bytes:
    """Runs in a tensor of any size, that only the layout has."""

    def change(index: dict[str, Any]) -> None:
        index["layout"][0] = ["bytes", "U8", [elements]]
        index["blocks"][0]["runs"] = runs

    return on_index(change)


def nothing_changed(layout: Layout) -> bytes:
    """A sound delta without blocks."""
    return write_payload(PayloadHeader("delta", layout, StateDigest(1, 2), StateDigest(1, 2)), [])


def named(name: str) -> bytes:
    return nothing_changed(Layout.of([TensorSpec(name, DTYPES["F32"], (2, 2))]))


def other_parent() -> bytes:
    block = good_block("exp/1")
    parent = blocks.digest(NEW)
    return write_payload(PayloadHeader("delta", OLD.layout, parent, parent + block.digest), [block])


def anchor_of_others() -> bytes:
    """An anchor whose blocks promise one state and hold another."""
    zeros = Weights(OLD.layout, tuple(a * 0 for a in OLD.arrays))
    found = anchor_blocks(OLD)
    held = [b.data for b in anchor_blocks(zeros)]
    swapped = [Block(b.codec, b.runs, b.changed, b.digest, data) for b, data in zip(found, held, strict=True)]
    return write_payload(PayloadHeader("anchor", OLD.layout, None, blocks.digest(OLD)), swapped)


def anchor_with_a_hole() -> bytes:
    """An anchor of which one element is missing, and that is right in all else."""

    def change(p: Pieces) -> None:
        p.index["blocks"][0].update(runs=[[0, 1, 99]], changed=99)
        p.metadata["changed"] = "399"

    sound = PayloadHeader("anchor", OLD.layout, None, blocks.digest(OLD))
    return mutated(write_payload(sound, anchor_blocks(OLD)), change)


def one_more_tensor(p: Pieces) -> None:
    p.data["more"] = b"1234"
    p.specs.append(TensorSpec("more", DTYPES["U8"], (4,)))


NESTED = "[" * 20_000
CHANGED = str(good_block("exp/1", "bytes").changed + 96)
ATTACKS: dict[str, Attack] = {
    # cut short, or too long
    "empty": Attack(b"", "corrupt", "safetensors.truncated"),
    "only-a-length": Attack(DELTA[:8], "corrupt", "safetensors.truncated"),
    "cut-in-the-header": Attack(DELTA[:100], "corrupt", "safetensors.truncated"),
    "cut-in-the-data": Attack(DELTA[:-30], "corrupt", "safetensors.truncated"),
    "cut-by-one": Attack(DELTA[:-1], "corrupt", "safetensors.truncated"),
    "longer-by-one": Attack(DELTA + b"\0", "corrupt", "safetensors.trailing"),
    # the header of the container
    "header-of-2^64": Attack(container("{}", length=2**64 - 1), "corrupt", "safetensors.header_size"),
    "header-of-99-MB": Attack(container("{}", length=99_000_000), "corrupt", "safetensors.truncated"),
    "header-not-an-object": Attack(container("[]"), "corrupt", "safetensors.json"),
    "header-not-utf-8": Attack(container(b'{"\xff": 1}'), "corrupt", "safetensors.json"),
    "header-nested": Attack(container('{"a":' + NESTED), "corrupt", "safetensors.json"),
    "header-key-twice": Attack(container('{"a":{},"a":{}}'), "corrupt", "safetensors.duplicate"),
    "header-fraction": Attack(tensor(shape=[4.0]), "corrupt", "safetensors.json"),
    "header-not-a-number": Attack(container('{"a":NaN}'), "corrupt", "safetensors.json"),
    "header-5000-digits": Attack(container('{"a":' + "9" * 5000 + "}"), "corrupt", "safetensors.json"),
    "header-half-a-character": Attack(container('{"\\ud800":1}'), "corrupt", "safetensors.json"),
    "metadata-a-number": Attack(container('{"__metadata__":{"format":1}}'), "corrupt", "safetensors.metadata"),
    "shape-of-16-times-2^48": Attack(tensor(shape=[1 << 48] * 16), "corrupt", "safetensors.size"),
    "shape-of-17-dimensions": Attack(tensor(shape=[1] * 17), "corrupt", "safetensors.shape"),
    "shape-negative": Attack(tensor(shape=[-4]), "corrupt", "safetensors.shape"),
    "shape-of-2^63": Attack(tensor(shape=[1 << 63]), "corrupt", "safetensors.shape"),
    "offsets-of-2^64": Attack(tensor(data_offsets=[0, 1 << 64]), "corrupt", "safetensors.offsets"),
    "offsets-reversed": Attack(tensor(data_offsets=[4, 0]), "corrupt", "safetensors.offsets"),
    "tensors-overlap": Attack(
        container(
            json.dumps({n: {"dtype": "U8", "shape": [4], "data_offsets": [b, b + 4]} for n, b in (("a", 0), ("b", 2))}),
            b"123456",
        ),
        "corrupt",
        "safetensors.offsets",
    ),
    "entry-of-nothing": Attack(container('{"a":{}}'), "corrupt", "safetensors.entry"),
    "type-unknown": Attack(tensor(dtype="F4"), "format", "dtype"),
    # what the payload says of itself
    "not-a-payload": Attack(tensor(), "format", "payload.format"),
    "a-later-format": Attack(metadata(format="deltasync/2"), "format", "payload.format"),
    "another-kind": Attack(metadata(kind="skip"), "format", "payload.kind"),
    "kind-missing": Attack(mutated(DELTA, lambda p: p.metadata.pop("kind")), "corrupt", "payload.metadata"),
    "changed-not-a-number": Attack(metadata(changed="0x10"), "corrupt", "payload.metadata"),
    "delta-that-calls-itself-anchor": Attack(
        mutated(DELTA, lambda p: (p.metadata.update(kind="anchor"), p.metadata.pop("parent_digest"))),
        "corrupt",
        "payload.anchor",
    ),
    "anchor-with-a-hole": Attack(anchor_with_a_hole(), "corrupt", "payload.cover"),
    "tensor-that-nobody-asked-for": Attack(mutated(DELTA, one_more_tensor), "corrupt", "payload.tensors"),
    "block-that-is-not-there": Attack(mutated(DELTA, lambda p: p.specs.pop()), "corrupt", "payload.tensors"),
    "digest-wrong": Attack(metadata(digest="0" * 32), "corrupt", "payload.digest"),
    "digest-short": Attack(metadata(digest="0"), "format", "digest.hex"),
    "2^60-changed": Attack(metadata(changed=str(1 << 60)), "corrupt", "payload.totals"),
    "layout-hash-wrong": Attack(metadata(layout_sha256="0" * 64), "corrupt", "payload.layout"),
    # the index
    "index-not-zlib": Attack(raw_index(b"{}"), "corrupt", "index.zlib"),
    "index-cut": Attack(raw_index(zlib.compress(b"{}")[:-1]), "corrupt", "index.zlib"),
    "index-and-more": Attack(raw_index(zlib.compress(b"{}") + b"x"), "corrupt", "index.trailing"),
    "index-nested": Attack(raw_index(zlib.compress(b'{"a":' + NESTED.encode())), "corrupt", "index.json"),
    "index-key-twice": Attack(raw_index(zlib.compress(b'{"a":1,"a":1}')), "corrupt", "index.duplicate"),
    "index-of-nothing": Attack(raw_index(zlib.compress(b"{}")), "corrupt", "index.field"),
    "index-from-the-future": Attack(
        on_index(lambda i: i.update(must_understand=["encryption"])), "format", "index.must_understand"
    ),
    "layout-not-a-list": Attack(on_index(lambda i: i.update(layout={})), "format", "layout.type"),
    "layout-of-2^80-elements": Attack(layout_entry("bytes", "U8", [1 << 40, 1 << 40]), "format", "layout.elements"),
    "layout-of-17-dimensions": Attack(layout_entry("bytes", "U8", [1] * 17), "format", "layout.dimensions"),
    "layout-negative": Attack(layout_entry("bytes", "U8", [-1]), "format", "layout.entry"),
    "layout-twice": Attack(layout_entry("weights", "BF16", [20, 15]), "format", "layout.duplicate"),
    "layout-not-sorted": Attack(layout_entry("zebra", "U8", [100]), "format", "layout.order"),
    "layout-of-another-shape": Attack(layout_entry("bytes", "U8", [10, 10]), "corrupt", "payload.layout"),
    "name-of-nothing": Attack(layout_entry("", "U8", [100]), "format", "layout.name"),
    "name-of-5000-bytes": Attack(layout_entry("a" * 5000, "U8", [100]), "format", "layout.name"),
    # blocks and their runs
    "block-not-an-object": Attack(on_index(lambda i: i["blocks"].append(7)), "corrupt", "block.field"),
    "block-without-sha256": Attack(on_index(lambda i: i["blocks"][0].pop("sha256")), "corrupt", "block.field"),
    "block-from-the-future": Attack(block_field("must_understand", ["key"]), "format", "block.must_understand"),
    "codec-unknown": Attack(block_field("codec", "exp/2"), "format", "block.codec"),
    "changed-more-than-there-is": Attack(block_field("changed", 301), "corrupt", "block.changed"),
    "changed-2^70": Attack(block_field("changed", 1 << 70), "corrupt", "block.changed"),
    "runs-none": Attack(block_field("runs", []), "corrupt", "runs.entry"),
    "runs-negative": Attack(block_field("runs", [[1, -1, 5]]), "corrupt", "runs.entry"),
    "runs-of-2^63": Attack(block_field("runs", [[1, 1 << 63, 1 << 63]]), "corrupt", "runs.entry"),
    "runs-past-the-end": Attack(block_field("runs", [[1, 299, 2]]), "corrupt", "runs.range"),
    "runs-of-no-tensor": Attack(block_field("runs", [[2, 0, 1]]), "corrupt", "runs.tensor"),
    "runs-empty": Attack(block_field("runs", [[1, 0, 0]]), "corrupt", "runs.empty"),
    "runs-on-themselves": Attack(block_field("runs", [[1, 0, 9, 5, 3]]), "corrupt", "runs.stride"),
    "runs-overlap": Attack(block_field("runs", [[1, 0, 200], [1, 100, 200]]), "corrupt", "runs.overlap"),
    "runs-interleave": Attack(block_field("runs", [[1, 0, 2, 4, 75], [1, 1, 2, 4, 70]]), "corrupt", "runs.overlap"),
    "runs-of-two-types": Attack(block_field("runs", [[0, 0, 1], [1, 0, 299]]), "corrupt", "runs.dtype"),
    "blocks-overlap": Attack(
        on_index(lambda i: i["blocks"][0].update(runs=[[1, 290, 10]], changed=1)), "corrupt", "runs.overlap"
    ),
    "block-of-2^30-elements": Attack(runs_of_a_giant([[0, 0, 1 << 30]], 1 << 30), "corrupt", "runs.elements"),
    "2^23-runs": Attack(runs_of_a_giant([[0, 0, 1, 2, 1 << 23]], 1 << 24), "corrupt", "runs.pieces"),
    "2^40-runs": Attack(runs_of_a_giant([[0, 0, 1, 2, 1 << 40]], 1 << 48), "corrupt", "runs.elements"),
    "plain-in-the-middle": Attack(
        mutated(PLAIN, lambda p: p.index["blocks"][0].update(runs=[[0, 0, 99]])), "corrupt", "block.coo"
    ),
    "plain-among-others": Attack(block_field("codec", "coo/1"), "corrupt", "payload.mixed"),
    "plain-2^40-changes": Attack(
        mutated(PLAIN, lambda p: p.index["blocks"][0].update(changed=1 << 40)), "corrupt", "block.changed"
    ),
    # sound files that do not fit what they are applied to
    "sha256-wrong": Attack(block_field("sha256", "0" * 64), "corrupt", "block.sha256", "apply"),
    "block-damaged": Attack(DELTA[:-1] + bytes((DELTA[-1] ^ 1,)), "corrupt", "block.sha256", "apply"),
    "made-against-another-state": Attack(other_parent(), "mismatch", "payload.parent", "apply"),
    "anchor-of-others": Attack(anchor_of_others(), "corrupt", "block.digest", "apply"),
    "changed-not-as-told": Attack(
        mutated(DELTA, lambda p: (p.index["blocks"][1].update(changed=96), p.metadata.update(changed=CHANGED))),
        "corrupt",
        "block.changed",
        "apply",
    ),
    # names that would do harm if they were paths, or were printed as they are
    **{
        f"name-{what}": Attack(named(name), "mismatch", "layout.differs", "apply")
        for what, name in {
            "that-climbs": "../../../../tmp/deltasync-was-here",
            "that-is-absolute": "/tmp/deltasync-was-here",
            "with-escape-codes": "\x1b[2J\x1b]0;owned\x07",
            "with-line-ends": "a\r\nerror: none\n",
            "with-nul": "a\0b",
            "that-turns-around": "\u202egnp.exe\u2066",
            "with-markup": "[bold red]x[/bold red][link=file:///]",
            "of-the-index": "deltasync.index",
            "of-the-metadata": "__metadata__",
        }.items()
    },
}


def main() -> None:
    shutil.rmtree(HERE / "files", ignore_errors=True)
    (HERE / "files").mkdir()
    for name, attack in ATTACKS.items():
        (HERE / "files" / f"{name}.safetensors").write_bytes(attack.data)
    lines = [json.dumps({"name": n, "stage": a.stage, "error": a.error, "rule": a.rule}) for n, a in ATTACKS.items()]
    (HERE / "manifest.json").write_text("[\n " + ",\n ".join(lines) + "\n]\n")
    print(f"{len(ATTACKS)} files, {sum(len(a.data) for a in ATTACKS.values())} bytes")


if __name__ == "__main__":
    main()
