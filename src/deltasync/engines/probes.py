"""In the worker processes: the map from checkpoint to memory, read from twins that hold the indices of their elements.

A twin is the served model once more, loaded and processed by the engine's own code. It is loaded with one digit of
each element's own index, as bits that loading does not change. Where a digit is found in memory, that element is; the
digits of a few twins give the whole index. One more twin with other weights proves these findings and shows which
further memory depends on weights. Nothing is assumed about the loader or about what follows loading.
"""

import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from deltasync.engines.memory import Indices, Memory, Placement, Span, fit, joined
from deltasync.errors import MismatchError
from deltasync.format.layout import DType, TensorSpec
from deltasync.format.weights import Bits
from deltasync.torch.tensors import as_bits, torch_dtype

NamedTensors = Iterator[tuple[str, torch.Tensor]]
Build = Callable[[NamedTensors], torch.nn.Module]
"""Builds a twin, loads it with these tensors and processes it as the engine does. It raises what the engine raises."""

_CHUNK_ELEMENTS = 1 << 22
"""Elements that are explained in one step, which bounds the temporary memory."""
_RUN_ELEMENTS = 1 << 12
"""Longer runs are found by comparison; where runs are shorter, every element is decoded."""
_PLACEMENTS_MAX = 1 << 10
"""If a chunk needs more placements of one tensor, its elements count as computed."""
_DIGIT_BITS = 14
"""Of types with 16 bits or more. Both kinds of 16-bit floats have normal numbers from 0x0400 to 0x43FF."""
_FIRST_PATTERN = 0x0400
_NOISE_ELEMENTS = 1_000_003
"""The period of the weights that prove the map. It is a prime, so that no shape repeats with it."""

_HINT = "serve the model that is trained, in the same layout"

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")
"""How the names of the tensors of a layer begin, in the checkpoints of all common architectures."""


def layer_of(name: str) -> int | None:
    """The number of the layer that a tensor belongs to; None if it belongs to no layer."""
    match = _LAYER.search(name)
    return None if match is None else int(match[1])


