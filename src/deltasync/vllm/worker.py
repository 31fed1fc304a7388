"""In the worker processes: the live weights of one worker, read and written in checkpoint coordinates.

The caller of `scatter`, `copy` and `load` has paused the engine.
"""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deltasync.checkpoint import open_checkpoint
from deltasync.errors import CorruptError, DeltasyncError, InvalidInputError
from deltasync.format.layout import DTYPES, Layout, TensorSpec
from deltasync.format.weights import Bits, Region, Weights
from deltasync.kernels import kernels
from deltasync.torch.tensors import bits_dtype, torch_dtype
from deltasync.vllm.stage import SEGMENT_ELEMENTS, Segment, read_stage
from deltasync.vllm.tracing import Copy, Storages, Trace, trace

_COMPARE_ELEMENTS = 1 << 24
"""Elements that are compared in one call, which bounds the temporary memory on an accelerator."""


class RuntimeWeights:
    """The weights of one worker.

    The map that `describe` builds is valid while the model keeps its memory, which vLLM's graphs rely on, too.
    """

    def __init__(self, model: torch.nn.Module, model_config: Any, rank: int) -> None:
        self._model = model
        self._rank = rank
        self._model_config = model_config
        self._layout = Layout(())
        self._storages = Storages(model)
        self._trace = Trace()
        self._mirror: tuple[str, Weights] | None = None
        self._staged: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def describe(self, layout: list[Any]) -> dict[str, Any]:
        """Trace how the model loads tensors of this layout. Nothing is written."""
        self._layout = Layout.from_json(layout)
        self._storages = Storages(self._model)
        self._trace = trace(self._model, self._layout, self._storages)
        parameters = [(name, self._storages.ordinal(p)) for name, p in self._model.named_parameters()]
        return {
            "copies": {name: [c.to_json() for c in copies] for name, copies in self._trace.copies.items()},
            "errors": self._trace.errors,
            "computed": sorted(self._trace.computed),
            "unfilled": self._trace.unfilled(parameters),
            "types": [str(flat.dtype).removeprefix("torch.") for flat in self._storages.flat],
        }

    def prove(self, checkpoint: str) -> list[str] | None:
        """The tensors that are in memory where the map says, by the loaded checkpoint; None if that is not available.

        This detects what vLLM rearranges after loading (packed, transposed, quantized weights).
        """
        truth = _opened(checkpoint)
        if truth is None:
            return None
        loaded = {spec.name: (spec, bits) for spec, bits in zip(truth.layout.tensors, truth.arrays, strict=True)}
        # The feed may have another type: only the positions of the elements are checked here.
        common = [spec for spec in self._layout.tensors if spec.name in loaded]
        fitting = [spec.name for spec in common if spec.shape == loaded[spec.name][0].shape]
        return [name for name in fitting if not self._differing(*loaded[name])]

    def missing(self, checkpoint: str) -> list[str]:
        """The tensors of the loaded checkpoint that fill memory which no tensor of the feed fills."""
        truth = _opened(checkpoint)
        if truth is None or not all(self._trace.computed.values()):
            return []
        loaded = trace(self._model, truth.layout, self._storages)
        wanted, given = loaded.filled(), self._trace.filled()
        # Names may differ, as those of stacked experts do, so the number of filled elements is compared.
        short = {storage for storage, elements in wanted.items() if given.get(storage, 0) < elements}
        short -= set().union(*self._trace.computed.values())
        lacking = [name for name in loaded.copies if name not in self._layout.ordinals]
        return sorted(name for name in lacking if loaded.storages(name) & short)

    def prepare(self, stages: Sequence[str]) -> None:
        """Read this worker's stage, or the only one, and copy it to the device; on a CPU it stays mapped."""
        path = Path(stages[self._rank if len(stages) > 1 else 0])
        self._staged = [self._on_device(segment) for segment in read_stage(path)]

    def scatter(self) -> None:
        """Write what was prepared. Values are absolute, so this can be repeated."""
        for flat, positions, values in self._staged:
            overwrite(flat, positions, values)
        if self._storages.flat[0].device.type != "cpu":
            torch.accelerator.synchronize()

    def copy(self, mirror: str, ordinals: Sequence[int]) -> None:
        """Write whole tensors of the mirror to where the map says."""
        weights = self._mapped(mirror)
        for ordinal in ordinals:
            spec = self._layout.tensors[ordinal]
            for copy in self._trace.copies.get(spec.name, ()):
                live, wanted = self._pair(spec, weights.arrays[ordinal], copy)
                live.copy_(wanted)

    def compare(self, mirror: str, ordinals: Sequence[int], repair: bool) -> list[tuple[int, int]]:
        """The tensors, by ordinal, that differ from the mirror, each with the number of elements.

        `repair` overwrites them.
        """
        weights = self._mapped(mirror)
        counts = [(o, self._differing(self._layout.tensors[o], weights.arrays[o])) for o in ordinals]
        differing = [(ordinal, count) for ordinal, count in counts if count]
        if repair and differing:
            self.copy(mirror, [ordinal for ordinal, _ in differing])
        return differing

    def load(self, mirror: str, names: Sequence[str]) -> None:
        """Pass tensors of the mirror to vLLM's own loader, with all others that go into the same modules."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        weights = self._mapped(mirror)
        wanted = self._closure(set(names))
        with _errors_only("vllm.model_executor.model_loader.reload.layerwise"):
            initialize_layerwise_reload(self._model)
            self._model.load_weights(  # type: ignore[operator]
                (spec.name, _tensor(spec, bits))
                for spec, bits in zip(weights.layout.tensors, weights.arrays, strict=True)
                if spec.name in wanted
            )
            finalize_layerwise_reload(self._model, self._model_config)

    def _closure(self, names: set[str]) -> set[str]:
        """All tensors that are loaded into the same modules, or every tensor if one of the modules is not known.

        vLLM processes a module as a whole after loading, and does not keep what it was loaded with before.
        """
        if not all(self._trace.storages(name) for name in names) or not all(self._trace.computed.values()):
            return {spec.name for spec in self._layout.tensors}
        owners: dict[int, set[int]] = {}
        for number, module in enumerate(self._model.modules()):
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                ordinal = self._storages.ordinal(tensor)
                if ordinal is not None:
                    owners.setdefault(ordinal, set()).add(number)
        modules = {
            name: {module for storage in self._trace.storages(name) for module in owners.get(storage, ())}
            for name in self._layout.ordinals
        }
        touched = set().union(*(modules[name] for name in names))
        return {name for name, numbers in modules.items() if numbers & touched}

    def _differing(self, spec: TensorSpec, bits: Bits) -> int:
        count = 0
        for copy in self._trace.copies.get(spec.name, ()):
            live, wanted = self._pair(spec, bits, copy)
            rows = max(1, _COMPARE_ELEMENTS * len(live) // copy.elements)
            for first in range(0, len(live), rows):
                here, there = live[first : first + rows], wanted[first : first + rows]
                there = there.to(here.device)
                is_other = _as_bits(here) != _as_bits(there)
                if torch_dtype(spec.dtype) != here.dtype:
                    # The bits of a NaN after a cast depend on the strides of the elements.
                    is_other &= ~(here.isnan() & there.isnan())
                count += int(is_other.sum())
        return count

    def _pair(self, spec: TensorSpec, bits: Bits, copy: Copy) -> tuple[torch.Tensor, torch.Tensor]:
        """The live elements of a copy and the wanted ones, which are cast as vLLM casts them if its type differs."""
        flat = self._storages.flat[copy.storage]
        live = flat.as_strided(copy.shape, copy.target_strides, copy.target)
        wanted = _tensor(spec, bits).reshape(-1).as_strided(copy.shape, copy.source_strides, copy.source)
        return live, wanted if wanted.dtype == live.dtype else wanted.to(live.dtype)

    def _on_device(self, segment: Segment) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        storages = self._storages.flat[segment.storage : segment.storage + 1]
        flat = _as_bits(storages[0])[segment.first : segment.first + SEGMENT_ELEMENTS] if storages else torch.empty(0)
        width = segment.values.dtype.itemsize
        if flat.element_size() != width or segment.positions[-1] >= len(flat):
            # Checked for all segments before the first value is written.
            raise CorruptError(
                f"the stage has values of {width} bytes up to element "
                f"{segment.first + int(segment.positions[-1])} of storage {segment.storage}, which this worker lacks",
                rule="stage.place",
                hint="stage the version again; it may belong to another model",
            )
        positions = _from_mapped(segment.positions)
        values = _from_mapped(segment.values)
        if flat.device.type == "cpu":
            return flat, positions, values.view(flat.dtype)
        return flat, wide(positions.to(flat.device)), values.to(flat.device).view(flat.dtype)

    def _mapped(self, mirror: str) -> Weights:
        """The weights of the mirror, opened once; InvalidInputError unless they have the layout of `describe`."""
        if self._mirror is None or self._mirror[0] != mirror:
            self._mirror = mirror, open_checkpoint(mirror).weights
        if self._mirror[1].layout != self._layout:
            raise InvalidInputError(f"{mirror} has another layout than the feed", hint="restart the server")
        return self._mirror[1]


@contextmanager
def _errors_only(name: str) -> Iterator[None]:
    """Hide the warnings of a logger: vLLM warns of every module that is loaded with nothing, which is intended here."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def overwrite(flat: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> None:
    """Write values at ascending positions of flat bits."""
    write = overwrite_on_host if flat.device.type == "cpu" else overwrite_on_device
    write(flat, positions, values)


