"""The second act of the demo, examples/wordle: playing, learning, rollouts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from demo.published import digest_of, published_copy
from support import LONG_S
from transformers import PreTrainedModel
from wordle.game import GREEN, LETTERS, Wordle
from wordle.rollouts import Rollouts, Spool
from wordle.training import (
    BEGIN,
    FIRST_LETTER,
    PER_TURN,
    TEXT,
    VOCABULARY,
    Learner,
    Played,
    advantages,
    all_letter_log_probs,
    careless_games,
    chosen_letters,
    grpo_loss,
    guesses_of,
    imitation_loss,
    mark_tokens,
    new_policy,
    play,
    policy_of_config,
)

from deltasync.torch import Publisher
from deltasync.transformers import model_files


@pytest.fixture(scope="module")
def wordle() -> Wordle:
    return Wordle.bundled()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return new_policy(0)


def played(model: PreTrainedModel, wordle: Wordle, *, games: int = 8, seed: int = 0) -> Played:
    return play(model, wordle, np.arange(games) // 4, torch.Generator().manual_seed(seed))


# --- playing and learning ---------------------------------------------------------------------------------------------


def test_log_probs_while_playing_equal_those_of_the_whole_text(model: PreTrainedModel, wordle: Wordle) -> None:
    found = played(model, wordle)
    texts = torch.from_numpy(found.texts)
    assert texts.shape == (8, TEXT)
    whole = all_letter_log_probs(model, texts).gather(2, chosen_letters(texts)[..., None])[..., 0]
    assert torch.allclose(whole, torch.from_numpy(found.log_probs), atol=1e-5)


def test_marks_are_read_after_each_guess(model: PreTrainedModel, wordle: Wordle) -> None:
    found = played(model, wordle)
    for text in found.texts:
        guess, seen = text[1 : 1 + LETTERS] - FIRST_LETTER, text[1 + LETTERS : 1 + PER_TURN]
        word = wordle.find(guess[None])[0]
        # Random letters are hardly ever a word.
        assert word >= 0 or seen.tolist() == [VOCABULARY - 1] * LETTERS


def test_guesses_after_a_solved_game_do_not_count(wordle: Wordle) -> None:
    knowing = _Oracle(wordle, answer=3, at_turn=1)
    found = play(knowing, wordle, np.array([3, 4]), torch.Generator().manual_seed(0))  # type: ignore[arg-type]
    assert found.solved.tolist() == [True, False]
    assert found.counts.reshape(2, -1, LETTERS).all(axis=2).sum(axis=1).tolist() == [2, 6]
    assert found.rewards[0] == pytest.approx(0.9)


def test_guesses_of_a_game(wordle: Wordle) -> None:
    answers = np.array([3, 4])
    found = play(_Oracle(wordle, answer=3, at_turn=1), wordle, answers, torch.Generator().manual_seed(0))  # type: ignore[arg-type]
    won, lost = (guesses_of(wordle, found, game, wordle.words[answers[game]]) for game in range(2))
    assert [guess for guess, _ in won] == [wordle.words[0], wordle.words[3]]
    assert won[-1][1] == "ggggg"
    assert len(lost) == 6
    assert all("ggggg" not in given for _, given in lost)
    random = played(new_policy(0), wordle)
    words = [guess for guess, given in guesses_of(wordle, random, 0, wordle.words[0]) if given != "xxxxx"]
    assert set(words) <= set(wordle.words)


class _Oracle:
    """A stand-in for a trained policy: guesses the first word, and from a certain turn on one answer."""

    def __init__(self, wordle: Wordle, *, answer: int, at_turn: int) -> None:
        self._wordle, self._answer, self._at_turn = wordle, answer, at_turn
        self._asked = 0

    def __call__(self, tokens: torch.Tensor, **_: Any) -> Any:
        turn, place = divmod(self._asked, LETTERS)
        word = self._answer if turn >= self._at_turn else 0
        logits = torch.full((len(tokens), 1, VOCABULARY), -100.0)
        logits[:, :, FIRST_LETTER + int(self._wordle.letters[word, place])] = 100.0
        self._asked += 1
        return type("Output", (), {"logits": logits})


@pytest.mark.parametrize(
    ("rewards", "wanted"),
    [
        ([0.0, 1.0, 5.0, 7.0], [-1, 1, -1, 1]),
        ([0.3, 0.3, 0.1, 0.1], [0, 0, 0, 0]),
    ],
)
def test_advantages(rewards: list[float], wanted: list[float]) -> None:
    assert advantages(np.array(rewards), group=2).tolist() == pytest.approx(wanted, abs=1e-3)


def test_a_step_makes_better_games_more_likely(wordle: Wordle) -> None:
    model = new_policy(1)
    found = replace(played(model, wordle), rewards=np.array([1.0, 0, 0, 0, 0, 0, 0, 1]))

    def likely() -> torch.Tensor:
        texts = torch.from_numpy(found.texts)
        with torch.no_grad():
            return all_letter_log_probs(model, texts).gather(2, chosen_letters(texts)[..., None]).sum(dim=(1, 2))

    before, learner = likely(), Learner(model, lr=1e-3)
    for _ in range(3):
        learner.step(grpo_loss(model, found, group=4))
    risen = likely() - before
    assert risen[[0, 7]].min() > risen[1:7].max()


def test_games_with_the_same_reward_give_no_loss(model: PreTrainedModel, wordle: Wordle) -> None:
    found = replace(played(model, wordle), rewards=np.full(8, 0.3))
    assert float(grpo_loss(model, found, group=4).detach()) == pytest.approx(0, abs=1e-6)


def test_ratio_is_clipped(model: PreTrainedModel, wordle: Wordle) -> None:
    found = played(model, wordle)
    # These letters were far less likely for the policy that played: the ratio is large, and only gains are clipped.
    stale = replace(found, log_probs=found.log_probs - 3, rewards=np.array([1.0, 1, 0, 0, 1, 1, 0, 0]))
    ratio, clipped = np.exp(3), 1.2
    assert float(grpo_loss(model, stale, group=4).detach()) == pytest.approx((ratio - clipped) / 2, rel=0.01)


def test_careless_games(wordle: Wordle) -> None:
    texts = careless_games(wordle, 64, follows_marks=1.0, random=np.random.default_rng(0))
    assert texts.shape == (64, TEXT)
    assert (texts[:, 0] == BEGIN).all()
    turns = texts[:, 1:]
    last = turns[:, -LETTERS:] - FIRST_LETTER
    assert (wordle.find(last) >= 0).all()
    # A player who follows all marks keeps each green letter in its place.
    first, seen = turns[:, :LETTERS] - FIRST_LETTER, turns[:, LETTERS:PER_TURN]
    green = seen == mark_tokens(first, np.full_like(first, GREEN))
    assert green.any()
    assert (last[green] == first[green]).all()


def test_warm_up_teaches(wordle: Wordle) -> None:
    model = new_policy(2)
    learner, random = Learner(model, lr=3e-3), np.random.default_rng(0)
    losses = [
        learner.step(imitation_loss(model, careless_games(wordle, 8, follows_marks=0.7, random=random)))
        for _ in range(6)
    ]
    assert losses[-1] < losses[0] - 0.1


# --- weights and rollouts ---------------------------------------------------------------------------------------------


def test_a_model_from_the_feed_computes_the_same(tmp_path: Path) -> None:
    ours, theirs = new_policy(3), policy_of_config(model_files(new_policy(0), dtype=torch.bfloat16)["config.json"])
    published = published_copy(ours)
    assert {parameter.dtype for parameter in published.parameters()} == {torch.bfloat16}
    theirs.load_state_dict(published.state_dict())
    assert digest_of(published_copy(theirs)) == digest_of(published)
    with Publisher(tmp_path.as_posix(), dtype=torch.bfloat16) as publisher:
        assert publisher.publish(ours).wait(LONG_S).digest.hex == digest_of(published)
    ours.load_state_dict(published.state_dict())
    text = torch.zeros((1, TEXT), dtype=torch.int64)
    assert torch.equal(all_letter_log_probs(ours, text), all_letter_log_probs(theirs, text))
    with torch.no_grad():
        next(published.parameters())[0, 0] += 1
    assert digest_of(published) != digest_of(published_copy(ours))


def test_spool(tmp_path: Path, model: PreTrainedModel, wordle: Wordle) -> None:
    spool = Spool(tmp_path)
    assert spool.take() is None
    given = [Rollouts(name, version, played(model, wordle, seed=version)) for name, version in (("b", 4), ("a", 5))]
    for rollouts in given:
        spool.put(rollouts)
    (tmp_path / "half.part").write_bytes(b"of one that was killed")
    assert [spool.waiting(name) for name in ("a", "b", "c")] == [1, 1, 0]
    for wanted in given:
        found = spool.take()
        assert found is not None
        assert (found.replica, found.version) == (wanted.replica, wanted.version)
        for name in ("texts", "log_probs", "counts", "rewards", "solved"):
            assert np.array_equal(getattr(found.played, name), getattr(wanted.played, name)), name
    assert spool.take() is None
