"""What vLLM calls in each of its processes: the `vllm.general_plugins` entry point."""

from typing import Any

BACKEND = "deltasync"


def register() -> None:
    """Make the backend known. vLLM may call this several times in one process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.v1.worker.gpu_worker import Worker

    if BACKEND in WeightTransferEngineFactory._registry:
        return
    WeightTransferEngineFactory.register_engine(BACKEND, "deltasync.serve.vllm.engine", "DeltaSyncEngine")
    # What `--worker-extension-cls` would add, without a second flag: a method that a collective call can name.
    Worker.deltasync = _call_engine
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from deltasync.serve.vllm.cpu import keep_plain_weights

        keep_plain_weights()


def is_used(config: Any) -> bool:
    """Whether a config of vLLM asks for this backend."""
    transfer = getattr(config, "weight_transfer_config", None)
    return transfer is not None and transfer.backend == BACKEND


def _call_engine(worker: Any, method: str, *args: Any) -> Any:
    """Call a method of the worker's `RuntimeWeights`."""
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(worker.vllm_config):
        return getattr(worker.weight_transfer_engine.runtime, method)(*args)
