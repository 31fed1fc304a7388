"""The trainer of the demo: warms the policy up, then learns from rollouts and publishes after every step.

Run as `python -m wordle.trainer SETTINGS`.
"""

import math
import sys
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from deltasync import EngineError, InvalidInputError, Publication, PublisherOptions, PublishEvent
from deltasync.torch import Publisher
from deltasync.transformers import model_files
from wordle.game import Wordle
from wordle.processes import GROUP, SPOOL, Orders, Settings, run_child, send
from wordle.rollouts import Rollouts, Spool
from wordle.training import (
    PUBLISHED,
    Learner,
    Played,
    Warmup,
    digest_of,
    grpo_loss,
    loaded_policy,
    new_policy,
    play,
    published_copy,
)

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
    options = PublisherOptions(files=files, retry_s=_RETRY_S, observer=_send_version)
    with Publisher(settings.store, dtype=PUBLISHED, options=options) as publisher:
        weights = model.num_parameters()
        send("ready", weights=weights, full_bytes=weights * PUBLISHED.itemsize, **_score(before))
        # The replicas cannot start without it.
        publisher.publish(model, step=0).wait()
        _learn(model, publisher, settings, orders)
    head = publisher.head
    if head is not None and not orders.stopped.is_set():
        after = trial(model, wordle, seed=settings.seed)
        send("trained", version=head.version, digest=digest_of(published_copy(model)), **_score(after))


def trial(model: PreTrainedModel, wordle: Wordle, *, seed: int) -> Played:
    """Play the same number of games on every answer."""
    answers = np.tile(np.arange(len(wordle.words)), -(-_TRIAL_GAMES // len(wordle.words)))
    return play(model, wordle, answers, torch.Generator().manual_seed(seed))


def _warm_up(model: PreTrainedModel, wordle: Wordle, settings: Settings, orders: Orders) -> bool:
    """Return False if this process was stopped."""
    warmup = Warmup(model, wordle, seed=settings.seed)
    for step, loss in enumerate(warmup, start=1):
        send("warmed", step=step, steps=len(warmup), loss=loss)
        if orders.stopped.is_set():
            return False
    return True


def _learn(model: PreTrainedModel, publisher: Publisher, settings: Settings, orders: Orders) -> None:
    learner, spool = Learner(model, lr=settings.lr), Spool(settings.folder / SPOOL)
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


def _send_version(event: PublishEvent) -> None:
    send("published", **asdict(event))


if __name__ == "__main__":
    given = Settings.from_json(sys.argv[1])
    sys.exit(run_child(lambda orders: main(given, orders)))
