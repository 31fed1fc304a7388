import hashlib
import json
from typing import Any

import pytest

from deltasync.errors import CorruptError, DeltasyncError, FormatError
from deltasync.format import limits
from deltasync.format.sealed import (
    FORMAT,
    FeedRecord,
    FloorRecord,
    Heartbeat,
    LeaseRecord,
    Pin,
    is_count,
    is_decimal,
    is_sha256,
    parse_object,
    require_fields,
    sealed,
)

CASES = [
    (b"", "t.json"),
    (b"[]", "t.json"),
    (b"{", "t.json"),
    (b'{"a": 1} x', "t.json"),
    (b'{"a": NaN}', "t.json"),
    (b'{"a": -Infinity}', "t.json"),
    (b'{"a": 1.0}', "t.json"),
    (b'{"a": 1e400}', "t.json"),
    (b'{"a": ' + b"9" * 5000 + b"}", "t.json"),
    (b'{"a": "\xff"}', "t.json"),
    (b'{"a": "\\ud800"}', "t.json"),
    (b'{"\\uDC00": 1}', "t.json"),
    (b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "t.json"),
    (b'{"a": ' + b'{"a":' * 200_000 + b"1" + b"}" * 200_000 + b"}", "t.json"),
    (b'{"a": 1, "b": 2, "a": 1}', "t.duplicate"),
    (b'{"x": {"a": 1, "\\u0061": 1}}', "t.duplicate"),
]


@pytest.mark.parametrize(("data", "rule"), CASES, ids=[f"{d[:24]!r}" for d, _ in CASES])
def test_text_that_is_refused(data: bytes, rule: str) -> None:
    with pytest.raises(CorruptError) as caught:
        parse_object(data, what="it", scope="t")
    assert caught.value.rule == rule


def test_the_number_of_values_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "JSON_VALUES_MAX", 5)
    assert parse_object(b'{"a": [0, 1, 2]}', what="it", scope="t") == {"a": [0, 1, 2]}
    with pytest.raises(CorruptError) as caught:
        parse_object(b'{"a": [0, 1, 2, 3, 4]}', what="it", scope="t")
    assert caught.value.rule == "t.json"


@pytest.mark.parametrize("depth", [70, 500, *range(900, 1000, 3), 5000])
@pytest.mark.parametrize(("begin", "end"), [(b"[", b"]"), (b'{"a":', b"}")], ids=["lists", "objects"])
def test_nesting_that_the_parser_just_manages(depth: int, begin: bytes, end: bytes) -> None:
    """The seal is checked by encoding the values again, which needs more frames than parsing them."""
    nested = begin * depth + b"1" + end * depth
    unsealed = b'{"format":"deltasync/1","nested":' + nested + b',"version":1}'
    seal = hashlib.sha256(unsealed).hexdigest().encode()
    data = unsealed.replace(b'"version"', b'"sha256":"' + seal + b'","version"')
    with pytest.raises(CorruptError) as caught:
        FloorRecord.from_bytes(data)
    assert caught.value.rule == "floor.json"


def test_32_levels_are_read() -> None:
    nested: list[object] = []
    for _ in range(limits.JSON_DEPTH_MAX - 2):
        nested = [nested]
    assert FloorRecord.from_bytes(sealed({"format": FORMAT, "version": 7, "nested": nested})).version == 7
    assert limits.JSON_DEPTH_MAX >= 32


def test_escapes_that_are_whole_pairs_are_fine() -> None:
    assert parse_object(b'{"a": "\\ud83d\\ude00"}', what="it", scope="t") == {"a": "\U0001f600"}


def test_must_understand() -> None:
    require_fields({"new": 1, "old": 2}, ["old"], what="it", scope="t")
    require_fields({"must_understand": ["old"], "old": 2}, ["old"], what="it", scope="t")
    with pytest.raises(FormatError) as caught:
        require_fields({"must_understand": ["old", "new"]}, ["old"], what="it", scope="t")
    assert caught.value.rule == "t.must_understand"
    assert "new" in caught.value.message
    for bad in ("new", [1], {"new": 1}):
        with pytest.raises(CorruptError):
            require_fields({"must_understand": bad}, [], what="it", scope="t")


def test_missing_fields() -> None:
    with pytest.raises(CorruptError, match="it lacks b, d") as caught:
        require_fields({"a": 1, "c": 2}, ["a", "b", "c", "d"], what="it", scope="t")
    assert caught.value.rule == "t.field"


@pytest.mark.parametrize(
    ("value", "expected"), [(0, True), (9, True), (10, False), (-1, False), (True, False), (1.0, False), ("1", False)]
)
def test_is_count(value: object, expected: bool) -> None:
    assert is_count(value, most=9) is expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0", True),
        ("10", True),
        ("01", False),
        ("", False),
        ("-1", False),
        ("+1", False),
        ("1 ", False),
        ("\u0661", False),
        (1, False),
    ],
)
def test_is_decimal(value: object, expected: bool) -> None:
    assert is_decimal(value) is expected


def test_is_sha256() -> None:
    assert is_sha256("0a" * 32)
    assert not any(is_sha256(v) for v in ("0A" * 32, "0a" * 31, "0a" * 33, "0a" * 32 + "\n", 5, None))


RECORDS = [
    FeedRecord("f", 1),
    FloorRecord(7),
    LeaseRecord("w", 9),
    Heartbeat("r", 4, 5, {"engine": "vllm"}),
    Heartbeat("r", None, 5),
    Pin("best", 7, "ab" * 16, "", 5),
]


@pytest.mark.parametrize("record", RECORDS, ids=repr)
def test_records_round_trip(record: Any) -> None:
    assert type(record).from_bytes(record.to_bytes()) == record


@pytest.mark.parametrize(
    ("changes", "error", "rule"),
    [
        ({"format": "deltasync/9"}, FormatError, "heartbeat.format"),
        ({"must_understand": ["news"]}, FormatError, "heartbeat.must_understand"),
        ({"replica": ""}, CorruptError, "heartbeat.field"),
        ({"version": -1}, CorruptError, "heartbeat.field"),
        ({"unix_s": True}, CorruptError, "heartbeat.field"),
        ({"facts": {"a": 1}}, CorruptError, "heartbeat.field"),
        ({"facts": {"a": "x" * 70_000}}, CorruptError, "heartbeat.size"),
    ],
)
def test_records_that_are_refused(changes: dict[str, Any], error: type[DeltasyncError], rule: str) -> None:
    fields = json.loads(Heartbeat("r", 4, 5).to_bytes()) | changes
    del fields["sha256"]
    with pytest.raises(DeltasyncError) as caught:
        Heartbeat.from_bytes(sealed(fields))
    assert (type(caught.value), caught.value.rule) == (error, rule)


@pytest.mark.parametrize("record", RECORDS, ids=repr)
def test_every_field_of_a_record_is_required(record: Any) -> None:
    fields = json.loads(record.to_bytes())
    for name in fields:
        with pytest.raises(DeltasyncError):
            type(record).from_bytes(json.dumps({k: v for k, v in fields.items() if k != name}).encode())


@pytest.mark.parametrize("record", RECORDS, ids=repr)
def test_no_altered_byte_of_a_record_passes(record: Any) -> None:
    data = record.to_bytes()
    for place in range(len(data)):
        with pytest.raises(DeltasyncError):
            type(record).from_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
