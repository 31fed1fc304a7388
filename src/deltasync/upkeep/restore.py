"""Write the weights of a version as a checkpoint folder."""

import logging
import os

from deltasync.arguments import local_path, optional_path, optional_version
from deltasync.checkpoint import new_checkpoint
from deltasync.feed.fetch import find_files
from deltasync.feed.log import Log
from deltasync.feed.plan import Plan, plan
from deltasync.feed.route import Route
from deltasync.format.companions import has_config
from deltasync.format.manifest import Manifest
from deltasync.parallel import Progress
from deltasync.state import State
from deltasync.store import Feed, opened

logger = logging.getLogger(__name__)

_NO_CONFIG = "version %d of %s has no config.json beside its weights: engines cannot load the folder without one"


def plan_restore(feed: Feed, *, version: int | str | None = None) -> tuple[Manifest, Plan]:
    """The manifest of a version (the newest by default), and the plan by which it would be restored."""
    with opened(feed) as store:
        log = Log(store)
        target = log.resolve(version)
        return target, plan(log, target)


def restore(
    feed: Feed,
    out: str | os.PathLike[str],
    *,
    version: int | str | None = None,
    base: str | os.PathLike[str] | None = None,
    files: bool = True,
    trust_code: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Write the checkpoint of a version (the newest by default) to the folder `out`, whole or not at all.

    `version` is a number, or the name of a pin.

    `base` is a local copy of the checkpoint that the feed started with, if the one that the feed names is not
    available. If a payload is damaged or missing, another plan is tried. The digest is checked before `out` appears.
    `files`: also write the files beside the weights; if those of the version cannot be read, those of the nearest
    version with others are used, with a warning. Without, only the weights are written.
    `trust_code`: also write files of the feed that can run code when the folder is loaded, such as `modeling.py`.
    """
    local_path("out", out)
    base_path = optional_path("base", base)
    if not isinstance(version, str):
        optional_version(version)
    with opened(feed) as store:
        log = Log(store)
        target = log.resolve(version)
        beside = find_files(log, target, trust_code=trust_code) if files else {}
        if files and not has_config(beside):
            logger.warning(_NO_CONFIG, target.version, store.url)
        route = Route(log, target, base=base_path)
        with new_checkpoint(route.layout(), beside, out) as weights:
            State(weights, scratch=True).advance(route, progress=progress)
        return target
