"""The function that slime and Miles call after each version is on disk.

    --update-weight-transport disk --update-weight-disk-dir run/weights
    --custom-update-weight-post-write-path deltasync.interop.slime.publish

`DELTASYNC_FEED` is the feed. `DELTASYNC_SHADOW` keeps the last weights in a mapped file instead of memory.
`DELTASYNC_WAIT=1` waits for the commit of each version; otherwise the trainer goes on while it is put.
"""

import logging
import os
import sys
from pathlib import Path
from typing import Any

from deltasync import InvalidInputError, PublisherOptions
from deltasync.interop import Importer
from deltasync.interop.folder import folder_version

logger = logging.getLogger(__name__)

FEED, SHADOW, WAIT = "DELTASYNC_FEED", "DELTASYNC_SHADOW", "DELTASYNC_WAIT"

_EXPECTED = ("update_weight_mode", "update_weight_transport", "update_weight_disk_dir", "hf_checkpoint")
"""The arguments of slime 0.3 and Miles that the function reads."""

_importers: dict[str, Importer] = {}
"""One for each feed of this process, which slime gives no other place to keep it. The exit of Python finishes them."""


def publish(args: Any, version_dir: str, rollout_engines: object = None) -> None:
    """Publish one version that slime has written, or the checkpoint that training begins with.

    In delta mode slime calls this first with the folder of all versions, before it writes any: the weights of
    `--hf-checkpoint` are published then, as later versions are changes to them. Only rank 0 publishes. An error ends
    the training run: a version that the feed does not have would make all later ones wrong.
    """
    if _rank() != 0:
        return
    place = _checked(args, Path(version_dir))
    feed = os.environ.get(FEED, "")
    importer = _importers.get(feed)
    if importer is None:
        if not feed:
            raise InvalidInputError(f"{FEED} is not set", hint=f"export {FEED}=s3://bucket/run-42 in every process")
        options = PublisherOptions(shadow_path=os.environ.get(SHADOW) or None)
        importer = _importers[feed] = Importer(args.update_weight_disk_dir, feed, options=options)
    publication = importer.publish_base(args.hf_checkpoint) if place is None else importer.publish_folder(place)
    wait = os.environ.get(WAIT, "0")
    if wait not in ("0", "1"):
        raise InvalidInputError(f"{WAIT} must be 0 or 1, not {wait!r:.40}")
    if wait == "1":
        logger.info("version %d has %s", publication.wait().version, version_dir)


def _checked(args: Any, place: Path) -> Path | None:
    """The folder of a version; None for the folder of all of them. InvalidInputError if this is not slime's call."""
    missing = [name for name in _EXPECTED if not hasattr(args, name)]
    if missing:
        raise InvalidInputError(
            f"slime's arguments have no {', '.join(missing)}: this release calls its hook in another way",
            hint="deltasync.interop.slime expects those of slime 0.3",
        )
    if args.update_weight_transport != "disk":
        raise InvalidInputError(
            f"--update-weight-transport is {args.update_weight_transport!r:.40}, which writes no folders",
            hint="use --update-weight-transport disk",
        )
    if folder_version(place) is not None:
        return place
    is_root = Path(args.update_weight_disk_dir).resolve() == place.resolve()
    if is_root and args.update_weight_mode == "delta":
        return None
    raise InvalidInputError(f"slime must give a folder weight_v… of --update-weight-disk-dir, not {place}")


def _rank() -> int:
    """The rank of this process, as torch has it; torch is not imported for that."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    text = os.environ.get("RANK", "0")
    if not text.isdecimal():
        raise InvalidInputError(f"RANK must be a whole number, not {text!r:.40}")
    return int(text)
