"""Checkpoints that a feed names instead of carrying them: a folder, or a model on the Hugging Face Hub."""

import os
from pathlib import Path

from deltasync import blocks
from deltasync.checkpoint import Checkpoint, open_checkpoint
from deltasync.errors import InvalidInputError, MismatchError, NotFoundError
from deltasync.format.manifest import BaseRef, Manifest


def open_base(manifest: Manifest, *, at: Path | None = None, threads: int | None = None) -> Checkpoint:
    """The checkpoint that a base names, or the copy of it `at` another place, proved by its state digest.

    NotFoundError if it is not at hand; MismatchError if it is there and has other bits.
    """
    if manifest.base is None:
        raise InvalidInputError(f"version {manifest.version} is not a base")
    checkpoint = open_checkpoint(_located(manifest.base) if at is None else at)
    layout = checkpoint.weights.layout
    if layout.sha256 != manifest.layout_sha256:
        raise MismatchError(
            f"{checkpoint.path} has other tensors than the base of version {manifest.version}",
            version=manifest.version,
            rule="base.layout",
            hint="give the checkpoint that the feed began with",
        )
    found = blocks.digest(checkpoint.weights, threads=threads)
    if found != manifest.digest:
        raise MismatchError(
            f"{checkpoint.path} has the digest {found}, the base of version {manifest.version} has {manifest.digest}",
            version=manifest.version,
            rule="base.digest",
            hint="give the very checkpoint (and revision) that the feed began with",
        )
    return checkpoint


def _located(base: BaseRef) -> Path:
    # Of a name that no file can have, Path.exists raises.
    if os.path.exists(base.checkpoint):
        return Path(base.checkpoint)
    told = f"{base.checkpoint!r:.200}" + ("" if base.revision is None else f" at revision {base.revision!r:.80}")
    hint = "give a local copy of it: `--base DIR`"
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError
    except ImportError as error:
        hint += ", or install deltasync[hf] to fetch it from the Hub"
        raise NotFoundError(f"the base {told} is not a folder here", hint=hint) from error
    try:
        return Path(snapshot_download(base.checkpoint, revision=base.revision))
    except (OSError, ValueError, HFValidationError) as error:
        # The client's errors of network, permission and absence are all OSErrors.
        raise NotFoundError(f"the base {told} is not at hand: {error!s:.300}", hint=hint) from error
