"""Write versions to a feed: put payloads, draft the manifest, commit it, add anchors; for one process or for ranks."""

import json
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

from deltasync import blocks as coded
from deltasync.arguments import described, whole_number
from deltasync.blocks import layout_runs
from deltasync.codecs import planes
from deltasync.errors import CorruptError, InvalidInputError, NotFoundError
from deltasync.feed.fetch import fetch
from deltasync.feed.upload import LATE_S, RESUME_S, Upload
from deltasync.format import keys, limits
from deltasync.format.companions import write_files
from deltasync.format.digest import StateDigest, layout_digest
from deltasync.format.layout import Layout
from deltasync.format.manifest import BaseRef, Kind, Manifest, PayloadRef, Timeline
from deltasync.format.payload import Block, PayloadHeader, grouped, write_payload
from deltasync.format.weights import Changes, Readable, Runs, Weights
from deltasync.parallel import Progress, counting, each, threads
from deltasync.store.fencing import not_kept
from deltasync.trainer.events import CaptureTime, CommittedVersion
from deltasync.trainer.group import Alone, Group
from deltasync.trainer.schedule import AnchorSchedule
from deltasync.trainer.shards import Shards

logger = logging.getLogger(__name__)

SHARD_ELEMENTS = 1 << 26
"""A shard ends at the first end of a block from here on: about 90 MB of bfloat16 weights."""

SHARDS_WANTED = 512
SHARD_ELEMENTS_LEAST = 1 << 22
"""Smaller weights are cut into this many shards, or shards of this size: those in progress then take little memory."""

SHARDS_MAX = 4096
"""Beyond this number shards become larger instead: the manifest names every one."""

DELTA_PAYLOADS = 16
DELTA_BYTES_LEAST = 1 << 19
DELTA_BYTES_MOST = 1 << 23
"""A delta is cut into about this many payloads, within these sizes: some are put or fetched while others are coded."""

INDEX_SHARE = 500
"""A payload of a delta has at least this many times the bytes of the layout in its index, which also takes time."""

PUTS_MOST = 8
PUT_BYTES = 1 << 25
"""Payloads of a delta that are put at once: so many, or two, or those that have so many bytes together."""

_WORKERS_MAX = 8


@dataclass(frozen=True, slots=True)
class Part:
    """What one process adds to a version: payloads, and what they add to the digest and to the count of changes."""

    payloads: tuple[PayloadRef, ...]
    digest_delta: StateDigest
    changed: int | None
    put_unix_s: float | None = None
    """When the process put the first of them, by its clock."""

    @classmethod
    def total(cls, parts: Sequence["Part"]) -> "Part":
        """What all processes add together; processes that have no element may have put one and the same payload."""
        payloads = dict.fromkeys(ref for part in parts for ref in part.payloads)
        counts = [part.changed for part in parts if part.changed is not None]
        digest_delta = sum((part.digest_delta for part in parts), StateDigest.ZERO)
        put_unix_s = min((part.put_unix_s for part in parts if part.put_unix_s is not None), default=None)
        return cls(tuple(payloads), digest_delta, sum(counts) if counts else None, put_unix_s)


class Payloads(ABC):
    """The payloads that one process adds to a version. They can be put again, and are the same each time."""

    def __init__(self, layout: Layout, start: StateDigest, shards: Shards | None) -> None:
        self.start = start
        """The digest that the parts of all processes add to."""
        self.encode_s = 0.0
        """For how long putting has waited for the encoder."""
        self._layout = layout
        self._shards = shards

    @abstractmethod
    def put(self, upload: Upload, within_s: float = RESUME_S) -> Part:
        """Put them. What the store got within the last `within_s` may be left out."""

    def _placed(self, blocks: Iterable[Block]) -> Iterable[Block]:
        return blocks if self._shards is None else self._shards.place(blocks)


