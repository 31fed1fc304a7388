"""Torch tensors as weights: which tensors are published under which names, and their raw bits, cast if requested."""

import threading
from collections.abc import Iterable, Mapping
from functools import cache

import numpy as np
import torch

from deltasync.errors import InvalidInputError
from deltasync.format.layout import DTYPES, DType, Layout, TensorSpec
from deltasync.format.weights import Bits, Region, Runs, region_keys
from deltasync.trainer.capture import Masters

NamedTensors = Iterable[tuple[str, torch.Tensor]]
_COMPILED = "_orig_mod."
"""What torch.compile adds to the names of a submodule that was compiled on its own."""

TorchState = torch.nn.Module | Mapping[str, torch.Tensor]


def named_tensors(weights: TorchState) -> dict[str, torch.Tensor]:
    """The tensors of a module or state dict. Tied weights come once, under the name that the checkpoint uses."""
    state: Mapping[str, object]
    if isinstance(weights, torch.nn.Module):
        module = unwrapped(weights)
        state = {name.replace(_COMPILED, ""): tensor for name, tensor in module.state_dict().items()}
        # Names that transformers leaves out of a checkpoint because another name has their weights.
        names = getattr(module, "all_tied_weights_keys", None)
        names = getattr(module, "_tied_weights_keys", None) if names is None else names
        tied = frozenset(() if names is None else names)
    else:
        state, tied = weights, frozenset()
    tensors: dict[str, torch.Tensor] = {}
    by_memory: dict[object, str] = {}
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise InvalidInputError(
                f"{name!r:.200} is a {type(tensor).__qualname__}, not a tensor",
                hint="give a module or its state dict; leave out what is not a weight",
            )
        tensors[name] = tensor.detach()
        local = getattr(tensor, "_local_tensor", tensor)
        # Equal for two names of the same memory, seen the same way.
        place: object = name
        if tensor.numel() and tensor.device.type != "meta" and local.numel():
            place = local.data_ptr(), local.device, local.dtype, tuple(local.shape), local.stride()
        kept = by_memory.setdefault(place, name)
        if kept in tied and name not in tied:
            by_memory[place] = name
    kept_names = set(by_memory.values())
    return {name: tensor for name, tensor in tensors.items() if name in kept_names}


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The model inside DistributedDataParallel and torch.compile: their names are not those of the checkpoint."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if inner is None and isinstance(module, torch.nn.parallel.DistributedDataParallel):
            inner = module.module
        if not isinstance(inner, torch.nn.Module):
            return module
        module = inner


_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
}
_GRAIN = 1 << 15  # elements from which on torch shares an operation among threads
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def dtype_of(tensor: torch.Tensor, cast: torch.dtype | None) -> torch.dtype:
    """The type that is published: `cast` replaces floating-point types, never integers."""
    return cast if cast is not None and tensor.is_floating_point() else tensor.dtype


def element_type(name: str, dtype: torch.dtype) -> DType:
    """The element type of the format; InvalidInputError names the tensor that has none."""
    known = _NAMES.get(dtype)
    if known is None or known not in DTYPES:
        raise InvalidInputError(
            f"tensor {name!r:.200} has the type {dtype}, which cannot be published",
            hint=f"cast it, or leave it out; these can be published: {', '.join(DTYPES)}",
        )
    return DTYPES[known]


def require_dtype(dtype: object) -> None:
    """InvalidInputError unless floating-point weights can be published as this type."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or _NAMES.get(dtype) not in DTYPES:
        raise InvalidInputError(
            f"dtype must be a floating-point type of torch that can be published, not {dtype!r:.80}",
            hint="torch.bfloat16, for example; None publishes weights as they are",
        )


def torch_dtype(dtype: DType) -> torch.dtype:
    """The type of torch for an element type of the format."""
    return next(known for known, name in _NAMES.items() if name == dtype.name)


def layout_of(
    tensors: Mapping[str, torch.Tensor], *, cast: torch.dtype | None = None, known: Layout | None = None
) -> Layout:
    """The layout of tensors as they are published. `known`: one that it probably is, which is then not built again."""
    specs = {}
    for name, tensor in tensors.items():
        specs[name] = TensorSpec(name, element_type(name, dtype_of(tensor, cast)), tuple(tensor.shape))
    if known is not None and specs == {spec.name: spec for spec in known.tensors}:
        return known
    return Layout.of(specs.values())


def bits_dtype(width: int) -> torch.dtype:
    """The integer type of this many bytes, which shows raw bits."""
    return _BITS[width]


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as flat integers of its width: what is compared are bits, never floats."""
    return tensor.reshape(-1).view(_BITS[tensor.element_size()])


def bits_type(tensor: torch.Tensor) -> torch.dtype:
    """The integers that show the bits of a tensor."""
    return _BITS[tensor.element_size()]


