"""Step 7: overwrite in place. Values are absolute bits, so that doing it twice does no harm."""

import numpy as np

from deltasync.format.changes import Changes
from deltasync.format.weights import Weights
from deltasync.kernels.dispatch import kernels


def overwrite(target: Weights, changes: Changes) -> None:
    """Write the new bits into `target`'s arrays."""
    region = target.region(changes.runs)
    if changes.positions is not None:
        kernels().overwrite(region, changes.positions, changes.values)
        return
    ends = np.cumsum(region.runs[:, 2])
    for (array, offset, count), end in zip(region.runs.tolist(), ends.tolist(), strict=True):
        region.arrays[array][offset : offset + count] = changes.values[end - count : end]
