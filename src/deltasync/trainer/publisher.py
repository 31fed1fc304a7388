"""The publisher of one feed, for weights in memory: captures run in the foreground, the rest in the background."""

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from deltasync import arguments, blocks
from deltasync.errors import InvalidInputError
from deltasync.feed.plan import plan
from deltasync.feed.route import Route
from deltasync.feed.upload import Upload
from deltasync.format.companions import require_files
from deltasync.format.layout import Layout, TensorSpec
from deltasync.format.manifest import BaseRef, Manifest
from deltasync.format.weights import Bits, Changes, Readable, Weights
from deltasync.state import State
from deltasync.store.protocol import Store
from deltasync.trainer.anchoring import Anchors
from deltasync.trainer.background import BackgroundPruner, Skips
from deltasync.trainer.capture import (
    capture,
    capture_each,
    collect,
    copy_each,
    copy_into,
    lock_shadow,
    require_same,
    shadow_weights,
)
from deltasync.trainer.events import Observer, Publication
from deltasync.trainer.exit import finish_at_exit
from deltasync.trainer.pipeline import FirstVersion, Pipeline
from deltasync.trainer.schedule import AnchorBacklog, AnchorPolicy, AnchorSchedule
from deltasync.trainer.versions import Metadata, VersionWriter
from deltasync.upkeep.compact import require_levels
from deltasync.upkeep.prune import Retention

logger = logging.getLogger(__name__)

