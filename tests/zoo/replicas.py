"""A model that vLLM serves in this process: its answers, its memory, and how it follows a feed."""

import gc
import hashlib
import math
import os
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import LLM, SamplingParams

from deltasync.engines.memory import Memory
from deltasync.vllm.bootstrap import BareModel

from .checkpoints import VERSIONS
from .models import VOCABULARY, Model

_held: list[Any] = []
_PROMPTS = ([5, 17, 99, 240, 33, 8], [300, 2, 2, 2, 51], [(7 * i) % (VOCABULARY - 20) + 10 for i in range(40)])


def plain(model: Model, folder: Path) -> None:
    """Raise what vLLM raises for a model that it does not serve, without deltasync."""
    _answers(_served(model, folder / "start", weight_transfer_config=None), model)


def fresh(model: Model, folder: Path) -> dict[str, Any]:
    """What a replica that starts with the head answers and holds."""
    llm = _served(model, folder / "head")
    return {"answers": _answers(llm, model), "memory": llm.collective_rpc(_hashes)}


def bare(model: Model, folder: Path) -> dict[str, Any]:
    """What a replica that loads the head from the feed answers and holds. It has no checkpoint."""
    feed = (folder / "feed").as_uri()
    os.environ.update(DELTASYNC_FEED=feed, DELTASYNC_MIRROR=str(folder / "mirror.safetensors"))
    BareModel.of_feed(feed, base=None, trust_code=True, needs_tokenizer=False).write(folder / "bare")
    llm = _served(model, folder / "bare", load_format="deltasync")
    return {"answers": _answers(llm, model), "memory": llm.collective_rpc(_hashes)}


def followed(model: Model, folder: Path) -> dict[str, Any]:
    """What a replica that follows the feed to its head answers and holds, and what went wrong on its way."""
    problems: list[str] = []
    llm = _served(model, folder / "start")
    started = _answers(llm, model)
    memory = llm.collective_rpc(_hashes)
    llm.collective_rpc(_remember)
    for feed in ("other", "partial"):
        try:
            _advance(llm, folder / feed, [0])
            problems.append(f"the feed {feed!r} was not refused")
        except Exception as error:  # noqa: BLE001
            # vLLM passes on only the message of a worker in another process.
            if "[engine.model]" not in str(error):
                problems.append(f"the feed {feed!r} was refused with {error!r:.300}")
            _drain(llm)
        if llm.collective_rpc(_hashes) != memory:
            problems.append(f"the feed {feed!r} changed the memory of the model, which refused it")
        if _answers(llm, model) != started:
            problems.append(f"the feed {feed!r} changed the answers of the model, which refused it")
    _advance(llm, folder / "feed", range(VERSIONS))
    head = {"answers": _answers(llm, model), "memory": llm.collective_rpc(_hashes)}
    if head["answers"] == started and model.is_steady:
        problems.append("the answers do not depend on the version")
    explained = llm.collective_rpc(_explained)
    problems += [f"windows of layers map {name} in another way" for rank in explained for name in rank["other"]]
    flipped, damaged = sum(llm.collective_rpc(_flip)), sum(llm.collective_rpc(_scrub))
    if damaged < flipped:
        problems.append(f"the scrub found {damaged} of {flipped} flipped bits")
    for before, after in zip(head["memory"], llm.collective_rpc(_hashes), strict=True):
        damage = [key for key in before if after.get(key) != before[key] and not key.startswith("reached")]
        problems += [f"the scrub left damage in {', '.join(damage[:8])}"] if damage else []
    if sum(llm.collective_rpc(_scrub)):
        problems.append("a second scrub found damage")
    return {
        **head,
        "problems": problems,
        **{key: sum(rank[key] for rank in explained) for key in ("mapped", "computed")},
        "windows": explained[0]["windows"],
    }


def _served(model: Model, checkpoint: Path, **arguments: Any) -> Any:
    llm = LLM(
        str(checkpoint),
        dtype=model.dtype,
        tensor_parallel_size=model.ranks,
        quantization=model.quantization,
        max_model_len=128,
        max_num_seqs=8,
        enforce_eager=True,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        trust_remote_code=True,
        disable_log_stats=True,
        kv_cache_memory_bytes=1 << 26,
        **{"weight_transfer_config": {"backend": "deltasync"}, **arguments},
    )
    # The process ends without shutting it down, which takes seconds.
    _held.append(llm)
    return llm


def _answers(llm: Any, model: Model) -> list[Any]:
    """Tokens and the bits of their log-probabilities, those of the prompt included."""
    sampling = SamplingParams(
        temperature=0, max_tokens=8, logprobs=5, prompt_logprobs=3, ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in _PROMPTS]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    if not model.is_steady:
        return []
    return [
        [[token, entry.logprob.hex()] for token, entry in sorted(candidates.items())]
        for output in outputs
        for candidates in (*output.prompt_logprobs[1:], *output.outputs[0].logprobs)
    ]


