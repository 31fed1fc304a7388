"""The shadow: the trainer's copy of the weights that were committed last, in memory or in a mapped file."""

import threading
from collections.abc import Callable
from pathlib import Path

from deltasync.checkpoint import map_files, open_checkpoint
from deltasync.checkpoint_output import create_file, require_space
from deltasync.detect import Changed
from deltasync.errors import CorruptError, FormatError, NotFoundError
from deltasync.files import temporary_beside
from deltasync.format.layout import Layout
from deltasync.format.manifest import Manifest
from deltasync.format.weights import Weights
from deltasync.publishing.rebase import bits_at, overwrite_all
from deltasync.replay import zeros


class Shadow:
    """`weights` are those of version `head`, or not yet of any. `lock` is held to compare or overwrite them."""

    def __init__(self, weights: Weights, head: Manifest | None) -> None:
        self.weights = weights
        self.head = head
        self.lock = threading.RLock()
        self.followers: list[Callable[[Changed], None]] = []
        """Told what the weights were overwritten with, with the lock held: copies elsewhere that must stay equal."""

    def advance(self, changed: Changed, head: Manifest) -> Changed:
        """Move on to a version that is committed; the bits that it replaced."""
        with self.lock:
            before = bits_at(self.weights, changed)
            overwrite_all(self.weights, changed)
            for follow in self.followers:
                follow(changed)
            self.head = head
            return before


def shadow_weights(layout: Layout, path: Path | None) -> Weights:
    """Room for a shadow: zeros in memory, or what the mapped file at `path` holds, made if it is not there.

    A file of another layout is replaced. Whether its bits are those of a version is for the caller to prove.
    """
    if path is None:
        return zeros(layout)
    if _layout_of(path) != layout:
        require_space(path, layout.nbytes)
        with temporary_beside(path) as temporary:
            # The widest first: then all are aligned, and every one is mapped.
            create_file(temporary, sorted(layout.tensors, key=lambda spec: -spec.dtype.width))
            temporary.replace(path)
    return map_files(open_checkpoint(path).files, writable=True).weights


def _layout_of(path: Path) -> Layout | None:
    try:
        return open_checkpoint(path).weights.layout
    except (CorruptError, FormatError, NotFoundError):
        return None
