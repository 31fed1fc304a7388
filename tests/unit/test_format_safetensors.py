import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from support.helpers import safetensors_bytes, state

from deltasync.errors import CorruptError, DeltasyncError, FormatError
from deltasync.format import limits
from deltasync.format.layout import DTYPES, TensorSpec
from deltasync.format.safetensors import header_bytes, parse_header, read_header


def test_the_library_reads_what_we_write() -> None:
    tensors = state()
    found = dict(safetensors.deserialize(safetensors_bytes(tensors)))
    assert found.keys() == tensors.keys()
    for name, array in tensors.items():
        assert bytes(found[name]["data"]) == array.tobytes()
        assert tuple(found[name]["shape"]) == array.shape


def test_we_read_what_the_library_writes() -> None:
    tensors = {n: a for n, a in state().items() if a.dtype.name in ("float32", "uint8", "int64", "float16")}
    data = safetensors.numpy.save(tensors, metadata={"hello": "wörld"})
    header = parse_header(data)
    assert header.metadata == {"hello": "wörld"}
    assert {e.name for e in header.entries} == tensors.keys()
    for entry in header.entries:
        assert data[entry.begin : entry.end] == tensors[entry.name].tobytes()
        assert entry.shape == tensors[entry.name].shape


specs = st.lists(
    st.builds(
        TensorSpec,
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(lambda n: n != "__metadata__"),
        st.sampled_from([d for d in DTYPES.values() if d.name != "F8_E8M0"]),
        st.lists(st.integers(0, 4), max_size=3).map(tuple),
    ),
    max_size=6,
    unique_by=lambda s: s.name,
)


@given(
    specs,
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"])), st.text(st.characters(exclude_categories=["Cs"]))
    ),
)
def test_round_trip(tensors: list[TensorSpec], metadata: dict[str, str]) -> None:
    head = header_bytes(tensors, metadata)
    assert len(head) % 8 == 0
    data = head + bytes(sum(t.nbytes for t in tensors))
    header = parse_header(data)
    assert [e.spec for e in header.entries if e.spec.nbytes] == [t for t in tensors if t.nbytes]
    assert {e.name: e.spec for e in header.entries} == {t.name: t for t in tensors}
    assert header.metadata == metadata
    assert len(safetensors.deserialize(data)) == len(tensors)


def test_the_header_is_deterministic() -> None:
    one = TensorSpec("x", DTYPES["U8"], (3,))
    assert header_bytes([one], {"b": "2", "a": "1"}) == header_bytes([one], {"a": "1", "b": "2"})


def file_of(fields: Any, data: bytes = b"") -> bytes:
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return len(text).to_bytes(8, "little") + text + data


