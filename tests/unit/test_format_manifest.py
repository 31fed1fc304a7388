import dataclasses
import json
from typing import Any

import pytest

from deltasync.errors import CorruptError, DeltasyncError, FormatError
from deltasync.format import limits
from deltasync.format.digest import StateDigest
from deltasync.format.manifest import BaseRef, Manifest, PayloadRef, Timeline
from deltasync.format.sealed import sealed

SHA = "0123456789abcdef" * 4
DELTA = Manifest(
    kind="delta",
    version=7,
    parent=6,
    step=120,
    layout_sha256="ab" * 32,
    parent_digest=StateDigest(1, 2),
    digest=StateDigest(3, 4),
    elements=1000,
    changed=9,
    payloads=(PayloadRef(SHA, 12345),),
    writer="w-1",
    created_unix_s=1_700_000_000,
    extra={"lr": "1e-6", "näme": "ü"},
)
WHOLE: dict[str, Any] = {"changed": None}
NO_PARENT: dict[str, Any] = {"parent": None, "parent_digest": None, **WHOLE}
GOOD = {
    "delta": DELTA,
    "delta of nothing": dataclasses.replace(DELTA, digest=StateDigest(1, 2), payloads=()),
    "skip": dataclasses.replace(DELTA, kind="skip", parent=0),
    "anchor": dataclasses.replace(DELTA, kind="anchor", **NO_PARENT, step=None),
    "anchor with parent": dataclasses.replace(DELTA, kind="anchor", **WHOLE),
    "with a timeline": dataclasses.replace(DELTA, timeline=Timeline(1_700_000_000_123, 4, 0, 50, 600)),
    "with files": dataclasses.replace(DELTA, files=PayloadRef("cd" * 32, 7)),
    "base": dataclasses.replace(DELTA, kind="base", **NO_PARENT, payloads=(), base=BaseRef("org/model", "main")),
    "base without revision": dataclasses.replace(DELTA, kind="base", **NO_PARENT, payloads=(), base=BaseRef("m")),
}


@pytest.mark.parametrize("manifest", GOOD.values(), ids=GOOD.keys())
def test_round_trip(manifest: Manifest) -> None:
    data = manifest.to_bytes()
    assert Manifest.from_bytes(data) == manifest
    assert Manifest.from_bytes(data).to_bytes() == data


def sealed_again(fields: dict[str, Any]) -> bytes:
    return sealed({name: value for name, value in fields.items() if name != "sha256"})


@pytest.mark.parametrize("place", range(0, len(DELTA.to_bytes()), 3))
def test_no_altered_byte_passes(place: int) -> None:
    data = DELTA.to_bytes()
    with pytest.raises(DeltasyncError):
        Manifest.from_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])


@pytest.mark.parametrize("spelling", [b" ", b"\n"])
def test_only_one_spelling(spelling: bytes) -> None:
    with pytest.raises(CorruptError) as caught:
        Manifest.from_bytes(DELTA.to_bytes() + spelling)
    assert caught.value.rule == "manifest.sha256"


