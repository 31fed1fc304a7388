"""In the worker processes: all memory that a model can reach, as spans that are named and compared by path.

Parameters, buffers and tensors in plain attributes count alike: engines keep derived weights in all three. Through the
map, spans are compared with a checkpoint, bit by bit.
"""

import functools
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch

from deltasync.engines.placement import Placement
from deltasync.format.layout import TensorSpec
from deltasync.format.weights import Bits
from deltasync.torch.tensors import as_bits, bits_type, torch_dtype

_DEPTH = 6
"""How many objects deep attributes are followed, beginning at a module."""
_ENGINES = re.compile(r"(vllm|sglang(?!\.srt\.distributed))(\.|$)")
"""The modules whose objects are looked into: those of engines, but not groups of processes, which have buffers."""
_CACHES = frozenset({"kv_cache"})
"""Attributes that hold the state of requests, not of the model."""
_ADAPTERS = "lora_"
"""How the attributes of adapter layers begin. Adapters are weights of their own, which no base model determines."""
_WRAPPER = ".base_layer"
"""What vLLM adds to the names of modules that adapters wrap, after they are loaded."""
_COMPARE_ELEMENTS = 1 << 24
"""Elements that are compared in one call, which bounds the temporary memory on an accelerator."""


View = tuple[int, tuple[int, ...], tuple[int, ...]]
"""A tensor in a span: the index of its first element there, its shape and its strides."""


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Consecutive elements of one storage that hold tensors of a model. Tied tensors are views of one span."""

    flat: torch.Tensor
    views: Mapping[str, View]
    is_parameter: bool

    @property
    def path(self) -> str:
        """The name of its first tensor."""
        return next(iter(self.views))

    @property
    def bits(self) -> torch.Tensor:
        return as_bits(self.flat)

    @property
    def row_elements(self) -> int:
        """The elements of one row of its largest tensor."""
        shape = max((shape for _, shape, _ in self.views.values()), key=math.prod)
        return max(1, math.prod(shape[1:]))


class Memory:
    """The spans of a model, by ordinal and by the path of a tensor, and the numbers in its attributes."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.spans: list[Span] = []
        self.ordinals: dict[str, int] = {}
        self.numbers: dict[str, float] = {}
        parameters = {path.replace(_WRAPPER, "") for path, _ in model.named_parameters(remove_duplicate=False)}
        by_storage: dict[object, dict[str, torch.Tensor]] = {}
        for path, value in _reachable(model):
            if isinstance(value, float):
                self.numbers[path] = value
            elif value.layout == torch.strided and not value.is_meta and value.numel():
                storage = value.untyped_storage()
                if storage.nbytes():
                    by_storage.setdefault((storage.data_ptr(), value.dtype), {})[path] = value.detach()
        for tensors in by_storage.values():
            self.ordinals.update(dict.fromkeys(tensors, len(self.spans)))
            self.spans.append(_span(tensors, is_parameter=not parameters.isdisjoint(tensors)))

    def sums(self) -> list[tuple[int, int]]:
        """The address of each span and the sum of its bits: equal as long as nothing replaces or writes it."""
        sums = []
        for span in self.spans:
            data = span.flat.view(torch.uint8)
            # In words of 8 bytes where they are aligned: those are read at the speed of memory.
            words = len(data) // 8 * 8 if data.storage_offset() % 8 == 0 else 0
            total = int(data[:words].view(torch.int64).sum()) if words else 0
            sums.append((span.flat.data_ptr(), total + int(data[words:].sum(dtype=torch.int64))))
        return sums


def _span(tensors: Mapping[str, torch.Tensor], *, is_parameter: bool) -> Span:
    first = min(int(t.storage_offset()) for t in tensors.values())
    end = max(
        int(t.storage_offset()) + 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        for t in tensors.values()
    )
    views = {path: (int(t.storage_offset()) - first, tuple(t.shape), tuple(t.stride())) for path, t in tensors.items()}
    some = next(iter(tensors.values()))
    return Span(some.as_strided((end - first,), (1,), first), views, is_parameter)


