import json
import mmap
import tempfile
import zlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st
from support.helpers import (
    LAYOUT,
    Pieces,
    anchor_payload,
    block,
    coo_payload,
    delta_payload,
    mutated,
    safetensors_bytes,
    sha256,
    shard_payload,
    state,
)

from deltasync.errors import CorruptError, DeltasyncError, FormatError
from deltasync.format import limits
from deltasync.format.digest import StateDigest, layout_digest
from deltasync.format.index import decode_index, encode_index
from deltasync.format.layout import DTYPES, Layout, TensorSpec
from deltasync.format.payload import Block, Payload, PayloadHeader, grouped, index_dtype, write_payload
from deltasync.format.safetensors import parse_header

PAYLOADS = {"delta": delta_payload, "anchor": anchor_payload, "shard": shard_payload, "coo": coo_payload}


def same(a: Block, b: Block) -> bool:
    return (a.codec, a.changed, a.digest, a.data) == (b.codec, b.changed, b.digest, b.data) and np.array_equal(
        a.runs, b.runs
    )


def test_round_trip() -> None:
    blocks = [
        block("exp/1", [[0, 0, 2], [0, 10, 2], [0, 20, 2], [1, 3, 4]], 5, (3, 4), b"some bytes"),
        block("planes/1", [[2, 0, 6]], 6, (2**64 - 1, 1), b""),
    ]
    header = PayloadHeader("delta", LAYOUT, StateDigest(1, 2), StateDigest(3, 7))
    data = write_payload(header, blocks)
    payload = Payload.parse(data)
    assert payload.header == header
    assert all(same(a, b) for a, b in zip(payload.blocks(), blocks, strict=True))
    assert payload.nbytes == len(data)
    assert write_payload(payload.header, list(payload.blocks())) == data


def test_a_known_layout_is_used_only_if_it_is_the_same() -> None:
    data = delta_payload()
    equal = Layout.of(LAYOUT.tensors)
    assert Payload.parse(data, known=equal).header.layout is equal
    first, *rest = LAYOUT.tensors
    for others in ([], rest, [TensorSpec(f"{first.name}x", first.dtype, first.shape), *rest]):
        parsed = Payload.parse(data, known=Layout.of(others))
        assert parsed.header.layout == LAYOUT
        assert len(parsed.block_infos) == len(Payload.parse(data).block_infos)


def test_a_layout_that_only_python_takes_for_the_known_one_is_refused() -> None:
    known = Layout.of([TensorSpec("a", DTYPES["U8"], (1, 3))])
    text = zlib.decompress(encode_index(known, ()))
    assert decode_index(zlib.compress(text), known) == (known, ())
    with pytest.raises(FormatError, match="an entry of the layout"):
        decode_index(zlib.compress(text.replace(b"[1,3]", b"[true,3]")), known)


def test_a_delta_without_changes_has_no_blocks() -> None:
    header = PayloadHeader("delta", LAYOUT, StateDigest(1, 2), StateDigest(1, 2))
    assert list(Payload.parse(write_payload(header, [])).blocks()) == []


@pytest.mark.parametrize("make", PAYLOADS.values(), ids=PAYLOADS.keys())
def test_it_is_a_safetensors_file_with_readable_metadata(make: Callable[[], bytes]) -> None:
    data = make()
    assert "deltasync.index" in dict(safetensors.deserialize(data))
    metadata = parse_header(data).metadata
    assert metadata["format"] == "deltasync/1"
    assert metadata["layout_sha256"] == LAYOUT.sha256
    assert metadata["elements"] == "126"


def test_one_range_holds_one_block() -> None:
    data = delta_payload()
    for info, content in zip(Payload.parse(data).block_infos, (b"first block", b"second"), strict=True):
        [(begin, end)] = info.ranges
        assert data[begin:end] == content
        assert info.sha256 == sha256(content)
        assert info.nbytes == len(content)


