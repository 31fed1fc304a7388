"""A client program that uses the public names as an application does. `make lint` type-checks it; it is never run."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import assert_type

import numpy as np
import torch

import deltasync
from deltasync import (
    Advance,
    AnchorPolicy,
    BaseRef,
    Damage,
    FolderTarget,
    Follower,
    Gate,
    Manifest,
    NotFoundError,
    Publication,
    PublishEvent,
    Retention,
    Staged,
    StateDigest,
    Store,
    StoreError,
    Target,
    Verification,
)
from deltasync.torch import ModuleTarget, Publisher, ShardedPublisher


def checkpoints(feed: str | Path | Store) -> Manifest:
    """Checkpoints in, checkpoints out."""
    manifest = deltasync.publish(feed, "checkpoint-100", step=100)
    assert_type(manifest, Manifest)
    verification = deltasync.verify(feed, deep=True)
    assert_type(verification, Verification)
    if not verification.is_clean:
        raise SystemExit(1)
    digest: StateDigest = deltasync.digest("checkpoint-100")
    try:
        restored = deltasync.restore(feed, Path("restored"), version=manifest.version)
    except (NotFoundError, StoreError) as error:
        print(error.kind, error.hint)
        raise
    assert restored.digest == digest
    skips: tuple[Manifest, ...] = deltasync.compact(feed, levels=(4, 16))
    print(len(skips))
    pruning = deltasync.plan_prune(feed, Retention(anchors=2, versions=100))
    deltasync.prune(feed, pruning)
    return restored


def states() -> None:
    """Two states and a payload, without a feed."""
    old, new = {"weight": np.zeros(4, np.float32)}, {"weight": np.ones(4, np.float32)}
    payload: bytes = deltasync.diff(old, new)
    print(deltasync.inspect(payload).changed)
    deltasync.apply(old, payload)


def train(feed: str, model: torch.nn.Module) -> int | None:
    """The trainer's side."""
    deltasync.set_threads(4)
    policy, base = AnchorPolicy(versions=100), BaseRef("Qwen/Qwen3-0.6B")
    print(policy, base)
    with Publisher(feed, dtype=torch.bfloat16) as publisher:
        publication = publisher.publish(model, step=1)
        assert_type(publication, Publication)
        publication.wait(timeout_s=60)
        event: PublishEvent | None = publication.stats
        print(event)
    with ShardedPublisher(feed, dtype=torch.bfloat16) as sharded:
        sharded.publish(model, step=2)
    return None if publisher.head is None else publisher.head.version


def serve(feed: str | Path | Store, model: torch.nn.Module) -> int:
    """The replica's side."""
    gate = Gate()

    def on_move(move: Advance) -> None:
        print(move.version, move.seconds.pause)

    with Follower(feed, ModuleTarget(model, hold=gate), mirror=Path("mirror"), observer=on_move) as follower:
        follower.start()
        version = follower.wait_live(timeout_s=600)
        damages: Sequence[Damage] = follower.scrub()
        print(damages, follower.status().lag, follower.error)
        with gate:
            print(model)
        follower.stop()
    return version


def every_target(model: torch.nn.Module) -> list[Target]:
    """The targets of the package, and one of the client's own, are all Targets."""
    return [ModuleTarget(model, hold=threading.Lock()), FolderTarget(Path("current")), LoggedTarget(model)]


class LoggedTarget(ModuleTarget):
    """A target of the client's own."""

    def stage(self, staged: Staged) -> None:
        print(staged.version)
        super().stage(staged)


def objects(store: Store) -> list[str]:
    """A store is a context manager with seven verbs."""
    with store:
        is_new: bool = store.create("probes/client", b"content")
        content: bytes = store.get("probes/client")
        print(is_new, content, store.get_range("probes/client", 0, 4), store.capabilities)
        store.put("probes/client", content)
        keys = [info.key for info in store.list("probes/")]
        store.delete("probes/client")
    return keys


if __name__ == "__main__":
    with deltasync.open_store("memory://client") as opened:
        checkpoints(opened)
        objects(opened)