def _advance(llm: Any, feed: Path, versions: Any) -> None:
    llm.init_weight_transfer_engine({"init_info": {"feed": feed.as_uri()}})
    for version in versions:
        llm.start_weight_update()
        llm.update_weights({"update_info": {"version": version}})
        llm.finish_weight_update(str(version))


def _drain(llm: Any) -> None:
    """Read the answers of the other ranks: vLLM stops reading at the first one that has failed."""
    executor = llm.llm_engine.model_executor
    for queue in getattr(executor, "response_mqs", ())[1:]:
        queue.dequeue(timeout=300)


# What follows runs in the workers, by `collective_rpc`.


def _hashes(worker: Any) -> dict[str, str]:
    """A hash of all memory that the model reaches: by our own walk, by torch's and by that of the garbage collector."""
    runner = worker.model_runner
    model = runner.get_model()
    caches = {tensor.untyped_storage().data_ptr() for tensor in _tensors([runner.kv_caches])}
    memory = Memory(model)
    hashes = {f"span {span.path}": _hash(span.flat) for span in memory.spans}
    hashes |= {f"number {path}": repr(number) for path, number in memory.numbers.items()}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    hashes |= {f"named {path}": _hash(tensor) for path, tensor in named}
    reached = Counter(
        _hash(tensor) for tensor in _tensors([model]) if tensor.untyped_storage().data_ptr() not in caches
    )
    hashes |= {f"reached {digest}": str(count) for digest, count in reached.items()}
    return hashes


def _hash(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(flat.numpy().data).hexdigest()[:16]}"


def _tensors(roots: list[Any]) -> Iterator[torch.Tensor]:
    """Every tensor that can be reached from these objects, through anything but modules, classes and globals."""
    seen: dict[int, Any] = {}
    left = list(roots)
    while left:
        found = left.pop()
        if id(found) in seen or isinstance(found, types.ModuleType | type | types.FrameType | types.CodeType):
            continue
        seen[id(found)] = found
        if isinstance(found, torch.Tensor):
            if found.layout == torch.strided and not found.is_meta and found.numel():
                yield found
            left += vars(found).values()
        elif isinstance(found, types.FunctionType):
            left += [found.__closure__, found.__defaults__, found.__kwdefaults__]
        else:
            left += gc.get_referents(found)


def _remember(worker: Any) -> None:
    """Keep what the memory holds now."""
    worker.zoo_start = [span.bits.clone() for span in Memory(worker.model_runner.get_model()).spans]


def _flip(worker: Any) -> int:
    """Flip one bit of one element in each span that has changed since `_remember`; how many."""
    random = torch.Generator().manual_seed(0)
    flipped = 0
    for span, before in zip(Memory(worker.model_runner.get_model()).spans, worker.zoo_start, strict=True):
        # Integers are the state of a router, not weights.
        changed = (span.bits != before).nonzero() if span.flat.is_floating_point() else ()
        if len(changed):
            place = changed[int(torch.randint(len(changed), (), generator=random))]
            bit = int(torch.randint(8 * span.bits.element_size() - 1, (), generator=random))
            span.bits[place] ^= 1 << bit
            flipped += 1
    return flipped


def _scrub(worker: Any) -> int:
    """Scrub with repair; the number of elements that were damaged."""
    return sum(damage.elements for damage in worker.weight_transfer_engine._follower.scrub(repair=True))


def _explained(worker: Any) -> dict[str, Any]:
    """How many elements of memory are copies of elements of the feed, and how many are computed from them.

    Explains the model once more in windows of one layer, where vLLM can build them: the map must be the same.
    """
    runtime = worker.weight_transfer_engine.runtime
    layout = runtime._layout
    whole = runtime.describe(layout.to_json())
    worker._WINDOW_BYTES = 1
    parts = runtime.describe(layout.to_json())
    if "refused" in parts:
        raise AssertionError(f"in windows of one layer, the model is refused: {parts['refused'][0]}")
    mapped = sum(math.prod(shape) for placements in whole["placements"].values() for _, shape, *_ in placements)
    return {
        "mapped": mapped,
        "computed": whole["elements"] - mapped,
        "windows": len(runtime._twins.windows(layout)),
        "other": sorted(
            name
            for name in whole["placements"].keys() | parts["placements"].keys()
            if not np.array_equal(
                _places(whole["placements"].get(name, [])), _places(parts["placements"].get(name, []))
            )
        ),
    }


def _places(placements: Any) -> Any:
    """Span, place and source of each element, in ascending order."""
    places = [np.empty((3, 0), np.int64)]
    for span, shape, source, source_strides, target, target_strides in placements:
        at = np.indices(shape).reshape(len(shape), -1)
        there, here = np.array(source_strides) @ at + source, np.array(target_strides) @ at + target
        places.append(np.stack([np.full_like(here, span), here, there]))
    joined = np.concatenate(places, axis=1)
    return joined[:, np.lexsort(joined)]
