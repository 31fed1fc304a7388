"""Capture on an accelerator: weights are compared on the device, and only what changed is copied to the host.

The code uses torch operations only, so that it runs on any device. Each run of elements waits for the device once, to
learn how many of them changed.
"""

from collections.abc import Mapping
from operator import attrgetter

import numpy as np
import torch

from deltasync.blocks import cut_changes, layout_runs
from deltasync.format import limits
from deltasync.format.layout import Layout
from deltasync.format.weights import Bits, Changes, tensor_parts
from deltasync.state import State
from deltasync.torch.tensors import TorchWeights, as_bits, dtype_of, layout_of
from deltasync.trainer.capture import WeightsSource, require_same


class DeviceCapture:
    """Finds changes of tensors on one device, which keeps a copy of the shadow: its bits, one flat tensor for each."""

    def __init__(self) -> None:
        self._copy: list[torch.Tensor] = []
        self._missed: list[list[Changes]] | None = None
        """What the shadow was overwritten with since: the copy is updated when it is used next. None without a copy."""

    def find(self, shadow: State, tensors: Mapping[str, torch.Tensor], cast: torch.dtype | None) -> list[Changes]:
        """What differs from the shadow, whose lock is held."""
        weights = shadow.require_weights()
        layout = layout_of(tensors, cast=cast, known=weights.layout)
        require_same(weights.layout, layout)
        device = next(iter(tensors.values())).device
        if self._missed is None:
            self._copy = [_from_host(array, device) for array in weights.arrays]
            self._missed = shadow.missed()
        while self._missed:
            for changes in self._missed[0]:
                self._overwrite(layout, changes)
            # Not before: if the device runs out of memory in between, all of them are overwritten again.
            self._missed.pop(0)
        compared = []
        for runs in layout_runs(layout, elements=limits.BLOCK_ELEMENTS_MAX):
            parts, copies = [], []
            for ordinal, first, count in runs.tolist():
                tensor = tensors[layout.tensors[ordinal].name]
                flat = tensor.contiguous().reshape(-1)[first : first + count]
                parts.append(as_bits(flat.to(dtype_of(tensor, cast))))
                copies.append(self._copy[ordinal][first : first + count])
            new = _cat(parts)
            at = torch.nonzero(new != _cat(copies)).reshape(-1)
            if at.numel():
                # The copies to the host continue while the next run is compared.
                compared.append((runs, _to_host(at.to(torch.int32)), _to_host(new[at])))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found: list[Changes] = []
        while compared:
            runs, places, values = compared.pop(0)
            bits = values.numpy().view(layout.tensors[int(runs[0, 0])].dtype.bits_dtype)
            # Packed as on the host. The wide positions of a run are freed before those of the next one are packed.
            found += [changes.packed() for changes in cut_changes(runs, places.numpy().view(np.uint32), bits)]
        return found

    def _overwrite(self, layout: Layout, changes: Changes) -> None:
        for ordinal, indices, values in tensor_parts(layout, changes):
            target = self._copy[ordinal]
            at = torch.from_numpy(indices.astype(np.int64)).to(target.device, non_blocking=True)
            target[at] = _from_host(values, target.device)


class DeviceSource(WeightsSource):
    """Tensors on one device, which are compared there."""

    def __init__(
        self,
        capture: DeviceCapture,
        tensors: Mapping[str, torch.Tensor],
        cast: torch.dtype | None,
        known: Layout | None,
    ) -> None:
        super().__init__(TorchWeights(tensors, cast=cast, known=known))
        self._capture = capture
        self._tensors = tensors
        self._cast = cast

    def changes(self, shadow: State) -> list[Changes]:
        return self._capture.find(shadow, self._tensors, self._cast)


def source_of(
    tensors: Mapping[str, torch.Tensor],
    cast: torch.dtype | None,
    capture: DeviceCapture | None,
    *,
    known: Layout | None = None,
) -> WeightsSource:
    """Tensors that are compared on their device, if there is a `capture` and they are all on one; else on the host.

    `known`: the layout that they probably have.
    """
    devices = set(map(attrgetter("device"), tensors.values()))
    if capture is None or len(devices) != 1 or devices == {torch.device("cpu")}:
        return WeightsSource(TorchWeights(tensors, cast=cast, known=known))
    return DeviceSource(capture, tensors, cast, known)


def _cat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


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
