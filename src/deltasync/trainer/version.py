"""Write versions to a feed: put payloads, draft the manifest, commit it, add anchors; for one process or for ranks."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from deltasync import blocks as coded
from deltasync.blocks import layout_runs
from deltasync.codecs import planes
from deltasync.errors import CorruptError, InvalidInputError
from deltasync.feed.writer import Writer
from deltasync.format import keys, limits
from deltasync.format.companions import write_files
from deltasync.format.digest import StateDigest, layout_digest
from deltasync.format.layout import Layout
from deltasync.format.manifest import BaseRef, Kind, Manifest, PayloadRef
from deltasync.format.payload import Block, PayloadHeader, write_payload
from deltasync.format.weights import Readable, Runs, Weights
from deltasync.parallel import Progress, counting, each, threads
from deltasync.store.retry import Retry
from deltasync.trainer.events import PublishEvent
from deltasync.trainer.shards import Shards

SHARD_ELEMENTS = 1 << 26
"""A shard ends at the first end of a block from here on: about 90 MB of bfloat16 weights."""

SHARDS_WANTED = 512
SHARD_ELEMENTS_LEAST = 1 << 22
"""Smaller weights are cut into this many shards, or shards of this size: those in progress then take little memory."""

SHARDS_MAX = 4096
"""Beyond this number shards become larger instead: the manifest names every one."""

RESUME_S = 3600
"""A shard that has been in the store for longer is put again: `prune` may be about to remove it."""

_WORKERS_MAX = 8


class _HasRuns(Protocol):
    @property
    def runs(self) -> Runs: ...


_B = TypeVar("_B", bound=_HasRuns)


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
) -> tuple[tuple[PayloadRef, ...], StateDigest]:
    """Put all weights as the shards of an anchor; returns their references and the state digest. Commits nothing.

    A shard that an interrupted attempt left in the store is not sent again. `shards`: the weights are only those of
    this process; the digest counts the elements of the others as zero.
    """
    stored = _recent(writer)
    layout = weights.layout if shards is None else shards.layout
    zero = layout_digest(layout)
    count = counting(progress, "anchor", weights.layout.elements)

    def put(group: Sequence[_BlockRuns]) -> tuple[PayloadRef, StateDigest]:
        blocks = [planes.encode(weights, runs.local) for runs in group]
        digest_delta = sum((block.digest for block in blocks), StateDigest.ZERO)
        placed = blocks if shards is None else list(shards.place(blocks))
        data = write_payload(PayloadHeader("shard", layout, None, zero + digest_delta, version), placed)
        ref = PayloadRef.of(data)
        return ref if stored.get(ref.sha256) == ref.nbytes else writer.put(data), digest_delta

    def report(group: Sequence[_BlockRuns]) -> None:
        if count is not None:
            count(sum(int(runs.local[:, 2].sum()) for runs in group))

    blocks = (
        _BlockRuns(local, local if shards is None else shards.spread(local)[1])
        for local in layout_runs(weights.layout, elements=limits.PLANES_ELEMENTS)
    )
    # Weights without any element still make one shard: an anchor has a payload.
    groups = grouped(blocks, elements=_shard_elements(layout.elements)) if layout.elements else [[]]
    # One shard more than there are cores is in progress, as some of them wait for the store.
    done = list(each(put, groups, waiting=min(_WORKERS_MAX, threads()) + 1, on_done=report))
    return tuple(ref for ref, _ in done), sum((digest_delta for _, digest_delta in done), zero)


def _shard_elements(elements: int) -> int:
    """The size of shards. It depends on the weights alone, so that a second attempt puts the same shards."""
    wanted = max(SHARD_ELEMENTS_LEAST, -(-elements // SHARDS_WANTED))
    return max(min(SHARD_ELEMENTS, wanted), -(-elements // SHARDS_MAX))


def grouped(blocks: Iterable[_B], *, elements: int | None = None) -> Iterator[list[_B]]:
    """Neighbouring blocks, one group for each payload: it ends once it covers `elements`, or has too many runs."""
    group: list[_B] = []
    held = runs = 0
    for block in blocks:
        if group and runs + len(block.runs) > limits.RUNS_MAX:
            yield group
            group, held, runs = [], 0, 0
        group.append(block)
        held += int(block.runs[:, 2].sum())
        runs += len(block.runs)
        if elements is not None and held >= elements:
            yield group
            group, held, runs = [], 0, 0
    if group:
        yield group


def _recent(writer: Writer) -> dict[str, int]:
    """The sizes of payloads that were put within `RESUME_S`, by their SHA-256."""
    since = time.time() - RESUME_S
    items = ((keys.parse_payload_key(i.key), i) for i in writer.store.list(keys.PAYLOADS) if i.modified_unix_s > since)
    return {sha256: item.nbytes for sha256, item in items if sha256 is not None}


_T = TypeVar("_T")
_R = TypeVar("_R")


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

    @classmethod
    def total(cls, parts: Sequence["Part"]) -> "Part":
        """What all processes add together; processes that have no element may have put one and the same payload."""
        payloads = dict.fromkeys(ref for part in parts for ref in part.payloads)
        counts = [part.changed for part in parts if part.changed is not None]
        digest_delta = sum((part.digest_delta for part in parts), StateDigest.ZERO)
        return cls(tuple(payloads), digest_delta, sum(counts) if counts else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """What a manifest says about a version besides its weights. `extra` is the user's own."""

    step: int | None = None
    files: PayloadRef | None = None
    extra: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CommittedVersion:
    """A committed version or a late anchor, and the time that it took. `is_anchor_due`: it should get an anchor."""

    manifest: Manifest
    put_s: float = 0.0
    commit_s: float = 0.0
    retries: int = 0
    is_anchor_due: bool = False

    def event(self, *, held_s: float = 0.0, encode_s: float = 0.0, coalesced: int = 0) -> PublishEvent:
        """The event that reports it."""
        m = self.manifest
        return PublishEvent(
            kind=m.kind,
            version=m.version,
            step=m.step,
            elements=m.elements,
            changed=m.changed,
            payload_bytes=m.nbytes,
            held_s=held_s,
            encode_s=encode_s,
            put_s=self.put_s,
            commit_s=self.commit_s,
            coalesced=coalesced,
            retries=self.retries,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionWriter:
    """Writes versions of one layout. In a `group`, each process gives its `shards` and all of them call each method.

    `retry_s`: how long each operation of a failing store is retried.
    `is_anchor_due`: asked once for each committed version, in the process that commits.
    """

    writer: Writer
    layout: Layout
    retry_s: float = 0.0
    shards: Shards | None = None
    group: Group = field(default_factory=OneProcess)
    is_anchor_due: Callable[[Manifest], bool] = lambda manifest: False

    def put_files(self, files: Mapping[str, bytes]) -> PayloadRef | None:
        """Put the files beside the weights, if there are any."""
        if not files:
            return None
        data = write_files(files)
        return Retry(self.retry_s)(lambda: self.writer.put(data))

    def anchor(
        self, weights: Readable, parent: Manifest | None, metadata: Metadata, *, progress: Progress | None = None
    ) -> CommittedVersion:
        """Commit all weights as the version after `parent`."""
        retry, started = Retry(self.retry_s), time.perf_counter()
        with self.group.report_errors():
            draft = self._draft("anchor", parent, metadata)
            part = self._put_weights(weights, draft.version, retry, progress)
        return self._commit(draft, layout_digest(self.layout), part, retry, started)

    def base(
        self, weights: Weights, base: BaseRef, metadata: Metadata, *, progress: Progress | None = None
    ) -> CommittedVersion:
        """Commit version 0 as the name of a checkpoint that has the same weights: none are put."""
        retry, started = Retry(self.retry_s), time.perf_counter()
        with self.group.report_errors():
            draft = replace(self._draft("base", None, metadata), base=base)
            digest = coded.digest(weights, on_progress=counting(progress, "digest", weights.layout.elements))
            part = Part((), digest - layout_digest(weights.layout), None)
        return self._commit(draft, layout_digest(self.layout), part, retry, started)

    def delta(self, blocks: Sequence[Block], parent: Manifest, metadata: Metadata) -> CommittedVersion:
        """Commit blocks that were encoded against `parent` as the version after it."""
        retry, started = Retry(self.retry_s), time.perf_counter()
        with self.group.report_errors():
            draft = self._draft("delta", parent, metadata)
            digest_delta = sum((block.digest for block in blocks), StateDigest.ZERO)
            placed = blocks if self.shards is None else self.shards.place(blocks)
            refs = tuple(self._put_delta(parent, group, retry) for group in grouped(placed))
            part = Part(refs, digest_delta, sum(block.changed for block in blocks))
        return self._commit(draft, parent.digest, part, retry, started)

    def add_anchor(
        self, manifest: Manifest, weights: Readable, *, progress: Progress | None = None
    ) -> CommittedVersion:
        """Add an anchor to a committed version; CorruptError unless the weights have its digest.

        Every attempt writes the same bytes, so that one whose answer got lost is not a conflict.
        """
        retry, started = Retry(self.retry_s), time.perf_counter()
        with self.group.report_errors():
            part = self._put_weights(weights, manifest.version, retry, progress)
        put_s = time.perf_counter() - started

        def add(parts: Sequence[Part]) -> Manifest:
            total = Part.total(parts)
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
            )
            retry(lambda: self.writer.add_anchor(anchor))
            return anchor

        anchor = self.group.agree(f"the anchor of version {manifest.version}", part, add)
        return CommittedVersion(anchor, put_s, time.perf_counter() - started - put_s, retry.count)

    def lost_commit(self, parent: Manifest | None) -> CommittedVersion | None:
        """The version after `parent` if this writer committed it although it got no answer."""
        after = -1 if parent is None else parent.version

        def find(_: Sequence[None]) -> CommittedVersion | None:
            head = Retry(self.retry_s)(lambda: self.writer.log.head(after=after))
            if head is None or head.writer != self.writer.id or head.version != after + 1:
                return None
            return CommittedVersion(head, is_anchor_due=self.is_anchor_due(head))

        return self.group.agree(f"what follows version {after}", None, find)

    def _put_weights(self, weights: Readable, version: int, retry: Retry, progress: Progress | None) -> Part:
        refs, digest = retry(lambda: put_anchor(self.writer, weights, version, shards=self.shards, progress=progress))
        return Part(refs, digest - layout_digest(self.layout), None)

    def _put_delta(self, parent: Manifest, group: list[Block], retry: Retry) -> PayloadRef:
        digest = sum((block.digest for block in group), parent.digest)
        header = PayloadHeader("delta", self.layout, parent.digest, digest, parent.version + 1)
        payload = write_payload(header, group)
        return retry(lambda: self.writer.put(payload))

    def _commit(
        self, draft: Manifest, start: StateDigest, part: Part, retry: Retry, started: float
    ) -> CommittedVersion:
        put_s = time.perf_counter() - started

        def commit(parts: Sequence[Part]) -> tuple[Manifest, bool]:
            total = Part.total(parts)
            manifest = replace(
                draft,
                payloads=total.payloads,
                digest=start + total.digest_delta,
                changed=total.changed,
                created_unix_s=int(time.time()),
            )
            retry(lambda: self.writer.commit(manifest))
            return manifest, self.is_anchor_due(manifest)

        manifest, is_anchor_due = self.group.agree(f"version {draft.version}, step {draft.step}", part, commit)
        commit_s = time.perf_counter() - started - put_s
        return CommittedVersion(manifest, put_s, commit_s, retry.count, is_anchor_due)

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


def require_extra(extra: Mapping[str, str]) -> None:
    """InvalidInputError unless a manifest can carry this metadata."""
    for key, value in extra.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise InvalidInputError(f"extra must map strings to strings, not {key!r:.80} to {value!r:.80}")
    nbytes = len(json.dumps(dict(extra)))
    if nbytes > limits.RECORD_BYTES_MAX:
        raise InvalidInputError(f"extra may have at most {limits.RECORD_BYTES_MAX} bytes as JSON, not {nbytes}")
