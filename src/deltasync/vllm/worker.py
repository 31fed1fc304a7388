"""In the worker processes: the live weights of one worker, read and written in checkpoint coordinates.

`Twins` of the served model, which vLLM's own code builds beside it, show where each element is: a twin holds what a
fresh server with the same arguments would hold for some weights. The live model is not involved.
"""

import copy
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deltasync.checkpoint import open_checkpoint
from deltasync.engines.memory import (
    SEGMENT_ELEMENTS,
    Memory,
    Placement,
    Segment,
    as_tensor,
    count_differing,
    from_mapped,
    pair,
    read_stage,
)
from deltasync.engines.probes import NamedTensors, layer_of, map_weights
from deltasync.errors import CorruptError, EngineError, InvalidInputError, MismatchError
from deltasync.format.layout import DTYPES, Layout, TensorSpec
from deltasync.format.weights import Bits, Region, Weights
from deltasync.kernels import kernels
from deltasync.torch.tensors import as_bits

logger = logging.getLogger(__name__)

_SAMPLE_ELEMENTS = 1 << 12
"""Elements of each segment that are read back after a scatter."""
LOADED = "deltasync_version"
"""The attribute of a model that was loaded from the mirror, with the version."""
_WINDOW_BYTES = 1 << 28
"""Weights that a twin holds. A layer of a large model may have more; the first one comes with the embeddings."""

_WITHOUT_WEIGHTS = frozenset({"ngram", "ngram_gpu", "suffix"})
"""Methods of speculative decoding that have no model of their own."""


@dataclass(frozen=True, slots=True)
class Window:
    """Some layers of the model, from `first` to before `end`, with the tensors of the feed that are loaded into them.

    The window that begins with layer 0 has all tensors that belong to no layer, too. `end` None is the whole model.
    """

    tensors: tuple[TensorSpec, ...]
    first: int = 0
    end: int | None = None


