"""The shadows of a sharded trainer at the head of a feed: each rank gets its own elements, nobody holds the model."""

import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from deltasync import blocks
from deltasync.checkpoint import open_checkpoint
from deltasync.errors import CorruptError
from deltasync.format.digest import StateDigest, layout_digest
from deltasync.format.manifest import Manifest
from deltasync.format.weights import Weights
from deltasync.restore import restore
from deltasync.shards import Shards
from deltasync.store.protocol import Store
from deltasync.trainer.distributed import Ranks

PIECE_ELEMENTS = 1 << 24
"""Elements that are sent at a time."""


def resume(
    ranks: Ranks,
    store: Store,
    head: Manifest,
    weights: Weights,
    shards: Shards,
    *,
    folder: Path | None,
    threads: int | None,
) -> None:
    """Bring the weights of every rank to the head. They may be there already, in files under `folder`."""

    def is_there() -> bool:
        with ranks.telling():
            mine = blocks.digest(weights, threads=threads) - layout_digest(weights.layout)
        return ranks.agree("the head", mine, lambda found: _total(shards, found) == head.digest)

    if folder is not None and is_there():
        return
    with ExitStack() as stack:
        with ranks.telling():
            source = stack.enter_context(_restored(store, head, folder, threads)) if ranks.rank == 0 else None
        ranks.agree("the head", None, lambda _: None)
        _hand_out(ranks, source, weights, shards)
    if not is_there():
        raise CorruptError(
            f"the ranks do not have the digest of version {head.version} together",
            rule="shadow.digest",
            version=head.version,
            hint="the memory or network of these machines may be faulty: start again",
        )


@contextmanager
def _restored(store: Store, head: Manifest, folder: Path | None, threads: int | None) -> Iterator[Weights]:
    """The whole of a version, in files that are mapped and gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="deltasync-", dir=folder) as temporary:
        out = Path(temporary) / "head"
        restore(store, out, version=head.version, threads=threads)
        yield open_checkpoint(out).weights


def _hand_out(ranks: Ranks, source: Weights | None, weights: Weights, shards: Shards) -> None:
    """From rank 0, which has the source, some rows at a time; every rank keeps its own elements of them."""
    for ordinal, box in enumerate(shards.boxes):
        dtype, row = weights.layout.tensors[ordinal].dtype.bits_dtype, math.prod(box.shape[1:])
        step = max(1, PIECE_ELEMENTS // max(1, row))
        for first in range(0, box.shape[0] if row else 0, step):
            rows = np.empty(min(step, box.shape[0] - first) * row, dtype)
            if source is not None:
                rows[:] = source.arrays[ordinal][first * row : first * row + len(rows)]
            ranks.share(rows)
            if box.elements:
                box.copy_rows(weights.arrays[ordinal], rows, first)


def _total(shards: Shards, parts: Sequence[StateDigest]) -> StateDigest:
    return sum(parts, layout_digest(shards.layout))
