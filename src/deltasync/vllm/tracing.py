"""In the worker processes: the map from checkpoint to runtime coordinates, recorded from vLLM's own loader.

The loader runs over tensors without content, and its copies are recorded instead of performed. Each copy is strided, so
divisions alone give the place of an element, for any kind of fusing and sharding.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deltasync.format.layout import Layout
from deltasync.torch.tensors import torch_dtype

Indices = NDArray[np.int64]
"""Flat indices of elements, in a tensor of the checkpoint or in a storage of the worker."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements of one checkpoint tensor, and where they go in a storage of a worker.

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
    ) -> "Copy":
        """A copy in its shortest form: without dimensions of one element, and with adjacent dimensions joined."""
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
    def from_json(cls, fields: list[object]) -> "Copy":
        """The copy that `to_json` describes."""
        storage, shape, source, source_strides, target, target_strides = fields
        return cls(storage, tuple(shape), source, tuple(source_strides), target, tuple(target_strides))  # type: ignore[arg-type]

    def to_json(self) -> list[object]:
        """The copy as JSON, for another process."""
        return [self.storage, self.shape, self.source, self.source_strides, self.target, self.target_strides]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def part(self) -> tuple[object, ...]:
        """Identifies the elements of the tensor; equal for workers that hold the same elements."""
        return self.shape, self.source, self.source_strides

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


def is_covered(elements: int, ranks: Iterable[Iterable[Copy]]) -> bool:
    """Whether the copies of all ranks can cover every element of a tensor. Equal parts count once."""
    parts = {copy.part: copy.elements for copies in ranks for copy in copies}
    return sum(parts.values()) >= elements


_aten = torch.ops.aten