def test_coo_tensors_are_plain_and_aligned() -> None:
    data = coo_payload()
    found = {name: (t["dtype"], t["shape"], bytes(t["data"])) for name, t in safetensors.deserialize(data)}
    assert found.keys() == {"a.indices", "a.values", "c.indices", "c.values", "deltasync.index"}
    assert found["a.indices"] == ("I32", [3], np.array([1, 5, 79], "<i4").tobytes())
    assert found["a.values"] == ("BF16", [3], b"abcdef")
    assert found["c.values"] == ("F32", [1], b"wxyz")
    assert all(e.begin % e.dtype.width == 0 for e in parse_header(data).entries)
    payload = Payload.parse(data)
    assert [len(i.ranges) for i in payload.block_infos] == [2, 2]
    assert payload.block(0).data == np.array([1, 5, 79], "<i4").tobytes() + b"abcdef"


def test_coo_is_aligned_for_every_width() -> None:
    names = ["BF16", "F64", "I8", "F32", "I64", "U8", "F16"]
    layout = Layout.of(TensorSpec(f"t{i}", DTYPES[n], (9,)) for i, n in enumerate(names))
    blocks = [
        block("coo/1", [[i, 0, 9]], 3, (0, 0), bytes(3 * (4 + t.dtype.width))) for i, t in enumerate(layout.tensors)
    ]
    data = write_payload(PayloadHeader("delta", layout, StateDigest.ZERO, StateDigest.ZERO), blocks)
    assert all(e.begin % e.dtype.width == 0 for e in parse_header(data).entries)
    assert all(same(a, b) for a, b in zip(Payload.parse(data).blocks(), blocks, strict=True))


def test_index_type_grows_with_the_tensor() -> None:
    u8 = DTYPES["U8"]
    assert index_dtype(TensorSpec("x", u8, ((1 << 31) - 1,))) == np.dtype("<i4")
    assert index_dtype(TensorSpec("x", u8, (1 << 31,))) == np.dtype("<i8")


def test_coo_blocks_may_be_larger_than_other_blocks() -> None:
    elements = limits.BLOCK_ELEMENTS_MAX + 1
    layout = Layout.of([TensorSpec("x", DTYPES["U8"], (elements,))])
    header = PayloadHeader("delta", layout, StateDigest.ZERO, StateDigest.ZERO)
    data = write_payload(header, [block("coo/1", [[0, 0, elements]], 1, (0, 0), bytes(5))])
    assert Payload.parse(data).block_infos[0].elements == elements
    with pytest.raises(CorruptError) as caught:
        Payload.parse(write_payload(header, [block("exp/1", [[0, 0, elements]], 1, (0, 0), bytes(5))]))
    assert caught.value.rule == "runs.elements"


def test_parsing_needs_few_reads_and_no_blocks() -> None:
    big = block("planes/1", [[0, 0, 80]], 80, (0, 0), bytes(1 << 20))
    data = write_payload(PayloadHeader("delta", LAYOUT, StateDigest.ZERO, StateDigest.ZERO), [big])
    asked: list[tuple[int, int]] = []

    def read(offset: int, length: int) -> bytes:
        asked.append((offset, length))
        return data[offset : offset + length]

    payload = Payload.open(read, len(data))
    assert asked == [(0, 64 << 10)]
    payload.block(0)
    assert asked[1:] == [(len(data) - (1 << 20), 1 << 20)]


def test_a_long_header_and_index_need_more_reads() -> None:
    rng = np.random.default_rng(0)
    layout = Layout.of(TensorSpec(rng.bytes(40).hex(), DTYPES["U8"], (1,)) for _ in range(3000))
    blocks = [block("planes/1", [[i, 0, 1]], 1, (0, 0), b"x") for i in range(3000)]
    data = write_payload(PayloadHeader("delta", layout, StateDigest.ZERO, StateDigest.ZERO), blocks)
    reads = 0

    def read(offset: int, length: int) -> bytes:
        nonlocal reads
        reads += 1
        return data[offset : offset + length]

    assert len(Payload.open(read, len(data)).block_infos) == 3000
    assert reads == 3


def test_a_mapped_file_can_be_parsed() -> None:
    with tempfile.TemporaryFile() as file:
        file.write(delta_payload())
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        assert Payload.parse(mapped).block(1).data == b"second"


def set_meta(name: str, value: str | None) -> Callable[[Pieces], object]:
    return lambda p: p.metadata.pop(name) if value is None else p.metadata.update({name: value})


def set_block(name: str, value: Any, i: int = 0) -> Callable[[Pieces], object]:
    return lambda p: p.index["blocks"][i].update({name: value})


