"""The index of a payload: the layout and one record per block, as compressed canonical JSON; and runs on the wire."""

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deltasync.errors import CorruptError, FormatError
from deltasync.format import limits
from deltasync.format.digest import StateDigest
from deltasync.format.layout import Layout
from deltasync.format.sealed import canonical_json, is_count, is_sha256, parse_object, require_fields
from deltasync.format.weights import Runs


def pack_runs(runs: Runs) -> list[list[int]]:
    """The JSON form: [tensor, start, count], and [..., stride, repeat] for runs at one stride.

    Strided runs are formed greedily, so that equal runs give equal bytes.
    """
    packed: list[list[int]] = []
    rows = runs.tolist()
    tensor, start, count = (runs[:, i] for i in range(3))
    stride = np.diff(start)
    joined = (np.diff(tensor) == 0) & (np.diff(count) == 0) & (stride >= count[:-1])
    stride = np.where(joined, stride, -1)
    # Rows from one edge to the next are at one stride. A row that two such ranges share goes to the first.
    edges = np.flatnonzero(np.diff(stride)) + 1
    free = 0
    for first, last in zip((0, *edges.tolist()), (*edges.tolist(), len(stride)), strict=True):
        if first == last or stride[first] < 0:
            continue
        begin = max(first, free)
        if last + 1 - begin < 2:
            continue
        packed.extend(rows[free:begin])
        packed.append([*rows[begin], int(stride[first]), last + 1 - begin])
        free = last + 1
    packed.extend(rows[free:])
    return packed


def unpack_runs(value: Any, layout: Layout, *, elements_max: int, runs_max: int) -> Runs:
    """The inverse of `pack_runs`. Everything is checked before strided runs are expanded.

    CorruptError unless every run is well formed and inside its tensor, all tensors have one element type, and they
    have at most `elements_max` elements in at most `runs_max` runs.
    """
    if not isinstance(value, list) or not value:
        raise CorruptError("runs of a block must be a list that is not empty", rule="runs.entry")
    checked = []
    runs = elements = 0
    dtypes = set()
    for item in value:
        tensor, _, count, _, repeat = run = _checked(item, layout)
        checked.append(run)
        runs += repeat
        elements += count * repeat
        dtypes.add(layout.tensors[tensor].dtype.name)
    if elements > elements_max:
        raise CorruptError(f"a block has {elements} elements; at most {elements_max} are allowed", rule="runs.elements")
    if runs > runs_max:
        raise CorruptError(
            f"a payload has more than {limits.RUNS_MAX} runs, the most that are allowed", rule="runs.pieces"
        )
    if len(dtypes) != 1:
        raise CorruptError(f"a block must have one element type, not {', '.join(sorted(dtypes))}", rule="runs.dtype")
    table = np.array(checked, np.int64)
    row = np.repeat(np.arange(len(table)), table[:, 4])
    step = np.arange(runs) - np.repeat(np.cumsum(table[:, 4]) - table[:, 4], table[:, 4])
    return np.column_stack((table[row, 0], table[row, 1] + step * table[row, 3], table[row, 2]))


def require_disjoint(all_runs: Sequence[Runs], layout: Layout) -> None:
    """CorruptError if any element is in two runs."""
    if not all_runs:
        return
    runs = np.concatenate(all_runs)
    runs = runs[np.lexsort((runs[:, 1], runs[:, 0]))]
    ends = runs[:-1, 1] + runs[:-1, 2]
    overlaps = (runs[1:, 0] == runs[:-1, 0]) & (runs[1:, 1] < ends)
    if overlaps.any():
        tensor, start, _ = runs[1:][int(np.argmax(overlaps))].tolist()
        name = layout.tensors[tensor].name
        raise CorruptError(f"element {start} of tensor {name!r:.200} is in two runs", rule="runs.overlap")


