"""Write one version: encode, put payloads, commit the manifest, add anchors; for one process or for ranks."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from deltasync import blocks
from deltasync.blocks import Changed, layout_runs
from deltasync.codecs import planes
from deltasync.feed.writer import Writer
from deltasync.format import keys, limits
from deltasync.format.companions import write_files
from deltasync.format.digest import StateDigest, layout_digest
from deltasync.format.manifest import BaseRef, Kind, Manifest, PayloadRef
from deltasync.format.payload import Block, PayloadHeader, write_payload
from deltasync.format.weights import Readable, Runs
from deltasync.parallel import Progress, counting, each, threads
from deltasync.store.retry import Retry
from deltasync.trainer.capture import Shadow
from deltasync.trainer.events import AnchorProgress
from deltasync.trainer.shards import Shards

SHARD_ELEMENTS = 1 << 26
"""The most elements in one shard, up to the end of a block: about 90 MB of bfloat16 weights."""

SHARDS_WANTED = 512
SHARD_ELEMENTS_LEAST = 1 << 22
"""Smaller weights are cut into so many, or so small ones: those under way take little memory beside the weights."""

SHARDS_MAX = 4096
"""More shards than this grow instead: the manifest names every one."""

RESUME_S = 3600
"""A shard that lies in the store for longer is put again: `prune` may be about to remove what no manifest names."""

_WORKERS_MAX = 8


class _HasRuns(Protocol):
    @property
    def runs(self) -> Runs: ...


_B = TypeVar("_B", bound=_HasRuns)


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """What becomes a block: its runs in the weights that are here, and in those of the version."""

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
    """Put all weights as the shards of an anchor; their names, and the state digest. The commit is left to the caller.

    A shard that an interrupted attempt left in the store is not sent again. `shards`: the weights are only a part of
    those of the version; the digest counts the others as zero.
    """
    there = _recent(writer)
    layout = weights.layout if shards is None else shards.layout
    zero = layout_digest(layout)
    count = counting(progress, "anchor", weights.layout.elements)

    def put(group: Sequence[_Piece]) -> tuple[PayloadRef, StateDigest]:
        blocks = [planes.encode(weights, piece.local) for piece in group]
        digest_delta = sum((block.digest for block in blocks), StateDigest.ZERO)
        placed = blocks if shards is None else list(shards.place(blocks))
        data = write_payload(PayloadHeader("shard", layout, None, zero + digest_delta, version), placed)
        ref = PayloadRef.of(data)
        return ref if there.get(ref.sha256) == ref.nbytes else writer.put(data), digest_delta

    def tell(group: Sequence[_Piece]) -> None:
        if count is not None:
            count(sum(int(piece.local[:, 2].sum()) for piece in group))

    pieces = (
        _Piece(local, local if shards is None else shards.spread(local)[1])
        for local in layout_runs(weights.layout, elements=limits.PLANES_ELEMENTS)
    )
    # Weights without any element still make one shard: an anchor has a payload.
    groups = grouped(pieces, elements=_shard_elements(layout.elements)) if layout.elements else [[]]
    # What is under way is one shard for each worker; one more than there are cores, as some wait for the store.
    done = list(each(put, groups, waiting=min(_WORKERS_MAX, threads()) + 1, on_done=tell))
    return tuple(ref for ref, _ in done), sum((digest_delta for _, digest_delta in done), zero)


def _shard_elements(elements: int) -> int:
    """Always the same for the same weights, so that a second attempt makes the same shards."""
    wanted = max(SHARD_ELEMENTS_LEAST, -(-elements // SHARDS_WANTED))
    return max(min(SHARD_ELEMENTS, wanted), -(-elements // SHARDS_MAX))


def grouped(blocks: Iterable[_B], *, elements: int | None = None) -> Iterator[list[_B]]:
    """Neighbouring blocks for one payload each: closed once it covers `elements`, and before it has too many runs."""
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
    """Sizes of payloads that were put not long ago, by their SHA-256."""
    since = time.time() - RESUME_S
    found = ((keys.parse_payload_key(i.key), i) for i in writer.store.list(keys.PAYLOADS) if i.modified_unix_s > since)
    return {sha256: item.nbytes for sha256, item in found if sha256 is not None}


_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Part:
    """What one process adds to a version: payloads, and what they add to the digest and to the count of changes."""

    payloads: tuple[PayloadRef, ...]
    digest_delta: StateDigest
    changed: int | None

    @classmethod
    def total(cls, parts: Sequence["Part"]) -> "Part":
        """What several processes add together; processes that have no element may have put one and the same payload."""
        payloads = dict.fromkeys(ref for part in parts for ref in part.payloads)
        counts = [part.changed for part in parts if part.changed is not None]
        digest_delta = sum((part.digest_delta for part in parts), StateDigest.ZERO)
        return cls(tuple(payloads), digest_delta, sum(counts) if counts else None)


@dataclass(frozen=True, slots=True)
class CommittedVersion:
    """A committed version, and what it took."""

    manifest: Manifest
    encode_s: float
    put_s: float
    commit_s: float
    retries: int


def put_files(writer: Writer, files: Mapping[str, bytes], *, retry_s: float) -> PayloadRef | None:
    """Put the files beside the weights, if there are any."""
    if not files:
        return None
    data = write_files(files)
    return Retry(retry_s)(lambda: writer.put(data))


Join = Callable[[str, Callable[[], Part], Callable[[Part], _T]], _T]
"""Makes a part, adds what other processes have, and gives the sum to whoever finishes the work.

