"""`ShardedPublisher`: every rank of a sharded trainer publishes its own shard; together they commit one version."""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from deltasync import arguments
from deltasync.errors import InvalidInputError
from deltasync.feed.plan import plan
from deltasync.feed.route import Route
from deltasync.feed.upload import Upload
from deltasync.files import make_folder
from deltasync.format.layout import Layout
from deltasync.format.manifest import Manifest, PayloadRef
from deltasync.format.weights import Changes, Weights
from deltasync.state import State
from deltasync.store import Feed
from deltasync.torch.publisher import TorchPublisher
from deltasync.torch.ranks import TorchRanks, owned
from deltasync.torch.tensors import TorchState, TorchWeights, layout_of, named_tensors, unwrapped
from deltasync.trainer.anchoring import Anchors
from deltasync.trainer.background import BackgroundPruner
from deltasync.trainer.capture import capture, copy_into, lock_shadow, require_same, shadow_weights
from deltasync.trainer.events import Publication
from deltasync.trainer.exit import finish_at_exit
from deltasync.trainer.group import Group, resume
from deltasync.trainer.pipeline import FirstVersion, Pipeline
from deltasync.trainer.publisher import PublisherOptions, require_layout
from deltasync.trainer.schedule import AnchorBacklog, AnchorSchedule
from deltasync.trainer.shards import Box, Shards, ShardWeights
from deltasync.trainer.versions import Metadata, VersionWriter


