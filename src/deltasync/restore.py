"""Any version of a feed as an ordinary Hugging Face checkpoint folder, bit for bit."""

import os
from pathlib import Path

from deltasync.checkpoint_output import write_checkpoint
from deltasync.format.manifest import Manifest
from deltasync.log.log import Log
from deltasync.log.payloads import fetch_files
from deltasync.log.planning import Plan, plan
from deltasync.progress import Progress
from deltasync.replay import by_any_way, plan_layout, replay
from deltasync.store.protocol import Store


def plan_restore(store: Store, *, version: int | None = None) -> tuple[Manifest, Plan]:
    """What a restore of a version (the newest by default) would fetch."""
    log = Log(store)
    target = log.require_head() if version is None else log.read(version)
    return target, plan(log, target)


def restore(
    store: Store,
    out: str | os.PathLike[str],
    *,
    version: int | None = None,
    base: Path | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Write the checkpoint of a version (the newest by default) to the folder `out`, whole or not at all.

    `base` is a local copy of the checkpoint that the feed began with, where the one that it names is not at hand. If a
    payload is damaged or gone, another way is taken where there is one. The digest is checked before `out` appears.
    """
    log = Log(store)
    target = log.require_head() if version is None else log.read(version)

    def attempt(way: Plan) -> None:
        layout = plan_layout(log, way, base=base)
        write_checkpoint(
            layout,
            fetch_files(store, target),
            out,
            lambda weights: replay(log, way, weights, base=base, threads=threads, progress=progress),
        )

    by_any_way(log, target, attempt)
    return target
