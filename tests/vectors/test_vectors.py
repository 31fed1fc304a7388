"""The golden vectors: readers of today read them, writers of today write them, and what was bad is still refused."""

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from support.helpers import anchor_blocks

from deltasync import blocks
from deltasync.checkpoint import open_checkpoint
from deltasync.errors import DeltasyncError
from deltasync.format.index import decode_index, encode_index
from deltasync.format.payload import INDEX_NAME, Payload
from deltasync.format.safetensors import parse_header
from deltasync.format.weights import Weights

HERE = Path(__file__).parent
MANIFEST = json.loads((HERE / "manifest.json").read_text())
POSITIVE = {v["name"]: v for v in MANIFEST["positive"]}
NEGATIVE = {v["name"]: v for v in MANIFEST["negative"]}

pytestmark = pytest.mark.usefixtures("every_kernels")
positive = pytest.mark.parametrize("vector", POSITIVE.values(), ids=POSITIVE.keys())


def state(name: str) -> Weights:
    return open_checkpoint(HERE / name).weights


def payload(vector: dict[str, Any]) -> Payload:
    return Payload.parse((HERE / vector["payload"]).read_bytes())


@positive
def test_a_reader_reads_them(vector: dict[str, Any]) -> None:
    found, old, new = payload(vector), state(vector["old"]), state(vector["new"])
    target = Weights(old.layout, tuple(a.copy() for a in old.arrays))
    blocks.decode_into(target, old, found.blocks(), relative=found.header.kind == "delta")
    assert [a.tobytes() for a in target.arrays] == [a.tobytes() for a in new.arrays]


@positive
def test_digests(vector: dict[str, Any]) -> None:
    header = payload(vector).header
    assert header.digest.hex == vector["digest"] == blocks.digest(state(vector["new"])).hex
    if header.parent_digest is None:
        assert vector["parent_digest"] is None
    else:
        assert header.parent_digest.hex == vector["parent_digest"] == blocks.digest(state(vector["old"])).hex


@positive
def test_a_writer_writes_them(vector: dict[str, Any]) -> None:
    old, new = state(vector["old"]), state(vector["new"])
    if vector["parent_digest"] is None:
        found = anchor_blocks(new)
    else:
        found = blocks.encode_delta(old, new, codec=vector["codec"])
    golden = payload(vector)
    for i, (block, expected) in enumerate(zip(found, vector["blocks"], strict=True)):
        assert (block.codec, block.runs.tolist(), block.changed, block.digest.hex) == (
            expected["codec"],
            expected["runs"],
            expected["changed"],
            expected["digest"],
        )
        assert block.data == golden.block(i).data
        assert (golden.block_infos[i].sha256, len(block.data)) == (expected["sha256"], expected["bytes"])


@positive
def test_the_index_is_canonical(vector: dict[str, Any]) -> None:
    """Up to its compression: builds of zlib differ."""
    data = (HERE / vector["payload"]).read_bytes()
    [entry] = [e for e in parse_header(data).entries if e.name == INDEX_NAME]
    index = data[entry.begin : entry.end]
    assert zlib.decompress(encode_index(*decode_index(index))) == zlib.decompress(index)


@pytest.mark.parametrize("vector", NEGATIVE.values(), ids=NEGATIVE.keys())
def test_a_reader_refuses(vector: dict[str, Any]) -> None:
    found, old = payload(vector), state(vector["old"])
    with pytest.raises(DeltasyncError) as caught:
        list(blocks.decode(old, found.blocks()))
    assert (caught.value.kind, caught.value.rule) == (vector["error"], vector["rule"])


def test_every_codec_has_vectors() -> None:
    codecs = {b["codec"] for v in POSITIVE.values() for b in v["blocks"]}
    assert codecs == {"exp/1", "abs/1", "planes/1", "coo/1"}
