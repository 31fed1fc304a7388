"""The memory that a rebase needs beside what it is given, and what it gives."""

import tracemalloc

import numpy as np
import pytest

from deltasync.blocks import cut_changes, layout_runs
from deltasync.format import limits
from deltasync.format.layout import DTYPES, Layout, TensorSpec
from deltasync.format.weights import Changes
from deltasync.trainer.capture import rebase

RUNS = 6
EVERY = 100
"""One element of so many changes in each step."""
LAYOUT = Layout.of([TensorSpec("weight", DTYPES["BF16"], (RUNS, limits.BLOCK_ELEMENTS_MAX))])


def captured(value: int, *, every: int) -> list[Changes]:
    positions = np.arange(0, limits.BLOCK_ELEMENTS_MAX, every, dtype=np.uint32)
    found = []
    for runs in layout_runs(LAYOUT):
        blocks = cut_changes(runs, positions, np.full(len(positions), value, np.uint16))
        found += [Changes(one.runs, one.held, one.values.copy()).packed() for one in blocks]
    return found


def test_a_rebase_needs_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was sent, what it replaced and the capture that waited are freed run by run: they pay for the result."""
    monkeypatch.setenv("DELTASYNC_THREADS", "1")
    tracemalloc.start()
    try:
        sent, before = captured(2, every=EVERY), captured(1, every=EVERY)
        waiting = captured(3, every=EVERY // 2)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        (result,) = rebase(LAYOUT, [waiting], sent, before)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    changes = sum(len(one.values) for one in result)
    assert changes == RUNS * len(range(0, limits.BLOCK_ELEMENTS_MAX, EVERY // 2))
    assert peak - held < 2 * held / RUNS, (peak - held, held)
