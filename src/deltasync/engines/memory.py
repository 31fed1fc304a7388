"""The memory of a worker: where the elements of a checkpoint lie in it, and how changes get there.

A placement says where elements of one tensor are, as a strided box: a few numbers, and divisions alone give the place
of an element, for any kind of fusing, sharding, transposing and packing.

A stage carries changes in these coordinates from the API server to a worker on the same host: a safetensors file in
shared memory, which the worker maps, and whose values it writes as they are.

A span is memory that a model can reach, named by path. Parameters, buffers and tensors in plain attributes count alike:
engines keep derived weights in all three. Through placements, spans are compared with a checkpoint, bit by bit.
"""

import functools
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray

from deltasync.checkpoint import open_checkpoint
from deltasync.errors import CorruptError
from deltasync.files import temporary_beside
from deltasync.format import limits
from deltasync.format.layout import DTYPES, TensorSpec
from deltasync.format.safetensors import header_bytes
from deltasync.format.weights import Bits
from deltasync.torch.tensors import as_bits, bits_type, torch_dtype

Indices = NDArray[np.int64]
"""Flat indices of elements, in a tensor of the checkpoint or in a span of the worker."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Elements of one checkpoint tensor, and where they are in a span of a worker.

    `source` and `target` are the indices of the first element; strides count elements. Dimensions are in descending
    order of the source's strides, and as few as possible.
    """

    storage: int
    shape: tuple[int, ...]
    source: int
    source_strides: tuple[int, ...]
    target: int
    target_strides: tuple[int, ...]

    @classmethod
    def of(
        cls,
        storage: int,
        shape: Iterable[int],
        *,
        source: int,
        source_strides: Iterable[int],
        target: int,
        target_strides: Iterable[int],
    ) -> "Placement":
        """A placement in its shortest form: without dimensions of one element, and with adjacent dimensions joined."""
        dims = [d for d in zip(shape, source_strides, target_strides, strict=True) if d[0] != 1]
        joined: list[tuple[int, int, int]] = []
        for size, there, here in sorted(dims, key=lambda dim: -dim[1]):
            if joined and joined[-1][1] == size * there and joined[-1][2] == size * here:
                joined[-1] = joined[-1][0] * size, there, here
            else:
                joined.append((size, there, here))
        if not joined:
            joined = [(1, 1, 1)]
        sizes, theirs, ours = zip(*joined, strict=True)
        return cls(storage, sizes, source, theirs, target, ours)

    @classmethod
    def from_json(cls, fields: list[object]) -> "Placement":
        """The placement that `to_json` describes."""
        storage, shape, source, source_strides, target, target_strides = fields
        return cls(storage, tuple(shape), source, tuple(source_strides), target, tuple(target_strides))  # type: ignore[arg-type]

    def to_json(self) -> list[object]:
        """The placement as JSON, for another process."""
        return [self.storage, self.shape, self.source, self.source_strides, self.target, self.target_strides]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def part(self) -> tuple[object, ...]:
        """Identifies the elements of the tensor; equal for workers that hold the same elements."""
        return self.shape, self.source, self.source_strides

    @property
    def is_nested(self) -> bool:
        """Whether divisions find each element: every stride of the source is beyond what the later ones reach."""
        reach = 1
        for size, stride in zip(reversed(self.shape), reversed(self.source_strides), strict=True):
            if stride < reach:
                return False
            reach += (size - 1) * stride
        return True

    def locate(self, indices: Indices) -> tuple[slice | NDArray[np.bool_], Indices]:
        """Which of the ascending `indices` are copied (for `indices[…]`), and their places in the storage."""
        last = self.source + sum((n - 1) * s for n, s in zip(self.shape, self.source_strides, strict=True))
        first, end = np.searchsorted(indices, (self.source, last + 1)).tolist()
        rest = indices[first:end] - self.source
        if len(self.shape) == 1 and self.source_strides[0] == 1:
            return slice(first, end), rest * self.target_strides[0] + self.target
        places = np.full_like(rest, self.target)
        is_copied = np.ones(len(rest), np.bool_)
        for size, there, here in zip(self.shape, self.source_strides, self.target_strides, strict=True):
            at, rest = np.divmod(rest, there)
            is_copied &= at < size
            places += at * here
        is_copied &= rest == 0
        whole = np.zeros(len(indices), np.bool_)
        whole[first:end] = is_copied
        return whole, places[is_copied]


def is_covered(elements: int, ranks: Iterable[Iterable[Placement]]) -> bool:
    """Whether the placements of all ranks together have every element of a tensor."""
    parts = {placement.part: placement for placements in ranks for placement in placements}
    if elements in (0, *(placement.elements for placement in parts.values())):
        return True
    if sum(placement.elements for placement in parts.values()) < elements:
        return False
    is_copied = np.zeros(elements, np.bool_)
    for part in parts.values():
        np.lib.stride_tricks.as_strided(is_copied[part.source :], part.shape, part.source_strides)[...] = True
    return bool(is_copied.all())


