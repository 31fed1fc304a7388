"""The worked examples of docs/format.md, section 19: read from there, and decoded and encoded here."""

import json
import re
import zlib
from pathlib import Path

import numpy as np
import pytest
from support.helpers import encode_with

from deltasync import blocks
from deltasync.format.digest import StateDigest
from deltasync.format.index import encode_index
from deltasync.format.layout import DTYPES, Layout, TensorSpec
from deltasync.format.payload import Block, Payload, PayloadHeader, write_payload
from deltasync.format.safetensors import parse_header
from deltasync.format.weights import Weights
from deltasync.kernels import kernels

TEXT = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
LAYOUT = Layout.of([TensorSpec("w", DTYPES["BF16"], (8, 8))])
OLD = Weights(LAYOUT, (np.tile(np.array([0x3F80, 0x3C00], np.uint16), 32),))
ALL = np.array([[0, 0, 64]])
REGION = OLD.region(ALL)

pytestmark = pytest.mark.usefixtures("every_kernels")


def section(number: str) -> str:
    return TEXT[TEXT.index(f"### {number} ") :].split("\n### ")[0].split("\n## ")[0]


def code(number: str) -> list[str]:
    """The code blocks of a section."""
    return re.findall(r"```\n(.*?)```", section(number), re.DOTALL)


def row(name: str) -> list[str]:
    """A row of the table of changes, without its name."""
    begin = TEXT.index("## 19. ")
    return next(line.split("|")[2:-1] for line in TEXT[begin:].splitlines() if line.startswith(f"| {name} |"))


INDICES = np.array([int(cell) for cell in row("index")], np.uint32)
VALUES = np.array([int(cell, 16) for cell in row("new")], np.uint16)
NEW = Weights(LAYOUT, (OLD.arrays[0].copy(),))
NEW.arrays[0][INDICES] = VALUES


def test_the_old_bits() -> None:
    assert OLD.arrays[0][INDICES].tolist() == [int(cell, 16) for cell in row("old")]


@pytest.mark.parametrize(("number", "thresholds"), [("19.1", []), ("19.2", [127])])
def test_steps(number: str, thresholds: list[int]) -> None:
    block = bytes.fromhex(code(number)[0])
    positions, values, _ = kernels().decode_changes(REGION, block, absolute=False)
    assert (positions.tolist(), values.tolist()) == (INDICES.tolist(), VALUES.tolist())
    assert encode_with(thresholds, REGION, INDICES, VALUES) == (False, block)


def test_what_a_writer_makes_of_them() -> None:
    absolute, block, lanes = kernels().encode_changes(REGION, INDICES, VALUES)
    assert (absolute, block) == (False, bytes.fromhex(code("19.1")[0]))
    assert f"adds `{StateDigest(*lanes).hex}`" in section("19.1")


def test_values() -> None:
    block = bytes.fromhex(code("19.3")[0])
    positions, values, lanes = kernels().decode_changes(REGION, block, absolute=True)
    assert (positions.tolist(), values.tolist()) == ([5, 40], [0xBF80, 0x4000])
    assert kernels().encode_changes(REGION, positions, values) == (True, block, lanes)


def test_planes() -> None:
    bits = np.full(40, 0x3F80, np.uint16)
    bits[7] = 0xBF80
    layout = Layout.of([TensorSpec("p", DTYPES["BF16"], (40,))])
    coded = bytes.fromhex("".join(re.findall(r"^\| `([0-9a-f ]+)` \|", section("19.4"), re.MULTILINE)))
    block = b"\0" + b"\x7f" * 40 + coded
    assert kernels().encode_planes(Weights(layout, (bits,)).region(np.array([[0, 0, 40]]))) == block
    assert kernels().decode_planes(block, 40, DTYPES["BF16"]).tolist() == bits.tolist()


def payload(codec: str) -> tuple[bytes, list[Block]]:
    found = blocks.encode_delta(OLD, NEW, codec=codec)
    header = PayloadHeader("delta", LAYOUT, blocks.digest(OLD), blocks.digest(NEW))
    return write_payload(header, found), found


def test_a_whole_payload() -> None:
    """Except for what depends on the build of zlib: the length of the index, and so of the file."""
    data, _ = payload("exp/1")
    expected_header, expected_index = (json.loads(text.replace("\n", "")) for text in code("19.5")[:2])
    header = parse_header(data)
    assert header.metadata == expected_header["__metadata__"]
    assert [e.name for e in header.entries] == [n for n in expected_header if n != "__metadata__"]
    [begin, end] = [e.begin for e in header.entries]
    index = zlib.decompress(data[begin:end])
    assert index == code("19.5")[1].replace("\n", "").encode()
    assert json.loads(index) == expected_index
    assert data[end:] == bytes.fromhex(code("19.1")[0])
    infos = Payload.parse(data).block_infos
    assert zlib.decompress(encode_index(LAYOUT, infos)) == index


def test_a_plain_payload() -> None:
    data, [block] = payload("coo/1")
    begin = parse_header(data).data_begin
    assert data[begin : begin + 48] == block.data == bytes.fromhex(code("19.5")[2])
