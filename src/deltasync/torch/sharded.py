"""`ShardedPublisher`: every rank of a sharded trainer publishes its own shard; together they commit one version."""

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from deltasync import blocks
from deltasync.checkpoint import open_checkpoint
from deltasync.errors import CorruptError, InvalidInputError
from deltasync.feed.plan import plan
from deltasync.feed.replay import restore
from deltasync.feed.writer import Writer
from deltasync.format.digest import StateDigest, layout_digest
from deltasync.format.layout import Layout
from deltasync.format.manifest import BaseRef, Manifest, PayloadRef
from deltasync.format.weights import Changes, Weights
from deltasync.store.protocol import Store
from deltasync.store.retry import Retry
from deltasync.torch.publisher import CaptureOn, TorchPublisher
from deltasync.torch.ranks import Ranks, owned
from deltasync.torch.tensors import TorchState, TorchWeights, layout_of, named_tensors, unwrapped
from deltasync.trainer.anchoring import AnchorBacklog, Anchoring, AnchorPolicy
from deltasync.trainer.capture import Shadow, capture, copy_into, lock_shadow, require_same, shadow_weights
from deltasync.trainer.events import Observer, Publication
from deltasync.trainer.pipeline import First, Pipeline, Running
from deltasync.trainer.publisher import require_layout
from deltasync.trainer.shards import Box, Shards, ShardWeights
from deltasync.trainer.version import Part, VersionWriter, put_files


class RankedAnchoring(Anchoring):
    """Begins an anchor when `is_told`: only rank 0 asks whether one is due."""

    is_told = False

    def consider(self, manifest: Manifest) -> None:
        if self.is_told:
            self.begin(manifest)


class Committing:
    """The join of versions, for a Maker, and the look at what became of one, for a Pipeline."""

    def __init__(
        self, ranks: Ranks, writer: Writer, shadow: Shadow, anchoring: RankedAnchoring, *, retry_s: float
    ) -> None:
        self._ranks = ranks
        self._writer = writer
        self._shadow = shadow
        self._anchoring = anchoring
        self._retry_s = retry_s

    def join(self, about: str, make: Callable[[], Part], finish: Callable[[Part], Manifest]) -> Manifest:
        """Every rank makes its part, rank 0 finishes."""

        def commit(part: Part) -> tuple[Manifest, bool]:
            manifest = finish(part)
            return manifest, self._is_due(manifest)

        manifest, self._anchoring.is_told = self._ranks.join(about, make, commit)
        return manifest

    def look(self, after: int) -> Manifest | None:
        """The newest version behind one that all ranks know."""

        def find(_: Sequence[None]) -> tuple[Manifest | None, bool]:
            found = Retry(self._retry_s)(lambda: self._writer.log.head(after=after))
            return found, found is not None and found.writer == self._writer.id and self._is_due(found)

        found, self._anchoring.is_told = self._ranks.agree(f"what follows version {after}", None, find)
        return found

    def _is_due(self, manifest: Manifest) -> bool:
        with self._shadow.lock:
            return self._anchoring.is_due(manifest)


PIECE_ELEMENTS = 1 << 24
"""Elements that are sent at a time."""


def resume(
    ranks: Ranks,
    store: Store,
    head: Manifest,
    weights: Weights,
    shards: Shards,
    *,
    folder: Path | None,
) -> None:
    """Bring the weights of every rank to the head. They may be there already, in files under `folder`."""

    def is_there() -> bool:
        with ranks.telling():
            mine = blocks.digest(weights) - layout_digest(weights.layout)
        return ranks.agree("the head", mine, lambda found: _total(shards, found) == head.digest)

    if folder is not None and is_there():
        return
    with ExitStack() as stack:
        with ranks.telling():
            source = stack.enter_context(_restored(store, head, folder)) if ranks.rank == 0 else None
        ranks.agree("the head", None, lambda _: None)
        _hand_out(ranks, source, weights, shards)
    if not is_there():
        raise CorruptError(
            f"the ranks do not have the digest of version {head.version} together",
            rule="shadow.digest",
            version=head.version,
            hint="the memory or network of these machines may be faulty: start again",
        )


