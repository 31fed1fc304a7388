"""One version: encoded, put and committed, with patience for a store that fails for a while."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from deltasync import blocks
from deltasync.anchors import grouped, put_anchor
from deltasync.detect import Changed
from deltasync.format.companions import write_files
from deltasync.format.digest import StateDigest, layout_digest
from deltasync.format.manifest import BaseRef, Kind, Manifest, PayloadRef
from deltasync.format.payload import Block, PayloadHeader, write_payload
from deltasync.log.writer import Writer
from deltasync.publishing.events import AnchorProgress
from deltasync.publishing.shadow import Shadow
from deltasync.retrying import Retry
from deltasync.shards import Shards

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Part:
    """What one process adds to a version: payloads, and what they add to the digest and to the count of changes."""

    payloads: tuple[PayloadRef, ...]
    gained: StateDigest
    changed: int | None

    @classmethod
    def total(cls, parts: Sequence["Part"]) -> "Part":
        """What several processes add together; processes that have no element may have put one and the same payload."""
        payloads = dict.fromkeys(ref for part in parts for ref in part.payloads)
        counts = [part.changed for part in parts if part.changed is not None]
        gained = sum((part.gained for part in parts), StateDigest.ZERO)
        return cls(tuple(payloads), gained, sum(counts) if counts else None)


@dataclass(frozen=True, slots=True)
class Made:
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


class Maker:
    """Makes the versions of one feed from its shadow, together with the processes that have the other `shards`."""

    def __init__(
        self,
        writer: Writer,
        shadow: Shadow,
        *,
        threads: int | None,
        retry_s: float,
        shards: Shards | None = None,
        join: Join[Manifest] = alone,
    ) -> None:
        self.writer = writer
        self.shadow = shadow
        self._layout = shadow.weights.layout if shards is None else shards.layout
        self._shards = shards
        self._join = join
        self._threads = threads
        self._retry_s = retry_s

    def first(self, *, step: int | None, base: BaseRef | None, files: PayloadRef | None) -> Made:
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
        return Made(manifest, 0.0, clock.laps[0], clock.lap(), retry.count)

    def delta(self, changed: Changed, *, step: int | None) -> Made:
        """The version after the shadow's, with these changes. The shadow itself stays where it is."""
        head = self.shadow.head
        if head is None:
            raise ValueError("a delta needs a version before it")
        retry, clock = Retry(self._retry_s), _Clock()

        def make() -> Part:
            found = blocks.encode_changed(self.shadow.weights, changed, threads=self._threads)
            if self._shards is not None:
                found = list(self._shards.place(found))
            gained = sum((block.digest for block in found), StateDigest.ZERO)
            clock.lap()
            refs = tuple(self._put_delta(head, group, retry) for group in grouped(found))
            clock.lap()
            return Part(refs, gained, sum(block.changed for block in found))

        def finish(part: Part) -> Manifest:
            return self._commit(self._draft("delta", step, head.files), part, head.digest, retry)

        manifest = self._join(f"version {head.version + 1}, step {step}", make, finish)
        return Made(manifest, clock.laps[0], clock.laps[1], clock.lap(), retry.count)

    def _everything(self, retry: Retry) -> Part:
        weights, shards = self.shadow.weights, self._shards
        refs, digest = retry(
            lambda: put_anchor(
                self.writer, weights, 0, shards=shards, threads=self._threads, progress=AnchorProgress(0)
            )
        )
        return Part(refs, digest - layout_digest(self._layout), None)

    def _nothing(self) -> Part:
        weights = self.shadow.weights
        return Part((), blocks.digest(weights, threads=self._threads) - layout_digest(weights.layout), None)

    def _put_delta(self, head: Manifest, group: list[Block], retry: Retry) -> PayloadRef:
        leads_to = sum((block.digest for block in group), head.digest)
        payload = write_payload(PayloadHeader("delta", self._layout, head.digest, leads_to, head.version + 1), group)
        return retry(lambda: self.writer.put(payload))

    def _commit(self, draft: Manifest, part: Part, start: StateDigest, retry: Retry) -> Manifest:
        manifest = replace(draft, payloads=part.payloads, digest=start + part.gained, changed=part.changed)
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
