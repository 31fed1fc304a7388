"""The publisher of one feed, for weights in memory: capture in the foreground, everything else behind it."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from deltasync import blocks
from deltasync.errors import InvalidInputError
from deltasync.feed.log import Log
from deltasync.feed.plan import plan
from deltasync.feed.replay import open_start, replay, with_fallback
from deltasync.feed.writer import Writer
from deltasync.format.layout import Layout, TensorSpec
from deltasync.format.manifest import BaseRef, Manifest
from deltasync.format.weights import Bits, Changes, Readable, Weights
from deltasync.store.protocol import Store
from deltasync.store.retry import Retry
from deltasync.trainer.anchoring import AnchorBacklog, Anchoring, AnchorPolicy
from deltasync.trainer.capture import (
    Shadow,
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
from deltasync.trainer.pipeline import First, Pipeline, Running
from deltasync.trainer.version import VersionWriter, put_files

logger = logging.getLogger(__name__)

Find = Callable[[Shadow], Sequence[Changes]]
"""Compares with the shadow, whose lock is held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherOptions:
    """How a trainer publishes.

    `base`: the replicas have the checkpoint that training starts from, under this name; a new feed then uploads no
    anchor. `files`: what belongs beside the weights, by relative path (configuration, tokenizer).
    `wait`: while a publication is in flight the next one waits for it; else it is captured at once and, if a third one
    comes before its turn, becomes part of that.
    `shadow_path`: keep the shadow in a mapped file instead of memory; a restart is then quick.
    `retry_s`: how long a failing store is tried again before a publication counts as failed.
    """

    base: BaseRef | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    anchors: AnchorPolicy = field(default_factory=AnchorPolicy)
    wait: bool = False
    shadow_path: Path | None = None
    retry_s: float = 60.0
    require_fencing: bool = False
    observer: Observer | None = None


class FeedPublisher:
    """Publishes versions of one set of tensors. Not for several threads at once: a trainer has one loop."""

    def __init__(self, store: Store, options: PublisherOptions) -> None:
        self._writer = Writer(store, require_fencing=options.require_fencing)
        self._options = options
        self._running: Running | None = None
        self._is_closed = False
        self._lock: ExitStack | None = None

    @property
    def head(self) -> Manifest | None:
        """The version that was committed last, by this publisher or before it."""
        return None if self._running is None else self._running.shadow.head

    def open(self, layout: Layout | None = None) -> Layout | None:
        """Open the feed and rebuild the shadow where it has versions; the layout, None if it is not known yet.

        InvalidInputError, naming a tensor, if the feed has another layout than the one given.
        """
        self._require_open()
        if self._running is None:
            self._lock = lock_shadow(self._options.shadow_path) if self._lock is None else self._lock
            retry = Retry(self._options.retry_s)
            head = retry(self._writer.open)
            if head is not None:
                self._running = retry(lambda: self._resume(layout, head))
            elif layout is not None:
                self._running = self._start(shadow_weights(layout, self._options.shadow_path), None)
        if self._running is None:
            return None
        ours = self._running.shadow.weights.layout
        if layout is not None:
            require_same(ours, layout)
        return ours

    def publish(
        self, weights: Readable, *, step: int | None = None, anchor: bool = False, find: Find | None = None
    ) -> Publication:
        """Capture what changed, and return: the rest happens in the background.

        `anchor` asks for an anchor on top. `find` compares with the shadow in another way, such as on an accelerator.
        """
        self.open(weights.layout)
        return self._publish(
            lambda shadow: copy_into(shadow.weights, weights),
            (lambda shadow: capture(shadow.weights, weights)) if find is None else find,
            step=step,
            anchor=anchor,
        )

    def publish_each(
        self, tensors: Iterable[tuple[TensorSpec, Bits]], *, step: int | None = None, anchor: bool = False
    ) -> Publication:
        """The same from tensors that come one by one, so that the model never has to exist twice."""
        if self.open() is None:
            # A new feed: these copies become the shadow.
            weights = collect(tensors)
            if self._options.shadow_path is None:
                self._running = self._start(weights, None)
                return self._publish(lambda shadow: None, lambda shadow: (), step=step, anchor=anchor)
            return self.publish(weights, step=step, anchor=anchor)
        return self._publish(
            lambda shadow: copy_each(shadow.weights, tensors),
            lambda shadow: capture_each(shadow.weights, tensors),
            step=step,
            anchor=anchor,
        )

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until everything that was published is committed or has failed; False on time-out."""
        return self._running is None or self._running.pipeline.wait_idle(timeout_s)

    def close(self) -> None:
        """Finish what is in flight, anchors included, and give back the feed."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._running is not None:
            self._running.close()
        self._writer.close()
        if self._lock is not None:
            self._lock.close()

    def _publish(self, copy: Callable[[Shadow], None], find: Find, *, step: int | None, anchor: bool) -> Publication:
        running = self._require_running()
        started = time.perf_counter()
        running.pipeline.require_running()
        if self._options.wait:
            running.pipeline.wait_idle()
        files = None
        if not running.is_filled:
            files = put_files(self._writer, self._options.files, retry_s=self._options.retry_s)
        with running.shadow.lock:
            if anchor:
                running.anchoring.request()
            if running.is_filled:
                captured = find(running.shadow)
                return running.pipeline.submit(captured, step=step, held_s=time.perf_counter() - started)
            copy(running.shadow)
            running.is_filled = True
            first = First(step, self._options.base, files)
            return running.pipeline.start(first, held_s=time.perf_counter() - started)

    def _resume(self, layout: Layout | None, head: Manifest) -> Running:
        """The shadow at the head: it may be there already, in a mapped file; else it is rebuilt from the feed."""
        log, path = self._writer.log, self._options.shadow_path
        if layout is None:
            layout = with_fallback(log, head, lambda plan: open_start(log, plan).layout)
        require_layout(log, head, layout)
        weights = shadow_weights(layout, path)
        if path is None or blocks.digest(weights) != head.digest:
            logger.info("rebuilding the shadow of version %d from the feed", head.version)
            with_fallback(log, head, lambda plan: replay(log, plan, weights))
        return self._start(weights, head)

    def _start(self, weights: Weights, head: Manifest | None) -> Running:
        options = self._options
        shadow = Shadow(weights, head)
        anchoring = Anchoring(
            self._writer,
            shadow,
            options.anchors,
            retry_s=options.retry_s,
            observer=options.observer,
        )
        if head is not None:
            anchoring.resume(AnchorBacklog.of(plan(self._writer.log, head)))
        maker = VersionWriter(self._writer, shadow, retry_s=options.retry_s)
        pipeline = Pipeline(maker, anchoring, observer=options.observer, look=self._look)
        return Running(shadow, anchoring, pipeline, is_filled=head is not None)

    def _look(self, after: int) -> Manifest | None:
        return Retry(self._options.retry_s)(lambda: self._writer.log.head(after=after))

    def _require_open(self) -> None:
        if self._is_closed:
            raise InvalidInputError("this publisher is closed", hint="open a new one")

    def _require_running(self) -> Running:
        self._require_open()
        if self._running is None:
            raise InvalidInputError("the feed is not open")
        return self._running


def require_layout(log: Log, head: Manifest, layout: Layout) -> None:
    """InvalidInputError, naming the tensor, if the feed has other tensors than the weights."""
    if layout.sha256 != head.layout_sha256:
        require_same(with_fallback(log, head, lambda plan: open_start(log, plan).layout), layout)
