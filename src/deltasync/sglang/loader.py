"""In the workers of an SGLang server: write the changed elements of a version over the live weights.

    python -m sglang.launch_server … --custom-weight-loader deltasync.sglang.loader.load
    deltasync follow s3://bucket/run-42 --target /models/live --sglang http://127.0.0.1:30000 --only-changes

SGLang calls `load` in each worker. The map from checkpoint to memory is read from the model's own `load_weights`, which
puts indices into copies of the parameters; fused, stacked, sharded and padded parameters are found that way. The map
counts once all live weights were compared with a checkpoint through it. What cannot be mapped so is refused by name.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from deltasync.checkpoint import open_checkpoint
from deltasync.engines.memory import Memory, Placement, count_differing, from_mapped, read_stage
from deltasync.engines.probes import Build, NamedTensors, layer_of, map_weights
from deltasync.errors import DeltasyncError, InvalidInputError, MismatchError
from deltasync.format.layout import Layout, TensorSpec
from deltasync.format.weights import Weights
from deltasync.sglang.in_place import CHANGES_NAME, TENSOR_NAME, Answer, Request
from deltasync.torch.tensors import torch_dtype

__all__ = ["load"]

logger = logging.getLogger(__name__)

_HINT = "leave --only-changes out: SGLang's own route loads this model"


@dataclass(slots=True, eq=False)
class _Live:
    """The weights of a worker: where each tensor of a layout is, and the version that was proved."""

    layout: Layout
    memory: Memory
    placements: dict[str, list[Placement]]
    version: int | None = None


_live: "WeakKeyDictionary[torch.nn.Module, _Live]" = WeakKeyDictionary()


class _DamagedError(MismatchError):
    """The live weights are those of no version any more."""


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Do what `deltasync follow --only-changes` asks for, and leave an answer. SGLang has paused the engine.

    InvalidInputError, before anything is done, for other tensors. What fails after that is an answer, not an exception:
    SGLang would end the server.
    """
    if [name for name, _ in named_tensors] != [TENSOR_NAME]:
        raise InvalidInputError(
            f"this loader takes one tensor, {TENSOR_NAME!r}, not {[name for name, _ in named_tensors]!s:.200}",
            hint="it is for `deltasync follow --sglang URL --only-changes`",
        )
    request = Request.from_json(named_tensors[0][1].cpu().numpy().tobytes())
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    try:
        with torch.no_grad():
            answer = _ACTIONS[request.action](model, request)
    except _DamagedError as error:
        _live.pop(model, None)
        answer = Answer(damaged=str(error))
    except DeltasyncError as error:
        answer = Answer(refused=str(error))
    # A device may have no memory left, or a disk may fail: how far the action came is not known.
    except Exception as error:
        logger.exception("version %d: %s failed", request.version, request.action)
        _live.pop(model, None)
        answer = Answer(damaged=f"{type(error).__name__}: {error!s:.500}")
    for reason in filter(None, (answer.refused, answer.damaged)):
        logger.error("version %d: %s", request.version, reason)
    try:
        answer.write(request.answer_path(rank))
    except OSError as error:
        # The target misses the answer, and lets the server load the whole folder.
        logger.error("the answer for version %d cannot be written: %s", request.version, error)


def _map(model: torch.nn.Module, request: Request) -> Answer:
    """Find out where the tensors of the folder are in memory, and prove it: all live weights equal the folder."""
    _live.pop(model, None)
    weights = open_checkpoint(request.folder).weights
    if hasattr(model, "post_load_weights"):
        raise MismatchError(
            f"{type(model).__name__} computes further weights after it has loaded some (post_load_weights)",
            rule="sglang.derived",
            hint=_HINT,
        )
    memory = Memory(model)
    _require_no_derived(model, memory)
    before = memory.sums()
    placements: dict[str, list[Placement]] = {}
    try:
        for tensors, paths in _windows(weights.layout, model):
            found = map_weights(memory, _twin_of(model, paths), tensors, _served_dtype(model))
            if found.computed:
                path = memory.spans[found.computed[0]].path
                raise MismatchError(
                    f"SGLang computes {path!r:.200} from what it loads", rule="sglang.computed", hint=_HINT
                )
            for name, boxes in found.placements.items():
                placements.setdefault(name, []).extend(boxes)
    finally:
        if Memory(model).sums() != before:
            raise _DamagedError("the live weights changed while the loader of the model was traced", hint=_HINT)
    live = _Live(weights.layout, memory, placements)
    _require_equal(live, weights)
    live.version = request.version
    _live[model] = live
    return Answer(placements={name: [p.to_json() for p in held] for name, held in placements.items()})


def _compare(model: torch.nn.Module, request: Request) -> Answer:
    """Prove once more that all live weights are those of the folder."""
    _require_equal(_known(model), open_checkpoint(request.folder).weights)
    return Answer()


def _write(model: torch.nn.Module, request: Request) -> Answer:
    """Write what changed, with absolute values, and read all of it back."""
    live = _known(model)
    if live.version is None or live.version != request.start:
        raise MismatchError(f"the worker has version {live.version}, and the changes begin with {request.start}")
    writes = list(_located(live, Path(request.folder) / CHANGES_NAME))
    live.version = None
    for bits, places, values in writes:
        bits[places] = values
    for bits, places, values in writes:
        if not torch.equal(bits[places], values):
            raise _DamagedError("the weights in memory are not those that were written", hint="restart the server")
    live.version = request.version
    return Answer()


_ACTIONS: Mapping[str, Callable[[torch.nn.Module, Request], Answer]] = {
    "map": _map,
    "compare": _compare,
    "write": _write,
}


