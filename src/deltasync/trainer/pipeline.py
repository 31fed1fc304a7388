"""Captures become versions in a worker thread, one at a time and in order. Another one adds anchors to them.

At most one publication is in flight and one is pending. A newer capture replaces the pending one, so that memory is
bounded and no change is lost: it is part of the later version. An anchor is written from the shadow while the shadow
advances to later versions: the bits that they replace are kept until it is written. No second copy of the weights is
needed, and no delta waits for an anchor.
"""

import logging
import threading
import time
import warnings
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

from deltasync.blocks import encode_changes
from deltasync.errors import ConflictError, InvalidInputError, StoreError
from deltasync.format.digest import StateDigest
from deltasync.format.manifest import BaseRef, Manifest, PayloadRef
from deltasync.format.weights import Changes
from deltasync.observe import VersionTracer, tell
from deltasync.parallel import Pool
from deltasync.past import Past
from deltasync.state import State
from deltasync.trainer.background import SkipWriter
from deltasync.trainer.capture import rebase
from deltasync.trainer.events import (
    CaptureTime,
    CommittedVersion,
    Observer,
    Publication,
    PublishEvent,
    logged_progress,
)
from deltasync.trainer.versions import Metadata, VersionWriter

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Job:
    """One publication, and the earlier ones that it carries. `capture` is None for the first version."""

    publications: list[Publication]
    capture: list[Changes] | None
    metadata: Metadata
    captured: CaptureTime
    held_s: float