def drop_block_field(name: str) -> Callable[[Pieces], object]:
    return lambda p: p.index["blocks"][0].pop(name)


def set_index(name: str, value: Any) -> Callable[[Pieces], object]:
    return lambda p: p.index.update({name: value})


def raw_index(make: Callable[[bytes], bytes]) -> Callable[[Pieces], object]:
    def change(p: Pieces) -> None:
        p.index_bytes = make(json.dumps(p.index).encode())

    return change


def rename(old: str, new: str) -> Callable[[Pieces], object]:
    def change(p: Pieces) -> None:
        p.data[new] = p.data[old]
        p.specs = [TensorSpec(new, s.dtype, s.shape) if s.name == old else s for s in p.specs]

    return change


def retype(name: str, dtype: str, shape: tuple[int, ...]) -> Callable[[Pieces], object]:
    def change(p: Pieces) -> None:
        p.specs = [TensorSpec(name, DTYPES[dtype], shape) if s.name == name else s for s in p.specs]

    return change


def extra_tensor(p: Pieces) -> None:
    p.data["more"] = b"1234"
    p.specs.append(TensorSpec("more", DTYPES["U8"], (4,)))


def drop_tensor(name: str) -> Callable[[Pieces], object]:
    def change(p: Pieces) -> None:
        p.specs = [s for s in p.specs if s.name != name]

    return change


def swap_last(p: Pieces) -> None:
    p.specs[-1], p.specs[-2] = p.specs[-2], p.specs[-1]


def layout_entry(i: int, entry: Any) -> Callable[[Pieces], object]:
    return lambda p: p.index["layout"].__setitem__(i, entry)


def drop_anchor_block(p: Pieces) -> None:
    """Remove the last block and correct all that follows from it, but not what an anchor must cover."""
    p.index["blocks"].pop()
    drop_tensor("deltasync.block.00000002")(p)
    p.metadata["changed"] = "120"
    p.metadata["digest"] = (layout_digest(LAYOUT) + StateDigest(3, 3)).hex


def shrink_anchor_block(p: Pieces) -> None:
    p.index["blocks"][0].update({"runs": [[0, 1, 79]], "changed": 79})


