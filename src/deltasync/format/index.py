"""The index of a payload: the layout, and a record for each block. Compressed canonical JSON."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deltasync.errors import CorruptError, FormatError
from deltasync.format import limits
from deltasync.format.digest import StateDigest
from deltasync.format.layout import Layout, canonical_json
from deltasync.format.runs import elements_of, pack_runs, unpack_runs
from deltasync.format.strict_json import is_count, is_sha256, parse_object, require_understood
from deltasync.format.weights import Runs

COO = "coo/1"
PLANES = "planes/1"
CODECS = ("exp/1", "abs/1", PLANES, COO)
"""The codecs that a payload may name."""

_BLOCK_FIELDS = ("codec", "runs", "changed", "digest", "sha256")
_INDEX_FIELDS = ("layout", "blocks")


@dataclass(frozen=True, slots=True, eq=False)
class BlockRecord:
    """What the index says about one block. `digest` is the sum of key * (new - old) over it."""

    codec: str
    runs: Runs
    changed: int
    digest: StateDigest
    sha256: str

    @property
    def elements(self) -> int:
        return elements_of(self.runs)


def encode_index(layout: Layout, records: Sequence[BlockRecord]) -> bytes:
    """The bytes of the tensor `deltasync.index`."""
    blocks = [
        {
            "codec": r.codec,
            "runs": pack_runs(r.runs),
            "changed": r.changed,
            "digest": r.digest.hex,
            "sha256": r.sha256,
        }
        for r in records
    ]
    text = canonical_json({"layout": layout.to_json(), "blocks": blocks})
    if len(text) > limits.INDEX_BYTES_MAX:
        raise FormatError(f"an index of {len(text)} bytes", rule="index.size", hint="publish in several payloads")
    return zlib.compress(text, 9)


def decode_index(data: bytes) -> tuple[Layout, tuple[BlockRecord, ...]]:
    """The inverse of `encode_index`; every field is checked, but not how blocks relate to each other."""
    fields = parse_object(_inflate(data), what="the index", scope="index")
    require_understood(fields, _INDEX_FIELDS, what="the index", scope="index")
    if not isinstance(fields.get("blocks"), list) or "layout" not in fields:
        raise CorruptError("the index lacks layout or blocks", rule="index.field")
    layout = Layout.from_json(fields["layout"])
    records: list[BlockRecord] = []
    runs_left = limits.RUNS_MAX
    for i, item in enumerate(fields["blocks"]):
        record = _record(i, item, layout, runs_left)
        runs_left -= len(record.runs)
        records.append(record)
    return layout, tuple(records)


def _inflate(data: bytes) -> bytes:
    inflater = zlib.decompressobj()
    try:
        text = inflater.decompress(data, limits.INDEX_BYTES_MAX + 1)
    except zlib.error as error:
        raise CorruptError(f"the index does not decompress: {error}", rule="index.zlib") from error
    if len(text) > limits.INDEX_BYTES_MAX:
        raise CorruptError(f"the index has more than {limits.INDEX_BYTES_MAX} bytes", rule="index.size")
    if not inflater.eof:
        raise CorruptError("the index ends too early", rule="index.zlib")
    if inflater.unused_data:
        raise CorruptError("bytes after the end of the index", rule="index.trailing")
    return text


def _record(i: int, item: Any, layout: Layout, runs_left: int) -> BlockRecord:
    what = f"block {i}"
    if not isinstance(item, dict):
        raise CorruptError(f"{what} is not an object", rule="block.field")
    require_understood(item, _BLOCK_FIELDS, what=what, scope="block")
    missing = [name for name in _BLOCK_FIELDS if name not in item]
    if missing:
        raise CorruptError(f"{what} lacks {', '.join(missing)}", rule="block.field")
    codec, changed = item["codec"], item["changed"]
    if not isinstance(codec, str) or not is_sha256(item["sha256"]) or not isinstance(item["digest"], str):
        raise CorruptError(f"{what}: codec, digest or sha256 is not what it should be", rule="block.field")
    if codec not in CODECS:
        raise FormatError(
            f"{what} is coded in {codec!r:.80}", rule="block.codec", hint=f"known: {', '.join(CODECS)}; upgrade?"
        )
    elements_max = limits.ELEMENTS_MAX if codec == COO else limits.BLOCK_ELEMENTS_MAX
    runs = unpack_runs(item["runs"], layout, elements_max=elements_max, runs_max=runs_left)
    if not is_count(changed, most=elements_of(runs)):
        raise CorruptError(f"{what}: {changed!r:.40} of {elements_of(runs)} elements changed", rule="block.changed")
    return BlockRecord(codec, runs, changed, StateDigest.from_hex(item["digest"]), item["sha256"])
