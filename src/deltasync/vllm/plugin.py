"""In every process: the `vllm.general_plugins` entry point."""

from typing import Any

BACKEND = "deltasync"


def register() -> None:
    """Register the backend. vLLM may call this several times in one process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.v1.worker.gpu_worker import Worker

    if BACKEND in WeightTransferEngineFactory._registry:
        return
    WeightTransferEngineFactory.register_engine(BACKEND, "deltasync.vllm.engine", "DeltasyncEngine")
    # The method that collective calls name. `--worker-extension-cls` would add it, too, but is one more flag to set.
    Worker.deltasync = _call_runtime
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        keep_plain_weights()


def is_used(config: Any) -> bool:
    """Whether a config of vLLM selects this backend."""
    transfer = getattr(config, "weight_transfer_config", None)
    return transfer is not None and transfer.backend == BACKEND


def _call_runtime(worker: Any, method: str, *args: Any) -> Any:
    """Call a method of the worker's `RuntimeWeights`."""
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(worker.vllm_config):
        return getattr(worker.weight_transfer_engine.runtime, method)(*args)


def keep_plain_weights() -> None:
    """Make vLLM keep unpacked linear weights on a CPU, for models that are loaded from now on with this backend."""
    import torch
    from vllm.config import get_current_vllm_config_or_none
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    pack = utils.dispatch_cpu_unquantized_gemm
    set_up = UnquantizedFusedMoEMethod._setup_kernel

    def keep(layer: torch.nn.Module, remove_weight: bool) -> None:
        if is_used(get_current_vllm_config_or_none()) and layer.weight.ndim == 2:
            layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]
        else:
            pack(layer, remove_weight)

    def set_up_again(method: Any, layer: torch.nn.Module, **weights: torch.Tensor) -> None:
        was_set_up = method.moe_kernel is not None
        set_up(method, layer, **weights)
        if was_set_up:
            # vLLM packs only the first time, and would compute with plain weights after the second.
            method.moe_kernel.fused_experts.process_weights_after_loading(layer)

    utils.dispatch_cpu_unquantized_gemm = keep
    UnquantizedFusedMoEMethod._setup_kernel = set_up_again