def test_the_bytes_are_canonical() -> None:
    data = DELTA.to_bytes()
    assert data == json.dumps(json.loads(data), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    assert dataclasses.replace(DELTA, extra=dict(reversed(DELTA.extra.items()))).to_bytes() == data


def test_unknown_fields_are_ignored_unless_they_must_be_understood() -> None:
    fields = json.loads(DELTA.to_bytes())
    assert Manifest.from_bytes(sealed_again(fields | {"new": 1, "must_understand": ["step"]})) == DELTA
    with pytest.raises(FormatError) as caught:
        Manifest.from_bytes(sealed_again(fields | {"new": 1, "must_understand": ["new"]}))
    assert caught.value.rule == "manifest.must_understand"


def test_a_manifest_without_a_timeline_does_not_name_it() -> None:
    """So that its bytes are those of earlier releases."""
    assert b"timeline" not in DELTA.to_bytes()
    fields = json.loads(DELTA.to_bytes())
    assert Manifest.from_bytes(sealed_again(fields | {"timeline": None})) == DELTA


STEPS = ("captured_unix_ms", "held_ms", "queued_ms", "encode_ms", "put_ms")
BAD: dict[str, tuple[dict[str, Any], type[DeltasyncError], str]] = {
    "format": ({"format": "deltasync/9"}, FormatError, "manifest.format"),
    "kind": ({"kind": "patch"}, FormatError, "manifest.kind"),
    "kind a number": ({"kind": 1}, CorruptError, "manifest.field"),
    "version negative": ({"version": -1}, CorruptError, "manifest.field"),
    "version a bool": ({"version": True}, CorruptError, "manifest.field"),
    "version a text": ({"version": "7"}, CorruptError, "manifest.field"),
    "version huge": ({"version": 2**63}, CorruptError, "manifest.field"),
    "step negative": ({"step": -1}, CorruptError, "manifest.field"),
    "parent not the one before": ({"parent": 5}, CorruptError, "manifest.parent"),
    "parent itself": ({"parent": 7}, CorruptError, "manifest.parent"),
    "parent later": ({"parent": 8}, CorruptError, "manifest.parent"),
    "no parent": (NO_PARENT | {"changed": 9}, CorruptError, "manifest.parent"),
    "parent without digest": ({"parent_digest": None}, CorruptError, "manifest.parent"),
    "skip of one": ({"kind": "skip"}, CorruptError, "manifest.parent"),
    "anchor with a far parent": ({"kind": "anchor", "parent": 3}, CorruptError, "manifest.parent"),
    "changed more than all": ({"changed": 1001}, CorruptError, "manifest.changed"),
    "delta without changed": ({"changed": None}, CorruptError, "manifest.changed"),
    "anchor with changed": ({"kind": "anchor"}, CorruptError, "manifest.changed"),
    "elements a text": ({"elements": "9"}, CorruptError, "manifest.field"),
    "files a list": ({"files": []}, CorruptError, "manifest.field"),
    "files a path": ({"files": {"sha256": "../x", "bytes": 1}}, CorruptError, "manifest.field"),
    "digest": ({"digest": "00"}, FormatError, "digest.hex"),
    "digest null": ({"digest": None}, FormatError, "digest.hex"),
    "layout": ({"layout_sha256": "zz"}, CorruptError, "manifest.field"),
    "payloads null": ({"payloads": None}, CorruptError, "manifest.field"),
    "payloads of texts": ({"payloads": [SHA]}, CorruptError, "manifest.field"),
    "payload without bytes": ({"payloads": [{"sha256": SHA}]}, CorruptError, "manifest.field"),
    "payload bytes negative": ({"payloads": [{"sha256": SHA, "bytes": -1}]}, CorruptError, "manifest.field"),
    "payload path": ({"payloads": [{"sha256": "../x", "bytes": 1}]}, CorruptError, "manifest.field"),
    "payload twice": ({"payloads": [{"sha256": SHA, "bytes": 1}] * 2}, CorruptError, "manifest.payloads"),
    "no payload": ({"payloads": []}, CorruptError, "manifest.payloads"),
    "anchor without payload": ({"kind": "anchor", **NO_PARENT, "payloads": []}, CorruptError, "manifest.payloads"),
    "base without base": ({"kind": "base", **NO_PARENT, "payloads": []}, CorruptError, "manifest.base"),
    "base in a delta": ({"base": {"checkpoint": "m", "revision": None}}, CorruptError, "manifest.base"),
    "base empty": ({"base": {"checkpoint": "", "revision": None}}, CorruptError, "manifest.field"),
    "base a text": ({"base": "m"}, CorruptError, "manifest.field"),
    "base with payloads": (
        {"kind": "base", **NO_PARENT, "base": {"checkpoint": "m", "revision": None}},
        CorruptError,
        "manifest.payloads",
    ),
    "writer empty": ({"writer": ""}, CorruptError, "manifest.field"),
    "created a text": ({"created_unix_s": "now"}, CorruptError, "manifest.field"),
    "created a fraction": ({"created_unix_s": 1.5}, CorruptError, "manifest.json"),
    "timeline a list": ({"timeline": []}, CorruptError, "manifest.field"),
    "timeline that lacks a step": ({"timeline": {"captured_unix_ms": 1}}, CorruptError, "manifest.field"),
    "timeline of texts": ({"timeline": dict.fromkeys(STEPS, "1")}, CorruptError, "manifest.field"),
    "timeline negative": ({"timeline": dict.fromkeys(STEPS, -1)}, CorruptError, "manifest.field"),
    "extra a list": ({"extra": []}, CorruptError, "manifest.field"),
    "extra of numbers": ({"extra": {"a": 1}}, CorruptError, "manifest.field"),
}


@pytest.mark.parametrize(("changes", "error", "rule"), BAD.values(), ids=BAD.keys())
def test_refused(changes: dict[str, Any], error: type[DeltasyncError], rule: str) -> None:
    with pytest.raises(DeltasyncError) as caught:
        Manifest.from_bytes(json.dumps(json.loads(DELTA.to_bytes()) | changes).encode())
    assert (type(caught.value), caught.value.rule) == (error, rule)


@pytest.mark.parametrize("name", sorted(json.loads(DELTA.to_bytes())))
def test_every_field_is_required(name: str) -> None:
    fields = json.loads(DELTA.to_bytes())
    del fields[name]
    with pytest.raises(DeltasyncError) as caught:
        Manifest.from_bytes(json.dumps(fields).encode())
    rules = {"format": "manifest.format", "sha256": "manifest.sha256"}
    assert caught.value.rule == rules.get(name, "manifest.field")


def test_size_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MANIFEST_BYTES_MAX", 100)
    for attempt in (DELTA.to_bytes, lambda: Manifest.from_bytes(b"{" + b" " * 100 + b"}")):
        with pytest.raises(CorruptError) as caught:
            attempt()
        assert caught.value.rule == "manifest.size"


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"parent": 5}, "manifest.parent"),
        ({"step": -1}, "manifest.field"),
        ({"created_unix_s": 1 << 63}, "manifest.field"),
        ({"elements": 1e6}, "manifest.json"),
        ({"layout_sha256": "00"}, "manifest.field"),
        ({"timeline": Timeline(-1, 0, 0, 0, 0)}, "manifest.field"),
        ({"writer": ""}, "manifest.field"),
        ({"extra": {"a": 1}}, "manifest.field"),
        ({"extra": {"a": "b" * limits.MANIFEST_BYTES_MAX}}, "manifest.size"),
        ({"payloads": 2 * DELTA.payloads}, "manifest.payloads"),
    ],
)
def test_the_writer_refuses_what_the_reader_refuses(changes: dict[str, Any], rule: str) -> None:
    with pytest.raises(CorruptError) as caught:
        dataclasses.replace(DELTA, **changes).to_bytes()
    assert caught.value.rule == rule