def _known(model: torch.nn.Module) -> _Live:
    """The map of a model, whose memory is still where it was."""
    live = _live.get(model)
    if live is None:
        raise MismatchError("the worker does not know where its weights are")
    pointers = [span.flat.data_ptr() for span in Memory(model).spans]
    if pointers != [span.flat.data_ptr() for span in live.memory.spans]:
        raise MismatchError("SGLang has moved weights to other memory since they were mapped")
    return live


def _located(live: _Live, path: Path) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The bits of each span that changes reach, the places in it, and the new bits. Nothing is written."""
    for segment in read_stage(path):
        if segment.storage >= len(live.layout.tensors):
            raise MismatchError(f"{path} has changes of tensor {segment.storage}, which the model lacks")
        spec = live.layout.tensors[segment.storage]
        indices = segment.positions.astype(np.int64) + segment.first
        if (len(indices) and indices[-1] >= spec.elements) or segment.values.dtype != spec.dtype.bits_dtype:
            raise MismatchError(f"the changes of {spec.name!r:.200} do not fit its type or its shape")
        for placement in live.placements.get(spec.name, ()):
            which, places = placement.locate(indices)
            span = live.memory.spans[placement.storage]
            values = from_mapped(np.ascontiguousarray(segment.values[which])).view(torch_dtype(spec.dtype))
            stored = values.to(span.flat.device, span.flat.dtype)
            if len(places):
                yield span.bits, torch.from_numpy(places).to(span.flat.device), stored.view(span.bits.dtype)


def _require_equal(live: _Live, weights: Weights) -> None:
    """MismatchError unless the live weights are those of a checkpoint, bit by bit."""
    weights.layout.require_equal(live.layout, ours="the folder", theirs="the model")
    for spec, bits in zip(weights.layout.tensors, weights.arrays, strict=True):
        count = count_differing(live.memory.spans, live.placements.get(spec.name, ()), spec, bits)
        if count:
            raise MismatchError(
                f"SGLang holds {spec.name!r:.200} in another form than the checkpoint: {count} elements differ",
                rule="sglang.form",
                hint=_HINT,
            )


def _require_no_derived(model: torch.nn.Module, memory: Memory) -> None:
    """MismatchError if modules with weights hold further floating-point tensors, which may be computed from them.

    A module that has no weights in it, such as a rotary embedding, can compute nothing from them.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    parameters = {path for path, _ in model.named_parameters(remove_duplicate=False)}
    for span in memory.spans:
        if span.is_parameter or not span.flat.is_floating_point():
            continue
        for path in span.views:
            # The tensor may be in a list or an object that the module has.
            owner = path.rpartition(".")[0]
            while owner not in modules:
                owner = owner.rpartition(".")[0]
            if path not in parameters and any(True for _ in modules[owner].parameters()):
                raise MismatchError(
                    f"the model holds {path!r:.200} beside its parameters, which may be computed from them",
                    rule="sglang.derived",
                    hint=_HINT,
                )


def _windows(layout: Layout, model: torch.nn.Module) -> Iterator[tuple[list[TensorSpec], set[str]]]:
    """The tensors of each layer with the paths of the model's own tensors for it; last, those of no layer."""
    tensors: dict[int | None, list[TensorSpec]] = {}
    for spec in layout.tensors:
        tensors.setdefault(layer_of(spec.name), []).append(spec)
    paths: dict[int | None, set[str]] = {}
    for path in _tensors(model):
        paths.setdefault(layer_of(path), set()).add(path)
    for number, specs in tensors.items():
        yield specs, paths.get(number, set())


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by path; a tied one has several."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def _twin_of(model: Any, paths: set[str]) -> Build:
    """Loads weights into copies of the tensors at `paths`. The live ones are out of reach meanwhile, all of them."""

    def build(weights: NamedTensors) -> torch.nn.Module:
        with _without_live(model, paths) as copies:
            model.load_weights(weights)
        twin = torch.nn.Module()
        for path, tensor in copies.items():
            *parents, name = path.split(".")
            module = twin
            for parent in parents:
                if parent not in module._modules:
                    module.add_module(parent, torch.nn.Module())
                module = module.get_submodule(parent)
            module.register_buffer(name, tensor)
        return twin

    return build


@contextmanager
def _without_live(model: torch.nn.Module, paths: set[str]) -> Iterator[dict[str, torch.Tensor]]:
    """Give all tensors of a model other data: those at `paths` a copy on the host, the others nothing at all.

    Afterwards every module has what it had before: some loaders register parameters anew, or keep what they compute.
    """
    tensors = _tensors(model)
    before = [
        (held, dict(held))
        for module in model.modules()
        for held in (module.__dict__, module._parameters, module._buffers, module._modules)
    ]
    data = {id(tensor): (tensor, tensor.data) for tensor in tensors.values()}
    wanted = {id(tensors[path]) for path in paths}
    copies: dict[str, torch.Tensor] = {}
    try:
        for key, (tensor, live) in data.items():
            tensor.data = live.to("cpu", copy=True) if key in wanted else live.new_empty(0)
        copies.update((path, tensor.data) for path, tensor in tensors.items() if id(tensor) in wanted)
        yield copies
    finally:
        for tensor, live in data.values():
            tensor.data = live
        for held, items in before:
            if list(held) != list(items) or any(held[name] is not item for name, item in items.items()):
                held.clear()
                held.update(items)


def _served_dtype(model: torch.nn.Module) -> torch.dtype:
    """The floating-point type that most elements have."""
    elements: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            elements[parameter.dtype] = elements.get(parameter.dtype, 0) + parameter.numel()
    return max(elements, key=elements.__getitem__, default=torch.bfloat16)