def _checked(item: Any, layout: Layout) -> tuple[int, int, int, int, int]:
    """(tensor, start, count, stride, repeat), each inside its bounds."""
    is_run = isinstance(item, list) and len(item) in (3, 5)
    if not is_run or not all(is_count(value, most=limits.ELEMENTS_MAX) for value in item):
        raise CorruptError(f"a run must be 3 or 5 whole numbers, not {item!r:.120}", rule="runs.entry")
    tensor, start, count, stride, repeat = item if len(item) == 5 else (*item, item[2], 1)
    if tensor >= len(layout.tensors):
        raise CorruptError(f"a run is in tensor {tensor}, but the layout has {len(layout.tensors)}", rule="runs.tensor")
    if count == 0:
        raise CorruptError(f"a run in tensor {tensor} has no elements", rule="runs.empty")
    if len(item) == 5 and (repeat < 2 or stride < count):
        raise CorruptError(
            f"a run of {count} elements has stride {stride} and repeat {repeat}; a stride must be at least the number "
            "of elements, and a repeat at least 2",
            rule="runs.stride",
        )
    end = start + (repeat - 1) * stride + count
    spec = layout.tensors[tensor]
    if end > spec.elements:
        raise CorruptError(
            f"a run ends at element {end} of tensor {spec.name!r:.200}, which has {spec.elements}", rule="runs.range"
        )
    return tensor, start, count, stride, repeat


COO = "coo/1"
PLANES = "planes/1"
CODECS = ("exp/1", "abs/1", PLANES, COO)
"""The codecs that a payload may name."""

_BLOCK_FIELDS = ("codec", "runs", "changed", "digest", "sha256")


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
        return int(self.runs[:, 2].sum())


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
        raise FormatError(
            f"the index has {len(text)} bytes; at most {limits.INDEX_BYTES_MAX} are allowed",
            rule="index.size",
            hint="publish in several payloads",
        )
    return zlib.compress(text, 9)


def decode_index(data: bytes, known: Layout | None = None) -> tuple[Layout, tuple[BlockRecord, ...]]:
    """The inverse of `encode_index`; every field is checked, but not how blocks relate to each other.

    If the layout is equal to `known`, that object is returned: to check tens of thousands of tensors takes long.
    """
    fields = parse_object(_inflate(data), what="the index", scope="index")
    require_fields(fields, ("layout", "blocks"), what="the index", scope="index")
    if not isinstance(fields["blocks"], list):
        raise CorruptError("blocks of the index is not a list", rule="index.field")
    if known is not None and hashlib.sha256(canonical_json(fields["layout"])).hexdigest() == known.sha256:
        layout = known
    else:
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
        raise CorruptError(
            f"the index has more than {limits.INDEX_BYTES_MAX} bytes, the most that are allowed", rule="index.size"
        )
    if not inflater.eof:
        raise CorruptError("the index ends too early", rule="index.zlib")
    if inflater.unused_data:
        raise CorruptError("there are bytes after the end of the index", rule="index.trailing")
    return text


def _record(i: int, item: Any, layout: Layout, runs_left: int) -> BlockRecord:
    what = f"block {i}"
    if not isinstance(item, dict):
        raise CorruptError(f"{what} must be a JSON object", rule="block.field")
    require_fields(item, _BLOCK_FIELDS, what=what, scope="block")
    codec, changed = item["codec"], item["changed"]
    if not isinstance(codec, str) or not is_sha256(item["sha256"]) or not isinstance(item["digest"], str):
        raise CorruptError(f"codec and digest of {what} must be texts, and sha256 a SHA-256 in hex", rule="block.field")
    if codec not in CODECS:
        raise FormatError(
            f"{what} has the codec {codec!r:.80}; this release knows {', '.join(CODECS)}",
            rule="block.codec",
            hint="upgrade deltasync",
        )
    elements_max = limits.ELEMENTS_MAX if codec == COO else limits.BLOCK_ELEMENTS_MAX
    runs = unpack_runs(item["runs"], layout, elements_max=elements_max, runs_max=runs_left)
    elements = int(runs[:, 2].sum())
    if not is_count(changed, most=elements):
        raise CorruptError(
            f"changed of {what} must be from 0 to its {elements} elements, not {changed!r:.40}",
            rule="block.changed",
        )
    return BlockRecord(codec, runs, changed, StateDigest.from_hex(item["digest"]), item["sha256"])
