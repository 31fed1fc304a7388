"""Capture on an accelerator: weights are compared where they are, and only what changed crosses to the host.

Written in torch operations only, so that the same code runs on any device. Each block costs one wait for the device,
the one that tells how many elements changed.
"""

from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np
import torch

from deltasync.blocks import Changed, layout_runs
from deltasync.format.layout import Layout
from deltasync.format.weights import Bits, Changes, Runs
from deltasync.torch.tensors import as_bits, dtype_of, layout_of
from deltasync.trainer.capture import Shadow, require_same

BLOCK_ELEMENTS = 1 << 25

Place = Literal["device", "host"]


class DeviceCapture:
    """Finds changes of tensors on one device.

    `place` says where the shadow is read from: a copy on the device, which costs memory there, or the host's, which has
    to cross to the device every time.
    """

    def __init__(self, place: Place) -> None:
        self._place: Place = place
        self._copy: _DeviceShadow | None = None

    def find(self, shadow: Shadow, tensors: Mapping[str, torch.Tensor], cast: torch.dtype | None) -> list[Changes]:
        """What differs from the shadow, whose lock is held."""
        layout = layout_of(tensors, cast=cast)
        require_same(shadow.weights.layout, layout)
        device = next(iter(tensors.values())).device
        if self._place == "device" and self._copy is None:
            self._copy = _DeviceShadow(shadow, device)
            shadow.followers.append(self._copy.note)
        found = []
        for runs in layout_runs(layout, elements=BLOCK_ELEMENTS):
            old = _host_block(shadow, runs, device) if self._copy is None else self._copy.block(runs)
            new = _joined(tensors, layout, runs, cast)
            at = torch.nonzero(new != old).reshape(-1)
            if at.numel():
                # Copies to the host run on while the next block is compared.
                values = _to_host(new[at])
                found.append((runs, _to_host(at.to(torch.int32)), values))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return [_changes(layout, runs, at, values) for runs, at, values in found]


class _DeviceShadow:
    """The shadow's bits on the device, one flat tensor for each."""

    def __init__(self, shadow: Shadow, device: torch.device) -> None:
        weights = shadow.weights
        self._layout = weights.layout
        self._tensors = [_from_host(array, device) for array in weights.arrays]
        self._missed: list[Changed] = []

    def note(self, changed: Changed) -> None:
        """The shadow moved on, in another thread: the device is told when it is needed next."""
        self._missed.append(changed)

    def block(self, runs: Runs) -> torch.Tensor:
        """The bits of a block."""
        while self._missed:
            self._apply(self._missed.pop(0))
        return _cat([self._tensors[t][first : first + count] for t, first, count in runs.tolist()])

    def _apply(self, changed: Changed) -> None:
        for name, (indices, values) in changed.items():
            target = self._tensors[self._layout.ordinals[name]]
            at = torch.from_numpy(indices.astype(np.int64)).to(target.device, non_blocking=True)
            target[at] = _from_host(values, target.device)


def _joined(tensors: Mapping[str, torch.Tensor], layout: Layout, runs: Runs, cast: torch.dtype | None) -> torch.Tensor:
    return _cat(list(_pieces(tensors, layout, runs, cast)))


def _pieces(
    tensors: Mapping[str, torch.Tensor], layout: Layout, runs: Runs, cast: torch.dtype | None
) -> Iterator[torch.Tensor]:
    for ordinal, first, count in runs.tolist():
        tensor = tensors[layout.tensors[ordinal].name]
        flat = tensor.contiguous().reshape(-1)[first : first + count]
        yield as_bits(flat.to(dtype_of(tensor, cast)))


def _cat(pieces: list[torch.Tensor]) -> torch.Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _host_block(shadow: Shadow, runs: Runs, device: torch.device) -> torch.Tensor:
    return _from_host(shadow.weights.region(runs).gather(), device)


def _from_host(bits: Bits, device: torch.device) -> torch.Tensor:
    signed = bits if bits.dtype == np.uint8 else bits.view(f"i{bits.itemsize}")
    host = torch.from_numpy(signed.copy() if device.type == "cpu" else signed)
    return host.to(device, non_blocking=True)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cuda":
        return tensor.cpu()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return host


def _changes(layout: Layout, runs: Runs, at: torch.Tensor, values: torch.Tensor) -> Changes:
    bits_dtype = layout.tensors[int(runs[0, 0])].dtype.bits_dtype
    return Changes(runs, at.numpy().view(np.uint32), values.numpy().view(bits_dtype))
