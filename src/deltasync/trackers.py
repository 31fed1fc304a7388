"""Observers that send what publishers and followers report to W&B, MLflow or TensorBoard.

    options = PublisherOptions(observer=to_wandb(run))
    Follower(feed, target, observer=to_tensorboard(writer))

Each takes the run, client or writer that you have: no tracker is imported here. An error in an observer is logged and
stops nothing.
"""

import time
from collections.abc import Callable
from typing import Any

from deltasync import Advance, InvalidInputError, PublishEvent
from deltasync.observe import phases_of, tracked

__all__ = ["Observer", "event_metrics", "to_mlflow", "to_tensorboard", "to_wandb"]

Observer = Callable[[PublishEvent | Advance], None]

PREFIX = "deltasync/"


def event_metrics(event: PublishEvent | Advance, *, clock: Callable[[], float] = time.time) -> dict[str, float]:
    """The numbers of an event, by their names in a tracker.

    Of a publication: `publish/bytes`, `publish/changed_share`, `publish/bits_per_changed`, `publish/held_s` (how long
    the trainer waited), `publish/background_s`, `publish/retries`; of an anchor `anchor/bytes`. Of a replica:
    `replica/bytes`, `replica/pause_s`, `replica/total_s`, `replica/lag_s` (since the commit, by both clocks).
    """
    if isinstance(event, PublishEvent) and event.kind == "anchor" and event.version > 0:
        return _named("anchor", event.version, {"bytes": event.payload_bytes})
    found, phases_s = tracked(event), sum(phases_of(event).values())
    if isinstance(event, Advance):
        late_s = None if event.committed_unix_s is None else max(0.0, clock() - event.committed_unix_s)
        return _named("replica", event.version, {**found, "total_s": phases_s, "lag_s": late_s})
    bits = 8 * event.payload_bytes / event.changed if event.changed else None
    found |= {"changed_share": event.density, "bits_per_changed": bits, "background_s": phases_s}
    return _named("publish", event.version, found)


def to_wandb(run: Any) -> Observer:
    """Log to a run of W&B, in the row of the trainer's current step: the steps of the run stay those of the trainer."""
    _require(run, "log", "define_metric", what="a run of W&B, as wandb.init() returns it")
    run.define_metric(f"{PREFIX}*", step_metric=f"{PREFIX}version")

    def observe(event: PublishEvent | Advance) -> None:
        run.log(event_metrics(event), commit=False)

    return observe


def to_mlflow(client: Any, *, run_id: str) -> Observer:
    """Log to a run of MLflow, with the version as the step: `to_mlflow(MlflowClient(), run_id=run.info.run_id)`.

    A client is needed, as MLflow's active run is that of a thread.
    """
    _require(client, "log_metric", what="a MlflowClient")
    return _by_version(lambda name, value, step: client.log_metric(run_id, name, value, step=step))


def to_tensorboard(writer: Any) -> Observer:
    """Log to a SummaryWriter, with the version as the step."""
    _require(writer, "add_scalar", what="a SummaryWriter")
    return _by_version(writer.add_scalar)


def _by_version(log: Callable[[str, float, int], object]) -> Observer:
    def observe(event: PublishEvent | Advance) -> None:
        metrics = event_metrics(event)
        step = int(metrics.pop(f"{PREFIX}version"))
        for name, value in metrics.items():
            log(name, value, step)

    return observe


def _named(side: str, version: int, found: dict[str, float | None]) -> dict[str, float]:
    named = {f"{PREFIX}{side}/{name}": float(value) for name, value in found.items() if value is not None}
    return {f"{PREFIX}version": float(version), **named}


def _require(thing: Any, *methods: str, what: str) -> None:
    missing = [name for name in methods if not callable(getattr(thing, name, None))]
    if missing:
        raise InvalidInputError(f"this must be {what}, but it has no {', '.join(missing)}")
