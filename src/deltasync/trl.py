"""`DeltasyncTransfer`: TRL's asynchronous GRPO publishes to a feed instead of pushing weights into one server.

    transfer = DeltasyncTransfer("s3://bucket/runs/42", max_lag=1)
    trainer = AsyncGRPOTrainer(..., weight_transfer=transfer)
    transfer.attach(trainer)

This module does not import TRL: TRL calls five methods of the transfer, in its main process only.
"""

import inspect
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from deltasync.errors import DeltasyncError, InvalidInputError, StoreError
from deltasync.feed.log import Log
from deltasync.feed.prune import LIVE_S
from deltasync.format.sealed import Heartbeat
from deltasync.store import open_store
from deltasync.store.protocol import Store
from deltasync.torch.publisher import Publisher
from deltasync.trainer.events import Publication

__all__ = ["DeltasyncTransfer"]

_POLL_FIRST_S = 0.1
_POLL_MOST_S = 2.0

_LOOK = "look at the replicas; one that is dead is no longer waited for after `live_s`"
_START = "start a replica that follows this feed, such as `deltasync serve`, and look at what it says"


def serving(log: Log, *, live_s: float = LIVE_S, clock: Callable[[], float] = time.time) -> list[tuple[int, Heartbeat]]:
    """Versions and heartbeats of the live replicas that serve one, the slowest first.

    Live: the heartbeat is younger than `live_s`. A replica without a version makes no rollouts: it is not waited for.
    """
    oldest_unix_s = clock() - live_s
    found = [(b.version, b) for b in log.heartbeats() if b.version is not None and b.unix_s > oldest_unix_s]
    return sorted(found, key=lambda pair: (pair[0], pair[1].replica))


def slowest(log: Log, *, live_s: float = LIVE_S, clock: Callable[[], float] = time.time) -> Heartbeat | None:
    """The live replica that serves the oldest version; None if no live one serves any."""
    found = serving(log, live_s=live_s, clock=clock)
    return found[0][1] if found else None


