"""Behind the trainer's back: captures become versions, one at a time and in order.

At most one publication is in flight and one is pending. A newer capture takes the place of the pending one, so that
memory is bounded and nothing that changed is lost: it is part of the later version.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from deltasync.blocks import Changed
from deltasync.errors import ConflictError, InvalidInputError, StoreError
from deltasync.format.layout import Layout
from deltasync.format.manifest import BaseRef, Manifest, PayloadRef
from deltasync.format.weights import Changes
from deltasync.trainer.anchoring import Anchoring
from deltasync.trainer.capture import Part, Shadow, rebase, tensors_of
from deltasync.trainer.events import Observer, Publication, PublishEvent
from deltasync.trainer.version import CommittedVersion, VersionWriter

logger = logging.getLogger(__name__)

Look = Callable[[int], Manifest | None]
"""The newest version of the feed after the one that is given."""


@dataclass(frozen=True, slots=True)
class First:
    """How a new feed begins: with all weights of the shadow, or with the name of a base that has them."""

    step: int | None
    base: BaseRef | None
    files: PayloadRef | None


@dataclass(slots=True, eq=False)
class _Job:
    """One publication, and those that it took along. `captured` is None for the first version.

    `changed` is None until the captures are put in order.
    """

    publications: list[Publication]
    held_s: float
    captured: list[Changes] | None
    changed: Changed | None = None

    @property
    def step(self) -> int | None:
        return self.publications[-1].step

    def ordered(self, layout: Layout) -> Changed:
        """What changed, by tensor."""
        if self.changed is None:
            self.changed = dict(self.given_away(layout))
        return self.changed

    def given_away(self, layout: Layout) -> Iterator[tuple[str, Part]]:
        """The same one by one, and gone from here: nobody holds what the taker has let go of."""
        if self.changed is not None:
            changed, self.changed = dict(self.changed), None
            while changed:
                yield changed.popitem()
        elif self.captured is not None:
            yield from tensors_of(layout, _given_away(self.captured), in_place=True)


class Pipeline:
    """One feed, one shadow, one writer. All state is guarded by the shadow's lock.

    `look` is asked after a commit without an answer: whether it happened decides what the next version is. Without it
    such a commit stops the pipeline with a conflict, if it did happen.
    """

    def __init__(
        self, maker: VersionWriter, anchoring: Anchoring, *, observer: Observer | None, look: Look | None = None
    ) -> None:
        self._maker = maker
        self._look = look
        self._shadow: Shadow = maker.shadow
        self._anchoring = anchoring
        self._observer = observer
        self._moved = threading.Condition(self._shadow.lock)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="deltasync-publish")
        self._in_flight: _Job | None = None
        self._pending: _Job | None = None
        self._stopped: BaseException | None = None
        self._first: First | None = None
        self._doubt: Changed | None = None
        self._events: list[PublishEvent] = []

    def start(self, first: First, *, held_s: float) -> Publication:
        """The first version, of all weights in the shadow."""
        self._first = first
        return self._enqueue(_Job([Publication(first.step)], held_s, None))

    def submit(self, captured: Sequence[Changes], *, step: int | None, held_s: float) -> Publication:
        """What was captured against the shadow as it is. Called with the shadow's lock held since before that."""
        return self._enqueue(_Job([Publication(step)], held_s, list(captured)))

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Until nothing is in flight or pending; False on time-out."""
        with self._moved:
            return self._moved.wait_for(lambda: self._in_flight is None, timeout_s)

    def require_running(self) -> None:
        """Raise what stopped the pipeline, if something did."""
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
                hint="open a new one, which goes on from the feed's head",
            ) from self._stopped

    def close(self) -> None:
        """Finish what was submitted, then stop. Errors are told by the publications."""
        self.wait_idle()
        self._pool.shutdown()

    def _enqueue(self, job: _Job) -> Publication:
        own = job.publications[-1]
        with self._moved:
            self.require_running()
            if self._in_flight is None:
                self._begin(job)
            else:
                if self._pending is not None:
                    job.publications = [*self._pending.publications, own]
                    job.held_s += self._pending.held_s
                self._pending = job
        return own

    def _begin(self, job: _Job) -> None:
        self._in_flight, self._pending = job, None
        done = self._pool.submit(self._run, job)
        # There is one thread, so that this comes behind it, and never runs in the trainer's.
        self._pool.submit(self._end, job, done).add_done_callback(_complain)

    def _run(self, job: _Job) -> tuple[Manifest, PublishEvent]:
        self._settle(job)
        if self._shadow.head is None:
            # Also when an earlier attempt failed: what was captured since is a change of these very weights.
            made = self._make_first()
            if job.captured is None:
                return made.manifest, _event(made, job)
            self._events.append(_event(made))
        changed = job.ordered(self._shadow.weights.layout)
        made = self._make(lambda: self._maker.delta(changed, step=job.step), changed)
        self._advance(changed, made.manifest)
        return made.manifest, _event(made, job)

    def _make_first(self) -> CommittedVersion:
        first = self._first
        if first is None:
            raise InvalidInputError("the feed is empty and no first version was given")
        made = self._make(lambda: self._maker.first(step=first.step, base=first.base, files=first.files), {})
        self._advance({}, made.manifest)
        return made

    def _make(self, make: Callable[[], CommittedVersion], changed: Changed) -> CommittedVersion:
        try:
            return make()
        except StoreError:
            self._doubt = changed
            raise

    def _settle(self, job: _Job) -> None:
        """After a failure: if it was only the answer to the commit that got lost, the shadow moves on after all."""
        if self._doubt is None or self._look is None:
            return
        head = self._shadow.head
        found = self._look(-1 if head is None else head.version)
        changed, self._doubt = self._doubt, None
        expected = 0 if head is None else head.version + 1
        if found is not None and found.writer == self._maker.writer.id and found.version == expected:
            self._advance(changed, found, job)
            self._events.append(_event(CommittedVersion(found, 0.0, 0.0, 0.0, 0)))

    def _advance(self, changed: Changed, manifest: Manifest, job: _Job | None = None) -> None:
        """The shadow moves on to a version; what was captured against it before is rebased, `job` too."""
        with self._moved:
            before = self._shadow.advance(changed, manifest)
            self._anchoring.note(before)
            self._anchoring.consider(manifest)
            for waiting in (job, self._pending):
                if waiting is not None and waiting.captured is not None:
                    waiting.changed = rebase(waiting.given_away(self._shadow.weights.layout), changed, before)

    def _end(self, job: _Job, done: "Future[tuple[Manifest, PublishEvent]]") -> None:
        """Settle a publication in the worker, then take the next."""
        error = done.exception()
        if error is not None:
            logger.error("step %s was not published: %s", job.step, error)
        events, self._events = self._events, []
        with self._moved:
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
            self._moved.notify_all()
        for event in events if error is not None else (*events, done.result()[1]):
            logger.info("%s", event)
            if self._observer is not None:
                self._observer(event)


@dataclass(slots=True)
class Running:
    """What an open publisher has. `is_filled`: the shadow holds weights, of a version or of the first one to come."""

    shadow: Shadow
    anchoring: Anchoring
    pipeline: Pipeline
    is_filled: bool

    def close(self) -> None:
        """Finish what was submitted, anchors included."""
        self.pipeline.close()
        self.anchoring.close()


def _given_away(captured: list[Changes]) -> Iterator[Changes]:
    """One by one, and gone from the list."""
    captured.reverse()
    while captured:
        yield captured.pop()


def _complain(done: "Future[None]") -> None:
    """An observer failed. The version is committed all the same."""
    error = done.exception()
    if error is not None:
        logger.error("an observer of publications failed: %r", error, exc_info=error)


def _event(made: CommittedVersion, job: _Job | None = None) -> PublishEvent:
    """What a version took; without a job it was made on behalf of a publication that has failed before."""
    m = made.manifest
    return PublishEvent(
        kind=m.kind,
        version=m.version,
        step=m.step,
        elements=m.elements,
        changed=m.changed,
        payload_bytes=m.nbytes,
        held_s=0.0 if job is None else job.held_s,
        encode_s=made.encode_s,
        put_s=made.put_s,
        commit_s=made.commit_s,
        coalesced=0 if job is None else len(job.publications) - 1,
        retries=made.retries,
    )