@dataclass(slots=True)
class Trace:
    """What the loader does with each tensor. `errors` has the tensors that it rejects.

    `computed` has the tensors that it does not only copy, with the storages that the result goes to; the set is empty
    if these are not known.
    """

    copies: dict[str, list[Copy]] = field(default_factory=dict)
    computed: dict[str, set[int]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    loaded: set[str] = field(default_factory=set)
    """Parameters of the model that the loader reports as filled."""

    def storages(self, name: str) -> set[int]:
        """The storages that a tensor is known to go to."""
        return {copy.storage for copy in self.copies.get(name, ())} | self.computed.get(name, set())

    def filled(self) -> dict[int, int]:
        """How many elements of each storage are copied to."""
        elements: dict[int, int] = {}
        for copy in (copy for copies in self.copies.values() for copy in copies):
            elements[copy.storage] = elements.get(copy.storage, 0) + copy.elements
        return elements

    def unfilled(self, parameters: Iterable[tuple[str, int | None]]) -> list[str]:
        """Those of the parameters, each given with its storage, that no tensor goes to."""
        if not all(self.computed.values()):
            return []
        filled = set().union(*(self.storages(name) for name in (*self.copies, *self.computed)))
        return sorted(n for n, storage in parameters if n not in self.loaded and storage not in {None, *filled})


class Storages:
    """The memory of a model's parameters and buffers, by ordinal; tied parameters have one storage."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.flat: list[torch.Tensor] = []
        self._ordinals: dict[int, int] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in self._ordinals:
                self._ordinals[storage.data_ptr()] = len(self.flat)
                self.flat.append(torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage))

    def ordinal(self, tensor: torch.Tensor) -> int | None:
        """The storage that a tensor is a view of; None if it is not in one of the model's."""
        if tensor.is_meta:
            return None
        return self._ordinals.get(tensor.untyped_storage().data_ptr())


def trace(model: Any, layout: Layout, storages: Storages) -> Trace:
    """What `model.load_weights` does with the tensors of a layout."""
    result = Trace()
    probes = {t.name: torch.empty(t.shape, dtype=torch_dtype(t.dtype), device="meta") for t in layout.tensors}
    recorder = _Recorder(storages, probes, result)
    waiting: Sequence[str] = [t.name for t in layout.tensors]
    while waiting:
        given: list[str] = []
        try:
            with torch.no_grad(), recorder:
                result.loaded |= set(model.load_weights(_pairs(probes, waiting, given)) or ())
            return result
        except _NeedsContentError:
            result.computed.setdefault(given[-1], set())
            waiting = waiting[len(given) :]
        # Each architecture has its own loader, which may raise anything for a tensor that it cannot take.
        except Exception as error:  # noqa: BLE001
            result.errors[given[-1]] = f"{type(error).__name__}: {error!s:.300}"
            result.copies.pop(given[-1], None)
            result.computed.pop(given[-1], None)
            waiting = waiting[len(given) :]
    return result


def _pairs(
    probes: Mapping[str, torch.Tensor], names: Sequence[str], given: list[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The probes by name, each noted in `given` before the loader gets it."""
    for name in names:
        given.append(name)
        yield name, probes[name]


class _NeedsContentError(Exception):
    """The loader reads the values of a tensor."""


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what the loader does with probes instead of doing it. Nothing is written to any storage."""

    def __init__(self, storages: Storages, probes: Mapping[str, torch.Tensor], result: Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = storages
        self._probes = {probe.untyped_storage()._cdata: name for name, probe in probes.items()}
        self._types = {name: probe.dtype for name, probe in probes.items()}
        self._derived: dict[int, set[str]] = {}
        self._kept: list[torch.Tensor] = []
        """Storages are identified by their address, so none may be freed."""
        self._trace = result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        names = set().union(*(self._names(leaf) for leaf in tree_leaves((args, kwargs))))
        if names and func is _aten._local_scalar_dense.default:
            raise _NeedsContentError
        if names and func is _aten._to_copy.default:
            if args[0].is_meta and self._probe(args[0]) and kwargs.get("dtype") in (None, args[0].dtype):
                # A move to another device without a cast: the elements are still the same.
                return args[0]
            kwargs = {**kwargs, "device": "meta"}
        written = _written(func, args, kwargs)
        if not any(names or self._storages.ordinal(tensor) is not None for tensor in written if not tensor.is_meta):
            made = func(*args, **kwargs)
            for tensor in written:
                # A probe that is written to no longer stands for the checkpoint's tensor.
                self._probes.pop(tensor.untyped_storage()._cdata, None)
            self._derive(tree_leaves(made), names)
            return made
        for tensor in written:
            self._note(func, tensor, args, names)
        return written[0] if func._schema.returns else None

    def _note(self, func: Any, target: torch.Tensor, args: Any, names: set[str]) -> None:
        storage = self._storages.ordinal(target)
        if not names or not target.numel():
            # A write to a parameter that does not come from a probe is padding, which is already there.
            return
        if storage is None:
            self._derive([target], names)
            return
        name = self._probe(args[1]) if func is _aten.copy_.default else None
        if name is None or not self._is_plain(name, storage, target, args[1]):
            for name in names:
                self._trace.computed.setdefault(name, set()).add(storage)
            return
        source = args[1].expand(target.shape)
        copy = Copy.of(
            storage,
            target.shape,
            source=int(source.storage_offset()),
            source_strides=source.stride(),
            target=int(target.storage_offset()),
            target_strides=target.stride(),
        )
        self._trace.copies.setdefault(name, []).append(copy)

    def _is_plain(self, name: str, storage: int, target: torch.Tensor, source: torch.Tensor) -> bool:
        """Whether the copy is element by element, from the checkpoint's type to the storage's type."""
        given, stored = self._types[name], self._storages.flat[storage].dtype
        is_typed = (source.dtype, target.dtype) == (given, stored)
        is_bits = source.dtype == target.dtype and given == stored and given.itemsize == target.dtype.itemsize
        return source.numel() == target.numel() and (is_typed or is_bits)

    def _probe(self, tensor: torch.Tensor) -> str | None:
        return self._probes.get(tensor.untyped_storage()._cdata)

    def _names(self, leaf: Any) -> set[str]:
        """The names of the probes that a tensor was computed from."""
        if not isinstance(leaf, torch.Tensor):
            return set()
        name = self._probe(leaf)
        return self._derived.get(leaf.untyped_storage()._cdata, set()) if name is None else {name}

    def _derive(self, made: Iterable[Any], names: set[str]) -> None:
        for leaf in made:
            if names and isinstance(leaf, torch.Tensor) and self._probe(leaf) is None:
                self._kept.append(leaf)
                self._derived.setdefault(leaf.untyped_storage()._cdata, set()).update(names)


def _written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operation writes to."""
    if not func._schema.is_mutable:
        return []
    arguments = func._schema.arguments
    given = {**{argument.name: value for argument, value in zip(arguments, args, strict=False)}, **kwargs}
    written = [given.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return [leaf for leaf in tree_leaves(written) if isinstance(leaf, torch.Tensor)]
