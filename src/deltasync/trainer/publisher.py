"""The publisher of one feed, for weights in memory: captures run in the foreground, the rest in the background."""

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from deltasync import arguments, blocks
from deltasync.errors import InvalidInputError
from deltasync.feed.plan import plan
from deltasync.feed.route import Route
from deltasync.feed.upload import Upload
from deltasync.files import make_folder
from deltasync.format.companions import require_files
from deltasync.format.layout import Layout
from deltasync.format.manifest import BaseRef, Manifest
from deltasync.format.weights import Changes, Weights
from deltasync.state import State
from deltasync.store.protocol import Store
from deltasync.trainer.background import SkipWriter, start_pruning
from deltasync.trainer.capture import Source, lock_shadow, require_same, shadow_weights
from deltasync.trainer.events import Observer, Publication
from deltasync.trainer.exit import finish_at_exit
from deltasync.trainer.group import Group, resume
from deltasync.trainer.pipeline import Pipeline
from deltasync.trainer.schedule import AnchorBacklog, AnchorPolicy, AnchorSchedule
from deltasync.trainer.shards import ShardWeights
from deltasync.trainer.versions import Metadata, VersionWriter
from deltasync.upkeep.compact import require_levels
from deltasync.upkeep.prune import Retention

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherOptions:
    """How a trainer publishes.

    `base`: the replicas have the checkpoint that training starts from, under this name; a new feed then uploads no
    anchor.
    `files`: what belongs beside the weights (configuration, tokenizer), by relative path.
    `processing_class`: the tokenizer or processor of a model of transformers, whose files are added to these. Those of
    its configuration need not be given.
    `anchors`: when to add an anchor for replicas that join late.
    `retention`: what stays of the feed; the rest is deleted in the background. By default everything stays. An error is
    logged, and never fails a publication.
    `skips`: the levels of skips that are written in the background for replicas that are late, such as (4, 16, 64).
    This reads the feed, and needs memory for a second copy of the weights: `deltasync compact --follow` does the same
    on another machine. By default none are written. Sharded publishers write none.
    `wait`: a publication waits for the one before; otherwise it is captured at once and, if a third one comes before
    its turn, becomes part of that one. Sharded publishers always wait.
    `shadow_path`: keep the shadow in a mapped file instead of memory, which makes a restart quick. A sharded publisher
    takes a folder, in which each rank keeps a file.
    `capture_on`: where weights on an accelerator are compared: "device" keeps a second copy of the weights there,
    "host" copies the weights to the host.
    `retry_s`: how long a failing store is retried before a publication counts as failed.
    `require_fencing`: refuse a store that cannot keep two writers apart.
    `must_exist`: raise NotFoundError if the feed has no version yet, instead of starting a new one: for a trainer that
    resumes, and a folder whose file system may not be mounted.
    `exit_s`: how long the exit of the interpreter waits for what was published, if the publisher was not closed.
    `observer`: called with an event for each committed version and each anchor, in a worker thread; its method
    `failed`, if it has one, with the error of each publication that failed. `PublisherMetrics` is one.
    """

    base: BaseRef | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    processing_class: object = None
    anchors: AnchorPolicy = field(default_factory=AnchorPolicy)
    retention: Retention | None = None
    skips: Sequence[int] = ()
    wait: bool = False
    shadow_path: str | os.PathLike[str] | None = None
    capture_on: Literal["device", "host"] = "device"
    retry_s: float = 60.0
    require_fencing: bool = False
    must_exist: bool = False
    exit_s: float = 300.0
    observer: Observer | None = None

    def __post_init__(self) -> None:
        if self.base is not None:
            hint = 'use BaseRef("Qwen/Qwen3-0.6B", revision), from deltasync'
            arguments.instance("base", self.base, BaseRef, hint=hint)
        require_files(self.files)
        if self.processing_class is not None and not hasattr(self.processing_class, "save_pretrained"):
            what = arguments.described(self.processing_class)
            raise InvalidInputError(f"processing_class must be a tokenizer or a processor of transformers, not {what}")
        arguments.instance("anchors", self.anchors, AnchorPolicy, hint="AnchorPolicy(versions=100), from deltasync")
        if self.retention is not None:
            arguments.instance("retention", self.retention, Retention, hint="Retention(versions=100), from deltasync")
        if self.skips != ():
            require_levels("skips", self.skips)
        arguments.optional_path("shadow_path", self.shadow_path)
        arguments.one_of("capture_on", self.capture_on, ("device", "host"))
        arguments.seconds("retry_s", self.retry_s)
        arguments.seconds("exit_s", self.exit_s)
        if self.observer is not None and not callable(self.observer):
            raise InvalidInputError(f"observer must be a function, not {arguments.described(self.observer)}")