def overwrite_on_device(flat: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> None:
    """Write with torch, at `wide` positions."""
    flat.scatter_(0, positions, values)


def wide(positions: torch.Tensor) -> torch.Tensor:
    """Unsigned 4-byte positions, viewed as signed ones, as the 8-byte ones that torch indexes with."""
    return positions.to(torch.int64) & 0xFFFFFFFF


def overwrite_on_host(flat: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> None:
    """Write with our kernel, which takes positions as they are staged."""
    width = flat.element_size()
    array = flat.numpy().view(f"u{width}")
    region = Region(
        DTYPES[f"U{8 * width}"], (array,), np.array([(0, 0, len(array))], np.int64), np.zeros((1, 3), np.uint64)
    )
    kernels().overwrite(region, positions.numpy().view(np.uint32), values.numpy().view(f"u{width}"))


def _as_bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(bits_dtype(tensor.element_size()))


def _opened(checkpoint: str) -> Weights | None:
    try:
        return open_checkpoint(checkpoint).weights
    except (DeltasyncError, OSError):
        return None


def _tensor(spec: TensorSpec, bits: Bits) -> torch.Tensor:
    return _from_mapped(bits).view(torch_dtype(spec.dtype)).view(spec.shape)


def _from_mapped(bits: Bits) -> torch.Tensor:
    """A tensor of signed integers over the bits of a mapped file, which must not be written to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(bits.view(f"i{bits.dtype.itemsize}"))
