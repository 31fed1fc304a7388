"""Anchors: all weights of a version as shards that are put in parallel, and not again after an interruption."""

import time
from collections.abc import Iterable, Iterator, Sequence

from deltasync import blocks
from deltasync.format import keys, limits
from deltasync.format.digest import StateDigest, layout_digest
from deltasync.format.manifest import PayloadRef
from deltasync.format.payload import Block, PayloadHeader, write_payload
from deltasync.format.weights import Readable
from deltasync.log.writer import Writer
from deltasync.parallel import each
from deltasync.progress import Progress, counting
from deltasync.shards import Shards

SHARD_ELEMENTS = 1 << 26
"""Elements in one shard: about 90 MB of bfloat16 weights."""

SHARDS_MAX = 4096
"""More shards than this grow instead: the manifest names every one."""

RESUME_S = 3600
"""A shard that lies in the store for longer is put again: `prune` may be about to remove what no manifest names."""

_PUT_THREADS = 2


def put_anchor(
    writer: Writer,
    weights: Readable,
    version: int,
    *,
    shards: Shards | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> tuple[tuple[PayloadRef, ...], StateDigest]:
    """Put all weights as the shards of an anchor; their names, and the state digest. The commit is left to the caller.

    A shard that an interrupted attempt left in the store is not sent again. `shards`: the weights are only a part of
    those of the version; the digest counts the others as zero.
    """
    there = _recent(writer)
    encoded = blocks.encode_anchor(
        weights, threads=threads, on_progress=counting(progress, "anchor", weights.layout.elements)
    )
    layout = weights.layout if shards is None else shards.layout
    zero = layout_digest(layout)

    def put(group: Sequence[Block]) -> tuple[PayloadRef, StateDigest]:
        gained = sum((block.digest for block in group), StateDigest.ZERO)
        data = write_payload(PayloadHeader("shard", layout, None, zero + gained, version), group)
        ref = PayloadRef.of(data)
        return ref if there.get(ref.sha256) == ref.nbytes else writer.put(data), gained

    # Always cut at the same places, so that a second attempt makes the same shards.
    size = max(SHARD_ELEMENTS, -(-layout.elements // SHARDS_MAX))
    groups = grouped(encoded if shards is None else shards.place(encoded), elements=size)
    # Weights without any element still make one shard: an anchor has a payload.
    done = list(each(put, groups if layout.elements else [[]], threads=_PUT_THREADS))
    return tuple(ref for ref, _ in done), sum((gained for _, gained in done), zero)


def grouped(encoded: Iterable[Block], *, elements: int | None = None) -> Iterator[list[Block]]:
    """Neighbouring blocks for one payload each: closed once it covers `elements`, and before it has too many runs."""
    group: list[Block] = []
    held = runs = 0
    for block in encoded:
        if group and runs + len(block.runs) > limits.RUNS_MAX:
            yield group
            group, held, runs = [], 0, 0
        group.append(block)
        held += int(block.runs[:, 2].sum())
        runs += len(block.runs)
        if elements is not None and held >= elements:
            yield group
            group, held, runs = [], 0, 0
    if group:
        yield group


def _recent(writer: Writer) -> dict[str, int]:
    """Sizes of payloads that were put not long ago, by their SHA-256."""
    since = time.time() - RESUME_S
    found = ((keys.parse_payload_key(i.key), i) for i in writer.store.list(keys.PAYLOADS) if i.modified_unix_s > since)
    return {sha256: item.nbytes for sha256, item in found if sha256 is not None}