class Pipeline:
    """Writes the versions of one feed from captures against its shadow. All state is guarded by the shadow's lock.

    `anchors`: writes anchors, in a thread of its own. `base`: what a new feed begins with, instead of an anchor.
    """

    def __init__(
        self,
        versions: VersionWriter,
        anchors: VersionWriter,
        shadow: State,
        *,
        base: BaseRef | None = None,
        skips: SkipWriter | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.is_closed = False
        self.head = shadow.at
        """The version that was committed last."""
        self.is_filled = shadow.at is not None
        """Whether the shadow holds weights: those of a version, or those of the first one to come."""
        self._newest: Publication | None = None
        self.shadow = shadow
        self.versions = versions
        self.files: PayloadRef | None = None
        """The files that the next versions name."""
        self._base = base
        self._anchors = anchors
        self._observer = observer
        self._idle = threading.Condition(shadow.lock)
        self._pool = Pool(1, "deltasync-publish")
        self._anchor_pool = Pool(1, "deltasync-anchor")
        self._in_flight: _Job | None = None
        self._pending: _Job | None = None
        self._stopped: BaseException | None = None
        self._first: Metadata | None = None
        """Of the first version, whose weights the shadow holds."""
        self._uncertain: tuple[list[Changes], StateDigest] | None = None
        """The changes of a version whose commit got no answer, and what they add to the digest.

        The next job finds out whether the commit happened.
        """
        self._events: list[PublishEvent] = []
        self._tracer = VersionTracer(versions.upload.log.feed_id)
        # Now: from Python 3.12 on, no thread can be started any more when the interpreter exits.
        self._pool.start()
        self._anchor_pool.start()
        self._skips = skips
        if skips is not None:
            skips.start()

    def __del__(self) -> None:
        if not self.is_closed and self._newest is not None:
            warnings.warn(self.forgotten, ResourceWarning, stacklevel=1, source=self)

    @property
    def forgotten(self) -> str:
        """The message of the warning about a publisher that was not closed."""
        url = self.versions.upload.store.url
        return f"the publisher of {url} was not closed: use it in a `with` block, or call close()"

    def submit(self, capture: list[Changes] | None, metadata: Metadata, *, held_s: float) -> Publication:
        """Publish a capture; None publishes all weights of the shadow as the first version.

        Called with the shadow's lock held since before the capture.
        """
        captured = CaptureTime(self.versions.upload.clock() - held_s, held_s, time.perf_counter())
        own = Publication(metadata.step)
        job = _Job([own], capture, replace(metadata, captured=captured), captured, held_s)
        with self._idle:
            self.require_running()
            if capture is None:
                self._first, self.is_filled = job.metadata, True
            if self._in_flight is None:
                self._begin(job)
            else:
                if self._pending is not None:
                    job.publications = [*self._pending.publications, own]
                    job.held_s += self._pending.held_s
                self._pending = job
            self._newest = own
        return own

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is in flight or pending; False on timeout."""
        with self._idle:
            return self._idle.wait_for(lambda: self._in_flight is None, timeout_s)

    def wait_anchors(self, timeout_s: float | None = None) -> bool:
        """Wait until no anchor is being written; False on timeout."""
        with self._idle:
            return self._idle.wait_for(lambda: not self.shadow.pasts, timeout_s)

    def unpublished(self) -> str | None:
        """What was submitted last and is not committed, and why, as a message; None if all is."""
        newest = self._newest
        if newest is None or newest.version is not None:
            return None
        reason = "" if newest.error is None else f": {newest.error}"
        return f"step {newest.step} was not published to {self.versions.upload.store.url}{reason}"

    def require_running(self) -> None:
        """Raise the error that stopped the pipeline, if one did."""
        if isinstance(self._stopped, ConflictError):
            raise ConflictError(
                f"this publisher has stopped: {self._stopped.message}",
                hint=self._stopped.hint,
                version=self._stopped.version,
                key=self._stopped.key,
            ) from self._stopped
        if self._stopped is not None:
            raise InvalidInputError(
                f"this publisher has stopped: {self._stopped}",
                hint="open a new one, which continues from the feed's head",
            ) from self._stopped

    def close(self) -> None:
        """Finish what was submitted, anchors included, then stop. Errors are reported by the publications."""
        self.wait_idle()
        self._pool.shutdown()
        self._anchor_pool.shutdown()
        if self._skips is not None:
            self._skips.close()
        self.is_closed = True

    def _begin(self, job: _Job) -> None:
        self._in_flight, self._pending = job, None
        done = self._pool.submit(self._write, job)
        # The pool has one thread, so that this runs after the job, and never in the trainer's thread.
        self._pool.submit(self._finish, job, done)

    def _write(self, job: _Job) -> tuple[Manifest, PublishEvent]:
        if self._uncertain is not None:
            # After a failure: the version may have been committed, and only the answer got lost.
            changes, digest_delta = self._uncertain
            committed = self.versions.lost_commit(self.head, digest_delta)
            self._uncertain = None
            if committed is not None:
                self._advance(changes, committed, job)
                self._events.append(committed.event())
        if self.head is not None:
            return self._write_delta(job, self.head)
        # Also after a failed first attempt: later captures are changes of the weights of the first version.
        if self._first is None:
            raise InvalidInputError("the feed is empty and no first version was given")
        weights, metadata = self.shadow.require_weights(), replace(self._first, files=self.files)
        try:
            if self._base is None:
                committed = self.versions.anchor(weights, None, metadata, progress=logged_progress(0))
            else:
                committed = self.versions.base(weights, self._base, metadata)
        except StoreError:
            self._uncertain = [], StateDigest.ZERO
            raise
        self._advance([], committed)
        if job.capture is None:
            return committed.manifest, committed.event(held_s=job.held_s, coalesced=len(job.publications) - 1)
        self._events.append(committed.event())
        return self._write_delta(job, committed.manifest)

    def _write_delta(self, job: _Job, head: Manifest) -> tuple[Manifest, PublishEvent]:
        changes = [] if job.capture is None else job.capture
        encode = partial(encode_changes, self.shadow.require_weights(), changes)
        try:
            count = sum(len(part.values) for part in changes)
            committed = self.versions.delta(encode, head, replace(job.metadata, files=self.files), changed=count)
        except StoreError:
            # All of it is encoded once more: the error may have come before the last block, and with a part of the sum
            # an earlier attempt whose commit arrives late could be taken for this one.
            self._uncertain = changes, sum((block.digest for block in encode()), StateDigest.ZERO)
            raise
        self._advance(changes, committed)
        return committed.manifest, committed.event(held_s=job.held_s, coalesced=len(job.publications) - 1)

    def _advance(self, changes: list[Changes], committed: CommittedVersion, job: _Job | None = None) -> None:
        """Advance the shadow to a version, and rebase captures that were made before: the pending one, and `job`'s."""
        shadow = self.shadow
        before = shadow.bits_before(changes)
        with self._idle:
            shadow.apply(changes, committed.manifest, before=before)
            self.head = committed.manifest
            if committed.is_anchor_due:
                past = shadow.past()
                shadow.pasts.append(past)
                self.versions.schedule.begin()
                progress = logged_progress(self.head.version)
                written = self._anchor_pool.submit(self._anchors.add_anchor, self.head, past, progress=progress)
                self._anchor_pool.submit(self._finish_anchor, past, written)
            waiting, captures = [], []
            for one in (job, self._pending):
                if one is not None and one.capture is not None:
                    waiting.append(one)
                    captures.append(one.capture)
            if captures:
                rebased = rebase(shadow.require_weights().layout, captures, changes, before)
                for one, capture in zip(waiting, rebased, strict=True):
                    one.capture = capture
        if self._skips is not None:
            self._skips.note(committed.manifest)

    def _finish_anchor(self, past: Past, done: "Future[CommittedVersion]") -> None:
        error = done.exception()
        with self._idle:
            self.shadow.pasts.remove(past)
            self.versions.schedule.finish(None if error is not None else done.result().manifest)
            self._idle.notify_all()
        if error is not None:
            # The feed is complete without it.
            logger.error("the anchor was not written, the next version gets one: %s", error)
        else:
            tell(self._observer, done.result().event())

    def _finish(self, job: _Job, done: "Future[tuple[Manifest, PublishEvent]]") -> None:
        """Complete the publications of a job, begin the next job, and report the events."""
        end_unix_s, error = time.time(), done.exception()
        if error is not None:
            logger.error("step %s was not published: %s", job.metadata.step, error)
        events, self._events = self._events, []
        with self._idle:
            # A store may recover, and the next publication carries everything. Another writer does not go away.
            if error is not None and not isinstance(error, StoreError):
                self._stopped = error
            for publication in job.publications:
                if error is None:
                    publication.succeed(*done.result())
                else:
                    publication.fail(error)
            following, self._in_flight, self._pending = self._pending, None, None
            if following is not None and self._stopped is None:
                self._begin(following)
            elif following is not None and self._stopped is not None:
                for publication in following.publications:
                    publication.fail(self._stopped)
            self._idle.notify_all()
        if error is not None:
            tell(self._observer, error, method="failed")
        for event in events if error is not None else (*events, done.result()[1]):
            logger.info("%s", event)
            # What was held in the trainer's thread ended before the other phases began.
            self._tracer.record("publish", event, began_unix_s=job.captured.unix_s, end_unix_s=end_unix_s)
            tell(self._observer, event)
