"""The trainer of the demo: warms the policy up, then learns from rollouts and publishes after every step.

Run as `python -m wordle.trainer SETTINGS`, by the demo.
"""

import math
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from demo.child import Orders, run_child, send, send_version
from demo.published import PUBLISHED, digest_of, published_copy
from demo.settings import WORDLE, Settings
from transformers import PreTrainedModel

from deltasync import EngineError, InvalidInputError, Publication, PublisherOptions
from deltasync.torch import Publisher
from deltasync.transformers import model_files
from wordle.game import Array, Wordle
from wordle.rollouts import GROUP, Rollouts, Spool
from wordle.training import Learner, Played, Warmup, grpo_loss, guesses_of, loaded_policy, new_policy, play

_AGE_MAX = 8
"""Rollouts are dropped once they are older than this many versions."""
_PATIENCE_S = 120.0
_RETRY_S = 20.0
"""How long a failing store is retried."""
_POLL_S = 0.02
_TRIAL_GAMES = 512
"""The number of games, at least, that measure how good a policy is."""


def main(settings: Settings, orders: Orders) -> None:
    """Warm up, train and publish; report how good the policy was before and after."""
    torch.set_num_threads(1)
    wordle = Wordle.bundled()
    model = new_policy(settings.seed) if settings.model is None else loaded_policy(Path(settings.model))
    if not _warm_up(model, wordle, settings, orders):
        return
    before = trial(model, wordle, seed=settings.seed)
    files = model_files(model, dtype=PUBLISHED)
    options = PublisherOptions(files=files, retry_s=_RETRY_S, observer=send_version)
    with Publisher(settings.feed(WORDLE), dtype=PUBLISHED, options=options) as publisher:
        weights = model.num_parameters()
        send("ready", weights=weights, full_bytes=weights * PUBLISHED.itemsize, **_score(before))
        # The replicas cannot start without it.
        publisher.publish(model, step=0).wait()
        _learn(model, publisher, settings, orders)
    head = publisher.head
    if head is not None and not orders.stopped.is_set():
        after = trial(model, wordle, seed=settings.seed)
        send(
            "trained",
            version=head.version,
            digest=digest_of(published_copy(model)),
            game=_example_game(wordle, before, after),
            **_score(after),
        )


def trial(model: PreTrainedModel, wordle: Wordle, *, seed: int) -> Played:
    """Play the same number of games on every answer."""
    return play(model, wordle, _trial_answers(wordle), torch.Generator().manual_seed(seed))


def _trial_answers(wordle: Wordle) -> Array:
    return np.tile(np.arange(len(wordle.words)), -(-_TRIAL_GAMES // len(wordle.words)))


def _example_game(wordle: Wordle, before: Played, after: Played) -> dict[str, Any]:
    """The first game of the trial that was lost before and is won after; the first of all if there is none."""
    better = np.flatnonzero(~before.solved & after.solved)
    game = int(better[0]) if len(better) else 0
    answer = wordle.words[_trial_answers(wordle)[game]]
    return {
        "answer": answer,
        "before": guesses_of(wordle, before, game, answer),
        "after": guesses_of(wordle, after, game, answer),
        "is_better": bool(len(better)),
    }


def _warm_up(model: PreTrainedModel, wordle: Wordle, settings: Settings, orders: Orders) -> bool:
    """Return False if this process was stopped."""
    warmup = Warmup(model, wordle, seed=settings.seed)
    for step, loss in enumerate(warmup, start=1):
        send("warmed", step=step, steps=len(warmup), loss=loss)
        if orders.stopped.is_set():
            return False
    return True


def _learn(model: PreTrainedModel, publisher: Publisher, settings: Settings, orders: Orders) -> None:
    learner, spool = Learner(model, lr=settings.lr), Spool.of(settings)
    recent: deque[Publication] = deque()
    for step in range(1, settings.steps + 1):
        started = time.perf_counter()
        rollouts = _next(spool, publisher, orders)
        if rollouts is None:
            return
        waited = time.perf_counter()
        age = _age(rollouts, publisher)
        loss = learner.step(grpo_loss(model, rollouts.played, group=GROUP))
        if not math.isfinite(loss):
            raise InvalidInputError(f"the loss of step {step} is {loss}", hint="choose a lower --lr")
        recent.append(publisher.publish(model, step=step))
        if len(recent) > _AGE_MAX:
            # By now it is committed, unless the store has failed for good; then no replica would get what comes next.
            recent.popleft().wait()
        send(
            "stepped",
            step=step,
            loss=loss,
            replica=rollouts.replica,
            age=age,
            wait_s=waited - started,
            step_s=time.perf_counter() - waited,
            **_score(rollouts.played),
        )
    recent[-1].wait()


def _next(spool: Spool, publisher: Publisher, orders: Orders) -> Rollouts | None:
    """The next rollouts that are not too old; None if this process was stopped."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while not orders.stopped.is_set():
        rollouts = spool.take()
        if rollouts is not None and _age(rollouts, publisher) <= _AGE_MAX:
            return rollouts
        if rollouts is None and time.monotonic() > deadline_s:
            raise EngineError(f"no rollouts came in {_PATIENCE_S:g} s", hint="look at the logs of the replicas")
        if rollouts is None:
            orders.stopped.wait(_POLL_S)
    return None


def _age(rollouts: Rollouts, publisher: Publisher) -> int:
    """The number of versions that were committed after the one that played."""
    return 0 if publisher.head is None else publisher.head.version - rollouts.version


def _score(played: Played) -> dict[str, float]:
    return {"reward": float(played.rewards.mean()), "solved": float(played.solved.mean())}


if __name__ == "__main__":
    given = Settings.from_json(sys.argv[1])
    sys.exit(run_child(lambda orders: main(given, orders)))
