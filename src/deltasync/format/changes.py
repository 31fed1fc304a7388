"""Changes: which elements of a block's runs got which new bits."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deltasync.format.weights import Bits, Runs

Positions = NDArray[np.uint32]
"""Places of elements, counted along the runs of a block."""


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """New bits for some elements of `runs`; `positions` is ascending, or None where every element is given."""

    runs: Runs
    positions: Positions | None
    values: Bits


def slice_runs(runs: Runs, start: int, stop: int) -> Runs:
    """The part of `runs` that covers positions `start` to `stop`."""
    ends = np.cumsum(runs[:, 2])
    begins = ends - runs[:, 2]
    lo, hi = np.maximum(begins, start), np.minimum(ends, stop)
    kept = lo < hi
    first = runs[:, 1] + lo - begins
    part: Runs = np.column_stack((runs[:, 0], first, hi - lo))[kept].astype(np.int64)
    return part


def cut_runs(runs: Runs, elements: int) -> list[Runs]:
    """`runs` in pieces of `elements` each; the last may be shorter."""
    total = int(runs[:, 2].sum())
    return [slice_runs(runs, start, min(start + elements, total)) for start in range(0, total, elements)]
