"""The trainer of the demo: warms a policy up, then learns from rollouts and publishes after every step.

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

from deltasync.errors import EngineError, InvalidInputError
from deltasync.torch.publisher import Publisher
from deltasync.trainer.events import Publication, PublishEvent
from deltasync.transformers import model_files
from wordle.child import Orders, run, tell
from wordle.grpo import Learner, loss_of
from wordle.playing import Played, play
from wordle.policy import loaded_policy, new_policy
from wordle.settings import GROUP, SPOOL, Settings
from wordle.spool import Rollouts, Spool
from wordle.warmup import Warmup
from wordle.weights import PUBLISHED, digest_of, published_copy
from wordle.wordle import Wordle

_AGE_MAX = 8
"""Versions after which rollouts are too old to learn from."""
_PATIENCE_S = 120.0
_RETRY_S = 20.0
"""How long a store that fails is tried again."""
_LOOK_S = 0.02
_TRIALS = 512
"""Games that say how good a policy is."""


def main(settings: Settings, orders: Orders) -> None:
    """Warm up, train, publish; tell how good the policy was before and after."""
    torch.set_num_threads(1)
    wordle = Wordle.bundled()
    model = new_policy(settings.seed) if settings.model is None else loaded_policy(Path(settings.model))
    if not _warm_up(model, wordle, settings, orders):
        return
    nbytes = sum(tensor.nbytes for tensor in published_copy(model).values())
    before = trial(model, wordle, seed=settings.seed)
    files = model_files(model, dtype=PUBLISHED)
    with Publisher(settings.store, dtype=PUBLISHED, files=files, retry_s=_RETRY_S, observer=_tell_version) as publisher:
        tell("ready", weights=model.num_parameters(), full_bytes=nbytes, **_told(before))
        # The replicas cannot begin without it.
        publisher.publish(model, step=0).wait()
        _learn(model, publisher, settings, orders)
    head = publisher.head
    if head is not None and not orders.stopped.is_set():
        after = trial(model, wordle, seed=settings.seed)
        tell("trained", version=head.version, digest=digest_of(published_copy(model)).hex, **_told(after))


def trial(model: PreTrainedModel, wordle: Wordle, *, seed: int) -> Played:
    """Games on every answer, the same number of each."""
    answers = np.tile(np.arange(len(wordle.words)), -(-_TRIALS // len(wordle.words)))
    return play(model, wordle, answers, torch.Generator().manual_seed(seed))


def _warm_up(model: PreTrainedModel, wordle: Wordle, settings: Settings, orders: Orders) -> bool:
    """False if it was stopped."""
    warmup = Warmup(model, wordle, seed=settings.seed)
    for step, loss in enumerate(warmup, start=1):
        tell("warmed", step=step, steps=len(warmup), loss=loss)
        if orders.stopped.is_set():
            return False
    return True


def _learn(model: PreTrainedModel, publisher: Publisher, settings: Settings, orders: Orders) -> None:
    learner, spool = Learner(model, lr=settings.lr), Spool(settings.folder / SPOOL)
    recent: deque[Publication] = deque()
    for step in range(1, settings.steps + 1):
        since = time.perf_counter()
        rollouts = _next(spool, publisher, orders)
        if rollouts is None:
            return
        waited = time.perf_counter()
        age = _age(rollouts, publisher)
        loss = learner.step(loss_of(model, rollouts.played, group=GROUP))
        if not math.isfinite(loss):
            raise InvalidInputError(f"the loss of step {step} is {loss}", hint="choose a lower --lr")
        recent.append(publisher.publish(model, step=step))
        if len(recent) > _AGE_MAX:
            # So old, it is committed, or the store has failed for good: what is learned now would reach nobody.
            recent.popleft().wait()
        tell(
            "stepped",
            step=step,
            loss=loss,
            replica=rollouts.replica,
            age=age,
            wait_s=waited - since,
            step_s=time.perf_counter() - waited,
            **_told(rollouts.played),
        )
    recent[-1].wait()


def _next(spool: Spool, publisher: Publisher, orders: Orders) -> Rollouts | None:
    """The next rollouts that are not too old; None if this process is to end."""
    until = time.monotonic() + _PATIENCE_S
    while not orders.stopped.is_set():
        rollouts = spool.take()
        if rollouts is not None and _age(rollouts, publisher) <= _AGE_MAX:
            return rollouts
        if rollouts is None and time.monotonic() > until:
            raise EngineError(f"no rollouts came in {_PATIENCE_S:g} s", hint="look at the logs of the replicas")
        if rollouts is None:
            orders.stopped.wait(_LOOK_S)
    return None


def _age(rollouts: Rollouts, publisher: Publisher) -> int:
    """How many versions were committed after the one that played."""
    return 0 if publisher.head is None else publisher.head.version - rollouts.version


def _told(played: Played) -> dict[str, float]:
    return {"reward": float(played.rewards.mean()), "solved": float(played.solved.mean())}


def _tell_version(event: PublishEvent) -> None:
    tell("published", **asdict(event))


if __name__ == "__main__":
    given = Settings.from_json(sys.argv[1])
    sys.exit(run(lambda orders: main(given, orders)))
