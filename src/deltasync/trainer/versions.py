"""Write versions to a feed: put payloads, draft the manifest, commit it, add anchors; for one process or for ranks."""

import json
import logging
import math
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from deltasync import blocks
from deltasync.arguments import described, whole_number
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
from deltasync.format.weights import Readable, Runs, Weights
from deltasync.parallel import Progress, counting, each, threads
from deltasync.trainer.events import CaptureTime, CommittedVersion
from deltasync.trainer.group import Group
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
    changed: int | None = None
    encode_s: float = 0.0
    """For how long putting has waited for the encoder."""
    put_unix_s: float | None = None
    """When the process put the first of them, by its clock."""

    @classmethod
    def total(cls, parts: Sequence["Part"]) -> "Part":
        """What all processes add together; processes that have no element may have put one and the same payload."""
        payloads: dict[PayloadRef, None] = {}
        digest_delta, changed, put_unix_s = StateDigest.ZERO, None, None
        for part in parts:
            payloads |= dict.fromkeys(part.payloads)
            digest_delta += part.digest_delta
            if part.changed is not None:
                changed = part.changed + (changed or 0)
            if part.put_unix_s is not None:
                put_unix_s = part.put_unix_s if put_unix_s is None else min(put_unix_s, part.put_unix_s)
        return cls(tuple(payloads), digest_delta, changed, put_unix_s=put_unix_s)