BLOCK0 = "deltasync.block.00000000"
Mutation = tuple[Callable[[], bytes], Callable[[Pieces], object], type[DeltasyncError], str]
BAD: dict[str, Mutation] = {
    # __metadata__
    "another format": (delta_payload, set_meta("format", "deltasync/2"), FormatError, "payload.format"),
    "no format": (delta_payload, set_meta("format", None), FormatError, "payload.format"),
    "another kind": (delta_payload, set_meta("kind", "skip"), FormatError, "payload.kind"),
    "no kind": (delta_payload, set_meta("kind", None), CorruptError, "payload.metadata"),
    "no digest": (delta_payload, set_meta("digest", None), CorruptError, "payload.metadata"),
    "no parent digest": (delta_payload, set_meta("parent_digest", None), CorruptError, "payload.metadata"),
    "no layout hash": (delta_payload, set_meta("layout_sha256", None), CorruptError, "payload.metadata"),
    "anchor with parent": (anchor_payload, set_meta("parent_digest", "0" * 32), CorruptError, "payload.metadata"),
    "elements not decimal": (delta_payload, set_meta("elements", "0126"), CorruptError, "payload.metadata"),
    "changed not decimal": (delta_payload, set_meta("changed", "-7"), CorruptError, "payload.metadata"),
    "elements wrong": (delta_payload, set_meta("elements", "127"), CorruptError, "payload.totals"),
    "changed wrong": (delta_payload, set_meta("changed", "8"), CorruptError, "payload.totals"),
    "digest not hex": (delta_payload, set_meta("digest", "x" * 32), FormatError, "digest.hex"),
    "parent not hex": (delta_payload, set_meta("parent_digest", "0" * 31), FormatError, "digest.hex"),
    "layout hash wrong": (delta_payload, set_meta("layout_sha256", "0" * 64), CorruptError, "payload.layout"),
    "layout changed": (delta_payload, layout_entry(3, ["none", "F32", [0, 1]]), CorruptError, "payload.layout"),
    # digests
    "digest wrong": (delta_payload, set_meta("digest", "0" * 32), CorruptError, "payload.digest"),
    "parent wrong": (delta_payload, set_meta("parent_digest", "0" * 32), CorruptError, "payload.digest"),
    "block digest wrong": (delta_payload, set_block("digest", "0" * 32), CorruptError, "payload.digest"),
    "anchor digest wrong": (anchor_payload, set_meta("digest", "0" * 32), CorruptError, "payload.digest"),
    # the index
    "index not zlib": (delta_payload, raw_index(lambda t: t), CorruptError, "index.zlib"),
    "index cut": (delta_payload, raw_index(lambda t: zlib.compress(t)[:-1]), CorruptError, "index.zlib"),
    "index empty": (delta_payload, raw_index(lambda t: b""), CorruptError, "index.zlib"),
    "index trailing": (delta_payload, raw_index(lambda t: zlib.compress(t) + b"x"), CorruptError, "index.trailing"),
    "index two streams": (delta_payload, raw_index(lambda t: zlib.compress(t) * 2), CorruptError, "index.trailing"),
    "index not JSON": (delta_payload, raw_index(lambda t: zlib.compress(t[:-1])), CorruptError, "index.json"),
    "index a list": (delta_payload, raw_index(lambda t: zlib.compress(b"[]")), CorruptError, "index.json"),
    "index twice": (
        delta_payload,
        raw_index(lambda t: zlib.compress(b'{"a":1,"a":1}')),
        CorruptError,
        "index.duplicate",
    ),
    "no blocks": (delta_payload, lambda p: p.index.pop("blocks"), CorruptError, "index.field"),
    "no layout": (delta_payload, lambda p: p.index.pop("layout"), CorruptError, "index.field"),
    "blocks an object": (delta_payload, set_index("blocks", {}), CorruptError, "index.field"),
    "index must_understand": (delta_payload, set_index("must_understand", ["x"]), FormatError, "index.must_understand"),
    "layout a text": (delta_payload, set_index("layout", "x"), FormatError, "layout.type"),
    "layout entry": (delta_payload, layout_entry(0, ["a", "BF16"]), FormatError, "layout.entry"),
    "layout type unknown": (delta_payload, layout_entry(0, ["a", "F4", [80]]), FormatError, "dtype"),
    "layout order": (delta_payload, layout_entry(0, ["z", "BF16", [80]]), FormatError, "layout.order"),
    "layout huge": (delta_payload, layout_entry(0, ["a", "BF16", [1 << 40, 1 << 40]]), FormatError, "layout.elements"),
    # block records
    "block a list": (delta_payload, lambda p: p.index["blocks"].__setitem__(0, []), CorruptError, "block.field"),
    **{
        f"block without {n}": (delta_payload, drop_block_field(n), CorruptError, "block.field")
        for n in ("codec", "runs", "changed", "digest", "sha256")
    },
    "codec unknown": (delta_payload, set_block("codec", "exp/2"), FormatError, "block.codec"),
    "codec a number": (delta_payload, set_block("codec", 1), CorruptError, "block.field"),
    "sha256 short": (delta_payload, set_block("sha256", "00"), CorruptError, "block.field"),
    "block digest a number": (delta_payload, set_block("digest", 0), CorruptError, "block.field"),
    "block digest short": (delta_payload, set_block("digest", "00"), FormatError, "digest.hex"),
    "block must_understand": (delta_payload, set_block("must_understand", ["x"]), FormatError, "block.must_understand"),
    "changed negative": (delta_payload, set_block("changed", -1), CorruptError, "block.changed"),
    "changed too many": (delta_payload, set_block("changed", 101), CorruptError, "block.changed"),
    "changed a bool": (delta_payload, set_block("changed", True), CorruptError, "block.changed"),
    "runs outside": (delta_payload, set_block("runs", [[0, 0, 81]]), CorruptError, "runs.range"),
    "runs of no tensor": (delta_payload, set_block("runs", [[4, 0, 1]]), CorruptError, "runs.tensor"),
    "runs negative": (delta_payload, set_block("runs", [[0, -1, 5]]), CorruptError, "runs.entry"),
    "runs empty": (delta_payload, set_block("runs", [[0, 0, 80], [1, 0, 0]]), CorruptError, "runs.empty"),
    "runs mix types": (delta_payload, set_block("runs", [[0, 0, 80], [2, 0, 1]]), CorruptError, "runs.dtype"),
    "runs overlap inside": (delta_payload, set_block("runs", [[0, 0, 50], [0, 49, 9]]), CorruptError, "runs.overlap"),
    "runs overlap between": (delta_payload, set_block("runs", [[0, 75, 5]], 1), CorruptError, "runs.overlap"),
    "runs equal": (delta_payload, set_block("runs", [[1, 0, 20]], 1), CorruptError, "runs.overlap"),
    # tensors of the file
    "block missing": (delta_payload, drop_tensor("deltasync.block.00000001"), CorruptError, "payload.tensors"),
    "index missing": (delta_payload, drop_tensor("deltasync.index"), CorruptError, "payload.tensors"),
    "tensor too many": (delta_payload, extra_tensor, CorruptError, "payload.tensors"),
    "block renamed": (delta_payload, rename(BLOCK0, "deltasync.block.0"), CorruptError, "payload.tensors"),
    "block of another type": (delta_payload, retype(BLOCK0, "I8", (11,)), CorruptError, "payload.tensors"),
    "blocks swapped": (delta_payload, swap_last, CorruptError, "payload.tensors"),
    "record too many": (
        delta_payload,
        lambda p: p.index["blocks"].append(
            p.index["blocks"][1] | {"runs": [[1, 30, 2]], "digest": "0" * 32, "changed": 0}
        ),
        CorruptError,
        "payload.tensors",
    ),
    # anchors
    "anchor does not cover": (anchor_payload, drop_anchor_block, CorruptError, "payload.cover"),
    "shard with parent": (shard_payload, set_meta("parent_digest", "0" * 32), CorruptError, "payload.metadata"),
    "shard digest wrong": (shard_payload, set_meta("digest", "0" * 32), CorruptError, "payload.digest"),
    "shard of another codec": (shard_payload, set_block("codec", "exp/1"), CorruptError, "payload.anchor"),
    "shard called an anchor": (shard_payload, set_meta("kind", "anchor"), CorruptError, "payload.cover"),
    "anchor with a hole": (anchor_payload, shrink_anchor_block, CorruptError, "payload.cover"),
    "anchor of another codec": (anchor_payload, set_block("codec", "exp/1"), CorruptError, "payload.anchor"),
    # coo/1
    "coo mixed": (coo_payload, set_block("codec", "exp/1"), CorruptError, "payload.mixed"),
    "coo half a tensor": (coo_payload, set_block("runs", [[0, 0, 79]]), CorruptError, "block.coo"),
    "coo two runs": (coo_payload, set_block("runs", [[0, 0, 80], [1, 0, 40]]), CorruptError, "block.coo"),
    "coo values typed": (coo_payload, retype("a.values", "F16", (3,)), CorruptError, "payload.tensors"),
    "coo indices typed": (coo_payload, retype("c.indices", "U32", (1,)), CorruptError, "payload.tensors"),
    "coo shape": (coo_payload, retype("a.values", "BF16", (3, 1)), CorruptError, "payload.tensors"),
    "coo values missing": (coo_payload, drop_tensor("a.values"), CorruptError, "payload.tensors"),
}


