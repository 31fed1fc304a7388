"""In the worker processes: the live weights of one worker, read and written in checkpoint coordinates.

The caller of `scatter` and `copy` has paused the engine.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from deltasync.checkpoint import open_checkpoint
from deltasync.engines.memory import Memory, as_tensor, count_differing, from_mapped, pair
from deltasync.engines.placement import Placement
from deltasync.engines.probes import NamedTensors, map_weights
from deltasync.engines.stage import SEGMENT_ELEMENTS, Segment, read_stage
from deltasync.errors import CorruptError, EngineError, InvalidInputError, MismatchError
from deltasync.format.layout import DTYPES, Layout, TensorSpec
from deltasync.format.weights import Bits, Region, Weights
from deltasync.kernels import kernels
from deltasync.torch.tensors import as_bits
from deltasync.vllm.twins import Window

logger = logging.getLogger(__name__)

_SAMPLE_ELEMENTS = 1 << 12
"""Elements of each segment that are read back after a scatter."""
LOADED = "deltasync_version"
"""The attribute of a model that was loaded from the mirror, with the version."""


class ModelBuilder(Protocol):
    """Builds twins of the served model."""

    @property
    def dtype(self) -> torch.dtype:
        """The type that the model is served in."""
        ...

    def windows(self, layout: Layout) -> list[Window]:
        """The parts of the model that can be built, each without the others."""
        ...

    def build(self, weights: NamedTensors, window: Window) -> torch.nn.Module:
        """One part, loaded with these weights and processed."""
        ...


class RuntimeWeights:
    """The weights of one worker.

    The map that `describe` builds is valid while the model keeps its memory, which vLLM's graphs rely on, too.
    """

    def __init__(self, model: torch.nn.Module, twins: ModelBuilder, rank: int) -> None:
        self._model = model
        self._twins = twins
        self._rank = rank
        self._layout = Layout(())
        self._memory: Memory | None = None
        self._placements: dict[str, list[Placement]] = {}
        self._computed: list[tuple[Window, list[int]]] = []
        """The windows with spans that only vLLM's own code can fill, and these spans."""
        self._mirror: tuple[str, Weights] | None = None
        self._staged: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._refreshed: list[tuple[int, torch.Tensor]] = []

    def loaded_version(self) -> int | None:
        """The version that the model was loaded with from the mirror; None if it was loaded from elsewhere."""
        version: int | None = getattr(self._model, LOADED, None)
        return version

    def describe(self, layout: list[Any]) -> dict[str, Any]:
        """Find out where the tensors of this layout are in memory. Nothing of the live model is written.

        If the model cannot be served with such tensors, the description has only the reason, as `refused`: an
        exception would not reach the API server as it is.
        """
        self._layout = Layout.from_json(layout)
        self._memory = live = Memory(self._model)
        before = live.sums()
        try:
            elements = self._map(live)
        except MismatchError as error:
            return {"refused": [error.message, error.rule, error.hint]}
        finally:
            if Memory(self._model).sums() != before:
                raise EngineError(
                    "the live model changed while twins of it were built",
                    hint="restart the server, and report the model and the arguments of the server",
                )
        return {
            "placements": {name: [p.to_json() for p in placements] for name, placements in self._placements.items()},
            "computed": [spec.name for window, _ in self._computed for spec in window.tensors],
            "types": [str(span.flat.dtype).removeprefix("torch.") for span in live.spans],
            "elements": elements,
        }

    def _map(self, live: Memory) -> int:
        """Build the map, window by window, and return the number of elements that depend on weights."""
        self._placements, self._computed = {}, []
        elements, paths, known = 0, set[str](), frozenset[int]()
        for window in self._twins.windows(self._layout):
            build = partial(self._twins.build, window=window)
            found = map_weights(live, build, window.tensors, self._twins.dtype, known=known)
            for name, placements in found.placements.items():
                self._placements.setdefault(name, []).extend(placements)
            if found.computed:
                self._computed.append((window, found.computed))
            elements += found.elements
            paths |= found.paths
            known |= found.spans
        _require_seen(live, paths)
        return elements

    def prepare(self, stages: Sequence[str]) -> None:
        """Read this worker's stage, or the only one, and copy it to the device; on a CPU it stays mapped."""
        path = Path(stages[self._rank if len(stages) > 1 else 0])
        # What was computed for a version that did not go live must not go live with this one.
        self._refreshed = []
        self._staged = [self._on_device(segment) for segment in read_stage(path)]

    def refresh(self, mirror: str) -> None:
        """Compute what no copy can give: in twins that are loaded with the mirror, for the next write."""
        self._refreshed = [
            pair for window, ordinals in self._computed for pair in self._rebuilt(mirror, window, ordinals)
        ]

    def scatter(self) -> None:
        """Write what was prepared, read a sample of it back, and free it.

        Values are absolute, so this can be repeated if it fails. A worker that has succeeded does nothing then.
        """
        for flat, positions, values in self._staged:
            overwrite(flat, positions, values)
        self._write_refreshed()
        for flat, positions, values in self._staged:
            sample = slice(None, None, max(1, len(positions) // _SAMPLE_ELEMENTS))
            read = flat[wide(positions[sample]).to(flat.device)]
            if not torch.equal(read, values[sample]):
                raise EngineError(
                    "the weights in memory are not those that were written",
                    hint="restart the server; its memory may be damaged, or something else writes to the weights",
                )
        self._free_prepared()

    def copy(self, mirror: str, ordinals: Sequence[int]) -> None:
        """Write whole tensors of the mirror to where the map says, and what was refreshed; free what was prepared."""
        weights = self._mapped(mirror)
        for ordinal in ordinals:
            self._copy(self._layout.tensors[ordinal], weights.arrays[ordinal])
        self._write_refreshed()
        self._free_prepared()

    def _free_prepared(self) -> None:
        """Free the memory that a version needs beside the weights until it is written."""
        self._staged, self._refreshed = [], []

    def compare(self, mirror: str, ordinals: Sequence[int], repair: bool) -> dict[str, Any]:
        """What differs from the mirror: the number of elements by tensor; and the elements compared with each ordinal.

        Memory that was computed is compared with that of a twin, together with the first tensor of its window, and
        has the name that the model gives to it. `repair` overwrites what differs.
        """
        weights = self._mapped(mirror)
        differing: dict[str, int] = {}
        elements: dict[int, int] = {}
        for ordinal in ordinals:
            spec = self._layout.tensors[ordinal]
            placements = self._placements.get(spec.name, ())
            elements[ordinal] = sum(placement.elements for placement in placements)
            count = count_differing(self._live.spans, placements, spec, weights.arrays[ordinal])
            if count:
                differing[spec.name] = count
                if repair:
                    self._copy(spec, weights.arrays[ordinal])
        for window, spans in self._computed:
            first = self._layout.ordinals[window.tensors[0].name]
            if first in elements:
                for ordinal, wanted in self._rebuilt(mirror, window, spans):
                    span = self._live.spans[ordinal]
                    elements[first] += len(span.flat)
                    count = int((span.bits != as_bits(wanted.to(span.flat.device))).sum())
                    if count:
                        differing[span.path] = count
                        if repair:
                            span.flat.copy_(wanted)
        return {"differing": differing, "elements": list(elements.items())}

    @property
    def _live(self) -> Memory:
        if self._memory is None:
            raise InvalidInputError("the worker does not know the layout of the feed", hint="call `describe` first")
        return self._memory

    def _rebuilt(self, mirror: str, window: Window, ordinals: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """The spans of a twin that is loaded with the mirror, on the host: a device may have no room for them."""
        with torch.no_grad():
            twin = Memory(self._twins.build(named_tensors(self._mapped(mirror), window.tensors), window))
        for ordinal in ordinals:
            span = self._live.spans[ordinal]
            there = twin.spans[twin.ordinals[span.path]]
            if len(there.flat) != len(span.flat) or there.flat.dtype != span.flat.dtype:
                raise EngineError(
                    f"vLLM now builds {span.path!r:.200} in another form than at the start of the server",
                    hint="restart the server",
                )
            yield ordinal, there.flat.cpu()

    def _write_refreshed(self) -> None:
        for ordinal, wanted in self._refreshed:
            self._live.spans[ordinal].flat.copy_(wanted)
        if self._live.spans and self._live.spans[0].flat.device.type != "cpu":
            torch.accelerator.synchronize()

    def _copy(self, spec: TensorSpec, bits: Bits) -> None:
        for placement in self._placements.get(spec.name, ()):
            live, wanted = pair(self._live.spans, placement, spec, bits)
            live.copy_(wanted)

    def _on_device(self, segment: Segment) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        spans = self._live.spans[segment.storage : segment.storage + 1]
        flat = spans[0].bits[segment.first : segment.first + SEGMENT_ELEMENTS] if spans else torch.empty(0)
        width = segment.values.dtype.itemsize
        if flat.element_size() != width or segment.positions[-1] >= len(flat):
            # Checked for all segments before the first value is written.
            raise CorruptError(
                f"the stage has values of {width} bytes up to element "
                f"{segment.first + int(segment.positions[-1])} of storage {segment.storage}, which this worker lacks",
                rule="stage.place",
                hint="stage the version again; it may belong to another model",
            )
        positions = from_mapped(segment.positions)
        values = from_mapped(segment.values)
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


def call_runtime(worker: Any, method: str, *args: Any) -> dict[str, Any]:
    """A method of vLLM's workers: call a method of the `RuntimeWeights` of one; its `result`, or the `error` as text.

    vLLM does not read the answers of the other workers after one that raises, and takes them for answers to the next
    call. So nothing may be raised here.
    """
    from vllm.config import set_current_vllm_config

    try:
        with set_current_vllm_config(worker.vllm_config):
            return {"result": getattr(worker.weight_transfer_engine.runtime, method)(*args)}
    except Exception as error:
        logger.exception("a worker failed at %r", method)
        return {"error": f"{type(error).__name__}: {error!s:.500}"}


def _require_seen(live: Memory, paths: set[str]) -> None:
    """MismatchError if the live model reaches weights that no twin has: they were derived after loading."""
    for span in live.spans:
        if span.flat.is_floating_point() and paths.isdisjoint(span.views):
            raise MismatchError(
                f"the live model holds {span.path!r:.200}, which vLLM makes while it serves; a new version would not "
                "reach it",
                rule="engine.derived",
                hint="restart the server for each version of this model",
            )


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


def named_tensors(weights: Weights, tensors: Iterable[TensorSpec]) -> NamedTensors:
    """Some tensors of mapped weights, for a loader of vLLM. They are clones: it may keep or change what it is given."""
    for spec in tensors:
        yield spec.name, as_tensor(spec, weights.arrays[weights.layout.ordinals[spec.name]]).clone()