class ShardedPublisher(TorchPublisher):
    """Publishes the weights of a model that is spread over the ranks of torch.distributed, as FSDP2 does.

    Every rank creates one and calls `publish` and `close`. A rank reads, compares, encodes and puts only its own
    elements: the model is never gathered. Rank 0 opens the feed and commits. Where several ranks have the same
    elements, the first of them publishes; tensors that are not DTensors are published by rank 0, so that under
    DistributedDataParallel a `Publisher` on rank 0 does the same with less communication.

    An error of one rank is raised on all of them. After any but a StoreError, and when a rank is lost, the publisher
    has stopped: what was not committed is invisible, and a new publisher continues from the head of the feed, with any
    number of ranks. `timeout_s` is how long rank 0 waits for the slowest rank; the others wait twice as long for it.
    Encoding and putting a shard (of all weights, for the first version) must take less time than that.

    `options.shadow_path` is a folder; each rank keeps a file there. A publication always waits for the one before. The
    observer receives the events of whole versions, on every rank that has one.
    """

    def __init__(
        self,
        feed: Feed,
        *,
        dtype: torch.dtype | None = None,
        timeout_s: float = 600.0,
        options: PublisherOptions = PublisherOptions(),
    ) -> None:
        if isinstance(options, PublisherOptions) and options.skips:
            raise InvalidInputError(
                "a sharded publisher writes no skips: no rank has all weights",
                hint="leave out skips, and run `deltasync compact --follow` beside it",
            )
        super().__init__(feed, dtype=dtype, options=options)
        self._timeout_s = arguments.seconds("timeout_s", timeout_s, is_zero_allowed=False)
        self._upload = Upload(self._store, retry_s=options.retry_s, require_fencing=options.require_fencing)
        self._shadow_folder = None if options.shadow_path is None else Path(options.shadow_path)
        self._shadow_lock: ExitStack | None = None
        self._groups: tuple[Group, Group] | None = None
        self._opened: _Opened | None = None
        self._failed: BaseException | None = None
        self._is_closed = False

    @property
    def head(self) -> Manifest | None:
        """The version that was committed last, by this publisher or before it."""
        return None if self._opened is None else self._opened.pipeline.head

    def publish(
        self,
        weights: TorchState,
        *,
        step: int | None = None,
        anchor: bool = False,
        extra: Mapping[str, str] | None = None,
    ) -> Publication:
        """Make these weights the next version: a module or a state dict. All ranks call this, with the same step.

        Returns once the publication before is complete and what changed is captured: the weights may change again.
        `anchor`, on rank 0, requests an anchor in addition. `extra`, on rank 0, is metadata that the manifest carries.
        """
        self._require_here()
        if self._is_closed or self._failed is not None:
            problem = "is closed" if self._failed is None else f"has stopped: {self._failed}"
            raise InvalidInputError(f"this publisher {problem}", hint="open a new one") from self._failed
        started = time.perf_counter()
        if self._opened is None:
            self._opened = self._open(weights)
        opened, pipeline = self._opened, self._opened.pipeline
        pipeline.wait_idle()
        pipeline.require_running()
        if anchor:
            pipeline.versions.schedule.request()
        with pipeline.shadow.lock:
            try:
                with opened.ranks.report_errors():
                    metadata = Metadata.of(step, extra)
                    captured = self._capture(opened, weights)
            except BaseException as error:
                # The other ranks stop as well: what they would publish next is not what this one would.
                self._failed = error
                raise
            held_s = time.perf_counter() - started
            if captured is not None:
                return pipeline.submit(captured, metadata, held_s=held_s)
            return pipeline.start(FirstVersion(base=self._options.base, metadata=metadata), held_s=held_s)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until everything that was published is committed or has failed; False on timeout."""
        self._require_here()
        return self._opened is None or self._opened.pipeline.wait_idle(timeout_s)

    def close(self) -> None:
        """Finish what is in flight, anchors included, and release the feed and the groups of ranks."""
        self._is_closed = True
        super().close()

    def _capture(self, opened: "_Opened", weights: TorchState) -> list[Changes] | None:
        """What changed on this rank; None if the feed is new and all weights were copied."""
        shadow = opened.pipeline.shadow
        boxes, tensors = self._shard(weights, opened.shards.layout, opened.ranks.rank)
        opened.shards.require(boxes)
        source = TorchWeights(tensors, cast=self._dtype)
        if not opened.pipeline.is_filled:
            copy_into(shadow.require_weights(), source)
            return None
        devices = {tensor.device for tensor in tensors.values()}
        if self._on_device is not None and len(devices) == 1 and devices != {torch.device("cpu")}:
            return self._on_device.find(shadow, tensors, self._dtype)
        # No digest is computed of what is compared, so that a run need not be contiguous in the whole tensor.
        mine = shadow.require_weights()
        return capture(Weights(mine.layout, mine.arrays), source)

    def _shard(self, weights: TorchState, layout: Layout, rank: int) -> tuple[list[Box], dict[str, torch.Tensor]]:
        """The box and the elements of each tensor of the layout that this rank publishes."""
        if rank == 0:
            tensors = named_tensors(weights)
        else:
            # Rank 0 chose which of several tied names counts: a rank whose shards are empty cannot do so.
            state = unwrapped(weights).state_dict() if isinstance(weights, torch.nn.Module) else weights
            tensors = {spec.name: state[spec.name].detach() for spec in layout.tensors if spec.name in state}
        require_same(layout, layout_of(tensors, cast=self._dtype))
        shards = {spec.name: owned(spec.name, tensors[spec.name], rank) for spec in layout.tensors}
        return [box for box, _ in shards.values()], {name: local for name, (_, local) in shards.items()}

    def _open(self, weights: TorchState) -> "_Opened":
        ranks, anchor_ranks = self._join_groups()
        with ranks.report_errors():
            named = layout_of(named_tensors(weights), cast=self._dtype).to_json() if ranks.rank == 0 else None
        with ranks.decision("its tensors", named) as tensors:
            tensors.result = named
        layout = Layout.from_json(tensors.result)
        with ranks.report_errors():
            boxes, _ = self._shard(weights, layout, ranks.rank)
            shards = Shards(layout, boxes)
            path = self._shadow_file(ranks)
            if self._shadow_lock is None:
                self._shadow_lock = self._resources.enter_context(lock_shadow(path))
            room = shadow_weights(shards.local, path)
        with ranks.decision("to this feed", shards.local.elements) as decision:
            if decision.parts is not None:
                decision.result = self._open_feed(weights, layout, decision.parts)
        state: _FeedState = decision.result
        # All ranks are one writer: each of them can recognize its versions.
        self._upload.id = state.writer
        mine = ShardWeights(shards.local, room.arrays, shards)
        shadow = State(mine, state.head)
        if state.head is not None:
            resume(ranks, self._store, state.head, mine, shards, folder=self._shadow_folder)
        options = self._options
        schedule = AnchorSchedule(options.anchors, state.backlog)
        versions = VersionWriter(upload=self._upload, layout=layout, shards=shards, group=ranks, schedule=schedule)
        # Anchors have a group of their own: versions and anchors are agreed on in two threads.
        anchors = Anchors(versions.beside(anchor_ranks), shadow, observer=options.observer)
        pipeline = Pipeline(versions, shadow, anchors, files=state.files, observer=options.observer)
        self._resources.callback(pipeline.close)
        if options.retention is not None and ranks.rank == 0:
            self._resources.callback(BackgroundPruner(self._store, options.retention, observer=options.observer).close)
        finish_at_exit(pipeline, options.exit_s)
        return _Opened(pipeline, ranks, shards)

    def _join_groups(self) -> tuple[Group, Group]:
        """The groups of ranks for versions and for anchors, joined at the first call."""
        if self._groups is None:
            ranks = TorchRanks.open(timeout_s=self._timeout_s)
            self._groups = ranks, ranks.fork()
            for ranks in self._groups:
                self._resources.callback(ranks.close)
            self._resources.callback(self._upload.close)
        return self._groups

    def _open_feed(self, weights: TorchState, layout: Layout, counts: Sequence[int]) -> "_FeedState":
        """On rank 0 only. `counts`: how many elements each rank has."""
        elements = sum(counts)
        if elements != layout.elements:
            raise InvalidInputError(
                f"the ranks have {elements} elements together, the model has {layout.elements}",
                hint="all ranks must have all tensors, and the mesh of each DTensor on rank 0 must have rank 0 in it",
            )
        if self._options.must_exist:
            self._upload.log.require_head()
        head = self._upload.open()
        versions = VersionWriter(upload=self._upload, layout=layout)
        if head is not None:
            require_layout(Route(self._upload.log, head), layout)
        given, defaults = self._files(weights)
        files = versions.put_files(given, head, defaults=defaults)
        if head is None:
            return _FeedState(self._upload.id, None, files, None)
        return _FeedState(self._upload.id, head, files, AnchorBacklog.of(plan(self._upload.log, head)))

    def _shadow_file(self, ranks: Group) -> Path | None:
        if self._shadow_folder is None:
            return None
        make_folder(self._shadow_folder)
        return self._shadow_folder / f"shadow-{ranks.rank:05d}-of-{ranks.size:05d}.safetensors"


@dataclass(frozen=True, slots=True)
class _FeedState:
    """The feed as rank 0 opened it, and the id that it writes under."""

    writer: str
    head: Manifest | None
    files: PayloadRef | None
    backlog: AnchorBacklog | None


@dataclass(frozen=True, slots=True)
class _Opened:
    """An open feed."""

    pipeline: Pipeline
    ranks: Group
    shards: Shards