@pytest.mark.parametrize(("make", "change", "error", "rule"), BAD.values(), ids=BAD.keys())
def test_refused(
    make: Callable[[], bytes], change: Callable[[Pieces], object], error: type[DeltasyncError], rule: str
) -> None:
    with pytest.raises(DeltasyncError) as caught:
        Payload.parse(mutated(make(), change))
    assert (type(caught.value), caught.value.rule) == (error, rule)


@pytest.mark.parametrize("make", PAYLOADS.values(), ids=PAYLOADS.keys())
def test_taken_apart_and_built_again_it_is_accepted(make: Callable[[], bytes]) -> None:
    """Otherwise the table above would prove nothing."""
    Payload.parse(mutated(make(), lambda p: None))


IGNORED: dict[str, Callable[[Pieces], object]] = {
    "metadata": set_meta("new", "field"),
    "index": set_index("new", [1]),
    "block": set_block("new", {"a": 1}),
    "understood": set_block("must_understand", ["codec"]),
}


@pytest.mark.parametrize("change", IGNORED.values(), ids=IGNORED.keys())
def test_unknown_fields_are_ignored(change: Callable[[Pieces], object]) -> None:
    assert len(Payload.parse(mutated(delta_payload(), change)).block_infos) == 2


@pytest.mark.parametrize("make", PAYLOADS.values(), ids=PAYLOADS.keys())
def test_damage_in_a_block_is_found_and_located(make: Callable[[], bytes]) -> None:
    data = make()
    for i, info in enumerate(Payload.parse(data).block_infos):
        for begin, _ in info.ranges:
            damaged = bytearray(data)
            damaged[begin] ^= 1
            payload = Payload.parse(damaged)
            with pytest.raises(CorruptError) as caught:
                payload.block(i)
            assert caught.value.rule == "block.sha256"
            assert all(payload.block(k) for k in range(len(payload.block_infos)) if k != i)


