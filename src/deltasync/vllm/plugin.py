"""In every process: the `vllm.general_plugins` entry point."""

import logging
from typing import Any

BACKEND = "deltasync"
"""The name of the backend for `--weight-transfer-config`, and of the load format for `--load-format`."""


def register() -> None:
    """Register the backend and the load format. vLLM may call this several times in one process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.gpu_worker import Worker

    if BACKEND in WeightTransferEngineFactory._registry:
        return
    WeightTransferEngineFactory.register_engine(BACKEND, "deltasync.vllm.engine", "DeltasyncEngine")
    from deltasync.vllm import core
    from deltasync.vllm.engine import MirrorLoader
    from deltasync.vllm.worker import call_runtime

    # The method that collective calls name. `--worker-extension-cls` would add it, too, but is one more flag to set.
    setattr(Worker, core.CALL, call_runtime)
    core.install(EngineCore)
    register_model_loader(BACKEND)(MirrorLoader)
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        keep_plain_weights()


def is_used(config: Any) -> bool:
    """Whether a config of vLLM selects this backend."""
    transfer = getattr(config, "weight_transfer_config", None)
    return transfer is not None and transfer.backend == BACKEND


def log_where_vllm_does() -> None:
    """Give our logger the handlers of vLLM's, which sets up no other one, unless the user has configured ours."""
    ours, theirs = logging.getLogger("deltasync"), logging.getLogger("vllm")
    if not ours.hasHandlers():
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)


def keep_plain_weights() -> None:
    """Make vLLM keep unpacked linear weights on a CPU, for models that are loaded from now on with this backend."""
    import torch
    from vllm.config import get_current_vllm_config_or_none
    from vllm.model_executor.layers import utils

    pack = utils.dispatch_cpu_unquantized_gemm

    def keep(layer: torch.nn.Module, remove_weight: bool) -> None:
        if is_used(get_current_vllm_config_or_none()) and layer.weight.ndim == 2:
            layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]
        else:
            pack(layer, remove_weight)

    utils.dispatch_cpu_unquantized_gemm = keep
