"""Publish a checkpoint as the next version of a feed."""

import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace

from deltasync import blocks
from deltasync.arguments import instance, local_path, optional_path
from deltasync.checkpoint import Checkpoint, companion_files, open_checkpoint
from deltasync.errors import InvalidInputError, MismatchError
from deltasync.feed.upload import Upload
from deltasync.format.manifest import BaseRef, Manifest
from deltasync.format.payload import Block
from deltasync.format.weights import Weights
from deltasync.parallel import Progress, counting
from deltasync.state import load
from deltasync.store import Feed, opened
from deltasync.store.fencing import PATIENCE_S
from deltasync.trainer.versions import Metadata, VersionWriter

_Path = str | os.PathLike[str]


def publish(
    feed: Feed,
    checkpoint: _Path,
    *,
    step: int | None = None,
    parent: _Path | None = None,
    anchor: bool = False,
    base: BaseRef | None = None,
    extra: Mapping[str, str] | None = None,
    trust_code: bool = False,
    require_fencing: bool = False,
    must_exist: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Commit the weights of a checkpoint as the next version, and return its manifest.

    `parent`: a checkpoint with the weights of the feed's head, which are rebuilt from the feed otherwise.
    `anchor`: add all weights, for replicas that join late; with other tensors than before, in place of a change.
    `base`: the feed is new, and every replica has this checkpoint under that name: no weights are uploaded.
    `extra`: metadata of your own, which the manifest carries.
    `trust_code`: also publish files of the folder that can run code when it is loaded, such as `modeling.py`.
    `must_exist`: raise NotFoundError if the feed has no version yet, instead of starting a new one.

    A new feed begins with version 0. ConflictError if another writer committed first: none of its objects is touched;
    call this again to publish on top.
    """
    metadata = Metadata.of(step, extra)
    if base is not None:
        instance("base", base, BaseRef, hint='use BaseRef("Qwen/Qwen3-0.6B", revision), from deltasync')
    parent = optional_path("parent", parent)
    source = open_checkpoint(local_path("checkpoint", checkpoint))
    new, files = source.weights, companion_files(source, trust_code=trust_code)
    with opened(feed) as store, closing(Upload(store, retry_s=PATIENCE_S, require_fencing=require_fencing)) as upload:
        if must_exist:
            upload.log.require_head()
        head = upload.open()
        versions = VersionWriter(upload=upload, layout=new.layout)
        if base is not None:
            if head is not None:
                raise InvalidInputError(
                    f"the feed is at version {head.version}: only its first version can be a base",
                    hint="leave out the base to publish the change",
                )
            metadata = replace(metadata, files=versions.put_files(files, head))
            return versions.base(new, base, metadata, progress=progress).manifest
        if head is None or (anchor and head.layout_sha256 != new.layout.sha256):
            metadata = replace(metadata, files=versions.put_files(files, head))
            return versions.anchor(new, head, metadata, progress=progress).manifest
        changes = _encode(upload, head, source, parent, progress)
        metadata = replace(metadata, files=versions.put_files(files, head))
        manifest = head
        # A second attempt finds its version at the head, where only the anchor may be missing.
        if changes or not anchor or head.step != metadata.step:
            changed = sum(block.changed for block in changes)
            manifest = versions.delta(changes, head, metadata, changed=changed).manifest
        if anchor and manifest.kind == "delta":
            versions.add_anchor(manifest, new, progress=progress)
        return manifest


def _encode(
    upload: Upload, head: Manifest, source: Checkpoint, parent: _Path | None, progress: Progress | None
) -> list[Block]:
    """What changed since the head."""
    old = load(upload.log, head, progress=progress) if parent is None else _parent_weights(parent, head, progress)
    try:
        old.layout.require_equal(source.weights.layout, ours="the feed", theirs=str(source.path))
    except MismatchError as error:
        hint = "publish it as an anchor (`--anchor`) if the model is meant to change"
        raise MismatchError(error.message, rule=error.rule, hint=hint) from error
    return blocks.encode_delta(
        old, source.weights, on_progress=counting(progress, "encode", source.weights.layout.elements)
    )


def _parent_weights(parent: _Path, head: Manifest, progress: Progress | None) -> Weights:
    weights = open_checkpoint(parent).weights
    digest = blocks.digest(weights, on_progress=counting(progress, "parent", weights.layout.elements))
    if digest != head.digest:
        raise MismatchError(
            f"{parent} has the digest {digest}, version {head.version} has {head.digest}",
            rule="publish.parent",
            version=head.version,
            hint="give the checkpoint that was published last, or leave it out: then the feed is read",
        )
    return weights
