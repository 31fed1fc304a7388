"""Checks that run inside vLLM's own process and environment. Prints JSON; run by `test_inside_vllm`."""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_HOST_IP="127.0.0.1",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("check", choices=("experts", "protocol"))
    parser.add_argument("checkpoint")
    parser.add_argument("new", nargs="?")
    parser.add_argument("--feed")
    options = parser.parse_args()
    if options.check == "experts":
        print(json.dumps(stacked_experts(options.checkpoint, options.new)))
    else:
        print(json.dumps(protocol(options.checkpoint, options.feed)))


def engine(checkpoint: str) -> Any:
    from vllm import LLM

    return LLM(
        checkpoint,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=256,
        weight_transfer_config={"backend": "deltasync"},
    )


def stacked_experts(old: str, new: str) -> dict[str, Any]:
    """Changes through the map into experts that are stacked but not packed, as on an accelerator."""
    import torch
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    from deltasync.blocks import detect, layout_runs
    from deltasync.checkpoint import open_checkpoint
    from deltasync.engines.memory import write_stage
    from deltasync.vllm.target import EngineMap, Rank

    CPUUnquantizedExperts.process_weights_after_loading = lambda self, layer: None
    CPUUnquantizedExperts.apply = lambda self, output, *args, **kwargs: output.zero_()
    llm = engine(old)
    worker = llm.llm_engine.model_executor.driver_worker.worker
    runtime, model = worker.weight_transfer_engine.runtime, worker.model_runner.get_model()
    before, after = open_checkpoint(old).weights, open_checkpoint(new).weights
    known = EngineMap(before.layout, [Rank.from_json(runtime.describe(before.layout.to_json()))])
    known.require_served()
    changes = [found for stretch in layout_runs(before.layout) for found in detect(before, after, stretch)]
    with tempfile.TemporaryDirectory() as folder:
        stage = Path(folder) / "stage.safetensors"
        write_stage(stage, known.segments(0, changes))
        runtime.prepare([str(stage)])
        runtime.scatter()
    scattered = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    names = [spec.name for spec in after.layout.tensors]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        tensors = [torch.from_numpy(bits.copy().view("i2")).view(torch.bfloat16) for bits in after.arrays]
        shaped = [tensor.view(spec.shape) for tensor, spec in zip(tensors, after.layout.tensors, strict=True)]
        model.load_weights(zip(names, shaped, strict=True))
    loaded = dict(model.named_parameters())
    return {
        "is_computed": known.has_computed,
        "stacked": sorted(name for name, parameter in loaded.items() if parameter.ndim == 3),
        "differing": [
            n for n, p in loaded.items() if not torch.equal(p.view(torch.int16), scattered[n].view(torch.int16))
        ],
    }


def protocol(checkpoint: str, feed: str) -> dict[str, Any]:
    """vLLM's own protocol to update weights: answers with the checkpoint, at versions 0, 1 and 0, and at 0 again.

    Before the last answer, the checkpoint is to be loaded again, and weights are to be discarded, which is refused.
    """
    from vllm import SamplingParams

    from deltasync.errors import InvalidInputError

    llm = engine(checkpoint)
    prompt = {"prompt_token_ids": [5, 17, 99, 240, 33, 8]}

    def answer() -> list[list[float]]:
        asked = SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True)
        said = llm.generate([prompt], asked, use_tqdm=False)[0].outputs[0].logprobs
        return [[token, chosen[token].logprob] for chosen in said for token in chosen]

    answers = [answer()]
    llm.init_weight_transfer_engine({"init_info": {"feed": feed}})
    for version in (0, 1, 0):
        llm.start_weight_update()
        llm.update_weights({"update_info": {"version": version}})
        llm.finish_weight_update(str(version))
        llm.reset_prefix_cache()
        answers.append(answer())
    refused = []
    for replace in (lambda: llm.collective_rpc("reload_weights"), lambda: llm.sleep(level=2)):
        try:
            replace()
        except InvalidInputError as error:
            refused.append(str(error))
    llm.reset_prefix_cache()
    return {"answers": [*answers, answer()], "refused": refused}


if __name__ == "__main__":
    main()
