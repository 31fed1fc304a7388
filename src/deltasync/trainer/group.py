"""The processes of a trainer: how they agree, and how they resume. Subclasses of `Group` connect them."""

import logging
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deltasync import blocks
from deltasync.checkpoint import open_checkpoint
from deltasync.errors import CorruptError, DeltasyncError, InvalidInputError, RankError, StoreError
from deltasync.files import temporary_folder_beside
from deltasync.format.digest import layout_digest
from deltasync.format.manifest import Manifest
from deltasync.format.weights import Bits, Weights
from deltasync.store.protocol import Store
from deltasync.trainer.shards import Shards
from deltasync.upkeep.restore import restore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Failure:
    """An error of one rank, in a form that can be sent to the others."""

    rank: int
    cls: type[DeltasyncError]
    message: str
    details: dict[str, Any]

    @classmethod
    def of(cls, error: BaseException, rank: int) -> "Failure":
        if not isinstance(error, DeltasyncError):
            message = f"{type(error).__name__}: {error!s:.500}"
            return cls(rank, RankError, message, {"hint": "see the log of that rank"})
        details: dict[str, Any] = {"hint": error.hint, "key": error.key}
        if isinstance(error, StoreError):
            return cls(rank, StoreError, error.message, {**details, "transient": error.transient})
        return cls(rank, type(error), error.message, {**details, "rule": error.rule, "version": error.version})

    def error(self) -> DeltasyncError:
        """The same error, naming the rank that it comes from."""
        return self.cls(f"rank {self.rank}: {self.message}", **self.details)


@dataclass(frozen=True, slots=True)
class Message:
    """What one rank contributes to an agreement, or the error that it had instead."""

    about: str
    value: Any
    failure: Failure | None = None


@dataclass(slots=True)
class Decision:
    """What rank 0 decides for all. `parts` is what each rank gave, in their order; None on the other ranks."""

    parts: Sequence[Any] | None = None
    result: Any = None
    """Set in the block by rank 0, and known to all ranks after it."""


class Group:
    """The processes that write the versions of a feed together: this one alone, or those that a subclass connects.

    `timeout_s`: how long rank 0 waits for the slowest. One thread uses it at a time. Once a rank is lost, no further
    agreement is possible.
    """

    def __init__(self, rank: int = 0, size: int = 1, *, timeout_s: float = 0.0) -> None:
        self.rank = rank
        self.size = size
        self._timeout_s = timeout_s
        self._lost: RankError | None = None

    @contextmanager
    def report_errors(self) -> Iterator[None]:
        """Report an error inside the block to the other ranks, which raise it at their next agreement."""
        if self.size == 1:
            yield
            return
        self.require_all()
        try:
            yield
        except BaseException as error:
            failed = self._agreement(Message("", None, Failure.of(error, self.rank)))
            with suppress(DeltasyncError), failed:
                pass
            raise

    @contextmanager
    def decision(self, about: str, mine: object) -> Iterator[Decision]:
        """Let rank 0 decide in the block, by what every rank gave. All ranks have the result after it.

        If the block fails, or a rank reports an error instead, every rank raises that error. `about` must be the same
        on all.
        """
        if self.size == 1:
            yield Decision([mine])
            return
        self.require_all()
        with self._agreement(Message(about, mine)) as decision:
            yield decision

    def fork(self) -> "Group":
        """The same processes with a channel of their own, for another thread. All of them call this."""
        return self

    def share(self, bits: Bits) -> None:
        """Overwrite `bits` on all ranks with those of rank 0. They must have the same size everywhere."""

    def close(self) -> None:
        """Release what connects the ranks. The other ranks need not do so at the same time."""

    def _send(self, rank: int, message: Message) -> None:
        """Send a message to a rank; the error of `lose` if that is lost."""
        raise NotImplementedError

    def _receive(self, rank: int, timeout_s: float) -> Message:
        """The next message of a rank; the error of `lose` if none comes in time."""
        raise NotImplementedError

    @contextmanager
    def _agreement(self, mine: Message) -> Iterator[Decision]:
        if self.rank:
            decision = Decision()
            yield decision
            self._send(0, mine)
            answer = self._receive(0, 2 * self._timeout_s)
            if answer.failure is not None:
                raise answer.failure.error()
            decision.result = answer.value
            return
        messages, lost = [mine], None
        until = time.monotonic() + self._timeout_s
        for rank in range(1, self.size):
            try:
                messages.append(self._receive(rank, max(0.001, until - time.monotonic())))
            except DeltasyncError as error:
                lost = error
                messages.append(Message(mine.about, None, Failure.of(error, 0)))
        try:
            for message in messages:
                if message.failure is not None:
                    raise message.failure.error()
            for rank, message in enumerate(messages):
                if message.about != mine.about:
                    raise InvalidInputError(
                        f"rank 0 publishes {mine.about}, rank {rank} publishes {message.about}",
                        hint="call publish on all ranks, in the same order and with the same step",
                    )
            decision = Decision([message.value for message in messages])
            yield decision
        except BaseException as error:
            failure = next((m.failure for m in messages if m.failure is not None), Failure.of(error, 0))
            self._send_all(Message(mine.about, None, failure))
            if lost is not None:
                raise lost from None
            raise
        self._send_all(Message(mine.about, decision.result))

    def _send_all(self, message: Message) -> None:
        for rank in range(1, self.size):
            try:
                self._send(rank, message)
            except DeltasyncError as error:
                # The decision stands. The next agreement will fail.
                logger.warning("the decision about %s did not reach rank %d: %s", message.about, rank, error)

    def lose(self, who: str, error: BaseException) -> RankError:
        """The error of a lost rank, which every later agreement raises, too."""
        self._lost = lost_contact(who, error) if self._lost is None else self._lost
        return self._lost

    def require_all(self) -> None:
        """Raise the error of a rank that is lost."""
        if self._lost is not None:
            raise self._lost


