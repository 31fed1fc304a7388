"""The shadow: the trainer's copy of the weights that were committed last, in memory or in a mapped file."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from deltasync.detect import Changed
from deltasync.files import locked
from deltasync.format.layout import Layout
from deltasync.format.manifest import Manifest
from deltasync.format.weights import Weights
from deltasync.mapped import mapped_weights
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


def lock_shadow(path: Path | None) -> ExitStack:
    """Keeps other processes off a mapped shadow until it is closed; InvalidInputError if one of them has it."""
    held = ExitStack()
    if path is not None:
        held.enter_context(locked(path))
    return held


def shadow_weights(layout: Layout, path: Path | None) -> Weights:
    """Room for a shadow: zeros in memory, or what the mapped file at `path` holds, made if it is not there.

    A file of another layout is replaced. Whether its bits are those of a version is for the caller to prove.
    """
    return zeros(layout) if path is None else mapped_weights(layout, path)
