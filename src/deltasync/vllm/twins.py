"""In the worker processes: twins of the served model, which vLLM's own code builds beside it.

A twin holds what a fresh server with the same arguments would hold for some weights. The live model is not involved.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from deltasync.engines.probes import NamedTensors, layer_of
from deltasync.errors import MismatchError
from deltasync.format.layout import Layout, TensorSpec

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
        from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

        device = torch.device(self._config.load_config.device or self._config.device_config.device)
        with self._building() as config, _only(window.first, window.end, []):
            with device:
                model: Any = initialize_model(config, model_config=config.model_config)
            model.load_weights(weights)
            _finish_online_quantization(model, config.model_config)
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


def _finish_online_quantization(model: torch.nn.Module, model_config: Any) -> None:
    from vllm.model_executor.model_loader.reload import finalize_layerwise_processing

    methods = (getattr(module, "quant_method", None) for module in model.modules())
    if any(getattr(method, "uses_meta_device", False) for method in methods):
        finalize_layerwise_processing(model, model_config)