class BasePayloads(Payloads):
    """A base has none: there is a checkpoint with the same weights elsewhere. Only the digest counts."""

    def __init__(self, weights: Weights, layout: Layout, *, progress: Progress | None = None) -> None:
        super().__init__(layout, layout_digest(layout), None)
        self._weights = weights
        self._progress = progress

    def put(self, upload: Upload, within_s: float = RESUME_S) -> Part:
        local = self._weights.layout
        digest = coded.digest(self._weights, on_progress=counting(self._progress, "digest", local.elements))
        return Part((), digest - layout_digest(local), None)


class AnchorPayloads(Payloads):
    """All weights, as the shards of an anchor of a version. With `shards`, they are only those of this process."""

    def __init__(
        self, weights: Readable, version: int, *, shards: Shards | None = None, progress: Progress | None = None
    ) -> None:
        layout = weights.layout if shards is None else shards.layout
        super().__init__(layout, layout_digest(layout), shards)
        self._weights = weights
        self._version = version
        self._progress = progress

    def put(self, upload: Upload, within_s: float = RESUME_S) -> Part:
        """Put them, but not what an interrupted attempt left in the store within the last `within_s`."""
        upload.resume(within_s)
        local, elements = self._weights.layout, self._layout.elements
        count = counting(self._progress, "anchor", local.elements)

        def put(group: Sequence[_BlockRuns]) -> tuple[PayloadRef, StateDigest]:
            blocks = [planes.encode(self._weights, runs.local) for runs in group]
            digest_delta = sum((block.digest for block in blocks), StateDigest.ZERO)
            header = PayloadHeader("shard", self._layout, None, self.start + digest_delta, self._version)
            data = write_payload(header, list(self._placed(blocks)))
            ref = PayloadRef.of(data)
            return ref if upload.has(ref) else upload.put(data, ref), digest_delta

        def report(group: Sequence[_BlockRuns]) -> None:
            if count is not None:
                count(sum(int(runs.local[:, 2].sum()) for runs in group))

        blocks = (
            _BlockRuns(runs, runs if self._shards is None else self._shards.spread(runs)[1])
            for runs in layout_runs(local, elements=limits.PLANES_ELEMENTS)
        )
        # Weights without any element still make one shard: an anchor has a payload.
        groups = grouped(blocks, enough=_shard_elements(elements)) if elements else [[]]
        # One shard more than there are cores is in progress, as some of them wait for the store.
        done = list(each(put, groups, waiting=min(_WORKERS_MAX, threads()) + 1, on_done=report))
        return Part(tuple(ref for ref, _ in done), sum((delta for _, delta in done), StateDigest.ZERO), None)


@dataclass(frozen=True, slots=True, eq=False)
class _BlockRuns:
    """The runs of a block: in the weights of this process, and in those of the version."""

    local: Runs
    runs: Runs


