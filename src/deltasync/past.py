"""Weights as they were at an earlier version, while the state that they are part of goes on.

Only the bits that were replaced since are kept, in the blocks in which they changed. So an anchor is written from a
moving shadow, a skip leads over many versions, and an export knows what a version changed, all with one copy of the
weights.
"""

from collections.abc import Iterator, Sequence
from threading import RLock

import numpy as np

from deltasync import blocks
from deltasync.format.layout import Layout
from deltasync.format.manifest import Manifest
from deltasync.format.weights import Bits, Changes, Region, Runs, Weights, tensor_parts
from deltasync.parallel import each


class Past:
    """The weights of version `at`. Other threads may read it while `weights` are overwritten with `lock` held.

    It stays true as long as `keep` gets the bits that are replaced, before or with the lock in which that happens.
    `over_anchors`: also those that an anchor replaces, which may be all. Without it, and when the layout changes, the
    past is lost: `is_lost`.
    """

    def __init__(self, weights: Weights, at: Manifest, lock: RLock, *, over_anchors: bool = False) -> None:
        self.at = at
        self.over_anchors = over_anchors
        self.is_lost = False
        self._weights = weights
        self._lock = lock
        self._steps: list[_Step] = []

    @property
    def layout(self) -> Layout:
        return self._weights.layout

    def keep(self, before: Sequence[Changes]) -> None:
        """Add one step: bits that are replaced now, in blocks that do not overlap."""
        if not self.is_lost and before:
            self._steps.append(_Step([changes.packed() for changes in before]))

    def lose(self) -> None:
        """Give up what was kept: something was replaced that `keep` did not get."""
        self.is_lost = True
        self._steps = []

    def restart(self, at: Manifest) -> None:
        """Be the weights as they are now."""
        self.at, self.is_lost, self._steps = at, False, []

    def region(self, runs: Runs) -> Region:
        """A copy of some elements, as they were."""
        with self._lock:
            region = self._weights.region(runs)
            bits = region.gather()
            steps = list(self._steps)
        # An element that changed twice gets the bits that it had first.
        for step in reversed(steps):
            step.put_back(runs, bits)
        return region.holding(bits)

    def difference(self) -> list[Changes]:
        """The bits of all elements that are others now, in blocks; an element that came back is left out."""
        if len(self._steps) < 2:
            return [changes for step in self._steps for changes in step.blocks]
        compared = each(lambda runs: list(blocks.detect(self._weights, self, runs)), blocks.layout_runs(self.layout))
        return [changes for part in compared for changes in part]

    def absorb(self, later: "Past") -> None:
        """Add what was replaced since a later past of the same weights, as one step."""
        if later.is_lost:
            self.lose()
        self.keep(later.difference())


class _Step:
    """Blocks of replaced bits, with an index of where their runs begin."""

    def __init__(self, replaced: Sequence[Changes]) -> None:
        self.blocks = replaced
        rows = [
            np.column_stack((one.runs, np.full(len(one.runs), number), np.cumsum(one.runs[:, 2]) - one.runs[:, 2]))
            for number, one in enumerate(replaced)
        ]
        table = np.concatenate(rows)
        self._table = table[np.lexsort((table[:, 1], table[:, 0]))]
        """Tensor ordinal, first flat index, number of elements, number of the block, position in the block."""

    def put_back(self, runs: Runs, bits: Bits) -> None:
        """Overwrite a copy of the bits of `runs` with those that were replaced."""
        begin = 0
        number, positions = -1, None
        for ordinal, first, count in runs.tolist():
            for start, size, block, offset in self._overlapping(ordinal, first, first + count):
                if block != number:
                    number, positions = block, self.blocks[block].positions
                low, high = max(first, start), min(first + count, start + size)
                lo, hi = offset + low - start, offset + high - start
                here, values = begin + low - first, self.blocks[block].values
                if positions is None:
                    bits[here : here + high - low] = values[lo:hi]
                else:
                    i, j = np.searchsorted(positions, (lo, hi))
                    bits[positions[i:j].astype(np.int64) + (here - lo)] = values[i:j]
            begin += count

    def _overlapping(self, ordinal: int, first: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """The rows of the table for one tensor that have elements from `first` to `end`."""
        lo, hi = np.searchsorted(self._table[:, 0], (ordinal, ordinal + 1))
        starts = self._table[lo:hi, 1]
        before = max(0, int(np.searchsorted(starts, first, side="right")) - 1)
        for _, start, size, block, offset in self._table[lo + before : lo + np.searchsorted(starts, end)].tolist():
            if start + size > first:
                yield start, size, block, offset


def bits_before(weights: Weights, changes: Changes) -> Changes:
    """The bits of the weights that changes will replace."""
    if changes.held is None:
        # Every element is given: few of them may be others than before.
        before = weights.region(changes.runs).gather()
        others = np.flatnonzero(before != changes.values)
        return Changes(changes.runs, others.astype(np.uint32), before[others])
    bits = [weights.arrays[ordinal][indices] for ordinal, indices, _ in tensor_parts(weights.layout, changes)]
    return Changes(
        changes.runs, changes.held, bits[0] if len(bits) == 1 else np.concatenate([changes.values[:0], *bits])
    )