def host_bits(tensor: torch.Tensor, dtype: DType) -> Bits:
    """The bits of a tensor as an array; no copy where it is contiguous and on the host."""
    return as_bits(tensor.contiguous().cpu()).numpy().view(dtype.bits_dtype)


class TorchWeights:
    """Tensors in host memory, of any strides, seen as `cast` where they are floating-point.

    `is_converted`: some have to be cast or put in order first. A region of them is valid until its thread asks for the
    next.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], *, cast: torch.dtype | None = None, known: Layout | None = None
    ) -> None:
        self.layout = layout_of(tensors, cast=cast, known=known)
        self._tensors: list[torch.Tensor] = []
        self._dtypes: list[torch.dtype] = []
        self._scratch = threading.local()
        self.is_converted = False
        for spec in self.layout.tensors:
            tensor = tensors[spec.name]
            dtype = dtype_of(tensor, cast)
            self._tensors.append(tensor)
            self._dtypes.append(dtype)
            self.is_converted |= tensor.dtype != dtype or not tensor.is_contiguous()

    def region(self, runs: Runs) -> Region:
        """The elements that `runs` names: views of the tensors' own memory where nothing has to be cast."""
        rows, arrays, room = runs.tolist(), [], None
        spec = self.layout.tensors[rows[0][0]]
        if self.is_converted:
            # Where this thread casts: fresh memory for every region would cost more than the cast.
            dtype, elements = self._dtypes[rows[0][0]], int(runs[:, 2].sum())
            room = getattr(self._scratch, "room", None)
            if room is None or not room.holds(dtype, elements):
                room = self._scratch.room = _Room(dtype, elements)
            room.clear()
        for ordinal, first, count in rows:
            tensor, dtype = self._tensors[ordinal], self._dtypes[ordinal]
            piece = _flat_slice(tensor, first, count)
            if room is not None and tensor.dtype != dtype and tensor.device.type == "cpu":
                piece = room.cast(piece)
            arrays.append(host_bits(piece.to(dtype), spec.dtype))
        local = np.column_stack((np.arange(len(rows)), np.zeros_like(runs[:, 0]), runs[:, 2]))
        return Region(spec.dtype, tuple(arrays), local, region_keys(self.layout, runs))

    def masters(self, runs: Runs) -> Masters | None:
        """The float32 elements that `runs` names, in place; None unless all of them are only to be rounded."""
        nan, rows, arrays = _nan_bits(), runs.tolist(), []
        if nan is None:
            return None
        for ordinal, _, _ in rows:
            tensor = self._tensors[ordinal]
            is_plain = tensor.device.type == "cpu" and tensor.is_contiguous()
            is_rounded = tensor.dtype == torch.float32 and self._dtypes[ordinal] == torch.bfloat16
            if not is_plain or not is_rounded:
                return None
            arrays.append(host_bits(tensor, DTYPES["F32"]))
        local = np.column_stack((np.arange(len(rows)), runs[:, 1], runs[:, 2]))
        return Region(DTYPES["F32"], tuple(arrays), local, region_keys(self.layout, runs)), nan


class _Room:
    """Memory that casts go to, one behind the other."""

    def __init__(self, dtype: torch.dtype, elements: int) -> None:
        self._memory = torch.empty(elements, dtype=dtype)
        self._used = 0
        # Beyond two threads torch would start a team of them for each of our own: slices below its grain stay in one.
        self._slice = _GRAIN - 1 if torch.get_num_threads() > 2 else elements

    def holds(self, dtype: torch.dtype, elements: int) -> bool:
        return self._memory.dtype == dtype and self._memory.numel() >= elements

    def clear(self) -> None:
        self._used = 0

    def cast(self, piece: torch.Tensor) -> torch.Tensor:
        target = self._memory[self._used : self._used + piece.numel()]
        self._used += piece.numel()
        if piece.numel() <= self._slice:
            target.copy_(piece)
        else:
            torch._foreach_copy_(torch.split(target, self._slice), torch.split(piece, self._slice))
        return target


@cache
def _nan_bits() -> int | None:
    """What torch's cast to bfloat16 makes of every NaN: it differs by machine. None where it depends on the NaN."""
    every = np.array([0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFC00000, 0xFFFFFFFF], np.uint32)
    # Many of each, so that torch uses the vector code that tensors go through.
    cast = torch.from_numpy(np.repeat(every, 32).view(np.int32)).view(torch.float32).to(torch.bfloat16)
    results = set(host_bits(cast, DTYPES["BF16"]).tolist())
    return results.pop() if len(results) == 1 else None


def _flat_slice(tensor: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Elements of a tensor in C order. Of one that is not contiguous only the rows that hold them are copied."""
    if tensor.is_contiguous():
        return tensor.reshape(-1)[first : first + count]
    if tensor.dim() == 1:
        return tensor[first : first + count].contiguous()
    row = tensor[0].numel()
    top = first // row
    rows = tensor[top : -(-(first + count) // row)].contiguous().reshape(-1)
    return rows[first - top * row : first - top * row + count]
