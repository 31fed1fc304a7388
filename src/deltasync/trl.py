"""`DeltasyncTransfer`: TRL's asynchronous GRPO publishes to a feed instead of pushing weights into one server.

    transfer = DeltasyncTransfer("s3://bucket/runs/42", max_lag=1)
    trainer = AsyncGRPOTrainer(..., weight_transfer=transfer)
    transfer.attach(trainer)

This module does not import TRL: TRL calls five methods of the transfer, in its main process only.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Protocol

import torch

from deltasync import DeltasyncError, InvalidInputError, Publication, PublisherOptions, Store, StoreError
from deltasync.torch import FeedReader, Publisher

logger = logging.getLogger(__name__)

__all__ = ["DeltasyncTransfer"]

_POLL_FIRST_S = 0.1
_POLL_MOST_S = 2.0

_CHECK = "check the replicas; one that has died no longer counts after `live_s`"
_START = "start a replica that follows this feed, such as `deltasync serve`, and check its log"


def wait_for_replicas(
    reader: FeedReader,
    version: int,
    *,
    replicas: int,
    timeout_s: float,
    live_s: float = 900,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until every live replica serves `version` or a later one, and at least `replicas` of them are live.

    A replica that sends no heartbeat for `live_s` no longer counts. Transient errors of the store are retried.
    StoreError, naming the replicas that are behind, after `timeout_s`.
    """
    started, pause_s = clock(), _POLL_FIRST_S
    while True:
        message, hint = None, _CHECK
        try:
            live = reader.serving(live_s=live_s, clock=clock)
            behind = [f"{name!r:.80} serves version {served}" for name, served in live.items() if served < version]
            more = f" and {len(behind) - 3} others" if len(behind) > 3 else ""
            if len(live) < replicas:
                message = f"{len(live)} live replicas serve a version, at least {replicas} are required"
                hint = _START
            elif behind:
                message = ", ".join(behind[:3]) + more
        except StoreError as error:
            if not error.transient:
                raise
            message = f"the heartbeats cannot be read: {error.message}"
        if message is None:
            return
        waited_s = clock() - started
        if waited_s >= timeout_s:
            raise StoreError(
                f"version {version} was not confirmed by the replicas in {timeout_s:g} s: {message}",
                transient=True,
                hint=hint,
            )
        sleep(min(pause_s, timeout_s - waited_s))
        pause_s = min(2 * pause_s, _POLL_MOST_S)


_LABEL_POLL_S = 0.5
_COUNTS_KEPT = 4096
"""Syncs whose versions are kept: far more than the age of any sample."""


class AsyncTrainer(Protocol):
    """The two attributes of TRL's trainer that a transfer reads.

    The state has the step. The worker, which only TRL's main process has, makes samples, and labels them with the model
    version that it was given last.
    """

    @property
    def state(self) -> Any: ...

    @property
    def rollout_worker(self) -> Any: ...


