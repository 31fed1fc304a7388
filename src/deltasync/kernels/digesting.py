"""Keys of the state digest.

The digest of a state is, in each of two lanes, the sum over all elements of key(tensor, index) * bits, modulo 2^64,
where a key is the product of a row part (tensor and index >> 10) and a column part (index & 1023). Keys are odd, so
a change of any single element always changes the digest.

An 8-byte element counts as two 4-byte ones, low half first: the top bits of a 64-bit product would see too few bits
of the key.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from deltasync.format.weights import Bits, Region

COLUMNS = 1024
LANES = 2
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64-bit numbers that scatters them well (the finalizer of splitmix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@cache
def columns(lane: int) -> NDArray[np.uint64]:
    """The column parts of one lane."""
    return mix(np.arange(1, COLUMNS + 1, dtype=np.uint64) + np.uint64(lane << 32)) | np.uint64(1)


def gain(region: Region, positions: NDArray[np.uint32], before: Bits, after: Bits) -> tuple[int, int]:
    """The sum of key * (after - before) over the elements at `positions`, per lane."""
    ends = np.cumsum(region.runs[:, 2])
    run = np.searchsorted(ends, positions, side="right")
    index = positions.astype(np.uint64) - (ends - region.runs[:, 2])[run].astype(np.uint64) + region.keys[run, 2]
    if region.dtype.width == 8:
        run = np.repeat(run, 2)
        index = (np.column_stack((index, index)) * np.uint64(2) + np.arange(2, dtype=np.uint64)).reshape(-1)
        before, after = before.view("<u4"), after.view("<u4")
    amounts = after.astype(np.uint64) - before.astype(np.uint64)
    sums = []
    for lane in range(LANES):
        row = mix(region.keys[run, lane] + ((index >> np.uint64(10)) + np.uint64(1)) * _GOLDEN) | np.uint64(1)
        key = row * columns(lane)[index & np.uint64(COLUMNS - 1)]
        sums.append(int((key * amounts).sum(dtype=np.uint64)))
    return sums[0], sums[1]