@dataclass(frozen=True, slots=True, eq=False)
class Alphabet:
    """The digits of elements of one type: digit `d` has the bits `base + (d << shift)`. No noise has such bits."""

    dtype: DType
    digit_bits: int
    base: int
    shift: int
    noise: Bits

    @classmethod
    def of(cls, dtype: DType, served: torch.dtype) -> "Alphabet":
        """Digits that survive a cast to the type that the model is served in, and to a wider one."""
        kind = torch_dtype(dtype)
        top = 1 << (8 * dtype.width - 1)
        if dtype.name == "BOOL":
            digit_bits, base, shift, top = 0, 0, 0, 0
        elif not kind.is_floating_point:
            # As floats, these are still the same numbers: a model that takes integers for floats is found out.
            digit_bits, base, shift = 7, 0, 0
        elif dtype.width == 1:
            digit_bits, base, shift = 6, 8, 0
        elif dtype.width == 2 and served in (kind, torch.float32):
            digit_bits, base, shift = _DIGIT_BITS, _FIRST_PATTERN, 0
        elif dtype.width == 4 and served in (torch.bfloat16, torch.float32):
            digit_bits, base, shift = _DIGIT_BITS, _FIRST_PATTERN << 16, 16
        else:
            # Whole numbers from 128 to 255 have 8 significant bits, which each of the types can hold.
            first, second = _unsigned(torch.tensor([128, 129]).to(kind)).tolist()
            digit_bits, base, shift = 7, first, (second - first).bit_length() - 1
        # Noise is negative and of usual size: what an engine computes from it is not the same for most elements.
        letters = 1 << max(1, digit_bits)
        random = np.random.default_rng(0x5EED).integers(letters * 7 // 8, letters, _NOISE_ELEMENTS, np.uint64)
        noise = (random << np.uint64(shift)) + np.uint64(base | top)
        return cls(dtype, digit_bits, base, shift, noise.astype(dtype.bits_dtype))

    def digits(self, elements: int) -> int:
        """How many digits identify each of so many elements; 0 if the type has no digits."""
        return math.ceil(max(1, (elements - 1).bit_length()) / self.digit_bits) if self.digit_bits else 0

    def weights(self, digit: int | None, first: int, count: int) -> torch.Tensor:
        """One digit of each of the indices from `first` on; noise for None."""
        letters = (np.arange(1 << self.digit_bits, dtype=np.uint64) << np.uint64(self.shift)) + np.uint64(self.base)
        period = letters.astype(self.dtype.bits_dtype) if digit is not None and self.digit_bits else self.noise
        if not digit:
            bits = np.resize(np.roll(period, -(first % len(period))), count)
        else:
            repeats = 1 << (digit * self.digit_bits)
            start, end = first // repeats, -(-(first + count) // repeats)
            edges = np.clip(np.arange(start, end + 1) * repeats, first, first + count)
            bits = np.repeat(period[np.arange(start, end) % len(period)], np.diff(edges))
        return torch.from_numpy(bits.view(f"i{self.dtype.width}")).view(torch_dtype(self.dtype))

    def decode(self, held: torch.Tensor) -> Indices:
        """The digits that memory holds; -1 where it holds none."""
        own = held.to(torch_dtype(self.dtype))
        digits = _unsigned(own).astype(np.int64) - self.base
        is_digit = (digits >= 0) & (digits >> self.shift < 1 << self.digit_bits)
        is_digit &= digits & ((1 << self.shift) - 1) == 0
        if own.dtype != held.dtype:
            is_digit &= _unsigned(own.to(held.dtype)) == _unsigned(held)
        return np.where(is_digit, digits >> self.shift, -1)


class Sources:
    """The elements of the tensors of a feed, numbered type by type: what the twins are loaded with."""

    def __init__(self, tensors: Sequence[TensorSpec], served: torch.dtype) -> None:
        self._tensors = tuple(tensors)
        by_type: dict[DType, list[TensorSpec]] = {}
        for spec in tensors:
            if spec.elements:
                by_type.setdefault(spec.dtype, []).append(spec)
        self.types: list[tuple[Alphabet, list[TensorSpec], Indices]] = []
        self.elements = 0
        for dtype, specs in by_type.items():
            starts = np.cumsum([self.elements, *(spec.elements for spec in specs)])
            self.types.append((Alphabet.of(dtype, served), specs, starts))
            self.elements = int(starts[-1])
        self.digits = max((alphabet.digits(self.elements) for alphabet, _, _ in self.types), default=0)

    def weights(self, digit: int | None) -> NamedTensors:
        """All tensors, each element with one digit of its index; noise for None."""
        firsts = {
            spec.name: (alphabet, int(first))
            for alphabet, specs, starts in self.types
            for spec, first in zip(specs, starts[:-1], strict=True)
        }
        for spec in self._tensors:
            if spec.elements:
                alphabet, first = firsts[spec.name]
                yield spec.name, alphabet.weights(digit, first, spec.elements).view(spec.shape)
            else:
                yield spec.name, torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))


@dataclass(slots=True)
class WeightMap:
    """Which memory of a worker depends on weights, and how: what probes find.

    `placements`: where elements are copied to, by tensor of the feed. `computed`: the spans that depend on weights in
    another way than by copies. `elements`: how many elements of memory depend on weights. `paths` and `spans`: what
    was looked at.
    """

    placements: dict[str, list[Placement]] = field(default_factory=dict)
    computed: list[int] = field(default_factory=list)
    elements: int = 0
    paths: set[str] = field(default_factory=set)
    spans: frozenset[int] = frozenset()


def map_weights(
    live: Memory,
    build: Build,
    tensors: Sequence[TensorSpec],
    served: torch.dtype,
    *,
    known: frozenset[int] = frozenset(),
) -> WeightMap:
    """Where the elements of these tensors are in live memory. The spans in `known` are passed over.

    MismatchError if the model does not take a tensor or lacks one, or if a twin is not like the live model.
    """
    sources = Sources(tensors, served)
    result = WeightMap()
    held: dict[int, list[torch.Tensor]] = {}
    numbers: dict[str, set[str]] = {}
    for digit in (*range(sources.digits), None):
        # One twin exists at a time. What is kept of it is on the host.
        twin = Memory(_built(build, sources.weights(digit)))
        for ordinal, part in _alike(live, twin):
            if ordinal not in known:
                held.setdefault(ordinal, []).append(part.cpu())
        for path, number in twin.numbers.items():
            numbers.setdefault(path, set()).add(repr(number))
        result.paths.update(twin.ordinals)
        del twin
    for path, values in numbers.items():
        if len(values) > 1:
            raise MismatchError(
                f"the model keeps the number {path!r:.200}, which the engine computes from weights when it loads them",
                rule="engine.derived",
                hint="restart the server for each version of this model",
            )
    result.spans = frozenset(held)
    for ordinal, twins in held.items():
        _map_span(ordinal, live.spans[ordinal], twins, sources, result)
    return result