@contextmanager
def _restored(store: Store, head: Manifest, folder: Path | None) -> Iterator[Weights]:
    """The whole of a version, in files that are mapped and gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="deltasync-", dir=folder) as temporary:
        out = Path(temporary) / "head"
        restore(store, out, version=head.version)
        yield open_checkpoint(out).weights


def _hand_out(ranks: Ranks, source: Weights | None, weights: Weights, shards: Shards) -> None:
    """From rank 0, which has the source, some rows at a time; every rank keeps its own elements of them."""
    for ordinal, box in enumerate(shards.boxes):
        dtype, row = weights.layout.tensors[ordinal].dtype.bits_dtype, math.prod(box.shape[1:])
        step = max(1, PIECE_ELEMENTS // max(1, row))
        for first in range(0, box.shape[0] if row else 0, step):
            rows = np.empty(min(step, box.shape[0] - first) * row, dtype)
            if source is not None:
                rows[:] = source.arrays[ordinal][first * row : first * row + len(rows)]
            ranks.share(rows)
            if box.elements:
                box.copy_rows(weights.arrays[ordinal], rows, first)


def _total(shards: Shards, parts: Sequence[StateDigest]) -> StateDigest:
    return sum(parts, layout_digest(shards.layout))


class ShardedPublisher(TorchPublisher):
    """Publishes the weights of a model that is spread over the ranks of torch.distributed, as FSDP2 does.

    Every rank makes one and calls `publish` and `close`. A rank reads, compares, encodes and puts only what it has
    itself: nobody gathers the model. Rank 0 opens the feed and commits. Where several ranks have the same elements, the
    first of them publishes; tensors that are not DTensors are published by rank 0, so that under
    DistributedDataParallel a `Publisher` on rank 0 does the same with less talk.

    An error of one rank is raised on all of them. After any but a StoreError, and when a rank is lost, the publisher
    has stopped: nobody sees what was not committed, and a new publisher goes on from the head of the feed, with any
    number of ranks. `timeout_s` is how long rank 0 waits for the slowest rank, the others wait twice as long for it:
    encoding and putting a shard (of all weights, for the first version) must fit into it.

    `shadow_path` is a folder; each rank keeps a file there. A publication waits for the one before. The other options
    are those of `Publisher`; the observer is told of whole versions, on every rank that has one.
    """

    def __init__(
        self,
        store: Store | str,
        *,
        dtype: torch.dtype | None = None,
        base: BaseRef | None = None,
        files: Mapping[str, bytes] | None = None,
        anchors: AnchorPolicy | None = None,
        shadow_path: Path | None = None,
        capture_on: CaptureOn = "device",
        retry_s: float = 60.0,
        timeout_s: float = 600.0,
        require_fencing: bool = False,
        observer: Observer | None = None,
    ) -> None:
        super().__init__(store, dtype=dtype, capture_on=capture_on)
        self._writer = Writer(self._store, require_fencing=require_fencing)
        self._base = base
        self._files = {} if files is None else files
        self._policy = AnchorPolicy() if anchors is None else anchors
        self._shadow_path = shadow_path
        self._retry_s = retry_s
        self._timeout_s = timeout_s
        self._observer = observer
        self._groups: tuple[Ranks, Ranks] | None = None
        self._running: _Running | None = None
        self._failed: BaseException | None = None
        self._is_closed = False
        self._lock: ExitStack | None = None

    @property
    def head(self) -> Manifest | None:
        """The version that was committed last, by this publisher or before it."""
        return None if self._running is None else self._running.shadow.head

    def publish(self, weights: TorchState, *, step: int | None = None, anchor: bool = False) -> Publication:
        """Make these weights the next version: a module or a state dict. All ranks call this, with the same step.

        Returns once the publication before is settled and what changed is captured: the weights may change again.
        `anchor`, on rank 0, asks for an anchor on top.
        """
        if self._is_closed or self._failed is not None:
            message = "is closed" if self._failed is None else f"has stopped: {self._failed}"
            raise InvalidInputError(f"this publisher {message}", hint="open a new one") from self._failed
        started = time.perf_counter()
        if self._running is None:
            self._running = self._open(weights)
        running = self._running
        running.pipeline.wait_idle()
        running.pipeline.require_running()
        if anchor:
            running.anchoring.request()
        with running.shadow.lock:
            captured = self._capture(running, weights)
            held_s = time.perf_counter() - started
            if captured is not None:
                return running.pipeline.submit(captured, step=step, held_s=held_s)
            return running.pipeline.start(First(step, self._base, running.files), held_s=held_s)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until everything that was published is committed or has failed; False on time-out."""
        return self._running is None or self._running.pipeline.wait_idle(timeout_s)

    def _finish(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._running is not None:
            self._running.close()
        self._writer.close()
        if self._lock is not None:
            self._lock.close()
        for ranks in () if self._groups is None else self._groups:
            ranks.close()

    def _capture(self, running: "_Running", weights: TorchState) -> list[Changes] | None:
        """What changed on this rank; None if the feed is new and all of it was copied."""
        try:
            with running.ranks.telling():
                boxes, tensors = self._shard(weights, running.shards.layout, running.ranks.rank)
                running.shards.require(boxes)
                return self._compare(running, tensors)
        except BaseException as error:
            # The other ranks stop as well: what they would publish next is not what this one would.
            self._failed = error
            raise

    def _compare(self, running: "_Running", tensors: dict[str, torch.Tensor]) -> list[Changes] | None:
        shadow, source = running.shadow, TorchWeights(tensors, cast=self._dtype)
        if not running.is_filled:
            copy_into(shadow.weights, source)
            running.is_filled = True
            return None
        devices = {tensor.device for tensor in tensors.values()}
        if self._on_device is not None and len(devices) == 1 and devices != {torch.device("cpu")}:
            return self._on_device.find(shadow, tensors, self._dtype)
        # Nobody asks for the digest of what is compared, so that a run need not be contiguous in the whole.
        plain = Weights(shadow.weights.layout, shadow.weights.arrays)
        return capture(plain, source)

    def _shard(self, weights: TorchState, layout: Layout, rank: int) -> tuple[list[Box], dict[str, torch.Tensor]]:
        """What this rank has of each tensor of the layout, and where it lies."""
        if rank == 0:
            tensors = named_tensors(weights)
        else:
            # Rank 0 said which of several tied names counts: a rank whose shards are empty cannot tell.
            state = unwrapped(weights).state_dict() if isinstance(weights, torch.nn.Module) else weights
            tensors = {spec.name: state[spec.name].detach() for spec in layout.tensors if spec.name in state}
        require_same(layout, layout_of(tensors, cast=self._dtype))
        found = {spec.name: owned(spec.name, tensors[spec.name], rank) for spec in layout.tensors}
        return [box for box, _ in found.values()], {name: local for name, (_, local) in found.items()}

    def _open(self, weights: TorchState) -> "_Running":
        if self._groups is None:
            self._groups = Ranks.open(timeout_s=self._timeout_s), Ranks.open(timeout_s=self._timeout_s)
        ranks = self._groups[0]
        with ranks.telling():
            named = layout_of(named_tensors(weights), cast=self._dtype).to_json() if ranks.rank == 0 else None
        layout = Layout.from_json(ranks.agree("its tensors", named, lambda said: said[0]))
        with ranks.telling():
            boxes, _ = self._shard(weights, layout, ranks.rank)
            shards = Shards(layout, boxes)
            path = self._shadow_file(ranks)
            self._lock = lock_shadow(path) if self._lock is None else self._lock
            room = shadow_weights(shards.local, path)
        opened = ranks.agree("to this feed", shards.local.elements, lambda counts: self._open_feed(layout, sum(counts)))
        # All ranks are one writer: each of them can tell whether a version is theirs.
        self._writer.id = opened.writer
        shadow = Shadow(ShardWeights(shards.local, room.arrays, shards), opened.head)
        if opened.head is not None:
            resume(ranks, self._store, opened.head, shadow.weights, shards, folder=self._shadow_path)
        return self._start(shadow, shards, opened)

    def _open_feed(self, layout: Layout, elements: int) -> "_Opened":
        """On rank 0 only."""
        if elements != layout.elements:
            raise InvalidInputError(
                f"the ranks have {elements} elements together, the model has {layout.elements}",
                hint="all ranks must have all tensors, and the mesh of each DTensor on rank 0 must have rank 0 in it",
            )
        head = self._writer.open()
        if head is None:
            return _Opened(self._writer.id, None, put_files(self._writer, self._files, retry_s=self._retry_s), None)
        require_layout(self._writer.log, head, layout)
        return _Opened(self._writer.id, head, head.files, AnchorBacklog.of(plan(self._writer.log, head)))

    def _start(self, shadow: Shadow, shards: Shards, opened: "_Opened") -> "_Running":
        if self._groups is None:
            raise ValueError("the ranks are not joined")
        ranks, anchor_ranks = self._groups
        anchoring = RankedAnchoring(
            self._writer,
            shadow,
            self._policy,
            retry_s=self._retry_s,
            observer=self._observer,
            shards=shards,
            # A group of its own: anchors and versions are agreed on in two threads.
            join=anchor_ranks.join,
        )
        if opened.since is not None:
            anchoring.resume(opened.since)

        together = Committing(ranks, self._writer, shadow, anchoring, retry_s=self._retry_s)
        maker = VersionWriter(self._writer, shadow, retry_s=self._retry_s, shards=shards, join=together.join)
        pipeline = Pipeline(maker, anchoring, observer=self._observer, look=together.look)
        return _Running(shadow, anchoring, pipeline, shadow.head is not None, ranks, shards, opened.files)

    def _shadow_file(self, ranks: Ranks) -> Path | None:
        if self._shadow_path is None:
            return None
        self._shadow_path.mkdir(parents=True, exist_ok=True)
        return self._shadow_path / f"shadow-{ranks.rank:05d}-of-{ranks.size:05d}.safetensors"


@dataclass(frozen=True, slots=True)
class _Opened:
    """The feed as rank 0 found it, and the id that it writes under."""

    writer: str
    head: Manifest | None
    files: PayloadRef | None
    since: AnchorBacklog | None


@dataclass(slots=True)
class _Running(Running):
    ranks: Ranks
    shards: Shards
    files: PayloadRef | None
