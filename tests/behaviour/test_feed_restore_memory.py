"""The memory that a restore needs beside the folder that it writes."""

import gc
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.helpers import BF16, safetensors_bytes

import deltasync
from deltasync import BaseRef, Store
from deltasync.format import limits
from deltasync.kernels import kernels
from deltasync.store.memory import MemoryStore

CELLS = 12
EVERY = 2
"""One element of so many changes: a block ends after each cell."""
CHANGE_BYTES = 4
"""The least that a decoded change takes: half of its position, and its bits."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """What is in progress at once depends on the number of threads."""
    deltasync.set_threads(1)
    yield
    deltasync.set_threads(None)


def published(folder: Path) -> Store:
    """A base, and a delta of many blocks."""
    bits = np.arange(CELLS * limits.CELL_ELEMENTS, dtype=np.uint32).astype(np.uint16)
    (folder / "old.safetensors").write_bytes(safetensors_bytes({"weight": bits.view(BF16)}))
    bits[::EVERY] ^= 1
    (folder / "new.safetensors").write_bytes(safetensors_bytes({"weight": bits.view(BF16)}))
    store = MemoryStore()
    deltasync.publish(store, folder / "old.safetensors", base=BaseRef("org/model"))
    delta = deltasync.publish(store, folder / "new.safetensors", parent=folder / "old.safetensors")
    assert delta.changed == CELLS * limits.CELL_ELEMENTS // EVERY
    return store


def restore_peak(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """The most memory that decoded changes take at once in a restore of that delta."""
    store, chosen = published(folder), type(kernels())
    decode = chosen.decode_changes
    is_first = True

    def decode_changes(self: Any, old: Any, data: Any, *, absolute: bool) -> Any:
        nonlocal is_first
        if is_first:
            # From here on: what the base took is not counted.
            is_first = False
            gc.collect()
            tracemalloc.reset_peak()
        positions, values, lanes = decode(self, old, data, absolute=absolute)
        # Copies, as the memory of the native core is not traced.
        return positions.copy(), values.copy(), lanes

    with monkeypatch.context() as patch:
        patch.setattr(chosen, "decode_changes", decode_changes)
        tracemalloc.start()
        try:
            deltasync.restore(store, folder / "out", base=folder / "old.safetensors", files=False)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()


def test_memory_does_not_grow_with_the_size_of_a_delta(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes are written block by block as they are decoded: a delta is never in memory as a whole."""
    peak = restore_peak(tmp_path, monkeypatch)
    decoded_bytes = CHANGE_BYTES * CELLS * limits.CELL_ELEMENTS // EVERY
    assert peak < decoded_bytes / 2, (peak, decoded_bytes)