class FeedPublisher:
    """Publishes versions of one set of tensors. Only one thread may use it: a trainer has one loop.

    With a `group`, each of its processes has one and publishes its shards: all of them call each method. The group is
    closed with it. `options.shadow_path` is a folder then, in which each process keeps a file.
    """

    def __init__(self, store: Store, options: PublisherOptions, group: Group | None = None) -> None:
        arguments.instance("options", options, PublisherOptions)
        self._upload = Upload(store, retry_s=options.retry_s, require_fencing=options.require_fencing)
        self._options = options
        self._is_sharded = group is not None
        self._group = Group() if group is None else group
        self._anchor_group: Group | None = None
        self._pipeline: Pipeline | None = None
        self._is_closed = False
        self._failed: BaseException | None = None
        self.files: Mapping[str, bytes] = options.files
        self.default_files: Mapping[str, bytes] = {}
        """Files beside the weights that were not asked for, but found with the model."""
        self.needs_files = True
        """Whether the files beside the weights are still to be put: those that are set then."""
        self._shadow_lock: ExitStack | None = None
        self._resources = ExitStack()
        self._resources.callback(self._group.close)
        self._resources.callback(self._upload.close)

    @property
    def head(self) -> Manifest | None:
        """The version that was committed last, by this publisher or before it."""
        return None if self._pipeline is None else self._pipeline.head

    def open(self, source: Source | None = None) -> Layout | None:
        """Open the feed and rebuild the shadow if there are versions, or make room for one if there is a source.

        Returns the layout; None if it is not known yet. InvalidInputError, naming a tensor, if the source has another.
        """
        self._require_usable()
        if self._pipeline is None:
            self._pipeline = self._open(source)
        elif source is not None and not self._is_sharded and source.layout is not None:
            require_same(self._pipeline.versions.layout, source.layout)
        return None if self._pipeline is None else self._pipeline.versions.layout

    def publish(
        self,
        source: Source,
        *,
        step: int | None = None,
        anchor: bool = False,
        extra: Mapping[str, str] | None = None,
    ) -> Publication:
        """Capture what changed, and return: the rest happens in the background.

        `anchor` requests an anchor in addition. `extra` is metadata that the manifest carries.
        """
        started = time.perf_counter()
        self._require_usable()
        if self._options.wait or self._is_sharded:
            self.wait()
        if self._pipeline is not None:
            self._pipeline.require_running()
        with self._stopping():
            metadata = Metadata.of(step, extra)
        if self._pipeline is None or self.needs_files:
            # Before files are put: other tensors than those of the feed are refused.
            self.open(source)
        pipeline = self._pipeline
        if pipeline is None:
            raise InvalidInputError("the feed is not open", hint="call open first")
        if self.needs_files:
            with self._group.decision("its files", None) as decision:
                if decision.parts is not None:
                    head = pipeline.head
                    decision.result = pipeline.versions.put_files(self.files, head, defaults=self.default_files)
            pipeline.files = decision.result
            self.needs_files = False
        shadow = pipeline.shadow
        with shadow.lock:
            if anchor:
                pipeline.versions.schedule.request()
            capture: list[Changes] | None = None
            with self._stopping():
                if pipeline.is_filled:
                    capture = source.changes(shadow)
                else:
                    source.copy_into(shadow.require_weights())
            return pipeline.submit(capture, metadata, held_s=time.perf_counter() - started)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until everything that was published is committed or has failed; False on timeout."""
        return self._pipeline is None or self._pipeline.wait_idle(timeout_s)

    def close(self) -> None:
        """Finish what is in flight, anchors included, and release the feed and the group."""
        self._is_closed = True
        self._resources.close()

    def _require_usable(self) -> None:
        if self._is_closed or self._failed is not None:
            problem = "is closed" if self._failed is None else f"has stopped: {self._failed}"
            raise InvalidInputError(f"this publisher {problem}", hint="open a new one") from self._failed

    @contextmanager
    def _stopping(self) -> Iterator[None]:
        """An error in the block stops all processes: what they would publish next is not what this one would."""
        try:
            with self._group.report_errors():
                yield
        except BaseException as error:
            if self._is_sharded:
                self._failed = error
            raise

    def _open(self, source: Source | None) -> Pipeline | None:
        """None if the feed is new and there is no source."""
        group, upload, options = self._group, self._upload, self._options
        if self._anchor_group is None:
            # Versions and anchors are agreed on in two threads.
            self._anchor_group = group.fork()
            self._resources.callback(self._anchor_group.close)
        with group.report_errors():
            named = None if source is None else source.layout
        with group.decision("its tensors", None) as tensors:
            tensors.result = named
        layout: Layout | None = tensors.result
        with group.report_errors():
            shards = None if source is None or layout is None else source.shards(layout)
            folder = path = None if options.shadow_path is None else Path(options.shadow_path)
            if folder is not None and self._is_sharded:
                make_folder(folder)
                path = folder / f"shadow-{group.rank:05d}-of-{group.size:05d}.safetensors"
            if self._shadow_lock is None:
                self._shadow_lock = self._resources.enter_context(lock_shadow(path))
            weights: Weights | None = None
            if shards is not None:
                weights = ShardWeights(shards.local, shadow_weights(shards.local, path).arrays, shards)
        with group.decision("to this feed", None if shards is None else shards.local.elements) as opened:
            if opened.parts is not None:
                opened.result = upload.id, self._open_feed(layout, opened.parts)
        head: Manifest | None
        # All processes are one writer: each of them can recognize its versions.
        upload.id, head = opened.result
        if weights is not None and shards is not None:
            if head is not None:
                resume(group, upload.store, head, weights, shards, folder=folder)
        elif head is not None:
            weights = self._resumed(layout, head, path)
        elif layout is not None:
            weights = shadow_weights(layout, path)
        elif source is not None:
            copies = source.collect()
            weights = copies if path is None else shadow_weights(copies.layout, path)
        else:
            return None
        with group.decision("the last anchor", None) as last:
            if last.parts is not None:
                last.result = None if head is None else AnchorBacklog.of(plan(upload.log, head))
        shadow = State(weights, head)
        versions = VersionWriter(
            upload=upload,
            layout=weights.layout if shards is None else shards.layout,
            shards=shards,
            group=group,
            schedule=AnchorSchedule(options.anchors, last.result),
        )
        skips: SkipWriter | None = None
        if options.skips:
            skips = SkipWriter(upload.store, options.skips, retry_s=options.retry_s, observer=options.observer)
        # Anchors are written in a thread of their own, which counts its own retries.
        anchors = replace(versions, upload=upload.beside(), group=self._anchor_group)
        pipeline = Pipeline(versions, anchors, shadow, base=options.base, skips=skips, observer=options.observer)
        self._resources.callback(pipeline.close)
        if options.retention is not None and group.rank == 0:
            self._resources.callback(start_pruning(upload.store, options.retention, observer=options.observer))
        finish_at_exit(pipeline, options.exit_s)
        return pipeline

    def _open_feed(self, layout: Layout | None, elements: Sequence[int | None]) -> Manifest | None:
        """On rank 0 only: the head. `elements`: how many each process has, where they have shards."""
        total = sum(count for count in elements if count is not None)
        if self._is_sharded and layout is not None and total != layout.elements:
            raise InvalidInputError(
                f"the ranks have {total} elements together, the model has {layout.elements}",
                hint="all ranks must have all tensors, and the mesh of each DTensor on rank 0 must have rank 0 in it",
            )
        if self._options.must_exist:
            self._upload.log.require_head()
        head = self._upload.open()
        if head is not None and layout is not None:
            require_layout(Route(self._upload.log, head), layout)
        return head

    def _resumed(self, layout: Layout | None, head: Manifest, path: Path | None) -> Weights:
        """The shadow at the head: a mapped file may hold it already; otherwise it is rebuilt from the feed."""
        route = Route(self._upload.log, head)
        weights = shadow_weights(route.start().layout if layout is None else layout, path)
        if path is None or blocks.digest(weights) != head.digest:
            logger.info("rebuilding the shadow of version %d from the feed", head.version)
            State(weights, scratch=True).advance(route)
        return weights


def require_layout(route: Route, layout: Layout) -> None:
    """InvalidInputError, naming the tensor, if the feed has other tensors than the weights."""
    if layout.sha256 != route.goal.layout_sha256:
        require_same(route.start().layout, layout)