def _built(build: Build, weights: NamedTensors) -> torch.nn.Module:
    given: list[str] = []

    def noted() -> NamedTensors:
        for name, tensor in weights:
            given.append(name)
            yield name, tensor

    try:
        with torch.no_grad(), _filled():
            return build(noted())
    # Each architecture has its own loader, which may raise anything for a tensor that it cannot take.
    except Exception as error:
        what = f"the model does not take {given[-1]!r:.200}" if given else "the model cannot be built again"
        raise MismatchError(
            f"{what}: {type(error).__name__}: {error!s:.300}", rule="engine.model", hint=_HINT
        ) from error


@contextmanager
def _filled() -> Iterator[None]:
    """Fill memory that is allocated and not initialized with NaN, or with the largest integer."""
    was_enabled = torch.are_deterministic_algorithms_enabled()
    was_warning = torch.is_deterministic_algorithms_warn_only_enabled()
    was_filling = torch._C._get_deterministic_fill_uninitialized_memory()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch._C._set_deterministic_fill_uninitialized_memory(True)
    try:
        yield
    finally:
        torch._C._set_deterministic_fill_uninitialized_memory(was_filling)
        torch.use_deterministic_algorithms(was_enabled, warn_only=was_warning)


def _alike(live: Memory, twin: Memory) -> Iterator[tuple[int, torch.Tensor]]:
    """The memory of a twin by span of the live model, cut to the tensors that both have."""
    shared = {span.flat.data_ptr() for span in live.spans}
    for span in twin.spans:
        if span.flat.data_ptr() in shared:
            # vLLM gives some constants, such as those of rotary embeddings, to every model of the process.
            continue
        ordinals = {live.ordinals.get(path) for path in span.views}
        ordinal = ordinals.pop()
        if ordinal is None and not ordinals:
            continue
        if ordinal is None or ordinals or not _is_alike(live.spans[ordinal], span):
            raise MismatchError(
                f"the live model holds {span.path!r:.200} in another form than the model that is built from its "
                "configuration",
                rule="engine.twin",
                hint="it may have been shared or replaced since; report the model and the arguments of the server",
            )
        yield ordinal, span.flat


def _is_alike(live: Span, twin: Span) -> bool:
    """Whether both hold the same tensors at the same places."""
    if live.flat.dtype != twin.flat.dtype or len(live.flat) != len(twin.flat):
        return False
    return all(live.views.get(path) == view for path, view in twin.views.items())


