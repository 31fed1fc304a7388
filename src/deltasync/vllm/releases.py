"""What the plugin is tested with: the releases of vLLM, what differs between them, and the architectures of models.

No other file depends on a release.
"""

import logging
import re
from collections.abc import Iterable
from typing import Any

logger = logging.getLogger(__name__)

OLDEST = (0, 30)
NEWEST = (0, 32)
"""The releases that `make test-vllm-oldest` and `make test-e2e` run the plugin on."""

_RELEASE = re.compile(r"(\d+)\.(\d+)")


def is_tested(release: str) -> bool:
    """Whether the plugin is tested with a release."""
    return OLDEST <= _parsed(release) <= NEWEST


def warn_if_untested(release: str) -> None:
    """Log a warning for a release outside the tested range. The map of a model is proved with every release."""
    if not is_tested(release):
        logger.warning(
            "deltasync is tested with vLLM %d.%d to %d.%d, not with %s; it starts anyway, and refuses a feed whose "
            "tensors it cannot place in memory",
            *OLDEST,
            *NEWEST,
            release,
        )


def has_weight_versions(completion: Any) -> bool:
    """Whether vLLM records the version that each token of a completion was sampled under.

    Releases since 0.32 do, and report the versions with the last output of a completion. Before 0.32, `labels` takes
    every version that was live while the request ran.
    """
    return hasattr(completion, "weight_versions")


def waiting_requests(scheduler: Any) -> list[Any]:
    """The requests of a scheduler that wait and hold no KV.

    In 0.30, those that wait for something else than memory, such as a grammar, are in a queue of their own.
    """
    waiting = [*scheduler.waiting, *getattr(scheduler, "skipped_waiting", ())]
    return [request for request in waiting if request.num_computed_tokens == 0]


def check_pauses(client: Any, release: str) -> None:
    """Make `pause_generation` of an engine client fail if a KV connector could not clear its cache.

    Releases since 0.31 do so by themselves. Before 0.31, vLLM ignores it, and would use what was computed with the
    weights of an older version.
    """
    if _parsed(release) >= (0, 31):
        return
    pause = client.pause_generation

    async def pause_and_check(*, mode: str, clear_cache: bool) -> None:
        await pause(mode=mode, clear_cache=clear_cache)
        # The pause does not return what became of the connector's cache, so it is cleared once more.
        if clear_cache and not await client.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
            raise RuntimeError("the cache of the KV connector was not cleared")

    client.pause_generation = pause_and_check


def _parsed(release: str) -> tuple[int, int]:
    """The first two numbers of a release; zeros for a build whose version is not a release."""
    match = _RELEASE.match(release)
    return (0, 0) if match is None else (int(match[1]), int(match[2]))


TESTED = frozenset(
    {
        "AfmoeForCausalLM",
        "ApertusForCausalLM",
        "ArceeForCausalLM",
        "BloomForCausalLM",
        "Cohere2ForCausalLM",
        "Cohere2MoeForCausalLM",
        "CohereForCausalLM",
        "CwmForCausalLM",
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "Dots1ForCausalLM",
        "Ernie4_5ForCausalLM",
        "Ernie4_5_MoeForCausalLM",
        "Exaone4ForCausalLM",
        "ExaoneForCausalLM",
        "ExaoneMoeForCausalLM",
        "FalconForCausalLM",
        "FalconH1ForCausalLM",
        "FlexOlmoForCausalLM",
        "GPT2LMHeadModel",
        "GPTBigCodeForCausalLM",
        "GPTJForCausalLM",
        "GPTNeoXForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Gemma3nForCausalLM",
        "Gemma4ForCausalLM",
        "GemmaForCausalLM",
        "Glm4ForCausalLM",
        "Glm4MoeForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "GlmForCausalLM",
        "GptOssForCausalLM",
        "GraniteForCausalLM",
        "GraniteMoeForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeSharedForCausalLM",
        "HYV3ForCausalLM",
        "HeliumForCausalLM",
        "HunYuanDenseV1ForCausalLM",
        "HunYuanMoEV1ForCausalLM",
        "HyperCLOVAXForCausalLM",
        "InternLM2ForCausalLM",
        "Jais2ForCausalLM",
        "Lfm2ForCausalLM",
        "Lfm2MoeForCausalLM",
        "Llama4ForCausalLM",
        "LlamaForCausalLM",
        "Mamba2ForCausalLM",
        "MellumForCausalLM",
        "MiMoForCausalLM",
        "MiMoV2FlashForCausalLM",
        "MiniCPM3ForCausalLM",
        "MiniCPMForCausalLM",
        "Ministral3ForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "NanoChatForCausalLM",
        "NemotronForCausalLM",
        "NemotronHForCausalLM",
        "OPTForCausalLM",
        "Olmo2ForCausalLM",
        "Olmo3ForCausalLM",
        "OlmoForCausalLM",
        "OlmoeForCausalLM",
        "OrionForCausalLM",
        "Phi3ForCausalLM",
        "PhiForCausalLM",
        "PhiMoEForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
        "SeedOssForCausalLM",
        "SmolLM3ForCausalLM",
        "SolarForCausalLM",
        "StableLmForCausalLM",
        "Starcoder2ForCausalLM",
        "TeleFLMForCausalLM",
        "VaultGemmaForCausalLM",
        "Zamba2ForCausalLM",
    }
)
"""Those of `tests/zoo`, whose models follow feeds to the bits of a fresh server. A test compares both lists."""


def warn_if_not_in_zoo(architectures: Iterable[str]) -> None:
    """Log which of these architectures are not in the zoo."""
    for architecture in architectures:
        if architecture not in TESTED:
            logger.warning(
                "deltasync was not tested with the architecture %s: its map is proved like that of every model, "
                "but compare this server with a fresh one before you rely on it",
                architecture,
            )
