"""What else a trainer could do after a step: write all weights, or the announced design of sparse updates."""

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save, save_file

from deltasync.store.protocol import Store

State = Mapping[str, torch.Tensor]

_GAP_MAX = 0xFFFF


def write_full(state: State, path: Path, *, dtype: torch.dtype) -> int:
    """All weights as one safetensors file, synced to disk; its size."""
    save_file({name: tensor.to(dtype) for name, tensor in state.items()}, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return path.stat().st_size


class Announced:
    """Compare by torch operations, gaps as u16 and values as they are, in one safetensors file for each step.

    The trainer does all of it before it goes on. A gap that does not fit makes the whole tensor's gaps u32.
    `threads` is how many torch uses: on a machine that has other work, fewer can be quicker.
    """

    def __init__(self, state: State, store: Store, *, dtype: torch.dtype, threads: int) -> None:
        self._dtype = dtype
        self._threads = threads
        self._store = store
        self._last = {name: _bits(tensor.to(dtype)).clone() for name, tensor in state.items()}
        self._number = 0

    def publish(self, state: State) -> int:
        """Put what changed; the bytes that it took."""
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        data = self._encode(state)
        torch.set_num_threads(before)
        self._number += 1
        self._store.put(f"announced/{self._number}", data)
        return len(data)

    def _encode(self, state: State) -> bytes:
        found: dict[str, torch.Tensor] = {}
        for name, tensor in state.items():
            new = _bits(tensor.to(self._dtype))
            changed = torch.ne(new, self._last[name]).nonzero().squeeze(1)
            if changed.numel():
                values = new[changed]
                found[f"{name}.idx"], found[f"{name}.val"] = _gaps(changed), values
                self._last[name][changed] = values
        return save(found)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.int16)


def _gaps(ascending: torch.Tensor) -> torch.Tensor:
    gaps = torch.diff(ascending, prepend=torch.zeros(1, dtype=ascending.dtype)).numpy()
    return torch.from_numpy(gaps.astype(np.uint16 if gaps.max() <= _GAP_MAX else np.uint32))