def fit(storage: int, places: Indices, sources: Indices, *, at_most: int) -> list[Placement] | None:
    """Placements that say where each of the `sources` is, for ascending `places`; None if it takes more than `at_most`.

    The innermost run of equal steps is a dimension if the whole sequence consists of such runs; then the beginnings of
    the runs are a shorter sequence of the same kind. Where that ends, the sequence is cut.
    """
    placements: list[Placement] = []
    while len(places):
        dims: list[tuple[int, int, int]] = []
        here, there = places, sources
        while len(here) > 1:
            step, jump = int(here[1] - here[0]), int(there[1] - there[0])
            is_same = (np.diff(here) == step) & (np.diff(there) == jump)
            size = len(here) if is_same.all() else int(np.argmin(is_same)) + 1
            whole = len(here) // size
            if whole > 1:
                is_run = np.append(is_same[: whole * size - 1], True).reshape(whole, size)[:, :-1].all(axis=1)
                whole = whole if is_run.all() else int(np.argmin(is_run))
            dims.append((size, jump, step))
            here, there = here[: whole * size : size], there[: whole * size : size]
        placement = _box(storage, dims, source=int(sources[0]), target=int(places[0]))
        while not placement.is_nested:
            # Divisions do not find such elements, for example those in descending order: each box is a placement.
            dims.pop()
            placement = _box(storage, dims, source=int(sources[0]), target=int(places[0]))
        if len(placements) == at_most:
            return None
        placements.append(placement)
        places, sources = places[placement.elements :], sources[placement.elements :]
    return placements


def _box(storage: int, dims: Sequence[tuple[int, int, int]], *, source: int, target: int) -> Placement:
    sizes, jumps, steps = zip(*dims, strict=True) if dims else ((), (), ())
    return Placement.of(storage, sizes, source=source, source_strides=jumps, target=target, target_strides=steps)


def joined(placements: Iterable[Placement]) -> list[Placement]:
    """The same placements, with those that repeat at equal distances as one with a further dimension."""
    result: list[Placement] = []
    for (storage, shape, theirs, ours), group in groupby(
        placements, key=lambda p: (p.storage, p.shape, p.source_strides, p.target_strides)
    ):
        alike = list(group)
        places, sources = np.array([[placement.target, placement.source] for placement in alike], np.int64).T
        starts = fit(storage, places, sources, at_most=len(alike)) if (np.diff(places) > 0).all() else None
        boxes = [
            Placement.of(
                storage,
                (*start.shape, *shape),
                source=start.source,
                source_strides=(*start.source_strides, *theirs),
                target=start.target,
                target_strides=(*start.target_strides, *ours),
            )
            for start in starts or ()
        ]
        result += boxes if boxes and all(box.is_nested for box in boxes) else alike
    return result


# Stages

_BITS = {1: DTYPES["U8"], 2: DTYPES["U16"], 4: DTYPES["U32"], 8: DTYPES["U64"]}
_POSITIONS = DTYPES["U32"]
_NAME = re.compile(r"(\d{1,18})\.(\d{1,18})\.positions")
_HINT = "stage the version again"
SEGMENT_ELEMENTS = limits.BLOCK_ELEMENTS_MAX
"""Elements of a storage that one segment can address: as many as a kernel overwrites in one call."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """New bits for elements of one storage, at `first` plus each of the ascending `positions`."""

    storage: int
    first: int
    positions: NDArray[np.uint32]
    values: Bits


def segments(storage: int, writes: Sequence[tuple[Indices, Bits]]) -> Iterator[Segment]:
    """The writes to one storage as segments, with every place once. Where writes overlap, the last one wins."""
    places = np.concatenate([indices for indices, _ in writes])
    values = np.concatenate([bits for _, bits in writes])
    if (np.diff(places) <= 0).any():
        order = np.argsort(places, kind="stable")
        places, values = places[order], values[order]
        is_last = np.append(places[1:] != places[:-1], True)
        places, values = places[is_last], values[is_last]
    for first in range(0, int(places[-1]) + 1 if len(places) else 0, SEGMENT_ELEMENTS):
        lo, hi = np.searchsorted(places, (first, first + SEGMENT_ELEMENTS)).tolist()
        if lo < hi:
            yield Segment(storage, first, (places[lo:hi] - first).astype(np.uint32), values[lo:hi])


def write_stage(path: Path, staged: Iterable[Segment]) -> int:
    """Write segments to a file and return its size in bytes."""
    tensors: list[tuple[TensorSpec, NDArray[np.unsignedinteger]]] = []
    for segment in staged:
        name = f"{segment.storage}.{segment.first}"
        tensors.append((TensorSpec(f"{name}.positions", _POSITIONS, segment.positions.shape), segment.positions))
        width = _BITS[segment.values.dtype.itemsize]
        tensors.append((TensorSpec(f"{name}.values", width, segment.values.shape), segment.values))
    # The widest tensors come first, so that all are aligned and can be mapped.
    tensors.sort(key=lambda pair: -pair[0].dtype.width)
    header = header_bytes([spec for spec, _ in tensors], {})
    size = len(header)
    with temporary_beside(path) as temporary:
        with temporary.open("xb") as file:
            file.write(header)
            for _, array in tensors:
                size += file.write(np.ascontiguousarray(array).data.cast("B"))
        temporary.replace(path)
    return size


def read_stage(path: Path) -> list[Segment]:
    """The segments of a file, mapped; CorruptError unless it is as `write_stage` writes it."""
    weights = open_checkpoint(path).weights
    arrays = {spec.name: bits for spec, bits in zip(weights.layout.tensors, weights.arrays, strict=True)}
    result = []
    for name, positions in arrays.items():
        match = _NAME.fullmatch(name)
        if match is not None:
            values = arrays.get(f"{match[1]}.{match[2]}.values")
            if values is None or not _is_ascending(positions) or len(values) != len(positions):
                raise CorruptError(
                    f"{path}: {name!r:.80} must be ascending, with as many values", rule="stage.pair", hint=_HINT
                )
            result.append(Segment(int(match[1]), int(match[2]), positions, values))
    if len(arrays) != 2 * len(result):
        raise CorruptError(f"{path} has tensors that are neither positions nor values", rule="stage.name", hint=_HINT)
    return result


def _is_ascending(positions: Bits) -> TypeGuard[NDArray[np.uint32]]:
    return positions.dtype == np.uint32 and len(positions) > 0 and not (positions[1:] <= positions[:-1]).any()


# Spans

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
