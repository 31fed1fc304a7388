"""On a CPU vLLM packs weights for its kernels and lets go of them, so that nothing could be written in place.

With this backend linear layers keep their weights and compute with them as they are. Stacked experts stay packed: they
go through vLLM's loader, which has to be told to pack them again.
"""

from typing import Any

import torch


def keep_plain_weights() -> None:
    """Has effect on models that are loaded from now on with this backend."""
    from vllm.config import get_current_vllm_config_or_none
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    from deltasync.serve.vllm.plugin import is_used

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
            # vLLM packs only at the first time, and would go on with the plain weights of the second.
            method.moe_kernel.fused_experts.process_weights_after_loading(layer)

    utils.dispatch_cpu_unquantized_gemm = keep
    UnquantizedFusedMoEMethod._setup_kernel = set_up_again
