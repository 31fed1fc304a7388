"""Write versions to a feed: put payloads, draft the manifest, commit it, add anchors; for one process or for ranks."""

import json
import logging
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, Protocol, TypeVar

from deltasync import blocks as coded
from deltasync.arguments import described, whole_number
from deltasync.blocks import layout_runs
from deltasync.codecs import planes
from deltasync.errors import CorruptError, InvalidInputError, NotFoundError
from deltasync.feed.fetch import fetch
from deltasync.feed.writer import LATE_S, Writer
from deltasync.format import keys, limits
from deltasync.format.companions import write_files
from deltasync.format.digest import StateDigest, layout_digest
from deltasync.format.layout import Layout
from deltasync.format.manifest import BaseRef, Kind, Manifest, PayloadRef
from deltasync.format.payload import Block, PayloadHeader, grouped, write_payload
from deltasync.format.weights import Readable, Runs, Weights
from deltasync.parallel import Progress, counting, each, threads
from deltasync.store.probe import not_kept, probe_clock
from deltasync.trainer.events import CaptureTime, CommittedVersion
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

RESUME_S = 3600
"""A shard that has been in the store for longer is put again: `prune` may be about to remove it."""

_WORKERS_MAX = 8


_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True, eq=False)
class _BlockRuns:
    """The runs of a block: in the weights of this process, and in those of the version."""

    local: Runs
    runs: Runs


def put_anchor(
    writer: Writer,
    weights: Readable,
    version: int,
    *,
    shards: Shards | None = None,
    progress: Progress | None = None,
    resume_s: float = RESUME_S,
) -> tuple[tuple[PayloadRef, ...], StateDigest]:
    """Put all weights as the shards of an anchor; returns their references and the state digest. Commits nothing.

    A shard that an interrupted attempt left in the store within the last `resume_s` is not sent again. `shards`: the
    weights are only those of this process; the digest counts the elements of the others as zero.
    """
    stored = _recent(writer, resume_s)
    layout = weights.layout if shards is None else shards.layout
    zero = layout_digest(layout)
    count = counting(progress, "anchor", weights.layout.elements)

    def put(group: Sequence[_BlockRuns]) -> tuple[PayloadRef, StateDigest]:
        blocks = [planes.encode(weights, runs.local) for runs in group]
        digest_delta = sum((block.digest for block in blocks), StateDigest.ZERO)
        placed = blocks if shards is None else list(shards.place(blocks))
        data = write_payload(PayloadHeader("shard", layout, None, zero + digest_delta, version), placed)
        ref = PayloadRef.of(data)
        return ref if stored.get(ref.sha256) == ref.nbytes else writer.put(data, ref), digest_delta

    def report(group: Sequence[_BlockRuns]) -> None:
        if count is not None:
            count(sum(int(runs.local[:, 2].sum()) for runs in group))

    blocks = (
        _BlockRuns(local, local if shards is None else shards.spread(local)[1])
        for local in layout_runs(weights.layout, elements=limits.PLANES_ELEMENTS)
    )
    # Weights without any element still make one shard: an anchor has a payload.
    groups = grouped(blocks, enough=_shard_elements(layout.elements)) if layout.elements else [[]]
    # One shard more than there are cores is in progress, as some of them wait for the store.
    done = list(each(put, groups, waiting=min(_WORKERS_MAX, threads()) + 1, on_done=report))
    return tuple(ref for ref, _ in done), sum((digest_delta for _, digest_delta in done), zero)


