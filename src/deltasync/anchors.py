"""Anchors: all weights of a version as shards that are put in parallel, and not again after an interruption."""

import time
from collections.abc import Iterator, Sequence

from deltasync import blocks
from deltasync.format import keys
from deltasync.format.digest import StateDigest, layout_digest
from deltasync.format.manifest import PayloadRef
from deltasync.format.payload import Block, PayloadHeader, write_payload
from deltasync.format.weights import Readable
from deltasync.log.writer import Writer
from deltasync.parallel import each
from deltasync.progress import Progress, counting

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
    threads: int | None = None,
    progress: Progress | None = None,
) -> tuple[tuple[PayloadRef, ...], StateDigest]:
    """Put all weights as the shards of an anchor; their names, and the state digest. The commit is left to the caller.

    A shard that an interrupted attempt left in the store is not sent again.
    """
    there = _recent(writer)
    encoded = blocks.encode_anchor(
        weights, threads=threads, on_progress=counting(progress, "anchor", weights.layout.elements)
    )
    zero = layout_digest(weights.layout)

    def put(group: Sequence[Block]) -> tuple[PayloadRef, StateDigest]:
        gained = sum((block.digest for block in group), StateDigest.ZERO)
        data = write_payload(PayloadHeader("shard", weights.layout, None, zero + gained, version), group)
        ref = PayloadRef.of(data)
        return ref if there.get(ref.sha256) == ref.nbytes else writer.put(data), gained

    done = list(each(put, _groups(encoded, weights.layout.elements), threads=_PUT_THREADS))
    return tuple(ref for ref, _ in done), sum((gained for _, gained in done), zero)


def _groups(encoded: Iterator[Block], elements: int) -> Iterator[list[Block]]:
    """Neighbouring blocks, always cut at the same places, so that a second attempt makes the same shards."""
    size = max(SHARD_ELEMENTS, -(-elements // SHARDS_MAX))
    group: list[Block] = []
    held = 0
    for block in encoded:
        group.append(block)
        held += int(block.runs[:, 2].sum())
        if held >= size:
            yield group
            group, held = [], 0
    # Weights without any element still make one shard: an anchor has a payload.
    if group or elements == 0:
        yield group


def _recent(writer: Writer) -> dict[str, int]:
    """Sizes of payloads that were put not long ago, by their SHA-256."""
    since = time.time() - RESUME_S
    found = ((keys.parse_payload_key(i.key), i) for i in writer.store.list(keys.PAYLOADS) if i.modified_unix_s > since)
    return {sha256: item.nbytes for sha256, item in found if sha256 is not None}
