"""Ways to bring changed elements into a vLLM model, timed in its own process. Prints JSON; run by `benchmarks.replica`.

All ways get the same changes, which lie in memory. Each must leave the same bits in every parameter.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def main() -> None:
    """Load the old checkpoint, then apply the difference to the new one repeatedly."""
    parser = argparse.ArgumentParser()
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    from vllm import LLM

    llm = LLM(
        str(options.old),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=256,
        weight_transfer_config={"backend": "deltasync"},
        skip_tokenizer_init=True,
    )
    worker = llm.llm_engine.model_executor.driver_worker.worker
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(_measure(worker, options, Path(folder))), file=sys.stdout, flush=True)


def _measure(worker: Any, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.checkpoint_weight_patch import (
        CheckpointWeightPatch,
        load_checkpoint_weight_patches,
    )
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    from benchmarks.machine import peak_extra_bytes
    from deltasync.blocks import detect, layout_runs
    from deltasync.checkpoint import open_checkpoint
    from deltasync.engines.memory import write_stage
    from deltasync.format.weights import tensor_parts
    from deltasync.vllm.target import EngineMap, Rank

    runtime = worker.weight_transfer_engine.runtime
    model = worker.model_runner.get_model()
    old, new = open_checkpoint(options.old).weights, open_checkpoint(options.new).weights
    changes = [found for stretch in layout_runs(old.layout) for found in detect(old, new, stretch)]
    description: dict[str, Any] = {}
    begun = time.perf_counter()
    describe_bytes = peak_extra_bytes(lambda: description.update(runtime.describe(old.layout.to_json())))
    known = EngineMap(old.layout, [Rank.from_json(description)])
    describe_s = time.perf_counter() - begun
    stage = folder / "stage.safetensors"
    begun = time.perf_counter()
    write_stage(stage, known.segments(0, changes))
    stage_s = time.perf_counter() - begun
    patches = [
        CheckpointWeightPatch(
            name=old.layout.tensors[ordinal].name,
            shape=old.layout.tensors[ordinal].shape,
            dtype=torch.bfloat16,
            values=torch.from_numpy(values.view("i2")).view(torch.bfloat16),
            indices=torch.from_numpy(indices.astype("i8")),
        )
        for part in changes
        for ordinal, indices, values in tensor_parts(old.layout, part)
    ]
    ordinals = list(range(len(old.layout.tensors)))

    def reload() -> None:
        initialize_layerwise_reload(model)
        model.load_weights(
            (spec.name, torch.from_numpy(bits.view("i2")).view(torch.bfloat16).view(spec.shape))
            for spec, bits in zip(new.layout.tensors, new.arrays, strict=True)
        )
        finalize_layerwise_reload(model, worker.vllm_config.model_config)

    ways: dict[str, Callable[[], Any]] = {
        "prepare": lambda: runtime.prepare([str(stage)]),
        "scatter": runtime.scatter,
        "native sparse loader": lambda: load_checkpoint_weight_patches(model, patches),
        "full reload": reload,
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    bits: dict[str, bool] = {}
    with torch.no_grad(), set_current_vllm_config(worker.vllm_config):
        for _ in range(options.rounds):
            for way, run in ways.items():
                if way != "scatter":
                    runtime.copy(str(options.old), ordinals)
                begun = time.perf_counter()
                run()
                seconds[way].append(time.perf_counter() - begun)
                bits[way] = not runtime.compare(str(options.new), ordinals, False)["differing"]
    return {
        "elements": old.layout.elements,
        "changed": sum(len(part.values) for part in changes),
        "model_bytes": old.layout.nbytes,
        "describe_s": describe_s,
        "describe_bytes": describe_bytes,
        "map_bytes": len(json.dumps(description)),
        "stage_s": stage_s,
        "stage_bytes": stage.stat().st_size,
        "seconds": {way: statistics.median(found) for way, found in seconds.items()},
        "exact": {way: is_exact for way, is_exact in bits.items() if way != "prepare"},
    }


if __name__ == "__main__":
    main()