def _map_span(ordinal: int, span: Span, twins: Sequence[torch.Tensor], sources: Sources, result: WeightMap) -> None:
    """Find out what each element of a span is: an element of a tensor, a constant, or computed from weights."""
    chunk = min(max(1, _CHUNK_ELEMENTS // span.row_elements) * span.row_elements, 1 << 26)
    placements: dict[str, list[Placement]] = {}
    is_computed, is_filled = False, True
    first = 0
    while first < len(span.flat) and not is_computed:
        end = min(len(span.flat), (first // chunk + 1) * chunk)
        run = _run(first, end, twins, sources)
        if run is not None and run[2] >= min(_RUN_ELEMENTS, end - first):
            name, source, count = run
            box = Placement.of(ordinal, (count,), source=source, source_strides=(1,), target=first, target_strides=(1,))
            placements.setdefault(name, []).append(box)
            first += count
            continue
        parts = [twin[first:end] for twin in twins]
        is_explained = np.zeros(end - first, np.bool_)
        for alphabet, specs, starts in sources.types:
            indices = _indices(alphabet, parts, starts)
            owners = np.searchsorted(starts, indices, side="right") - 1
            for owner in np.unique(owners[indices >= 0]).tolist():
                places = np.nonzero((owners == owner) & (indices >= 0))[0]
                boxes = fit(ordinal, places + first, indices[places] - starts[owner], at_most=_PLACEMENTS_MAX)
                if boxes is not None:
                    placements.setdefault(specs[owner].name, []).extend(boxes)
                    is_explained[places] = True
        bits = [_unsigned(part) for part in parts]
        is_constant = np.logical_and.reduce([bits[-1] == other for other in bits[:-1]]) & ~is_explained
        is_filled &= _is_filled(span, first, parts[-1], is_constant)
        is_computed = not (is_explained | is_constant).all()
        first = end
    if is_computed:
        # Where one element is computed, others that are the same in all twins need not be constants. What is computed
        # from memory that was never written is not a number in any of them.
        is_filled = not any(_is_all_nan(twins, first, chunk) for first in range(0, len(span.flat), chunk))
    if span.is_parameter and not is_filled:
        raise MismatchError(
            f"the feed has nothing for elements of the model's parameter {span.path!r:.200}",
            rule="engine.model",
            hint=_HINT,
        )
    if is_computed:
        result.computed.append(ordinal)
        result.elements += len(span.flat)
    else:
        for name, found in placements.items():
            result.placements.setdefault(name, []).extend(joined(found))
            result.elements += sum(placement.elements for placement in found)


def _run(first: int, end: int, twins: Sequence[torch.Tensor], sources: Sources) -> tuple[str, int, int] | None:
    """The tensor whose element is at `first`, the index of the element, and how many follow it in memory as they do
    in the tensor."""
    for alphabet, specs, starts in sources.types:
        index = int(_indices(alphabet, [twin[first : first + 1] for twin in twins], starts)[0])
        if index < 0:
            continue
        owner = int(np.searchsorted(starts, index, side="right")) - 1
        count = min(end - first, int(starts[owner + 1]) - index)
        is_same = np.ones(count, np.bool_)
        for digit, twin in zip((*range(len(twins) - 1), None), twins, strict=True):
            there = alphabet.weights(digit, index, count).to(twin.dtype)
            is_same &= _unsigned(there) == _unsigned(twin[first : first + count])
        length = count if is_same.all() else int(np.argmin(is_same))
        return specs[owner].name, index - int(starts[owner]), length
    return None


def _indices(alphabet: Alphabet, parts: Sequence[torch.Tensor], starts: Indices) -> Indices:
    """The index that each element of memory holds, proved by the twin with noise; -1 where there is none.

    The tensors of the type have the indices from the first of `starts` to before the last.
    """
    indices = np.zeros(len(parts[0]), np.int64)
    is_index = np.full(len(parts[0]), alphabet.digit_bits > 0)
    for digit, part in enumerate(parts[:-1] if alphabet.digit_bits else ()):
        digits = alphabet.decode(part)
        is_index &= digits >= 0
        indices += np.maximum(digits, 0) << (digit * alphabet.digit_bits)
    is_index &= (indices >= starts[0]) & (indices < starts[-1])
    wanted = alphabet.noise[np.where(is_index, indices, 0) % len(alphabet.noise)]
    kind = torch_dtype(alphabet.dtype)
    noise = torch.from_numpy(wanted.view(f"i{alphabet.dtype.width}")).view(kind).to(parts[-1].dtype)
    is_index &= _unsigned(noise) == _unsigned(parts[-1])
    return np.where(is_index, indices, -1)


def _is_filled(span: Span, first: int, twin: torch.Tensor, is_constant: NDArray[np.bool_]) -> bool:
    """Whether the constants of a twin are initialized, and are those of the live model.

    If not, a tensor that the feed lacks must have filled them.
    """
    live = span.flat[first : first + len(twin)].cpu()
    if twin.is_floating_point():
        is_unfilled = twin.float().isnan()
    else:
        is_unfilled = twin == (1 if twin.dtype == torch.bool else torch.iinfo(twin.dtype).max)
    is_other = torch.from_numpy(_unsigned(live) != _unsigned(twin))
    return not bool(((is_unfilled | is_other) & torch.from_numpy(is_constant)).any())


def _is_all_nan(twins: Sequence[torch.Tensor], first: int, count: int) -> bool:
    """Whether one of these elements is NaN in every twin."""
    parts = (twin[first : first + count] for twin in twins)
    return twins[0].is_floating_point() and bool(
        functools.reduce(torch.logical_and, (part.float().isnan() for part in parts)).any()
    )


def _unsigned(tensor: torch.Tensor) -> Bits:
    bits: Bits = as_bits(tensor).numpy().view(f"u{tensor.element_size()}")
    return bits