class Twins:
    """Builds twins from the configuration that the live model was built from."""

    def __init__(self, vllm_config: Any) -> None:
        self._config = vllm_config

    @property
    def dtype(self) -> torch.dtype:
        """The type that the model is served in."""
        dtype: torch.dtype = self._config.model_config.dtype
        return dtype

    def require_fixed(self) -> None:
        """MismatchError if the server holds weights in another place or form than a twin can show."""
        draft = self._config.speculative_config
        if draft is not None and draft.method not in _WITHOUT_WEIGHTS:
            raise MismatchError(
                f"the server has a draft model ({draft.method}), which would keep its old weights",
                rule="vllm.draft",
                hint=f"serve without it, or with one of {', '.join(sorted(_WITHOUT_WEIGHTS))}",
            )
        if self._config.parallel_config.enable_eplb:
            raise MismatchError(
                "the server moves experts between ranks (--enable-eplb), so no map of them stays true",
                rule="vllm.eplb",
                hint="serve without --enable-eplb",
            )

    def windows(self, layout: Layout) -> list[Window]:
        """The model in windows, so that twins need little memory; as one window where vLLM cannot build parts of it.

        MismatchError as of `require_fixed`.
        """
        self.require_fixed()
        layers = int(self._config.model_config.get_total_num_hidden_layers())
        by_layer: dict[int | None, list[TensorSpec]] = {}
        for spec in layout.tensors:
            number = layer_of(spec.name)
            number = None if number is None or number >= layers else number
            by_layer.setdefault(number, []).append(spec)
        nbytes = {number: sum(spec.nbytes for spec in specs) for number, specs in by_layer.items()}
        no_layer_bytes = nbytes.pop(None, 0)
        layer_bytes = max((1, *nbytes.values()))
        size = max(1, _WINDOW_BYTES // layer_bytes)
        # Embeddings may be as large as many layers, so the first window has only as many as fit beside them. Some
        # models need more: their first layers have no experts.
        beside = max(1, (_WINDOW_BYTES - no_layer_bytes) // layer_bytes)
        for head in (beside, size) if beside < layers else ():
            windows = []
            for first, end in pairwise((0, *range(head, layers, size), layers)):
                numbers = (*(() if first else (None,)), *range(first, end))
                windows.append(Window(tuple(spec for n in numbers for spec in by_layer.get(n, ())), first, end))
            if all(self._has(window, layers) for window in windows):
                return windows
        return [Window(layout.tensors)]

    def _has(self, window: Window, layers: int) -> bool:
        """Whether vLLM can build the layers of a window without the others. Some models need a layer with experts."""
        asked: list[int] = []
        try:
            with torch.device("meta"), _only(window.first, window.end, asked), self._building() as config:
                from vllm.model_executor.model_loader.utils import initialize_model

                initialize_model(config, model_config=config.model_config)
        # An architecture may need all of its layers, and raises anything then.
        except Exception:  # noqa: BLE001
            return False
        return asked == [layers]

    def build(self, weights: NamedTensors, window: Window) -> torch.nn.Module:
        """A twin that is loaded with these weights and processed, as vLLM's loader does it."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_processing
        from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

        device = torch.device(self._config.load_config.device or self._config.device_config.device)
        with self._building() as config, _only(window.first, window.end, []):
            with device:
                model: Any = initialize_model(config, model_config=config.model_config)
            model.load_weights(weights)
            methods = (getattr(module, "quant_method", None) for module in model.modules())
            if any(getattr(method, "uses_meta_device", False) for method in methods):
                finalize_layerwise_processing(model, config.model_config)
            process_weights_after_loading(model, config.model_config, device)
        twin: torch.nn.Module = model.eval()
        return twin

    @contextmanager
    def _building(self) -> Iterator[Any]:
        """A configuration in which a second model registers its layers, and what else building one leaves behind."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.models import utils
        from vllm.utils.torch_utils import set_default_torch_dtype

        config = copy.copy(self._config)
        config.compilation_config = copy.copy(config.compilation_config)
        config.compilation_config.static_forward_context = {}
        config.compilation_config.static_all_moe_layers = []
        config.quant_config = copy.deepcopy(config.quant_config)
        # vLLM remembers missing layers by the address of a model, which the next twin may get.
        missing: dict[int, list[str]] = utils._model_to_pp_missing_layer_names
        known = dict(missing)
        missing.clear()
        try:
            with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
                yield config
        finally:
            missing.clear()
            missing.update(known)


@contextmanager
def _only(first: int, end: int | None, asked: list[int]) -> Iterator[None]:
    """Let vLLM build only these layers, as for a stage of a pipeline. `asked` gets the numbers of all layers.

    The stage with the first layer has what is before and after the layers, too.
    """
    if end is None:
        yield
        return
    from vllm.distributed import get_pp_group, utils

    def only(layers: int, rank: int, size: int) -> tuple[int, int]:
        asked.append(layers)
        return min(first, layers), min(end, layers)

    group, indices = get_pp_group(), utils.get_pp_indices
    ranks = group.ranks
    utils.get_pp_indices = only
    group.ranks = [-1, *ranks, -1] if first else ranks
    try:
        yield
    finally:
        utils.get_pp_indices = indices
        group.ranks = ranks


class RuntimeWeights:
    """The weights of one worker.

    The map that `describe` builds is valid while the model keeps its memory, which vLLM's graphs rely on, too. The
    caller of `scatter` and `copy` has paused the engine.
    """

    def __init__(self, model: torch.nn.Module, twins: Twins, rank: int) -> None:
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
        for span in live.spans:
            if span.flat.is_floating_point() and paths.isdisjoint(span.views):
                raise MismatchError(
                    f"the live model holds {span.path!r:.200}, which vLLM makes while it serves; a new version would "
                    "not reach it",
                    rule="engine.derived",
                    hint="restart the server for each version of this model",
                )
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
        self._staged, self._refreshed = [], []

    def copy(self, mirror: str, ordinals: Sequence[int]) -> None:
        """Write whole tensors of the mirror to where the map says, and what was refreshed; free what was prepared."""
        weights = self._mapped(mirror)
        for ordinal in ordinals:
            self._copy(self._layout.tensors[ordinal], weights.arrays[ordinal])
        self._write_refreshed()
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


def overwrite(flat: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> None:
    """Write values at ascending positions of flat bits: on the host with our kernel, which takes them as staged."""
    if flat.device.type != "cpu":
        overwrite_on_device(flat, positions, values)
        return
    width = flat.element_size()
    array = flat.numpy().view(f"u{width}")
    region = Region(
        DTYPES[f"U{8 * width}"], (array,), np.array([(0, 0, len(array))], np.int64), np.zeros((1, 3), np.uint64)
    )
    kernels().overwrite(region, positions.numpy().view(np.uint32), values.numpy().view(f"u{width}"))


def overwrite_on_device(flat: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> None:
    """Write with torch, at `wide` positions."""
    flat.scatter_(0, positions, values)


def wide(positions: torch.Tensor) -> torch.Tensor:
    """Unsigned 4-byte positions, viewed as signed ones, as the 8-byte ones that torch indexes with."""
    return positions.to(torch.int64) & 0xFFFFFFFF


def named_tensors(weights: Weights, tensors: Iterable[TensorSpec]) -> NamedTensors:
    """Some tensors of mapped weights, for a loader of vLLM. They are clones: it may keep or change what it is given."""
    for spec in tensors:
        yield spec.name, as_tensor(spec, weights.arrays[weights.layout.ordinals[spec.name]]).clone()