The text says what it is about, the same in every process. One process finishes; all get its result, or the error of
any of them.
"""


def alone(about: str, make: Callable[[], Part], finish: Callable[[Part], _T]) -> _T:
    """The join of a process that has no others."""
    return finish(make())


class VersionWriter:
    """Makes the versions of one feed from its shadow, together with the processes that have the other `shards`."""

    def __init__(
        self,
        writer: Writer,
        shadow: Shadow,
        *,
        retry_s: float,
        shards: Shards | None = None,
        join: Join[Manifest] = alone,
    ) -> None:
        self.writer = writer
        self.shadow = shadow
        self._layout = shadow.weights.layout if shards is None else shards.layout
        self._shards = shards
        self._join = join
        self._retry_s = retry_s

    def first(self, *, step: int | None, base: BaseRef | None, files: PayloadRef | None) -> CommittedVersion:
        """Version 0: all weights of the shadow, or the name of a checkpoint that has them."""
        retry, clock = Retry(self._retry_s), _Clock()

        def make() -> Part:
            part = self._everything(retry) if base is None else self._nothing()
            clock.lap()
            return part

        def finish(part: Part) -> Manifest:
            draft = replace(self._draft("anchor" if base is None else "base", step, files), base=base)
            return self._commit(draft, part, layout_digest(self._layout), retry)

        manifest = self._join(f"the first version, step {step}", make, finish)
        return CommittedVersion(manifest, 0.0, clock.laps[0], clock.lap(), retry.count)

    def delta(self, changed: Changed, *, step: int | None) -> CommittedVersion:
        """The version after the shadow's, with these changes. The shadow itself stays where it is."""
        head = self.shadow.head
        if head is None:
            raise ValueError("a delta needs a version before it")
        retry, clock = Retry(self._retry_s), _Clock()

        def make() -> Part:
            found = blocks.encode_changed(self.shadow.weights, changed)
            if self._shards is not None:
                found = list(self._shards.place(found))
            digest_delta = sum((block.digest for block in found), StateDigest.ZERO)
            clock.lap()
            refs = tuple(self._put_delta(head, group, retry) for group in grouped(found))
            clock.lap()
            return Part(refs, digest_delta, sum(block.changed for block in found))

        def finish(part: Part) -> Manifest:
            return self._commit(self._draft("delta", step, head.files), part, head.digest, retry)

        manifest = self._join(f"version {head.version + 1}, step {step}", make, finish)
        return CommittedVersion(manifest, clock.laps[0], clock.laps[1], clock.lap(), retry.count)

    def _everything(self, retry: Retry) -> Part:
        weights, shards = self.shadow.weights, self._shards
        refs, digest = retry(lambda: put_anchor(self.writer, weights, 0, shards=shards, progress=AnchorProgress(0)))
        return Part(refs, digest - layout_digest(self._layout), None)

    def _nothing(self) -> Part:
        weights = self.shadow.weights
        return Part((), blocks.digest(weights) - layout_digest(weights.layout), None)

    def _put_delta(self, head: Manifest, group: list[Block], retry: Retry) -> PayloadRef:
        leads_to = sum((block.digest for block in group), head.digest)
        payload = write_payload(PayloadHeader("delta", self._layout, head.digest, leads_to, head.version + 1), group)
        return retry(lambda: self.writer.put(payload))

    def _commit(self, draft: Manifest, part: Part, start: StateDigest, retry: Retry) -> Manifest:
        manifest = replace(draft, payloads=part.payloads, digest=start + part.digest_delta, changed=part.changed)
        retry(lambda: self.writer.commit(manifest))
        return manifest

    def _draft(self, kind: Kind, step: int | None, files: PayloadRef | None) -> Manifest:
        head, layout = self.shadow.head, self._layout
        return Manifest(
            kind=kind,
            version=0 if head is None else head.version + 1,
            parent=None if head is None else head.version,
            parent_digest=None if head is None else head.digest,
            step=step,
            layout_sha256=layout.sha256,
            digest=StateDigest.ZERO,
            elements=layout.elements,
            files=files,
            writer=self.writer.id,
            created_unix_s=int(time.time()),
        )


class _Clock:
    """Seconds of each lap."""

    def __init__(self) -> None:
        self.laps: list[float] = []
        self._last = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        elapsed, self._last = now - self._last, now
        self.laps.append(elapsed)
        return elapsed
