"""What servers answer, and whether the label of an answer tells the weights that made it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from training_feed import TrainingFeed
from transformers import AutoModelForCausalLM
from vllm_servers import Response, VllmServer

PROMPTS = [[5, 17, 99, 240, 33, 8], [300, 2, 2, 2, 51], list(range(10, 60))]

_ANSWERS_OF_A_VERSION = 4


def answers(server: VllmServer) -> list[Any]:
    """What a server says, with all its log-probabilities."""
    found = [server.complete(prompt, prompt_logprobs=3) for prompt in PROMPTS]
    assert all(answer.status == 200 for answer in found), found
    choices = [answer.body["choices"][0] for answer in found]
    return [(choice["text"], choice["logprobs"], choice["prompt_logprobs"]) for choice in choices]


def versions_of(response: Response) -> tuple[str, str]:
    """The oldest and the newest version, by the headers."""
    only = response.headers["x-deltasync-version"]
    first, last = (response.headers.get(f"x-deltasync-{which}-version") for which in ("first", "last"))
    assert (first is None) == (last is None)
    return (only, only) if first is None or last is None else (first, last)


def assert_made_by_their_label(found: Sequence[Response], feed: TrainingFeed, folder: Path) -> None:
    """Log-probabilities of answers with one version are those of its weights, by another implementation.

    Neighbouring versions must differ by far more than the two implementations do.
    """
    labelled = [(versions_of(response), response.body["choices"][0]) for response in found if response.status == 200]
    single = [(first, choice) for (first, last), choice in labelled if first == last]
    for version in sorted({version for version, _ in single}):
        # Before its first version a server has the checkpoint that it was started with.
        model = AutoModelForCausalLM.from_pretrained(
            feed.base if version == "none" else feed.restored(folder / f"label-{version}", version=int(version)),
            dtype=torch.bfloat16,
        )
        for choice in [choice for label, choice in single if label == version][:_ANSWERS_OF_A_VERSION]:
            ids = torch.tensor([choice["prompt_token_ids"] + choice["token_ids"]])
            with torch.no_grad():
                expected = model(ids).logits.float().log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
            told = torch.tensor(choice["logprobs"]["token_logprobs"])
            difference = (expected[-len(told) :] - told).abs()
            assert difference.mean() < 0.05, (version, difference)
