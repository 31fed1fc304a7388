"""The parts of the TRL example: the game, the text of a conversation, attention on a CPU, the account of versions."""

import queue
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "examples" / "trl_wordle"))

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(
    ("guesses", "text", "reward", "is_over"),
    [
        ([], "", 0.0, False),
        (["{answer}"], "{solved} over", 1.0, True),
        (["{other}", "{answer}"], "{solved} over", 0.9, True),
        (["xyzzy"], "not a word", -0.1, False),
        (["Ab"], "not a word", -0.1, False),
        (["xyzzy"] * 4, "not a word over", -0.4, True),
        (["xyzzy"] * 4 + ["{answer}"], "not a word over", -0.4, True),
        (["{answer}", "xyzzy"], "{solved} over", 1.0, True),
    ],
)
def test_the_guesses_determine_a_game(guesses: list[str], text: str, reward: float, is_over: bool) -> None:
    from environment import WORDS, Environment, Turn

    environment = Environment()
    answer = environment.answer(7)
    names = {
        "answer": answer,
        "other": next(word for word in WORDS if word != answer),
        "solved": "".join(f"{letter}+" for letter in answer),
    }
    turn = environment.play(7, [guess.format(**names) for guess in guesses])
    assert turn == Turn(text.format(**names), reward, is_over)


def test_a_conversation_only_grows_at_its_end(tmp_path: Path) -> None:
    """TRL renders the whole conversation for each turn: earlier turns must keep their tokens."""
    from make_model import careless_game, opening, rendered, tokenizer_for

    tokenizer = tokenizer_for(opening())
    for seed in range(20):
        game = careless_game(random.Random(seed))
        whole = rendered(tokenizer, game, tokenize=True, to_be_continued=False)
        assert tokenizer.unk_token_id not in whole
        assert len(whole) < 80
        for turns in range(1, len(game), 2):
            so_far = rendered(tokenizer, game[:turns], tokenize=True, to_be_continued=True)
            assert whole[: len(so_far)] == so_far


def test_attention_over_a_tree_equals_attention_over_each_sample() -> None:
    import on_cpu
    from trl.experimental.async_grpo.packing import TreeRow

    samples = [[1, 2, 3, 4], [1, 2, 5], [1, 2, 5, 6, 7], [8, 9], [1, 2, 3, 4, 9]]
    row = TreeRow()
    for ids in samples:
        mask = [0] + [1] * (len(ids) - 1)
        row.add({"input_ids": np.array(ids), "completion_mask": np.array(mask), "old_log_probs": np.zeros(len(ids)),
                 "advantage": 1.0, "group_id": 0})  # fmt: skip
    packed = row.pack()
    count = len(packed["input_ids"])
    assert count < sum(map(len, samples))
    random_ = torch.Generator().manual_seed(0)
    # The positions are already part of queries and keys, so a node of the tree may have any value.
    query, key, value = (torch.randn(1, heads, count, 8, generator=random_) for heads in (4, 2, 2))
    tree = {name: packed[name] for name in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")}
    found, _ = on_cpu.attention(None, query, key, value, None, scaling=0.3, **tree)
    for nodes in row.sample_nodes:
        at = torch.tensor([_places(row)[node] for node in nodes])
        alone = torch.nn.functional.scaled_dot_product_attention(
            query[:, :, at], key[:, :, at], value[:, :, at], is_causal=True, scale=0.3, enable_gqa=True
        )
        torch.testing.assert_close(found[:, at], alone.transpose(1, 2))


def _places(row: Any) -> dict[int, int]:
    """The position of each node of a tree in its packed form: depth first, as in `pack`."""
    places: dict[int, int] = {}

    def visit(nodes: Iterator[int]) -> None:
        for node in nodes:
            places[node] = len(places)
            visit(iter(row.children[node].values()))

    visit(iter(row.roots.values()))
    return places


@pytest.mark.parametrize(
    ("made_by", "label", "expected"),
    [
        # Here the count of a version is its number plus 1.
        ([(4, 4, 8)], 5, {"samples": 1, "answers": 1, "staleness": {"2": 8}}),
        ([(4, 5, 8), (5, 5, 2)], 5, {"samples": 1, "answers": 2, "spanning": 1, "newer_than_label": 2,
                                      "staleness": {"1": 2, "2": 8}}),
        ([(5, 5, 3), (3, 3, 7)], 5, {"samples": 1, "answers": 2, "older_than_label": 7, "newer_than_label": 3,
                                      "staleness": {"1": 3, "3": 7}}),
        ([(-1, -1, 9)], 0, {"dropped": 1}),
    ],
    ids=["as-labelled", "spanning", "older", "too-old"],
)  # fmt: skip
def test_the_account_counts_what_made_each_token(
    made_by: list[tuple[int, int, int]], label: int, expected: dict[str, Any]
) -> None:
    from versions import KEY, LabellingQueue, follow_versions

    samples: queue.Queue[Any] = queue.Queue()
    worker = SimpleNamespace(_loop_cls=None)
    args = SimpleNamespace(max_staleness=5)
    trainer: Any = SimpleNamespace(rollout_worker=worker, rollout_queue=samples, args=args, model_version=7)
    account = follow_versions(trainer, lambda version: version + 1)
    samples.put(SimpleNamespace(model_version=label, metrics={"reward": 1.0, KEY: made_by}))
    assert isinstance(trainer.rollout_queue, LabellingQueue)
    sample = trainer.rollout_queue.get(timeout=1)
    assert sample.model_version == min(first for first, _, _ in made_by) + 1
    assert sample.metrics == {"reward": 1.0}
    nothing = dict.fromkeys(("samples", "dropped", "answers", "spanning", "older_than_label", "newer_than_label"), 0)
    assert account.to_json() == {**nothing, "staleness": {}, **expected}