def _shard_elements(elements: int) -> int:
    """The size of shards. It depends on the weights alone, so that a second attempt puts the same shards."""
    wanted = max(SHARD_ELEMENTS_LEAST, -(-elements // SHARDS_WANTED))
    return max(min(SHARD_ELEMENTS, wanted), -(-elements // SHARDS_MAX))


class DeltaPayloads(Payloads):
    """The blocks of a change of `parent`, which are iterated each time they are put.

    Payloads are put while later blocks are encoded. `changed` is about the number of changes that are to come.
    """

    def __init__(
        self,
        blocks: Iterable[Block],
        parent: Manifest,
        layout: Layout,
        *,
        shards: Shards | None = None,
        changed: int = 0,
    ) -> None:
        super().__init__(layout, parent.digest, shards)
        self._blocks = blocks
        self._version = parent.version + 1
        self._changed = changed

    @property
    def payload_bytes(self) -> int:
        """The size of a payload: a change takes about a byte."""
        # Ranks put in parallel as it is, and the manifest names the payloads of all of them.
        if self._shards is not None:
            return DELTA_BYTES_MOST
        wanted = min(DELTA_BYTES_MOST, max(DELTA_BYTES_LEAST, self._changed // DELTA_PAYLOADS))
        return max(wanted, INDEX_SHARE * self._layout.index_bytes)

    def put(self, upload: Upload, within_s: float = RESUME_S) -> Part:
        """Put all of them."""
        digest_delta, changed = StateDigest.ZERO, 0

        def counted(blocks: Iterable[Block]) -> Iterator[Block]:
            nonlocal digest_delta, changed
            for block in blocks:
                digest_delta += block.digest
                changed += block.changed
                yield block

        def put(group: list[Block]) -> PayloadRef:
            digest = sum((block.digest for block in group), self.start)
            payload = write_payload(PayloadHeader("delta", self._layout, self.start, digest, self._version), group)
            # The payload has their bytes.
            group.clear()
            return upload.put(payload)

        at_once = max(2, min(PUTS_MOST, PUT_BYTES // self.payload_bytes))
        with closing(self._encoded()) as blocks:
            groups = grouped(
                self._placed(counted(blocks)), enough=self.payload_bytes, size=lambda block: len(block.data)
            )
            refs = tuple(each(put, groups, waiting=at_once))
        return Part(refs, digest_delta, changed)

    def _encoded(self) -> Generator[Block, None, None]:
        """The blocks, one by one. The time that they take is counted."""
        since_s = time.perf_counter()
        for block in self._blocks:
            self.encode_s += time.perf_counter() - since_s
            yield block
            since_s = time.perf_counter()
        self.encode_s += time.perf_counter() - since_s


@dataclass(frozen=True, slots=True)
class EncodedChanges:
    """The blocks of changes of the weights, encoded each time they are iterated."""

    weights: Weights
    changes: list[Changes]

    def __iter__(self) -> Iterator[Block]:
        return coded.encode_changes(self.weights, self.changes)

    @property
    def digest_delta(self) -> StateDigest:
        """What they add to the digest of the weights."""
        return sum((block.digest for block in self), StateDigest.ZERO)


@dataclass(frozen=True, slots=True)
class _Created:
    """A manifest that was created. `is_late`: its payloads may have been removed before that was done."""

    manifest: Manifest
    is_late: bool
    is_anchor_due: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """What a manifest says about a version besides its weights. `extra` is the user's own."""

    step: int | None = None
    files: PayloadRef | None = None
    extra: Mapping[str, str] = field(default_factory=dict)
    captured: CaptureTime | None = None

    @classmethod
    def of(cls, step: object, extra: Mapping[str, str] | None) -> "Metadata":
        """From the arguments of a call, which are checked: a manifest must be able to carry them."""
        own = {} if extra is None else extra
        if not isinstance(own, Mapping):
            raise InvalidInputError(f"extra must map strings to strings, not be {described(own)}")
        for key, value in own.items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise InvalidInputError(f"extra must map strings to strings, not {key!r:.80} to {value!r:.80}")
        nbytes = len(json.dumps(dict(own)))
        if nbytes > limits.RECORD_BYTES_MAX:
            raise InvalidInputError(f"extra may have at most {limits.RECORD_BYTES_MAX} bytes as JSON, not {nbytes}")
        return cls(step=None if step is None else whole_number("step", step), extra=dict(own))


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionWriter:
    """Writes versions of one layout. In a `group`, each process gives its `shards` and all of them call each method.

    `schedule`: asked once for each committed version, in the process that commits, whether it should get an anchor.
    """

    upload: Upload
    layout: Layout
    shards: Shards | None = None
    group: Group = field(default_factory=Alone)
    schedule: AnchorSchedule = field(default_factory=AnchorSchedule)

    def beside(self, group: Group) -> "VersionWriter":
        """The same for another thread, which counts its own retries. `group`: the same processes, on its channel."""
        return replace(self, upload=self.upload.beside(), group=group)

    def put_files(
        self, files: Mapping[str, bytes], head: Manifest | None = None, *, defaults: Mapping[str, bytes] | None = None
    ) -> PayloadRef | None:
        """The files that the version after `head` names: put unless the store has them already, whole.

        Without any, these are those of the head; a warning says if they are damaged. `defaults` are added to the files,
        and stand in for them where the head has none or damaged ones.
        """
        known = None if head is None else head.files
        if not files and known is not None:
            if self._is_whole(known):
                return known
            logger.warning(
                "the files beside the weights of %s are damaged or missing, and none were given to repair them",
                self.upload.store.url,
            )
        beside = {**({} if defaults is None else defaults), **files}
        if not beside:
            return known
        data = write_files(beside)
        ref = PayloadRef.of(data)
        if ref == known and self._is_whole(ref):
            return ref
        return self.upload.put(data, ref, keep=True)

    def _is_whole(self, ref: PayloadRef) -> bool:
        try:
            fetch(self.upload.store, ref)
        except (CorruptError, NotFoundError):
            return False
        return True

    def anchor(
        self, weights: Readable, parent: Manifest | None, metadata: Metadata, *, progress: Progress | None = None
    ) -> CommittedVersion:
        """Commit all weights as the version after `parent`."""
        draft = self._draft("anchor", parent, metadata)
        payloads = AnchorPayloads(weights, draft.version, shards=self.shards, progress=progress)
        return self._write(draft, payloads, metadata.captured)

    def base(
        self, weights: Weights, base: BaseRef, metadata: Metadata, *, progress: Progress | None = None
    ) -> CommittedVersion:
        """Commit version 0 as the name of a checkpoint that has the same weights: none are put."""
        draft = replace(self._draft("base", None, metadata), base=base)
        payloads = BasePayloads(weights, self.layout, progress=progress)
        return self._write(draft, payloads, metadata.captured)

    def delta(
        self, blocks: Iterable[Block], parent: Manifest, metadata: Metadata, *, changed: int = 0
    ) -> CommittedVersion:
        """Commit the blocks of a change of `parent` as the version after it.

        They are iterated again if the payloads must be put again. `changed` is about the number of changes to come.
        """
        payloads = DeltaPayloads(blocks, parent, self.layout, shards=self.shards, changed=changed)
        return self._write(self._draft("delta", parent, metadata), payloads, metadata.captured)

    def add_anchor(
        self, manifest: Manifest, weights: Readable, *, progress: Progress | None = None
    ) -> CommittedVersion:
        """Add an anchor to a committed version; CorruptError unless the weights have its digest.

        Every attempt writes the same bytes, so that one whose answer got lost is not a conflict.
        """
        draft = replace(
            manifest, kind="anchor", parent=None, parent_digest=None, changed=None, base=None, timeline=None
        )
        payloads = AnchorPayloads(weights, manifest.version, shards=self.shards, progress=progress)
        return self._write(draft, payloads, key=keys.anchor_key(manifest.version))

    def lost_commit(self, parent: Manifest | None, digest_delta: StateDigest) -> CommittedVersion | None:
        """The version after `parent` if this writer committed it although it got no answer.

        `digest_delta` is what this process wanted to add to the digest of the parent. A version of this writer that has
        another digest is an older attempt, which reached the store late: the next commit meets it as a conflict.
        """
        after = -1 if parent is None else parent.version
        with self.group.decision(f"what follows version {after}", digest_delta) as decision:
            if decision.parts is not None:
                head = self.upload.log.head(after=after)
                digest = None if parent is None else sum(decision.parts, parent.digest)
                is_next = head is not None and head.writer == self.upload.id and head.version == after + 1
                if head is not None and is_next and digest in (None, head.digest):
                    decision.result = CommittedVersion(head, is_anchor_due=self.schedule.is_due(head))
        committed: CommittedVersion | None = decision.result
        return committed

    def _write(
        self, draft: Manifest, payloads: Payloads, captured: CaptureTime | None = None, *, key: str | None = None
    ) -> CommittedVersion:
        """Put payloads in every process, then commit in one of them: the next version, or a late anchor under `key`.

        `prune` removes payloads that no manifest names after a day. If this process, or its machine, sleeps for that
        long, they are put again: before the manifest is created, and after it if that took long, too.
        """
        upload, started_s = self.upload, time.perf_counter()
        retries, within_s = upload.retries, float(RESUME_S)
        what = f"version {draft.version}, step {draft.step}"
        about = what if key is None else f"the anchor of version {draft.version}"
        while True:
            part = self._put(payloads, within_s)
            put_s = time.perf_counter() - started_s
            with self.group.decision(about, part) as decision:
                if decision.parts is not None:
                    total, encode_s = Part.total(decision.parts), payloads.encode_s
                    timeline = None
                    if captured is not None:
                        timeline = captured.timeline(started_s=started_s, encode_s=encode_s)
                    manifest = self._completed(draft, total, payloads.start, timeline, is_added=key is not None)
                    is_last = within_s == LATE_S
                    decision.result = self._commit(manifest, total.put_unix_s, key=key, is_last=is_last)
            created: _Created | None = decision.result
            if created is not None:
                break
            logger.warning("%s: the payloads were put hours ago, putting them again", about)
            within_s = LATE_S
        if created.is_late:
            self._put(payloads, math.inf)
        upload.forget(created.manifest.refs)
        return CommittedVersion(
            created.manifest,
            put_s=max(0.0, put_s - payloads.encode_s),
            commit_s=time.perf_counter() - started_s - put_s,
            retries=upload.retries - retries,
            is_anchor_due=created.is_anchor_due,
            encode_s=payloads.encode_s,
        )

    def _put(self, payloads: Payloads, within_s: float) -> Part:
        with self.group.report_errors():
            self.upload.renew()
            part = payloads.put(self.upload, within_s)
            return replace(part, put_unix_s=min(self.upload.put_unix_s(part.payloads), default=None))

    def _completed(
        self, draft: Manifest, total: Part, start: StateDigest, timeline: Timeline | None, *, is_added: bool
    ) -> Manifest:
        """The manifest of a new version, or of an anchor that is added to one and must have its digest."""
        digest = start + total.digest_delta
        if not is_added:
            now_unix_s = int(self.upload.clock())
            draft = replace(draft, digest=digest, changed=total.changed, created_unix_s=now_unix_s, timeline=timeline)
        elif digest != draft.digest:
            raise CorruptError(
                f"the shadow gives the digest {digest} for version {draft.version}, which has {draft.digest}",
                rule="shadow.digest",
                version=draft.version,
                hint="the memory of this machine may be faulty: restart the trainer from its checkpoint",
            )
        return replace(draft, payloads=total.payloads)

    def _commit(
        self, manifest: Manifest, since_unix_s: float | None, *, key: str | None, is_last: bool
    ) -> "_Created | None":
        """Create a manifest whose payloads all processes have put; None if they should put them again before.

        The payloads of an anchor are listed before: some stores report a `put` as done and keep nothing.
        """
        upload = self.upload
        missing = upload.missing(manifest.payloads) if manifest.kind == "anchor" else []
        # Right before the creation: this process may also have slept in the listing.
        if not is_last and upload.is_late(manifest.refs, since_unix_s=since_unix_s):
            return None
        if missing:
            raise not_kept(upload.store, f"{len(missing)} payloads that were just put, such as {missing[0]}")
        upload.commit(manifest, key=key)
        is_late = upload.is_late(manifest.refs, since_unix_s=since_unix_s)
        return _Created(manifest, is_late, key is None and self.schedule.is_due(manifest))

    def _draft(self, kind: Kind, parent: Manifest | None, metadata: Metadata) -> Manifest:
        return Manifest(
            kind=kind,
            version=0 if parent is None else parent.version + 1,
            parent=None if parent is None else parent.version,
            parent_digest=None if parent is None else parent.digest,
            step=metadata.step,
            layout_sha256=self.layout.sha256,
            digest=StateDigest.ZERO,
            elements=self.layout.elements,
            files=metadata.files,
            extra=dict(metadata.extra),
            writer=self.upload.id,
            created_unix_s=0,
        )
