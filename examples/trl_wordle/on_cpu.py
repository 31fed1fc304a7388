"""All that this example does differently on a machine without an accelerator. On a GPU none of it is used.

TRL's asynchronous trainer is written for CUDA, and vLLM for machines with more than two cores. No
installed file is changed: attributes of modules are replaced in this process, and vLLM gets other arguments.
"""

import os
from typing import Any

CONFIG: dict[str, Any] = {
    "use_cpu": True,
    # Autocast is slower than float32 without instructions for bfloat16.
    "bf16": False,
    "gradient_checkpointing": False,
    # A fixed number of samples: the budget by tokens is there for the memory of a GPU.
    "token_budget": -1,
}
"""Options of `AsyncGRPOConfig`."""

SERVER_ARGUMENTS = (
    "--dtype=bfloat16",
    "--enforce-eager",
    "--disable-uvicorn-access-log",
    # TRL sends a seed with every request, and vLLM's CPU engine cannot seed a chunked prefill.
    "--no-enable-chunked-prefill",
)
SERVER_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # One core for the engine: the other one is for the API server, the trainer and the environment.
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "VLLM_HOST_IP": "127.0.0.1",
}


def is_needed() -> bool:
    """Whether this machine has no accelerator."""
    import torch

    return not torch.cuda.is_available()


def adjust_torch() -> None:
    """Use one thread: on two cores that other processes use too, threads mostly wait for each other."""
    import torch

    torch.set_num_threads(1)


def adjust_trl() -> None:
    """Replace the parts that ask for CUDA. Call this before a trainer is made."""
    import trl.experimental.async_grpo.async_grpo_trainer as trainer
    import trl.experimental.async_grpo.async_rollout_worker as worker
    import trl.experimental.async_grpo.packing as packing

    # It asks CUDA for the name of the device. None leaves the utilisation out of the metrics.
    trainer.get_peak_flops_per_device = lambda accelerator, dtype: None
    packing.tree_attention = attention
    # It checks that vLLM is installed, but only sends HTTP requests to a server elsewhere.
    worker.is_vllm_available = lambda: True


def adjust_server() -> None:
    """Set the variables that vLLM reads from its environment."""
    os.environ.update({name: os.environ.get(name, value) for name, value in SERVER_ENVIRONMENT.items()})


def attention(  # type: ignore[no-untyped-def]
    module, query, key, value, mask, *, tree_kv_index, tree_cu_seqlens_q, tree_cu_seqlens_k, scaling=None, **kwargs
):
    """Attention over a tree of samples that share their beginnings; TRL has a CUDA kernel for it, this is a mask.

    Segment s has the queries `cu_seqlens_q[s:s+2]` and sees its path from the root, `kv_index` between
    `cu_seqlens_k[s:s+2]`; its own tokens are the last of the path, each of which sees those before it.
    """
    import torch

    queries, keys = torch.diff(tree_cu_seqlens_q).tolist(), torch.diff(tree_cu_seqlens_k).tolist()
    seen = torch.zeros(query.shape[2], key.shape[2], dtype=torch.bool)
    first = 0
    for own, path in zip(queries, tree_kv_index.split(keys), strict=True):
        reach = torch.ones(own, len(path), dtype=torch.bool).tril(len(path) - own)
        seen[first : first + own, path] = reach
        first += own
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=seen, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2), None