def wait_for_replicas(
    log: Log,
    version: int,
    *,
    replicas: int,
    timeout_s: float,
    live_s: float = LIVE_S,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Until every live replica serves `version` or a later one, and at least `replicas` of them are there.

    Replicas that fall silent for `live_s` are no longer waited for. While the store fails for a moment, it is asked
    again. StoreError, naming who is behind, after `timeout_s`.
    """
    started, pause_s = clock(), _POLL_FIRST_S
    while True:
        message, hint = None, _LOOK
        try:
            found = serving(log, live_s=live_s, clock=clock)
            message, hint = _missing(found, version, replicas), _LOOK if len(found) >= replicas else _START
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


def _missing(found: list[tuple[int, Heartbeat]], version: int, replicas: int) -> str | None:
    """What is still missing, in words; None if nothing is."""
    if len(found) < replicas:
        return f"{len(found)} live replicas serve a version, at least {replicas} are required"
    behind = [f"{beat.replica!r:.80} serves version {served}" for served, beat in found if served < version]
    more = f" and {len(behind) - 3} others" if len(behind) > 3 else ""
    return ", ".join(behind[:3]) + more if behind else None


logger = logging.getLogger(__name__)

_LABEL_POLL_S = 0.5
_COUNTS_KEPT = 4096
"""Syncs whose versions are remembered: far more than any sample may be old."""


class RolloutWorker(Protocol):
    """What TRL tells its version to: samples are labelled with the one that was told last."""

    def update_model_version(self, model_version: int) -> None: ...


class TrainerState(Protocol):
    """Where a trainer is."""

    global_step: int


class AsyncTrainer(Protocol):
    """The two things of TRL's trainer that a transfer looks at."""

    @property
    def state(self) -> TrainerState: ...

    @property
    def rollout_worker(self) -> RolloutWorker | None: ...


class DeltasyncTransfer:
    """Publishes every weight sync of TRL as a version. Replicas follow the feed by themselves: no server is paused.

    `send_weights` returns once what changed is captured, unless replicas are too far behind: it waits until all live
    ones have what was sent `max_lag` syncs before. 0 waits for every sync to arrive.
    `require_replicas`: so many must be live and serve a version; with 0 nobody is waited for while there is none.
    The first sync waits for them in any case: without them TRL would wait for samples, and not say for what.
    `timeout_s`: how long replicas, or the store, are waited for before training stops with an error.
    `live_s`: a replica that has been silent for so long counts as gone. Keep `timeout_s` above it: then a replica that
    died is left behind, and training goes on.
    Further options are those of `Publisher`.

    What a publication could not bring to the store is part of the next one. Training stops with the error of one that
    failed if none of the `max_lag` syncs after it has arrived, or if it was the last one.
    """

    def __init__(
        self,
        store: Store | str,
        *,
        max_lag: int = 1,
        require_replicas: int = 1,
        timeout_s: float = 1200.0,
        live_s: float = LIVE_S,
        **options: Any,
    ) -> None:
        if max_lag < 0 or require_replicas < 0:
            raise InvalidInputError(
                f"max_lag={max_lag} and require_replicas={require_replicas} must not be negative",
                hint="max_lag=0 waits until replicas have every version",
            )
        # A wrong option should not wait for the first sync to be found.
        inspect.signature(Publisher).bind(store, **options)
        self._store_or_url = store
        self._options = options
        self._require_replicas = require_replicas
        self._timeout_s = timeout_s
        self._live_s = live_s
        self._feed: _OpenFeed | None = None
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
            # Only TRL's main process has a worker.
            return
        self._labels = _Labels(worker.update_model_version, self._served, wait_for_first=self._require_replicas > 0)
        # On this instance alone: TRL treats its own class of workers specially, so a wrapper would not do.
        worker.update_model_version = self._update_label  # type: ignore[method-assign]

    def count_of(self, version: int) -> int:
        """What TRL calls a version of the feed: its count of syncs; 0 for weights from before the first one.

        Needs `attach`. If one version carries several syncs, it is the last of them.
        """
        for count, publication in reversed(self._counts):
            if publication.version is not None and publication.version <= version:
                return count
        return 0

    def init_weight_transfer(self) -> None:
        """Open the store, and read from it once: a wrong URL or account is found before training begins."""
        self._open().log.head()

    def pause(self) -> None:
        """Nothing: replicas decide themselves when to swap weights."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publish these weights, then wait for replicas that are too far behind."""
        feed = self._open()
        is_first = not self._sent
        self._sent.append(feed.publisher.publish(iterator, step=self._step()))
        if len(self._sent) == self._sent.maxlen or (is_first and self._require_replicas > 0):
            wait_for_replicas(
                feed.log,
                self._oldest_version(),
                replicas=self._require_replicas,
                timeout_s=self._timeout_s,
                live_s=self._live_s,
            )

    def resume(self) -> None:
        """Nothing, as `pause`."""

    def destroy(self) -> None:
        """Finish what is in flight and give back the feed; the error of the last publication if it failed."""
        if self._labels is not None:
            self._labels.stop()
        if self._feed is None:
            return
        feed, self._feed = self._feed, None
        feed.publisher.close()
        if isinstance(self._store_or_url, str):
            feed.log.store.close()
        last = self._sent[-1] if self._sent and not self._is_reported else None
        self._sent.clear()
        self._is_reported = False
        if last is not None:
            try:
                last.wait(self._timeout_s)
            except DeltasyncError as error:
                raise self._stopping(last, error) from None

    def _open(self) -> "_OpenFeed":
        if self._feed is None:
            given = self._store_or_url
            store = open_store(given) if isinstance(given, str) else given
            self._feed = _OpenFeed(Log(store), Publisher(store, **self._options))
        return self._feed

    def _oldest_version(self) -> int:
        """The version with what was sent first of all that is remembered: its own, or a later one that carries it."""
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
        feed = self._feed
        found = None if feed is None else slowest(feed.log, live_s=self._live_s)
        return None if found is None else found.version

    def _update_label(self, model_version: int) -> None:
        """In place of the worker's own: TRL calls it after each sync, and with an old count when it resumes."""
        if self._sent:
            self._counts.append((model_version, self._sent[-1]))
        if self._labels is not None:
            self._labels.sent(model_version, self._sent[-1] if self._sent else None)


class _OpenFeed:
    """A feed that is written to and whose heartbeats are read."""

    def __init__(self, log: Log, publisher: Publisher) -> None:
        self.log = log
        self.publisher = publisher


class _Labels:
    """Tells the rollout worker of a version once replicas serve it, in a thread of its own.

    The thread is needed: a trainer that gets no sample fresh enough makes no further step that could look again.
    While no replica is live, versions are told at once unless `wait_for_first`.
    """

    def __init__(self, tell: Callable[[int], None], served: Callable[[], int | None], *, wait_for_first: bool) -> None:
        self._tell = tell
        self._served = served
        self._wait_for_first = wait_for_first
        self._moved = threading.Condition()
        self._waiting: deque[tuple[int, Publication]] = deque()
        self._is_stopped = False
        self._thread: threading.Thread | None = None

    def sent(self, label: int, publication: Publication | None) -> None:
        """A version of TRL was sent as `publication`; None if it is a count to go on from."""
        with self._moved:
            if publication is None:
                self._tell(label)
                return
            self._waiting.append((label, publication))
            if self._thread is None:
                self._is_stopped = False
                self._thread = threading.Thread(target=self._run, name="deltasync-labels", daemon=True)
                self._thread.start()
            self._moved.notify_all()

    def stop(self) -> None:
        """End the thread."""
        with self._moved:
            self._is_stopped = True
            self._waiting.clear()
            self._moved.notify_all()
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._moved:
                self._moved.wait_for(lambda: self._is_stopped or bool(self._waiting))
                if self._is_stopped:
                    return
            self._look()
            with self._moved:
                self._moved.wait_for(lambda: self._is_stopped or not self._waiting, _LABEL_POLL_S)

    def _look(self) -> None:
        try:
            served = self._served()
        except DeltasyncError as error:
            logger.warning("the heartbeats cannot be read, samples keep their old label: %s", error)
            return
        with self._moved:
            # Not the first alone: a publication that failed has no version, and is part of a later one.
            confirmed = [i for i, (_, sent) in enumerate(self._waiting) if self._is_confirmed(sent.version, served)]
            for _ in range(confirmed[-1] if confirmed else 0):
                self._waiting.popleft()
            if confirmed:
                self._tell(self._waiting.popleft()[0])

    def _is_confirmed(self, version: int | None, served: int | None) -> bool:
        if served is None:
            return not self._wait_for_first
        return version is not None and version <= served
