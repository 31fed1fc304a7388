import json
from typing import Any

import pytest

from deltasync.errors import CorruptError, DeltasyncError, FormatError
from deltasync.format.sealed import FeedRecord, FloorRecord, Heartbeat, LeaseRecord, Pin, sealed

RECORDS = [
    FeedRecord("f", 1),
    FloorRecord(7),
    LeaseRecord("w", 9),
    Heartbeat("r", 4, 5, {"engine": "vllm"}),
    Heartbeat("r", None, 5),
    Pin("best", 7, "ab" * 16, "", 5),
]


@pytest.mark.parametrize("record", RECORDS, ids=repr)
def test_round_trip(record: Any) -> None:
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
def test_refused(changes: dict[str, Any], error: type[DeltasyncError], rule: str) -> None:
    fields = json.loads(Heartbeat("r", 4, 5).to_bytes()) | changes
    del fields["sha256"]
    with pytest.raises(DeltasyncError) as caught:
        Heartbeat.from_bytes(sealed(fields))
    assert (type(caught.value), caught.value.rule) == (error, rule)


@pytest.mark.parametrize("record", RECORDS, ids=repr)
def test_every_field_is_required(record: Any) -> None:
    fields = json.loads(record.to_bytes())
    for name in fields:
        with pytest.raises(DeltasyncError):
            type(record).from_bytes(json.dumps({k: v for k, v in fields.items() if k != name}).encode())


@pytest.mark.parametrize("record", RECORDS, ids=repr)
def test_no_altered_byte_passes(record: Any) -> None:
    data = record.to_bytes()
    for place in range(len(data)):
        with pytest.raises(DeltasyncError):
            type(record).from_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