def one(**changes: Any) -> dict[str, Any]:
    return {"x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]} | changes}


def two(begin: int, end: int) -> dict[str, Any]:
    return one() | {"y": {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}}


BAD: dict[str, tuple[bytes, str]] = {
    "no length": (b"1234567", "safetensors.truncated"),
    "empty": (b"", "safetensors.truncated"),
    "huge header": ((100_000_001).to_bytes(8, "little") + b"{}", "safetensors.header_size"),
    "largest length": (b"\xff" * 8 + b"{}", "safetensors.header_size"),
    "header past the end": ((3).to_bytes(8, "little") + b"{}", "safetensors.truncated"),
    "no header": (bytes(8), "safetensors.json"),
    "space first": (file_of(b" {}"), "safetensors.json"),
    "not an object": (file_of([]), "safetensors.json"),
    "not JSON": (file_of(b"{"), "safetensors.json"),
    "not UTF-8": (file_of(b'{"\xff": 1}'), "safetensors.json"),
    "lone surrogate": (file_of(b'{"\\ud800": {}}'), "safetensors.json"),
    "deep": (file_of(b'{"x":' + b"[" * 99_999), "safetensors.json"),
    "duplicate": (file_of(b'{"x": 1, "x": 1}'), "safetensors.duplicate"),
    "metadata of numbers": (file_of({"__metadata__": {"a": 1}}), "safetensors.metadata"),
    "metadata list": (file_of({"__metadata__": []}), "safetensors.metadata"),
    "entry is a list": (file_of({"x": []}), "safetensors.entry"),
    "no shape": (file_of({"x": {"dtype": "U8", "data_offsets": [0, 4]}}, bytes(4)), "safetensors.entry"),
    "three offsets": (file_of(one(data_offsets=[0, 2, 4]), bytes(4)), "safetensors.entry"),
    "dtype is a number": (file_of(one(dtype=8), bytes(4)), "safetensors.entry"),
    "negative dimension": (file_of(one(shape=[-4]), bytes(4)), "safetensors.shape"),
    "bool dimension": (file_of(one(shape=[4, True]), bytes(4)), "safetensors.shape"),
    "huge dimension": (file_of(one(shape=[10**30]), bytes(4)), "safetensors.shape"),
    "float dimension": (file_of(one(shape=[4.0]), bytes(4)), "safetensors.json"),
    "many dimensions": (file_of(one(shape=[1] * 999), bytes(4)), "safetensors.shape"),
    "offsets back": (file_of(one(data_offsets=[4, 0]), bytes(4)), "safetensors.offsets"),
    "offset negative": (file_of(one(data_offsets=[-4, 0]), bytes(4)), "safetensors.offsets"),
    "offset bool": (file_of(one(data_offsets=[False, 4]), bytes(4)), "safetensors.offsets"),
    "offset huge": (file_of(one(data_offsets=[0, 2**64]), bytes(4)), "safetensors.offsets"),
    "hole at the start": (file_of(one(data_offsets=[1, 5]), bytes(5)), "safetensors.offsets"),
    "hole": (file_of(two(5, 8), bytes(8)), "safetensors.offsets"),
    "overlap": (file_of(two(3, 8), bytes(8)), "safetensors.offsets"),
    "size": (file_of(one(shape=[5]), bytes(4)), "safetensors.size"),
    "size of a scalar": (file_of(one(shape=[]), bytes(4)), "safetensors.size"),
    "data cut": (file_of(one(), bytes(3)), "safetensors.truncated"),
    "data too long": (file_of(one(), bytes(5)), "safetensors.trailing"),
    "data without tensors": (file_of({}, bytes(1)), "safetensors.trailing"),
}


@pytest.mark.parametrize(("data", "rule"), BAD.values(), ids=BAD.keys())
def test_refused(data: bytes, rule: str) -> None:
    with pytest.raises(CorruptError) as caught:
        parse_header(data)
    assert caught.value.rule == rule


def test_an_unknown_type_names_the_tensor() -> None:
    with pytest.raises(FormatError, match=r"'x'.*F4_WEIRD") as caught:
        parse_header(file_of(one(dtype="F4_WEIRD"), bytes(4)))
    assert caught.value.rule == "dtype"


def test_extra_fields_of_an_entry_are_ignored_as_the_library_does() -> None:
    assert parse_header(file_of(one(more=1), bytes(4))).entries[0].name == "x"


def test_a_short_read_is_truncation() -> None:
    data = file_of(one(), bytes(4))
    with pytest.raises(CorruptError) as caught:
        read_header(lambda offset, length: data[offset : offset + length - 1], len(data))
    assert caught.value.rule == "safetensors.truncated"


def test_the_header_is_not_read_if_it_is_too_long() -> None:
    asked: list[int] = []

    def read(offset: int, length: int) -> bytes:
        asked.append(length)
        return b"\xff" * length

    with pytest.raises(CorruptError):
        read_header(read, 1 << 60)
    assert asked == [8]
    assert limits.SAFETENSORS_HEADER_BYTES_MAX == 100_000_000


mutations: st.SearchStrategy[Callable[[bytearray], None]] = st.builds(
    lambda at, value: lambda data: data.__setitem__(at % len(data), value), st.integers(0, 10_000), st.integers(0, 255)
)


@given(st.lists(mutations, min_size=1, max_size=4), st.integers(0, 400))
def test_damage_gives_our_errors_only(changes: list[Callable[[bytearray], None]], cut: int) -> None:
    data = bytearray(safetensors_bytes({"x": np.arange(5, dtype=np.float32), "y": np.zeros((2, 2), np.uint8)}))
    for change in changes:
        change(data)
    try:
        header = parse_header(bytes(data[: len(data) - cut]))
    except DeltasyncError:
        return
    assert all(0 <= e.begin <= e.end <= len(data) for e in header.entries)