def lost_contact(who: str, error: BaseException) -> RankError:
    """The error of ranks that cannot reach one of them."""
    return RankError(
        f"lost contact to {who}: {error!s:.300}",
        hint="what was not committed is invisible: restart the trainer, which continues from the feed's head",
    )


SENT_ELEMENTS = 1 << 24
"""Elements that are sent at a time."""


def resume(
    group: Group,
    store: Store,
    head: Manifest,
    weights: Weights,
    shards: Shards,
    *,
    folder: Path | None,
) -> None:
    """Bring the weights of every rank to the head, unless the files under `folder` hold them already."""
    if folder is not None and _is_at(group, head, weights, shards):
        return
    with ExitStack() as stack:
        source: Weights | None = None
        with group.report_errors():
            if group.rank == 0:
                # In mapped files, which are deleted at the end.
                place = Path(tempfile.gettempdir()) if folder is None else folder
                out = stack.enter_context(temporary_folder_beside(place / "deltasync-head")) / "head"
                restore(store, out, version=head.version, files=False)
                source = open_checkpoint(out).weights
        with group.decision("the head", None):
            pass
        # Rank 0 sends the rows of all tensors; every rank keeps its own elements of them.
        for ordinal, box in enumerate(shards.boxes):
            dtype, row = weights.layout.tensors[ordinal].dtype.bits_dtype, math.prod(box.shape[1:])
            step = max(1, SENT_ELEMENTS // max(1, row))
            for first in range(0, box.shape[0] if row else 0, step):
                rows = np.empty(min(step, box.shape[0] - first) * row, dtype)
                if source is not None:
                    rows[:] = source.arrays[ordinal][first * row : first * row + len(rows)]
                group.share(rows)
                if box.elements:
                    box.copy_rows(weights.arrays[ordinal], rows, first)
    if not _is_at(group, head, weights, shards):
        raise CorruptError(
            f"the weights of all ranks together do not have the digest of version {head.version}",
            rule="shadow.digest",
            version=head.version,
            hint="the memory or network of these machines may be faulty: start again",
        )


def _is_at(group: Group, head: Manifest, weights: Weights, shards: Shards) -> bool:
    """Whether the weights of all ranks together have the digest of a version."""
    with group.report_errors():
        mine = blocks.digest(weights) - layout_digest(weights.layout)
    with group.decision("the head", mine) as decision:
        if decision.parts is not None:
            decision.result = sum(decision.parts, layout_digest(shards.layout)) == head.digest
    return bool(decision.result)
