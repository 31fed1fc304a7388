"""Anchors: all weights of a version as shards that are put in parallel, and not again after an interruption."""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from deltasync.codecs import planes
from deltasync.detect import stretches
from deltasync.format import keys, limits
from deltasync.format.digest import StateDigest, layout_digest
from deltasync.format.manifest import PayloadRef
from deltasync.format.payload import PayloadHeader, write_payload
from deltasync.format.weights import Readable, Runs
from deltasync.log.writer import Writer
from deltasync.parallel import each
from deltasync.progress import Progress, counting
from deltasync.shards import Shards

SHARD_ELEMENTS = 1 << 26
"""The most elements in one shard, up to the end of a block: about 90 MB of bfloat16 weights."""

SHARDS_WANTED = 512
SHARD_ELEMENTS_LEAST = 1 << 22
"""Smaller weights are cut into so many, or so small ones: those under way take little memory beside the weights."""

SHARDS_MAX = 4096
"""More shards than this grow instead: the manifest names every one."""

RESUME_S = 3600
"""A shard that lies in the store for longer is put again: `prune` may be about to remove what no manifest names."""

_WORKERS_MAX = 8


class _HasRuns(Protocol):
    @property
    def runs(self) -> Runs: ...


_T = TypeVar("_T", bound=_HasRuns)


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """What becomes a block: its runs in the weights that are here, and in those of the version."""

    local: Runs
    runs: Runs


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
    layout = weights.layout if shards is None else shards.layout
    zero = layout_digest(layout)
    count = counting(progress, "anchor", weights.layout.elements)

    def put(group: Sequence[_Piece]) -> tuple[PayloadRef, StateDigest]:
        blocks = [planes.encode(weights, piece.local) for piece in group]
        gained = sum((block.digest for block in blocks), StateDigest.ZERO)
        placed = blocks if shards is None else list(shards.place(blocks))
        data = write_payload(PayloadHeader("shard", layout, None, zero + gained, version), placed)
        ref = PayloadRef.of(data)
        return ref if there.get(ref.sha256) == ref.nbytes else writer.put(data), gained

    def tell(group: Sequence[_Piece]) -> None:
        if count is not None:
            count(sum(int(piece.local[:, 2].sum()) for piece in group))

    pieces = (
        _Piece(local, local if shards is None else shards.spread(local)[1])
        for local in stretches(weights.layout, elements=limits.PLANES_ELEMENTS)
    )
    # Weights without any element still make one shard: an anchor has a payload.
    groups = grouped(pieces, elements=_shard_elements(layout.elements)) if layout.elements else [[]]
    # What is under way is one shard for each worker; one more than there are cores, as some wait for the store.
    cores = os.cpu_count() if threads is None else threads
    done = list(each(put, groups, threads=min(_WORKERS_MAX, 1 if cores is None else cores) + 1, on_done=tell))
    return tuple(ref for ref, _ in done), sum((gained for _, gained in done), zero)


def _shard_elements(elements: int) -> int:
    """Always the same for the same weights, so that a second attempt makes the same shards."""
    wanted = max(SHARD_ELEMENTS_LEAST, -(-elements // SHARDS_WANTED))
    return max(min(SHARD_ELEMENTS, wanted), -(-elements // SHARDS_MAX))


def grouped(blocks: Iterable[_T], *, elements: int | None = None) -> Iterator[list[_T]]:
    """Neighbouring blocks for one payload each: closed once it covers `elements`, and before it has too many runs."""
    group: list[_T] = []
    held = runs = 0
    for block in blocks:
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