def test_a_decompression_bomb_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "INDEX_BYTES_MAX", 10_000)
    bomb = mutated(delta_payload(), raw_index(lambda t: zlib.compress(t + b" " * 10_000)))
    with pytest.raises(CorruptError) as caught:
        Payload.parse(bomb)
    assert caught.value.rule == "index.size"


def test_runs_of_all_blocks_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RUNS_MAX", 2)
    with pytest.raises(CorruptError) as caught:
        Payload.parse(delta_payload())
    assert caught.value.rule == "runs.pieces"


def test_a_checkpoint_is_not_a_payload() -> None:
    with pytest.raises(FormatError, match="a checkpoint, not a delta") as caught:
        Payload.parse(safetensors_bytes({"x": state()["packed"]}).replace(b'{"format":"pt"}', b'{"formal":"pt"}'))
    assert caught.value.rule == "payload.format"


def test_the_writer_refuses_what_the_reader_refuses() -> None:
    blocks = [block("exp/1", [[0, 0, 9]], 1, (1, 1), b"x"), block("exp/1", [[0, 8, 2]], 1, (0, 0), b"y")]
    header = PayloadHeader("delta", LAYOUT, StateDigest.ZERO, StateDigest(1, 1))
    with pytest.raises(CorruptError) as caught:
        write_payload(header, blocks)
    assert caught.value.rule == "runs.overlap"
    with pytest.raises(CorruptError) as caught:
        write_payload(PayloadHeader("delta", LAYOUT, StateDigest.ZERO, StateDigest(2, 1)), blocks[:1])
    assert caught.value.rule == "payload.digest"


@pytest.mark.parametrize("make", PAYLOADS.values(), ids=PAYLOADS.keys())
def test_every_truncation_is_refused(make: Callable[[], bytes]) -> None:
    data = make()
    for size in range(len(data)):
        with pytest.raises(DeltasyncError):
            Payload.parse(data[:size])


@given(
    st.sampled_from(sorted(PAYLOADS)),
    st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 255)), min_size=1, max_size=3),
)
def test_any_damage_is_refused_or_harmless(name: str, flips: list[tuple[int, int]]) -> None:
    original = PAYLOADS[name]()
    data = bytearray(original)
    for at, mask in flips:
        data[at % len(data)] ^= mask
    try:
        payload = Payload.parse(bytes(data))
        blocks = list(payload.blocks())
    except DeltasyncError:
        return
    expected = Payload.parse(original)
    assert payload.header == expected.header
    assert all(same(a, b) for a, b in zip(blocks, expected.blocks(), strict=True))


def test_payloads_are_closed_before_they_have_too_many_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RUNS_MAX", 10)

    def block(runs: int) -> Block:
        return Block("exp/1", np.ones((runs, 3), np.int64), 1, StateDigest.ZERO, bytes(runs))

    found = [[len(b.runs) for b in group] for group in grouped(map(block, [4, 4, 4, 10, 1, 1, 11, 2]))]
    assert found == [[4, 4], [4], [10], [1, 1], [11], [2]]
    assert [len(group) for group in grouped(map(block, [1, 1, 1, 1, 1]), enough=2)] == [2, 2, 1]
    assert [len(group) for group in grouped(map(block, [1, 2, 1, 1]), enough=3)] == [2, 2]
    elements = (SimpleNamespace(runs=np.full((1, 3), count)) for count in (1, 2, 1, 1))
    assert [len(group) for group in grouped(elements, enough=3)] == [2, 2]
    assert list(grouped([])) == []