class DeltasyncTransfer:
    """Publishes every weight sync of TRL as a version. Replicas follow the feed by themselves: no server is paused.

    `send_weights` returns once what changed is captured, unless replicas are too far behind: it waits until all live
    ones have what was sent `max_lag` syncs before. 0 waits for every sync to arrive.
    `require_replicas`: how many replicas must be live and serve a version; with 0, no sync waits while there is none.
    The first sync waits for them in any case: without them TRL would wait for samples without saying so.
    `timeout_s`: how long to wait for replicas, or for the store, before training stops with an error.
    `live_s`: a replica whose last heartbeat is older counts as gone. Keep `timeout_s` above it: then training goes on
    without a replica that died.
    `dtype` and `options` are those of `Publisher`.

    The changes of a publication that failed are part of the next one. Training stops with the error of a publication
    if none of the `max_lag` syncs after it has arrived, or if it was the last one.
    """

    def __init__(
        self,
        feed: str | os.PathLike[str] | Store,
        *,
        max_lag: int = 1,
        require_replicas: int = 1,
        timeout_s: float = 1200.0,
        live_s: float = 900,
        dtype: torch.dtype | None = None,
        options: PublisherOptions = PublisherOptions(),
    ) -> None:
        if max_lag < 0 or require_replicas < 0:
            raise InvalidInputError(
                f"max_lag={max_lag} and require_replicas={require_replicas} must not be negative",
                hint="max_lag=0 waits until replicas have every version",
            )
        self._feed = feed
        self._dtype = dtype
        self._options = options
        self._require_replicas = require_replicas
        self._timeout_s = timeout_s
        self._live_s = live_s
        self._opened: tuple[FeedReader, Publisher] | None = None
        self._resources = ExitStack()
        self._sent: deque[Publication] = deque(maxlen=max_lag + 1)
        self._counts: deque[tuple[int, Publication]] = deque(maxlen=_COUNTS_KEPT)
        self._is_reported = False
        self._step: Callable[[], int | None] = lambda: None
        self._labels: _Labels | None = None

    def attach(self, trainer: AsyncTrainer) -> None:
        """Take the step from TRL's trainer, and label its samples by what replicas have confirmed.

        Without this, samples are labelled with the version that was sent last, although replicas may still serve one
        of `max_lag` syncs before.
        """
        self._step = lambda: trainer.state.global_step
        worker = trainer.rollout_worker
        if worker is None:
            return
        self._labels = _Labels(worker.update_model_version, self._served, wait_for_first=self._require_replicas > 0)
        # On this instance alone: TRL treats its own class of workers specially, so a wrapper would not do.
        worker.update_model_version = self._update_label

    def count_of(self, version: int) -> int:
        """TRL's number for a version of the feed: its count of syncs; 0 for weights from before the first one.

        Needs `attach`. If one version carries several syncs, it is the last of them.
        """
        for count, publication in reversed(self._counts):
            if publication.version is not None and publication.version <= version:
                return count
        return 0

    def init_weight_transfer(self) -> None:
        """Open the store, and read from it once: a wrong URL or account is an error before training begins."""
        reader, _ = self._open()
        reader.head()

    def pause(self) -> None:
        """Do nothing: replicas decide themselves when to swap weights."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publish these weights, then wait for replicas that are too far behind."""
        reader, publisher = self._open()
        is_first = not self._sent
        self._sent.append(publisher.publish(iterator, step=self._step()))
        if len(self._sent) == self._sent.maxlen or (is_first and self._require_replicas > 0):
            wait_for_replicas(
                reader,
                self._oldest_version(),
                replicas=self._require_replicas,
                timeout_s=self._timeout_s,
                live_s=self._live_s,
            )

    def resume(self) -> None:
        """Do nothing, as in `pause`."""

    def destroy(self) -> None:
        """Finish what is in flight and release the feed; raises the error of the last publication if it failed."""
        if self._labels is not None:
            self._labels.stop()
        if self._opened is None:
            return
        self._opened = None
        self._resources.close()
        last = self._sent[-1] if self._sent and not self._is_reported else None
        self._sent.clear()
        self._is_reported = False
        if last is not None:
            try:
                last.wait(self._timeout_s)
            except DeltasyncError as error:
                raise self._stopping(last, error) from None

    def _open(self) -> tuple[FeedReader, Publisher]:
        if self._opened is None:
            self._resources = ExitStack()
            reader = self._resources.enter_context(FeedReader(self._feed))
            publisher = self._resources.enter_context(Publisher(self._feed, dtype=self._dtype, options=self._options))
            self._opened = reader, publisher
        return self._opened

    def _oldest_version(self) -> int:
        """The version that carries the oldest publication that is kept: its own, or a later one."""
        deadline_s = time.monotonic() + self._timeout_s
        errors: list[DeltasyncError] = []
        for publication in self._sent:
            try:
                return publication.wait(max(0.0, deadline_s - time.monotonic())).version
            except DeltasyncError as error:
                errors.append(error)
        raise self._stopping(self._sent[0], errors[0])

    def _stopping(self, publication: Publication, error: DeltasyncError) -> DeltasyncError:
        self._is_reported = True
        error.add_note(f"the weights of step {publication.step} were not published, so training stops")
        return error

    def _served(self) -> int | None:
        """The version that all live replicas have reached; None if there is none."""
        opened = self._opened
        live = {} if opened is None else opened[0].serving(live_s=self._live_s)
        return min(live.values(), default=None)

    def _update_label(self, model_version: int) -> None:
        """Replaces the worker's method: TRL calls it after each sync, and with an old count when it resumes."""
        if self._sent:
            self._counts.append((model_version, self._sent[-1]))
        if self._labels is not None:
            self._labels.sent(model_version, self._sent[-1] if self._sent else None)


class _Labels:
    """Passes a version to the rollout worker once replicas serve it, in a worker thread.

    The thread is needed: a trainer that gets no sample fresh enough makes no further step at which to poll again.
    While no replica is live, versions are passed at once unless `wait_for_first`.
    """

    def __init__(
        self, update: Callable[[int], None], served: Callable[[], int | None], *, wait_for_first: bool
    ) -> None:
        self._update = update
        self._served = served
        self._wait_for_first = wait_for_first
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, Publication]] = deque()
        self._is_stopped = False
        self._thread: threading.Thread | None = None

    def sent(self, label: int, publication: Publication | None) -> None:
        """A version of TRL was sent as `publication`; None if TRL resumes with an old count."""
        with self._changed:
            if publication is None:
                self._update(label)
                return
            self._waiting.append((label, publication))
            if self._thread is None:
                self._is_stopped = False
                self._thread = threading.Thread(target=self._run, name="deltasync-labels", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def stop(self) -> None:
        """End the thread."""
        with self._changed:
            self._is_stopped = True
            self._waiting.clear()
            self._changed.notify_all()
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_stopped or bool(self._waiting))
                if self._is_stopped:
                    return
            try:
                served = self._served()
            except DeltasyncError as error:
                logger.warning("the heartbeats cannot be read, samples keep their old label: %s", error)
            else:
                self._confirm(served)
            with self._changed:
                self._changed.wait_for(lambda: self._is_stopped or not self._waiting, _LABEL_POLL_S)

    def _confirm(self, served: int | None) -> None:
        """Pass on the last label that replicas have reached, given the version that all live ones serve."""

        def is_confirmed(version: int | None) -> bool:
            if served is None:
                return not self._wait_for_first
            return version is not None and version <= served

        with self._changed:
            # Not only the first: a publication that failed has no version, and is part of a later one.
            confirmed = [i for i, (_, sent) in enumerate(self._waiting) if is_confirmed(sent.version)]
            for _ in range(confirmed[-1] if confirmed else 0):
                self._waiting.popleft()
            if confirmed:
                self._update(self._waiting.popleft()[0])
