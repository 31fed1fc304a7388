"""A checkpoint as the next version of a feed."""

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

from deltasync import blocks
from deltasync.checkpoint import Checkpoint, companion_files, open_checkpoint
from deltasync.errors import InvalidInputError, MismatchError
from deltasync.feed.replay import load
from deltasync.feed.writer import Writer
from deltasync.format.companions import write_files
from deltasync.format.digest import StateDigest
from deltasync.format.manifest import BaseRef, Kind, Manifest, PayloadRef
from deltasync.format.payload import PayloadHeader, write_payload
from deltasync.format.weights import Weights
from deltasync.parallel import Progress, counting
from deltasync.store import Feed, opened
from deltasync.trainer.version import put_anchor


def publish(
    feed: Feed,
    checkpoint: str | os.PathLike[str],
    *,
    step: int | None = None,
    parent: str | os.PathLike[str] | None = None,
    anchor: bool = False,
    base: BaseRef | None = None,
    require_fencing: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Commit the weights of a checkpoint as the next version, and return its manifest.

    `parent`: a checkpoint with the weights of the feed's head, which are rebuilt from the feed otherwise.
    `anchor`: add all weights, for replicas that join late; with other tensors than before, in place of a change.
    `base`: the feed is new, and every replica has this checkpoint under that name: no weights are uploaded.

    ConflictError if another writer was faster: nothing of theirs is touched, run it again to publish on top.
    """
    found = open_checkpoint(checkpoint)
    with opened(feed) as store:
        writer = Writer(store, require_fencing=require_fencing)
        try:
            head = writer.open()
            known = None if parent is None else Path(parent)
            return _Publication(writer, head, found, step, known, anchor, base, progress).run()
        finally:
            writer.close()


@dataclass(frozen=True, slots=True)
class _Publication:
    writer: Writer
    head: Manifest | None
    checkpoint: Checkpoint
    step: int | None
    parent: Path | None
    anchor: bool
    base: BaseRef | None
    progress: Progress | None

    def run(self) -> Manifest:
        """Put the payloads, then commit. An anchor of the same tensors comes on top of the change, for late joiners."""
        manifest = self._manifest()
        if self._is_second_attempt(manifest) and self.head is not None:
            manifest = self.head
        else:
            self.writer.commit(manifest)
        if self.anchor and manifest.kind == "delta":
            self.writer.add_anchor(self._late_anchor(manifest))
        return manifest

    def _is_second_attempt(self, manifest: Manifest) -> bool:
        """Whether the head is this very version, and only the anchor on top of it may be missing."""
        head, is_delta = self.head, manifest.kind == "delta"
        return self.anchor and is_delta and manifest.changed == 0 and head is not None and head.step == self.step

    def _late_anchor(self, manifest: Manifest) -> Manifest:
        """The same bytes at every attempt, so that one whose answer got lost is no conflict."""
        refs, digest = put_anchor(self.writer, self._weights, manifest.version, progress=self.progress)
        return replace(
            manifest, kind="anchor", parent=None, parent_digest=None, digest=digest, changed=None, payloads=refs
        )

    def _manifest(self) -> Manifest:
        if self.base is not None:
            return self._base(self.base)
        if self.head is None:
            return self._anchor()
        if self.anchor and self.head.layout_sha256 != self._weights.layout.sha256:
            return self._anchor()
        return self._delta(self.head)

    def _base(self, base: BaseRef) -> Manifest:
        if self.head is not None:
            raise InvalidInputError(
                f"the feed is at version {self.head.version}: only its first version can be a base",
                hint="leave out the base to publish the change",
            )
        digest = blocks.digest(self._weights, on_progress=self._count("digest"))
        return self._new("base", digest, base=base)

    def _anchor(self) -> Manifest:
        refs, digest = put_anchor(self.writer, self._weights, self._version, progress=self.progress)
        return self._new("anchor", digest, payloads=refs)

    def _delta(self, head: Manifest) -> Manifest:
        old = self._parent(head)
        new = self._weights
        try:
            old.layout.require_equal(new.layout, ours="the feed", theirs=str(self.checkpoint.path))
        except MismatchError as error:
            hint = "publish it as an anchor (`--anchor`) if the model is meant to change"
            raise MismatchError(error.message, rule=error.rule, hint=hint) from error
        found = blocks.encode_delta(old, new, on_progress=self._count("encode"))
        digest = sum((block.digest for block in found), head.digest)
        refs: tuple[PayloadRef, ...] = ()
        if found:
            header = PayloadHeader("delta", new.layout, head.digest, digest, self._version)
            refs = (self.writer.put(write_payload(header, found)),)
        return self._new("delta", digest, payloads=refs, changed=sum(block.changed for block in found))

    def _parent(self, head: Manifest) -> Weights:
        if self.parent is None:
            return load(self.writer.log, head, progress=self.progress)
        weights = open_checkpoint(self.parent).weights
        found = blocks.digest(weights, on_progress=self._count("parent"))
        if found != head.digest:
            raise MismatchError(
                f"{self.parent} has the digest {found}, version {head.version} has {head.digest}",
                rule="publish.parent",
                version=head.version,
                hint="give the checkpoint that was published last, or leave it out: then the feed is read",
            )
        return weights

    def _new(
        self,
        kind: Kind,
        digest: StateDigest,
        *,
        payloads: tuple[PayloadRef, ...] = (),
        changed: int | None = None,
        base: BaseRef | None = None,
    ) -> Manifest:
        layout = self._weights.layout
        return Manifest(
            kind=kind,
            version=self._version,
            parent=None if self.head is None else self.head.version,
            parent_digest=None if self.head is None else self.head.digest,
            step=self.step,
            layout_sha256=layout.sha256,
            digest=digest,
            elements=layout.elements,
            changed=changed,
            payloads=payloads,
            files=self._files(),
            base=base,
            writer=self.writer.id,
            created_unix_s=int(time.time()),
        )

    def _files(self) -> PayloadRef | None:
        """The files beside the weights; put only if they are not those of the head, or with an anchor, which heals."""
        files = companion_files(self.checkpoint)
        if not files:
            return None if self.head is None else self.head.files
        data = write_files(files)
        ref = PayloadRef.of(data)
        is_there = self.head is not None and ref == self.head.files and not self.anchor
        return ref if is_there else self.writer.put(data)

    @property
    def _weights(self) -> Weights:
        return self.checkpoint.weights

    @property
    def _version(self) -> int:
        return 0 if self.head is None else self.head.version + 1

    def _count(self, phase: str) -> blocks.OnProgress | None:
        return counting(self.progress, phase, self._weights.layout.elements)