def _shard_elements(elements: int) -> int:
    """The size of shards. It depends on the weights alone, so that a second attempt puts the same shards."""
    wanted = max(SHARD_ELEMENTS_LEAST, -(-elements // SHARDS_WANTED))
    return max(min(SHARD_ELEMENTS, wanted), -(-elements // SHARDS_MAX))


def _recent(writer: Writer, resume_s: float) -> dict[str, int]:
    """The sizes of payloads that were put within the last `resume_s` by the store's clock, by their SHA-256."""
    since = probe_clock(writer.store) - resume_s
    items = ((keys.parse_payload_key(i.key), i) for i in writer.store.list(keys.PAYLOADS) if i.modified_unix_s > since)
    return {sha256: item.nbytes for sha256, item in items if sha256 is not None}


class Group(Protocol):
    """The processes that write the versions of a feed together."""

    def report_errors(self) -> AbstractContextManager[None]:
        """Report an error inside the block to the other processes, which raise it at their next agreement."""
        ...

    def agree(self, about: str, mine: _T, decide: Callable[[Sequence[_T]], _R]) -> _R:
        """Call `decide` in one process, with what each process gave; its result, or its error, in all of them.

        `about` says what the agreement is about and must be the same in all processes.
        """
        ...


class OneProcess:
    """The group of a trainer that is a single process."""

    def report_errors(self) -> AbstractContextManager[None]:
        return nullcontext()

    def agree(self, about: str, mine: _T, decide: Callable[[Sequence[_T]], _R]) -> _R:
        return decide([mine])


@dataclass(frozen=True, slots=True)
class Part:
    """What one process adds to a version: payloads, and what they add to the digest and to the count of changes."""

    payloads: tuple[PayloadRef, ...]
    digest_delta: StateDigest
    changed: int | None
    put_unix_s: float = math.inf
    """When the first of the payloads was put, by the clock of the process."""

    @classmethod
    def total(cls, parts: Sequence["Part"]) -> "Part":
        """What all processes add together; processes that have no element may have put one and the same payload."""
        payloads = dict.fromkeys(ref for part in parts for ref in part.payloads)
        counts = [part.changed for part in parts if part.changed is not None]
        digest_delta = sum((part.digest_delta for part in parts), StateDigest.ZERO)
        put_unix_s = min(part.put_unix_s for part in parts)
        return cls(tuple(payloads), digest_delta, sum(counts) if counts else None, put_unix_s)


Put = Callable[[float], Part]
"""Puts what this process adds to a version. Shards that the store got within so many seconds are left out."""


Encode = Callable[[], Generator[Block, None, None]]
"""Encodes the blocks of a delta, one by one."""


@dataclass(frozen=True, slots=True)
class _Created(Generic[_R]):
    """What `create` returned. `is_late`: the payloads may have been removed before it was done."""

    result: _R
    is_late: bool


@dataclass(frozen=True, slots=True)
class _Written(Generic[_R]):
    """What the process that creates the manifest returned, and the time that it took."""

    result: _R
    put_s: float
    commit_s: float
    retries: int


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

    `is_anchor_due`: asked once for each committed version, in the process that commits.
    """

    writer: Writer
    layout: Layout
    shards: Shards | None = None
    group: Group = field(default_factory=OneProcess)
    is_anchor_due: Callable[[Manifest], bool] = lambda manifest: False

    def beside(self) -> "VersionWriter":
        """The same for another thread, which counts its own retries."""
        return replace(self, writer=self.writer.beside())

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
                self.writer.store.url,
            )
        beside = {**({} if defaults is None else defaults), **files}
        if not beside:
            return known
        data = write_files(beside)
        ref = PayloadRef.of(data)
        if ref == known and self._is_whole(ref):
            return ref
        return self.writer.put_files(data)

    def _is_whole(self, ref: PayloadRef) -> bool:
        try:
            fetch(self.writer.store, ref)
        except (CorruptError, NotFoundError):
            return False
        return True

    def anchor(
        self, weights: Readable, parent: Manifest | None, metadata: Metadata, *, progress: Progress | None = None
    ) -> CommittedVersion:
        """Commit all weights as the version after `parent`."""
        draft = self._draft("anchor", parent, metadata)
        put = partial(self._put_weights, weights, draft.version, progress)
        return self._commit(draft, layout_digest(self.layout), put, metadata.captured)

    def base(
        self, weights: Weights, base: BaseRef, metadata: Metadata, *, progress: Progress | None = None
    ) -> CommittedVersion:
        """Commit version 0 as the name of a checkpoint that has the same weights: none are put."""
        with self.group.report_errors():
            digest = coded.digest(weights, on_progress=counting(progress, "digest", weights.layout.elements))
            part = Part((), digest - layout_digest(weights.layout), None)
        draft = replace(self._draft("base", None, metadata), base=base)
        return self._commit(draft, layout_digest(self.layout), lambda resume_s: part, metadata.captured)

    def delta(self, encode: Encode, parent: Manifest, metadata: Metadata, *, changed: int = 0) -> CommittedVersion:
        """Commit blocks that `encode` encodes against `parent` as the version after it.

        Payloads are put while later blocks are encoded. `encode` gives the same blocks whenever it is called: it is
        called again if the payloads must be put again. `changed` is about the number of changes that are to come.
        """
        encode_s = 0.0
        payload_bytes = self._payload_bytes(changed)

        def put(resume_s: float) -> Part:
            nonlocal encode_s
            digest_delta, count = StateDigest.ZERO, 0

            def encoded() -> Iterator[Block]:
                nonlocal digest_delta, count, encode_s
                while True:
                    since = time.perf_counter()
                    block = next(blocks, None)
                    encode_s += time.perf_counter() - since
                    if block is None:
                        return
                    digest_delta += block.digest
                    count += block.changed
                    yield block

            def put_group(group: list[Block]) -> PayloadRef:
                return self._put_delta(parent, group)

            at_once = max(2, min(PUTS_MOST, PUT_BYTES // payload_bytes))
            with closing(encode()) as blocks:
                placed = encoded() if self.shards is None else self.shards.place(encoded())
                groups = grouped(placed, enough=payload_bytes, size=lambda block: len(block.data))
                refs = tuple(each(put_group, groups, waiting=at_once))
            return Part(refs, digest_delta, count)

        draft = self._draft("delta", parent, metadata)
        committed = self._commit(draft, parent.digest, put, metadata.captured, encode_s=lambda: encode_s)
        return replace(committed, encode_s=encode_s, put_s=max(0.0, committed.put_s - encode_s))

    def _payload_bytes(self, changed: int) -> int:
        """The size of payloads of a delta of so many changes, each of which takes about a byte."""
        # Ranks put in parallel as it is, and the manifest names the payloads of all of them.
        if self.shards is not None:
            return DELTA_BYTES_MOST
        wanted = min(DELTA_BYTES_MOST, max(DELTA_BYTES_LEAST, changed // DELTA_PAYLOADS))
        return max(wanted, INDEX_SHARE * self.layout.index_bytes)

    def add_anchor(
        self, manifest: Manifest, weights: Readable, *, progress: Progress | None = None
    ) -> CommittedVersion:
        """Add an anchor to a committed version; CorruptError unless the weights have its digest.

        Every attempt writes the same bytes, so that one whose answer got lost is not a conflict.
        """

        def add(total: Part) -> Manifest:
            digest = layout_digest(self.layout) + total.digest_delta
            if digest != manifest.digest:
                raise CorruptError(
                    f"the shadow gives the digest {digest} for version {manifest.version}, which has {manifest.digest}",
                    rule="shadow.digest",
                    version=manifest.version,
                    hint="the memory of this machine may be faulty: restart the trainer from its checkpoint",
                )
            anchor = replace(
                manifest,
                kind="anchor",
                parent=None,
                parent_digest=None,
                changed=None,
                payloads=total.payloads,
                base=None,
                timeline=None,
            )
            self.writer.add_anchor(anchor)
            return anchor

        put = partial(self._put_weights, weights, manifest.version, progress)
        written = self._write(f"the anchor of version {manifest.version}", put, add, is_anchor=True)
        return CommittedVersion(written.result, written.put_s, written.commit_s, written.retries)

    def lost_commit(self, parent: Manifest | None, digest_delta: StateDigest) -> CommittedVersion | None:
        """The version after `parent` if this writer committed it although it got no answer.

        `digest_delta` is what this process wanted to add to the digest of the parent. A version of this writer that has
        another digest is an older attempt, which reached the store late: the next commit meets it as a conflict.
        """
        after = -1 if parent is None else parent.version

        def find(deltas: Sequence[StateDigest]) -> CommittedVersion | None:
            head = self.writer.log.head(after=after)
            if head is None or head.writer != self.writer.id or head.version != after + 1:
                return None
            if parent is not None and head.digest != sum(deltas, parent.digest):
                return None
            return CommittedVersion(head, is_anchor_due=self.is_anchor_due(head))

        return self.group.agree(f"what follows version {after}", digest_delta, find)

    def _put_weights(self, weights: Readable, version: int, progress: Progress | None, resume_s: float) -> Part:
        refs, digest = put_anchor(
            self.writer, weights, version, shards=self.shards, progress=progress, resume_s=resume_s
        )
        return Part(refs, digest - layout_digest(self.layout), None)

    def _put_delta(self, parent: Manifest, group: list[Block]) -> PayloadRef:
        digest = sum((block.digest for block in group), parent.digest)
        header = PayloadHeader("delta", self.layout, parent.digest, digest, parent.version + 1)
        payload = write_payload(header, group)
        # The payload has their bytes.
        group.clear()
        return self.writer.put(payload)

    def _commit(
        self,
        draft: Manifest,
        start: StateDigest,
        put: Put,
        captured: CaptureTime | None,
        *,
        encode_s: Callable[[], float] = lambda: 0.0,
    ) -> CommittedVersion:
        started_s = time.perf_counter()

        def commit(total: Part) -> tuple[Manifest, bool]:
            manifest = replace(
                draft,
                payloads=total.payloads,
                digest=start + total.digest_delta,
                changed=total.changed,
                created_unix_s=int(self.writer.clock()),
                timeline=None if captured is None else captured.timeline(started_s=started_s, encode_s=encode_s()),
            )
            self.writer.commit(manifest)
            return manifest, self.is_anchor_due(manifest)

        about = f"version {draft.version}, step {draft.step}"
        written = self._write(about, put, commit, is_anchor=draft.kind == "anchor")
        self.writer.release_files()
        manifest, is_anchor_due = written.result
        return CommittedVersion(manifest, written.put_s, written.commit_s, written.retries, is_anchor_due)

    def _write(self, about: str, put: Put, create: Callable[[Part], _R], *, is_anchor: bool) -> _Written[_R]:
        """Call `put` in every process, then in one of them `create`, which creates the manifest.

        The payloads of an anchor are listed before: some stores report a `put` as done and keep nothing.

        `prune` removes payloads that no manifest names after a day. If this process, or its machine, sleeps for that
        long, they are put again: before the manifest is created, and after it if that took long, too.
        """
        retries, started = self.writer.retries, time.perf_counter()
        resume_s = float(RESUME_S)
        while True:
            with self.group.report_errors():
                part = self._put_all(put, resume_s)
            put_s = time.perf_counter() - started
            decide = partial(self._create, create, is_anchor=is_anchor, may_wait=resume_s == RESUME_S)
            created = self.group.agree(about, part, decide)
            if created is not None:
                break
            logger.warning("%s: the payloads were put hours ago, putting them again", about)
            resume_s = LATE_S
        if created.is_late:
            with self.group.report_errors():
                self._put_all(put, math.inf)
        return _Written(created.result, put_s, time.perf_counter() - started - put_s, self.writer.retries - retries)

    def _put_all(self, put: Put, resume_s: float) -> Part:
        put_unix_s = self.writer.clock()
        self.writer.renew_files(after_s=RESUME_S)
        return replace(put(resume_s), put_unix_s=put_unix_s)

    def _create(
        self,
        create: Callable[[Part], _R],
        parts: Sequence[Part],
        *,
        is_anchor: bool,
        may_wait: bool,
    ) -> "_Created[_R] | None":
        """The result of `create`; None if the payloads should be put again before."""
        total = Part.total(parts)
        missing = self.writer.missing(total.payloads) if is_anchor else []
        # Right before the creation: this process may also have slept in the listing.
        if may_wait and self._is_late(total):
            return None
        if missing:
            raise not_kept(self.writer.store, f"{len(missing)} payloads that were just put, such as {missing[0]}")
        result = create(total)
        return _Created(result, self._is_late(total))

    def _is_late(self, total: Part) -> bool:
        # The clocks of several processes differ; a difference of hours is treated as lateness.
        return abs(self.writer.clock() - total.put_unix_s) > LATE_S

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
            writer=self.writer.id,
            created_unix_s=0,
        )