def put_anchor(
    upload: Upload,
    weights: Readable,
    version: int,
    *,
    shards: Shards | None = None,
    progress: Progress | None = None,
) -> Part:
    """Put all weights as the shards of an anchor of a version; with `shards`, only those of this process.

    What an interrupted attempt left in the store is not put again, if the upload was resumed.
    """
    layout = weights.layout if shards is None else shards.layout
    start, count = layout_digest(layout), counting(progress, "anchor", weights.layout.elements)

    def put(group: Sequence[Placed]) -> tuple[PayloadRef, StateDigest]:
        coded = [replace(planes.encode(weights, one.local), runs=one.runs) for one in group]
        digest_delta = sum((block.digest for block in coded), StateDigest.ZERO)
        data = write_payload(PayloadHeader("shard", layout, None, start + digest_delta, version), coded)
        ref = PayloadRef.of(data)
        return ref if upload.has(ref) else upload.put(data, ref), digest_delta

    def report(group: Sequence[Placed]) -> None:
        if count is not None:
            count(sum(int(one.local[:, 2].sum()) for one in group))

    placed = (
        Placed(runs, runs if shards is None else shards.spread(runs)[1])
        for runs in blocks.layout_runs(weights.layout, elements=limits.PLANES_ELEMENTS)
    )
    # The size of shards depends on the weights alone, so that a second attempt puts the same shards.
    wanted = max(SHARD_ELEMENTS_LEAST, -(-layout.elements // SHARDS_WANTED))
    enough = max(min(SHARD_ELEMENTS, wanted), -(-layout.elements // SHARDS_MAX))
    # Weights without any element still make one shard: an anchor has a payload.
    groups = grouped(placed, enough=enough) if layout.elements else [[]]
    # One shard more than there are cores is in progress, as some of them wait for the store.
    done = list(each(put, groups, waiting=min(_WORKERS_MAX, threads()) + 1, on_done=report))
    return Part(tuple(ref for ref, _ in done), sum((delta for _, delta in done), StateDigest.ZERO))


class Placed(NamedTuple):
    """The runs of a block: in the weights of this process, and in those of the version."""

    local: Runs
    runs: Runs


def delta_payload_bytes(layout: Layout, changed: int) -> int:
    """The size of a payload of a delta: a change takes about a byte."""
    wanted = min(DELTA_BYTES_MOST, max(DELTA_BYTES_LEAST, changed // DELTA_PAYLOADS))
    return max(wanted, INDEX_SHARE * layout.index_bytes)


def put_delta(
    upload: Upload,
    encode: Callable[[], Iterable[Block]],
    parent: Manifest,
    layout: Layout,
    *,
    shards: Shards | None = None,
    changed: int = 0,
) -> Part:
    """Put the blocks of a change of `parent`, while later blocks are encoded.

    `changed` is about the number of changes that are to come.
    """
    # Ranks put in parallel as it is, and the manifest names the payloads of all of them.
    payload_bytes = delta_payload_bytes(layout, changed) if shards is None else DELTA_BYTES_MOST
    encode_s = 0.0

    def groups() -> Generator[list[Block], None, None]:
        nonlocal encode_s
        since_s = time.perf_counter()
        coded = encode() if shards is None else shards.place(encode())
        for group in grouped(coded, enough=payload_bytes):
            encode_s += time.perf_counter() - since_s
            yield group
            since_s = time.perf_counter()
        encode_s += time.perf_counter() - since_s

    def put(group: list[Block]) -> tuple[PayloadRef, StateDigest, int]:
        digest_delta, count = StateDigest.ZERO, 0
        for block in group:
            digest_delta += block.digest
            count += block.changed
        header = PayloadHeader("delta", layout, parent.digest, parent.digest + digest_delta, parent.version + 1)
        data = write_payload(header, group)
        # The payload has their bytes.
        group.clear()
        return upload.put(data), digest_delta, count

    refs, digest_delta, count = [], StateDigest.ZERO, 0
    with closing(groups()) as waiting:
        for ref, delta, number in each(put, waiting, waiting=max(2, min(PUTS_MOST, PUT_BYTES // payload_bytes))):
            refs.append(ref)
            digest_delta += delta
            count += number
    return Part(tuple(refs), digest_delta, count, encode_s)


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
    group: Group = field(default_factory=Group)
    schedule: AnchorSchedule = field(default_factory=AnchorSchedule)

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
        put = partial(put_anchor, self.upload, weights, draft.version, shards=self.shards, progress=progress)
        return self._write(draft, put, metadata.captured)

    def base(
        self, weights: Weights, base: BaseRef, metadata: Metadata, *, progress: Progress | None = None
    ) -> CommittedVersion:
        """Commit version 0 as the name of a checkpoint that has the same weights: only their digest counts."""

        def put() -> Part:
            on_progress = counting(progress, "digest", weights.layout.elements)
            return Part((), blocks.digest(weights, on_progress=on_progress) - layout_digest(weights.layout))

        return self._write(replace(self._draft("base", None, metadata), base=base), put, metadata.captured)

    def delta(
        self, encode: Callable[[], Iterable[Block]], parent: Manifest, metadata: Metadata, *, changed: int = 0
    ) -> CommittedVersion:
        """Commit the blocks of a change of `parent` as the version after it.

        They are encoded again if the payloads must be put again. `changed` is about the number of changes to come.
        """
        draft = self._draft("delta", parent, metadata)
        put = partial(put_delta, self.upload, encode, parent, self.layout, shards=self.shards, changed=changed)
        return self._write(draft, put, metadata.captured)

    def add_anchor(
        self, manifest: Manifest, weights: Readable, *, progress: Progress | None = None
    ) -> CommittedVersion:
        """Add an anchor to a committed version; CorruptError unless the weights have its digest.

        Every attempt writes the same bytes, so that one whose answer got lost is not a conflict.
        """
        draft = replace(
            manifest, kind="anchor", parent=None, parent_digest=None, changed=None, base=None, timeline=None
        )
        put = partial(put_anchor, self.upload, weights, manifest.version, shards=self.shards, progress=progress)
        return self._write(draft, put, key=keys.anchor_key(manifest.version))

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
        self,
        draft: Manifest,
        put: Callable[[], Part],
        captured: CaptureTime | None = None,
        *,
        key: str | None = None,
    ) -> CommittedVersion:
        """Put payloads in every process, then commit in one of them: the next version, or a late anchor under `key`.

        Payloads that were put hours ago, because this process or its machine slept, are put again: see `Upload.commit`.
        """
        upload, started_s = self.upload, time.perf_counter()
        retries, encode_s, within_s = upload.patient.retries, 0.0, float(RESUME_S)
        what = f"version {draft.version}, step {draft.step}"
        about = what if key is None else f"the anchor of version {draft.version}"
        while True:
            part = self._put(draft, put, within_s)
            encode_s += part.encode_s
            put_s = time.perf_counter() - started_s
            with self.group.decision(about, part) as decision:
                if decision.parts is not None:
                    timeline = None
                    if captured is not None:
                        timeline = captured.timeline(started_s=started_s, encode_s=encode_s)
                    total = Part.total(decision.parts)
                    manifest = self._completed(draft, total, timeline, is_added=key is not None)
                    is_last, is_anchor = within_s == LATE_S, draft.kind == "anchor"
                    outcome = upload.commit(
                        manifest, key=key, since_unix_s=total.put_unix_s, is_last=is_last, must_be_listed=is_anchor
                    )
                    is_due = outcome != "put again first" and key is None and self.schedule.is_due(manifest)
                    decision.result = manifest, outcome, is_due
            manifest, outcome, is_due = decision.result
            if outcome != "put again first":
                break
            logger.warning("%s: the payloads were put hours ago, putting them again", about)
            within_s = LATE_S
        if outcome == "put again":
            self._put(draft, put, math.inf)
        upload.forget(manifest.refs)
        commit_s = time.perf_counter() - started_s - put_s
        return CommittedVersion(
            manifest, max(0.0, put_s - encode_s), commit_s, upload.patient.retries - retries, is_due, encode_s
        )

    def _put(self, draft: Manifest, put: Callable[[], Part], within_s: float) -> Part:
        """Put the payloads of this process; of an anchor, what the store got within the last `within_s` is left out."""
        with self.group.report_errors():
            self.upload.renew()
            if draft.kind == "anchor":
                self.upload.resume(within_s)
            part = put()
            return replace(part, put_unix_s=min(self.upload.put_unix_s(part.payloads), default=None))

    def _completed(self, draft: Manifest, total: Part, timeline: Timeline | None, *, is_added: bool) -> Manifest:
        """The manifest of a new version, or of an anchor that is added to one and must have its digest."""
        start = draft.parent_digest if draft.kind == "delta" else None
        digest = (layout_digest(self.layout) if start is None else start) + total.digest_delta
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