def _reachable(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor | float]]:
    """Every tensor and number that the modules of a model reach without going through another module."""
    for name, module in model.named_modules(remove_duplicate=False):
        prefix = f"{name}.".replace(f"{_WRAPPER}.", ".") if name else ""
        seen = {id(module)}
        for attributes in (module._parameters, module._buffers, module.__dict__):
            for key, value in attributes.items():
                if key not in ("_parameters", "_buffers", "_modules") and not key.startswith(_ADAPTERS):
                    yield from _inside(prefix + key, key, value, _DEPTH, seen)


def _inside(path: str, key: str, value: Any, depth: int, seen: set[int]) -> Iterator[tuple[str, torch.Tensor | float]]:
    if key in _CACHES:
        return
    if isinstance(value, torch.Tensor | float):
        yield path, value
    elif depth and id(value) not in seen and not isinstance(value, torch.nn.Module):
        for inner_key, inner in _parts(value):
            # Only what has parts is remembered: other values may be freed, and their addresses used again.
            seen.add(id(value))
            yield from _inside(f"{path}.{inner_key}", inner_key, inner, depth - 1, seen)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What a container, a function or an object of an engine holds, with the name of each."""
    if isinstance(value, list | tuple):
        yield from ((str(i), item) for i, item in enumerate(value))
    elif isinstance(value, dict):
        yield from ((str(key), item) for key, item in value.items())
    elif isinstance(value, functools.partial):
        yield from (("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, MethodType):
        yield "self", value.__self__
    elif isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        yield from ((name, cell.cell_contents) for name, cell in cells if _is_set(cell))
    elif _ENGINES.match(type(value).__module__) and "Config" not in type(value).__name__:
        slots = (s for kind in type(value).__mro__ for s in getattr(kind, "__slots__", ()))
        yield from ((s, getattr(value, s)) for s in slots if hasattr(value, s))
        yield from getattr(value, "__dict__", {}).items()


def _is_set(cell: Any) -> bool:
    try:
        return bool(cell.cell_contents is not None)
    except ValueError:
        return False


# Live memory beside a checkpoint


def pair(spans: Sequence[Span], at: Placement, spec: TensorSpec, bits: Bits) -> tuple[torch.Tensor, torch.Tensor]:
    """The live elements of a placement and the wanted ones, cast as engines cast them if the live type differs."""
    flat = spans[at.storage].flat
    live = flat.as_strided(at.shape, at.target_strides, at.target + int(flat.storage_offset()))
    wanted = as_tensor(spec, bits).reshape(-1).as_strided(at.shape, at.source_strides, at.source)
    return live, wanted if wanted.dtype == live.dtype else wanted.to(live.dtype)


def count_differing(spans: Sequence[Span], placements: Iterable[Placement], spec: TensorSpec, bits: Bits) -> int:
    """How many live elements of these placements are not those of a tensor."""
    count = 0
    for placement in placements:
        live, wanted = pair(spans, placement, spec, bits)
        rows = max(1, _COMPARE_ELEMENTS * len(live) // placement.elements)
        for first in range(0, len(live), rows):
            here, there = live[first : first + rows], wanted[first : first + rows]
            there = there.to(here.device)
            is_other = here.view(bits_type(here)) != there.view(bits_type(there))
            if torch_dtype(spec.dtype) != here.dtype:
                # The bits of a NaN after a cast depend on the strides of the elements.
                is_other &= ~(here.isnan() & there.isnan())
            count += int(is_other.sum())
    return count


def as_tensor(spec: TensorSpec, bits: Bits) -> torch.Tensor:
    """A tensor of a checkpoint over the bits of a mapped file, which must not be written to."""
    return from_mapped(bits).view(torch_dtype(spec.dtype)).view(spec.shape)


def from_mapped(bits: Bits) -> torch.Tensor:
    """A tensor of signed integers over the bits of a mapped file, which must not be written to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(bits.view(f"i{bits.dtype.itemsize}"))
