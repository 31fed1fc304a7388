"""A torch module, or a state dict, in this process as a target: changed elements are overwritten in place."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from deltasync.arguments import described
from deltasync.blocks import overwrite, overwrite_all
from deltasync.errors import InvalidInputError, MismatchError
from deltasync.format.layout import Layout
from deltasync.format.weights import Bits, Weights, tensor_parts
from deltasync.replica.target import Damage, Gate, Staged, Target
from deltasync.torch.tensors import TorchState, as_bits, bits_type, host_bits, layout_of, named_tensors, torch_dtype

_METHODS = {torch.bfloat16: "bfloat16", torch.float16: "half", torch.float32: "float", torch.float64: "double"}
_SIGNED = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


class ModuleTarget(Target):
    """Tensors of any strides on any device, under the names of the checkpoint; nothing is ever cast.

    `hold` keeps the generating loop out while weights are overwritten: a `Gate`, which the loop enters for each batch,
    a lock, or any other context manager that can be entered many times.
    """

    engine = "torch"

    def __init__(self, module: TorchState, *, hold: Gate | AbstractContextManager[object] | None = None) -> None:
        if hold is not None and not isinstance(hold, AbstractContextManager):
            hint = "use a deltasync.Gate or a lock; None if nothing reads the weights meanwhile"
            raise InvalidInputError(f"hold must be a context manager, not {described(hold)}", hint=hint)
        self._module = module
        self._hold = hold
        self._writes: Weights | Sequence[_Write] | None = None
        """What is staged. Weights are the tensors themselves, in host memory: our kernels write the changes to them."""

    def require(self, layout: Layout) -> None:
        """MismatchError that names the first tensor that is missing, or has another type or shape."""
        _in_order(named_tensors(self._module), layout)

    def stage(self, staged: Staged) -> None:
        """Copy the changes to the devices. Full weights wait for `commit`: there may be no memory for a second copy."""
        layout = staged.weights.layout
        tensors = _in_order(named_tensors(self._module), layout)
        if staged.changes is None:
            bits = zip(tensors, staged.weights.arrays, strict=True)
            self._writes = [_Write(tensor, None, _as_torch(array)) for tensor, array in bits]
            return
        if all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors):
            specs = zip(tensors, layout.tensors, strict=True)
            self._writes = Weights(layout, tuple(host_bits(tensor, spec.dtype) for tensor, spec in specs))
            return
        parts: dict[int, list[tuple[NDArray[np.unsignedinteger], Bits]]] = {}
        for changes in staged.changes:
            for ordinal, indices, values in tensor_parts(layout, changes):
                parts.setdefault(ordinal, []).append((indices, values))
        self._writes = [
            _scatter(tensors[ordinal], changes, is_disjoint=staged.is_one_edge) for ordinal, changes in parts.items()
        ]

    def commit(self, staged: Staged) -> float:
        """Overwrite what changed inside the hold; returns the seconds that it took."""
        writes, self._writes = self._writes, None
        if writes is None:
            raise InvalidInputError(f"version {staged.version} was not staged", hint="call stage first")
        with self._holding():
            since = time.perf_counter()
            self.version = None
            if not isinstance(writes, Weights):
                _perform(writes)
            elif staged.is_one_edge:
                overwrite_all(writes, staged.changes or ())
            else:
                for part in staged.changes or ():
                    overwrite(writes, part)
            self.version = staged.version
            return time.perf_counter() - since

    def scrub(self, weights: Weights, tensors: Sequence[int], *, repair: bool) -> list[Damage]:
        """Compare bit by bit; a damaged tensor is copied as a whole."""
        live = _in_order(named_tensors(self._module), weights.layout)
        damages, writes = [], []
        for ordinal in tensors:
            spec, wanted = weights.layout.tensors[ordinal], weights.arrays[ordinal]
            elements = int(np.count_nonzero(host_bits(live[ordinal], spec.dtype) != wanted))
            if elements:
                damages.append(Damage(spec.name, elements))
                writes.append(_Write(live[ordinal], None, _as_torch(wanted)))
        if writes and repair:
            with self._holding():
                _perform(writes)
        return damages

    def _holding(self) -> AbstractContextManager[object]:
        if self._hold is None:
            return nullcontext()
        return self._hold.switch() if isinstance(self._hold, Gate) else self._hold


@dataclass(frozen=True, slots=True, eq=False)
class _Write:
    """New bits for all elements of a tensor, or for those at flat `indices`."""

    tensor: torch.Tensor
    indices: torch.Tensor | None
    values: torch.Tensor

    def perform(self) -> None:
        if self.indices is None:
            self.tensor.view(bits_type(self.tensor)).copy_(self.values.view(self.tensor.shape))
        elif self.tensor.is_contiguous():
            # The fastest of torch's operations for this on a CPU.
            as_bits(self.tensor).scatter_(0, self.indices, self.values)
        else:
            places = torch.unravel_index(self.indices, self.tensor.shape)
            self.tensor.view(bits_type(self.tensor)).index_put_(places, self.values)


def _scatter(
    tensor: torch.Tensor, parts: list[tuple[NDArray[np.unsignedinteger], Bits]], *, is_disjoint: bool
) -> _Write:
    """One write of all changes of a tensor, in which the last one wins."""
    indices = np.concatenate([i for i, _ in parts]).astype(np.int64)
    values = np.concatenate([v for _, v in parts])
    if not is_disjoint and len(parts) > 1:
        # On a device it is undefined which of two writes to one element wins: there must be only one.
        indices, last = np.unique(indices[::-1], return_index=True)
        values = values[::-1][last]
    return _Write(tensor, torch.from_numpy(indices).to(tensor.device), _as_torch(values).to(tensor.device))


@torch.inference_mode()
def _perform(writes: Sequence[_Write]) -> None:
    for write in writes:
        write.perform()
    devices = {write.tensor.device for write in writes}
    for device in (device for device in devices if device.type != "cpu"):
        torch.get_device_module(device).synchronize(device)


def _as_torch(bits: Bits) -> torch.Tensor:
    return torch.from_numpy(bits.view(_SIGNED[bits.dtype.itemsize]))


def _in_order(tensors: dict[str, torch.Tensor], layout: Layout) -> list[torch.Tensor]:
    ours = layout_of(tensors)
    try:
        ours.require_equal(layout, ours="the module", theirs="the feed")
    except MismatchError as error:
        raise _explained(error, ours, layout) from None
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise InvalidInputError(f"tensor {name!r:.200} has no data: it is on the device meta", hint="load it first")
    return [tensors[spec.name] for spec in layout.tensors]


def _explained(error: MismatchError, ours: Layout, theirs: Layout) -> MismatchError:
    """The error, with a hint that names the cast, if the tensors differ in nothing but their floating-point types."""
    types = {spec.name: spec.dtype for spec in theirs.tensors}
    same = [(spec.name, spec.shape) for spec in ours.tensors] == [(spec.name, spec.shape) for spec in theirs.tensors]
    others = {types[spec.name] for spec in ours.tensors if same and types[spec.name] != spec.dtype}
    wanted = {torch_dtype(dtype) for dtype in others}
    if len(wanted) != 1 or not all(dtype.is_floating_point for dtype in wanted):
        return error
    (dtype,) = wanted
    method = _METHODS.get(dtype)
    cast = f"module.to({dtype})" if method is None else f"module.{method}()"
    return MismatchError(
        error.message,
        rule=error.rule,
        hint=f"nothing is ever cast: call {cast} before you follow, or publish with the type of the module",
    )