Find = Callable[[State], list[Changes]]
"""Compares with the shadow, whose lock is held."""


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
    """Publishes versions of one set of tensors. Only one thread may use it: a trainer has one loop."""

    def __init__(self, store: Store, options: PublisherOptions) -> None:
        arguments.instance("options", options, PublisherOptions)
        self._upload = Upload(store, retry_s=options.retry_s, require_fencing=options.require_fencing)
        self._options = options
        self._shadow_path = None if options.shadow_path is None else Path(options.shadow_path)
        self._pipeline: Pipeline | None = None
        self._is_closed = False
        self.files: Mapping[str, bytes] = options.files
        self.default_files: Mapping[str, bytes] = {}
        """Files beside the weights that were not asked for, but found with the model."""
        self.needs_files = True
        """Whether the files beside the weights are still to be put: those that are set then."""
        self._shadow_lock: ExitStack | None = None
        self._resources = ExitStack()
        self._resources.callback(self._upload.close)

    @property
    def head(self) -> Manifest | None:
        """The version that was committed last, by this publisher or before it."""
        return None if self._pipeline is None else self._pipeline.head

    def open(self, layout: Layout | None = None) -> Layout | None:
        """Open the feed and rebuild the shadow if there are versions; returns the layout, None if it is not known yet.

        InvalidInputError, naming a tensor, if the feed has another layout than the one given.
        """
        if self._is_closed:
            raise InvalidInputError("this publisher is closed", hint="open a new one")
        if self._pipeline is None:
            if self._shadow_lock is None:
                self._shadow_lock = self._resources.enter_context(lock_shadow(self._shadow_path))
            if self._options.must_exist:
                self._upload.log.require_head()
            head = self._upload.open()
            if head is not None:
                self._pipeline = self._resume(layout, head)
            elif layout is not None:
                self._pipeline = self._start(shadow_weights(layout, self._shadow_path), None)
        if self._pipeline is None:
            return None
        ours = self._pipeline.shadow.require_weights().layout
        if layout is not None:
            require_same(ours, layout)
        return ours

    def publish(
        self,
        weights: Readable,
        *,
        step: int | None = None,
        anchor: bool = False,
        extra: Mapping[str, str] | None = None,
        find: Find | None = None,
    ) -> Publication:
        """Capture what changed, and return: the rest happens in the background.

        `anchor` requests an anchor in addition. `extra` is metadata that the manifest carries. `find` compares with
        the shadow in place of `capture`, such as on an accelerator.
        """
        metadata = Metadata.of(step, extra)
        self.open(weights.layout)
        return self._publish(
            lambda shadow: copy_into(shadow.require_weights(), weights),
            (lambda shadow: capture(shadow.require_weights(), weights)) if find is None else find,
            metadata,
            anchor=anchor,
        )

    def publish_each(
        self,
        tensors: Iterable[tuple[TensorSpec, Bits]],
        *,
        step: int | None = None,
        anchor: bool = False,
        extra: Mapping[str, str] | None = None,
    ) -> Publication:
        """The same from tensors that come one by one, so that the model never has to exist twice."""
        metadata = Metadata.of(step, extra)
        if self.open() is None:
            # A new feed: these copies become the shadow.
            weights = collect(tensors)
            if self._shadow_path is not None:
                return self.publish(weights, step=step, anchor=anchor, extra=extra)
            self._pipeline = self._start(weights, None)
            return self._publish(lambda shadow: None, lambda shadow: [], metadata, anchor=anchor)
        return self._publish(
            lambda shadow: copy_each(shadow.require_weights(), tensors),
            lambda shadow: capture_each(shadow.require_weights(), tensors),
            metadata,
            anchor=anchor,
        )

    def publish_changes(
        self, find: Find, *, step: int | None = None, extra: Mapping[str, str] | None = None
    ) -> Publication:
        """The same for a feed that has versions, where `find` knows what changed since the head."""
        metadata = Metadata.of(step, extra)
        if self.open() is None:
            raise InvalidInputError("the feed has no version yet", hint="publish all weights first")

        def no_copy(shadow: State) -> None:
            raise InvalidInputError("the first version is not committed yet", hint="wait for it")

        return self._publish(no_copy, find, metadata, anchor=False)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until everything that was published is committed or has failed; False on timeout."""
        return self._pipeline is None or self._pipeline.wait_idle(timeout_s)

    def close(self) -> None:
        """Finish what is in flight, anchors included, and release the feed."""
        self._is_closed = True
        self._resources.close()

    def _publish(self, copy: Callable[[State], None], find: Find, metadata: Metadata, *, anchor: bool) -> Publication:
        pipeline, options = self._pipeline, self._options
        if pipeline is None:
            raise InvalidInputError("the feed is not open", hint="call open first")
        started = time.perf_counter()
        pipeline.require_running()
        if options.wait:
            pipeline.wait_idle()
        if self.needs_files:
            head = pipeline.head
            pipeline.files = pipeline.versions.put_files(self.files, head, defaults=self.default_files)
            self.needs_files = False
        with pipeline.shadow.lock:
            if anchor:
                pipeline.versions.schedule.request()
            if pipeline.is_filled:
                captured = find(pipeline.shadow)
                return pipeline.submit(captured, metadata, held_s=time.perf_counter() - started)
            copy(pipeline.shadow)
            return pipeline.start(
                FirstVersion(base=options.base, metadata=metadata), held_s=time.perf_counter() - started
            )

    def _resume(self, layout: Layout | None, head: Manifest) -> Pipeline:
        """The shadow at the head: a mapped file may hold it already; otherwise it is rebuilt from the feed."""
        route = Route(self._upload.log, head)
        layout = route.start().layout if layout is None else layout
        require_layout(route, layout)
        weights = shadow_weights(layout, self._shadow_path)
        if self._shadow_path is None or blocks.digest(weights) != head.digest:
            logger.info("rebuilding the shadow of version %d from the feed", head.version)
            State(weights, scratch=True).advance(route)
        return self._start(weights, head)

    def _start(self, weights: Weights, head: Manifest | None) -> Pipeline:
        options, shadow = self._options, State(weights, head)
        backlog = None if head is None else AnchorBacklog.of(plan(self._upload.log, head))
        schedule = AnchorSchedule(options.anchors, backlog)
        versions = VersionWriter(upload=self._upload, layout=weights.layout, schedule=schedule)
        pipeline = Pipeline(
            versions,
            shadow,
            Anchors(versions.beside(versions.group.fork()), shadow, observer=options.observer),
            skips=(
                Skips(self._upload.store, options.skips, retry_s=options.retry_s, observer=options.observer)
                if options.skips
                else None
            ),
            observer=options.observer,
        )
        self._resources.callback(pipeline.close)
        if options.retention is not None:
            self._resources.callback(
                BackgroundPruner(self._upload.store, options.retention, observer=options.observer).close
            )
        finish_at_exit(pipeline, options.exit_s)
        return pipeline


def require_layout(route: Route, layout: Layout) -> None:
    """InvalidInputError, naming the tensor, if the feed has other tensors than the weights."""
    if layout.sha256 != route.goal.layout_sha256:
        require_same(route.start().layout, layout)
