"""The parts of the demo in examples/wordle: playing, learning, rollouts, events, the screen and the report."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from wordle.game import GREEN, LETTERS, Wordle
from wordle.processes import Settings
from wordle.report import Outcome, facts, plot, report_html, smooth, to_json
from wordle.rollouts import Rollouts, Spool
from wordle.run import main, prepare, require_equal
from wordle.screen import Board, Lines, recovery_text
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
    digest_of,
    grpo_loss,
    imitation_loss,
    mark_tokens,
    new_policy,
    play,
    policy_of_config,
    published_copy,
)

from deltasync import InvalidInputError, MismatchError, Verification
from deltasync.torch import Publisher
from deltasync.transformers import model_files

DIGEST = "0" * 31 + "1"
OTHER_DIGEST = "0" * 31 + "2"


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
    texts = careless_games(wordle, 64, heeds=1.0, random=np.random.default_rng(0))
    assert texts.shape == (64, TEXT)
    assert (texts[:, 0] == BEGIN).all()
    turns = texts[:, 1:]
    last = turns[:, -LETTERS:] - FIRST_LETTER
    assert (wordle.find(last) >= 0).all()
    # A player who heeds all marks keeps each green letter in its place.
    first, seen = turns[:, :LETTERS] - FIRST_LETTER, turns[:, LETTERS:PER_TURN]
    green = seen == mark_tokens(first, np.full_like(first, GREEN))
    assert green.any()
    assert (last[green] == first[green]).all()


def test_warm_up_teaches(wordle: Wordle) -> None:
    model = new_policy(2)
    learner, random = Learner(model, lr=3e-3), np.random.default_rng(0)
    losses = [
        learner.step(imitation_loss(model, careless_games(wordle, 8, heeds=0.7, random=random))) for _ in range(6)
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
        assert publisher.publish(ours).wait().digest.hex == digest_of(published)
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


# --- events -----------------------------------------------------------------------------------------------------------


def published(step: int | None, version: int, **fields: Any) -> dict[str, Any]:
    event = {"kind": "delta", "changed": 100, "elements": 1000, "payload_bytes": 80, "held_s": 0.002}
    return {"event": "published", "step": step, "version": version, **event, **fields}


def stepped(step: int) -> dict[str, Any]:
    return {
        "event": "stepped",
        "step": step,
        "reward": 0.1 * step,
        "solved": 0.2,
        "age": 1,
        "step_s": 1.0,
        "wait_s": 0.0,
    }


def moved(version: int, **fields: Any) -> dict[str, Any]:
    return {"event": "moved", "version": version, "edges": ["delta"], "nbytes": 80, "pause_s": 0.001, **fields}


def board_of_a_run() -> Board:
    """Three steps, one of them without a version of its own; a replica that was killed; one that is behind."""
    board = Board(("replica-1", "replica-2"), 3)
    events: list[tuple[str, dict[str, Any]]] = [
        ("trainer", {"event": "warmed", "step": 80, "steps": 80, "loss": 1.0}),
        ("trainer", {"event": "ready", "weights": 1000, "full_bytes": 2000, "reward": 0.1, "solved": 0.2}),
        ("trainer", published(0, 0, kind="anchor", changed=None, payload_bytes=1500)),
        ("replica-1", moved(0)),
        ("replica-2", moved(0)),
        ("trainer", published(1, 1)),
        ("trainer", published(1, 1, kind="anchor", payload_bytes=1300)),
        ("trainer", stepped(1)),
        ("replica-1", moved(1, pause_s=0.004)),
        ("trainer", stepped(2)),
        ("trainer", published(3, 2)),
        ("trainer", published(3, 2, kind="anchor", payload_bytes=1400)),
        ("trainer", stepped(3)),
    ]
    for name, fields in events:
        board.add(name, fields, now_s=10.0)
    board.kill("replica-2", now_s=20.0)
    board.add("replica-2", moved(2, edges=["delta", "delta"], nbytes=160), now_s=23.5)
    board.add("trainer", {"event": "trained", "version": 2, "digest": DIGEST, "reward": 0.5, "solved": 0.6}, now_s=30)
    for name in board.replicas:
        board.add(name, {"event": "final", "version": 2, "digest": DIGEST}, now_s=31.0)
    return board


def outcome_of(board: Board) -> Outcome:
    clean = Verification(2, True, (0, 1, 2), (), (), (), (), 0, 0)
    return Outcome(Settings("feed", "out"), board, clean, 40.0)


def test_board() -> None:
    board = board_of_a_run()
    assert [row.version for row in board.rows] == [0, 1, None, 2]
    assert [row.lags for row in board.rows[1:]] == [
        {"replica-1": 1, "replica-2": 1},
        {"replica-1": 0, "replica-2": 1},
        {"replica-1": 1, "replica-2": 2},
    ]
    assert board.rows[1].pauses_s == {"replica-1": 0.004}
    assert (board.sent_bytes, board.copies_bytes) == (1500 + 80 + 80 + 1300 + 1400, 3 * 2000)
    found = board.recovery
    assert found is not None
    assert (found.replica, found.at_step, found.had, found.back, found.took_s) == ("replica-2", 3, 0, 2, 3.5)
    assert "back with version 2 after 3.5 s (2 delta, 0.2 kB)" in recovery_text(board)


def test_summary() -> None:
    outcome = outcome_of(board_of_a_run())
    texts = dict(facts(outcome))
    assert texts["before"].startswith("mean reward 0.100, 20% of the games solved (after a supervised warm-up")
    assert texts["after"].startswith("mean reward 0.500")
    assert texts["sent"] == "0.00 MB in 2 deltas and 0.00 MB in anchors; 3 full copies are 0.01 MB, 1.4 times as much"
    assert texts["verify --deep"] == "clean, 3 versions decoded"
    assert to_json(outcome)["recovery"]["took_s"] == 3.5


def test_lines(capsys: pytest.CaptureFixture[str]) -> None:
    Lines().show(board_of_a_run())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1000 weights; after the warm-up: reward 0.100, 20% solved"
    assert lines[3].startswith(
        "step 1, reward 0.100, version 1, changed 10.0%, sent 0.1 kB, full / sent 25.0, held 2.00 ms"
    )
    assert lines[4].startswith("step 2, reward 0.200, version -, changed -,")


def test_report_loads_nothing_else() -> None:
    html = report_html(outcome_of(board_of_a_run()))
    assert html.count("<svg") == html.count("</svg>") == 5
    assert not re.search(r"(src|href)=|https?://|url\(|@import|<script", html)
    assert DIGEST in html


def test_plot() -> None:
    svg = plot({"a<b": [(0, 0), (10, 4)]})
    assert "a&lt;b" in svg
    points = re.search(r'points="([^"]*)"', svg)
    assert points is not None
    assert points[1] == "48.0,172.0 592.0,48.0"
    assert plot({"none": []}) == "<p>Nothing was measured.</p>"
    assert plot({"one": [(3, 3)]}).count("<polyline") == 1
    assert smooth([(i, float(i == 4)) for i in range(9)])[4] == (4, pytest.approx(1 / 9))


# --- errors -----------------------------------------------------------------------------------------------------------


def test_different_digests_are_an_error() -> None:
    board = board_of_a_run()
    require_equal(board)
    board.digests["replica-2"] = OTHER_DIGEST
    with pytest.raises(MismatchError, match=r"replica-2 has the digest 0+2, the trainer has 0+1"):
        require_equal(board)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"model": "nowhere"}, "nowhere has no config.json"),
        ({"store": "memory://run"}, "is in the memory of one process"),
        ({"store": "ftp://host/feed"}, "ftp:// is not a kind of store"),
        ({"out": "used"}, "used already exists"),
        ({"out": "used/file"}, "used/file already exists"),
        ({"store": "old"}, "there is already a feed in old"),
    ],
)
def test_wrong_settings_are_refused_before_any_process_starts(
    fields: dict[str, Any], wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    if fields.get("store") == "old":
        with Publisher("old") as publisher:
            publisher.publish({"weight": torch.zeros(4)})
    with pytest.raises(InvalidInputError, match=re.escape(wanted)) as refused:
        prepare(replace(Settings("feed", "new"), **fields))
    assert refused.value.hint
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "arguments", [("--lr", "0"), ("--lr", "nan"), ("--steps", "0"), ("--replicas", "x"), ("--seed", "-1")]
)
def test_wrong_usage(arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert arguments[1] in capsys.readouterr().err
