"""The host of the trainer: publishes a policy, and one version more for each step of GRPO on samples from the store.

Run as `python trainer.py FEED SAMPLES STEPS AGE`: it learns from a sample if at most AGE versions were committed after
the one that made it. Sends `published`, `stepped`, and `trained` at the end.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import islice

import torch
from demo.child import Orders, run_child, send
from demo.published import PUBLISHED, digest_of, published_copy
from samples import GROUP, Sample, taken
from transformers import PreTrainedModel
from wordle.game import Wordle
from wordle.training import Learner, Warmup, grpo_loss, new_policy

from deltasync.errors import EngineError
from deltasync.store import open_store
from deltasync.store.protocol import Store
from deltasync.torch.publisher import Publisher
from deltasync.trainer.publisher import PublisherOptions
from deltasync.transformers import model_files

_WARMUP_STEPS = 30
_WARMED_UP = 1
"""The version after the warm-up: those before it cannot spell, so that all of their games are alike."""
_LR = 1e-4
_FIRST_WITHIN_S, _NEXT_WITHIN_S = 600.0, 300.0
"""How long samples may take to come. Before the first one the replica has to start."""
_LOOK_S = 0.05


def main(feed: str, samples: str, steps: int, age_max: int, orders: Orders) -> None:
    """Publish what knows nothing, so that replicas can start; warm up; learn."""
    torch.set_num_threads(1)
    model = new_policy(seed=0)
    files = model_files(model, dtype=PUBLISHED)
    with (
        closing(open_store(samples)) as store,
        Publisher(feed, dtype=PUBLISHED, options=PublisherOptions(files=files)) as publisher,
    ):
        head = _publish(publisher, model, step=0)
        for _ in islice(Warmup(model, Wordle.bundled(), seed=0), _WARMUP_STEPS):
            if orders.stopped.is_set():
                return
        head = _publish(publisher, model, step=0)
        learner, found = Learner(model, lr=_LR), _samples(store)
        for step in range(1, steps + 1):
            within_s = _FIRST_WITHIN_S if step == 1 else _NEXT_WITHIN_S
            sample = _next(found, wanted=max(_WARMED_UP, head - age_max), within_s=within_s, orders=orders)
            if sample is None:
                return
            loss = learner.step(grpo_loss(model, sample.played, group=GROUP))
            reward = float(sample.played.rewards.mean())
            send("stepped", step=step, oldest=sample.oldest, newest=sample.newest, head=head, loss=loss, reward=reward)
            head = _publish(publisher, model, step=step)
    send("trained", version=head, digest=digest_of(published_copy(model)))


def _publish(publisher: Publisher, model: PreTrainedModel, *, step: int) -> int:
    """Commit the weights as they are; the version."""
    publication = publisher.publish(model, step=step)
    version = publication.wait().version
    send("published", version=version, changed=None if publication.stats is None else publication.stats.changed)
    return version


def _samples(store: Store) -> Iterator[Sample | None]:
    """All samples, oldest first, without end; None whenever there is no further one yet."""
    last: str | None = None
    while True:
        for key, sample in taken(store, after=last):
            last = key
            yield sample
        yield None


def _next(found: Iterator[Sample | None], *, wanted: int, within_s: float, orders: Orders) -> Sample | None:
    """The next sample that is wholly made by the version `wanted` or later ones; None if this process is to end."""
    deadline, newest = time.monotonic() + within_s, None
    while not orders.stopped.is_set():
        sample = next(found)
        if sample is not None and sample.oldest >= wanted:
            return sample
        if sample is not None:
            newest = sample.newest
        if time.monotonic() > deadline:
            raise EngineError(
                f"no sample of version {wanted} or later came in {within_s:g} s; the newest is of version {newest}",
                hint="does the replica reach the store, and the environment the replica?",
            )
        if sample is None:
            orders.stopped.wait(_LOOK_S)
    return None


if __name__ == "__main__":
    sys.exit(run_child(lambda orders: main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), orders)))
