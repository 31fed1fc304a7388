"""The ranks of a sharded trainer: how they agree, and how they resume. Subclasses of `Ranks` connect them."""

import logging
import math
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

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
_T = TypeVar("_T")
_R = TypeVar("_R")


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


class Ranks(ABC):
    """All ranks of the trainer. `timeout_s` is how long rank 0 waits for the slowest of the others.

    One thread uses it at a time. Once a rank is lost, no further agreement is possible. Subclasses connect the ranks.
    """

    def __init__(self, rank: int, size: int, *, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self._timeout_s = timeout_s
        self._lost: RankError | None = None

    @contextmanager
    def report_errors(self) -> Iterator[None]:
        """Report an error inside the block to the other ranks, which raise it at their next agreement."""
        self.require_all()
        try:
            yield
        except BaseException as error:
            message = Message("", None, Failure.of(error, self.rank))
            with suppress(DeltasyncError):
                _ = self._lead(message, lambda _: None) if self.rank == 0 else self._follow(message)
            raise

    def agree(self, about: str, mine: _T, decide: Callable[[Sequence[_T]], _R]) -> _R:
        """Call `decide` on rank 0, with what every rank gave, in their order; returns its result on all ranks.

        If it fails, or a rank reports an error instead, every rank raises that error. `about` must be the same on all.
        """
        self.require_all()
        message = Message(about, mine)
        if self.rank == 0:
            return self._lead(message, decide)
        answer = self._follow(message)
        if answer.failure is not None:
            raise answer.failure.error()
        result: _R = answer.value
        return result

    @abstractmethod
    def share(self, bits: Bits) -> None:
        """Overwrite `bits` on all ranks with those of rank 0. They must have the same size everywhere."""

    @abstractmethod
    def close(self) -> None:
        """Release what connects the ranks. The other ranks need not do so at the same time."""

    @abstractmethod
    def _send(self, rank: int, message: Message) -> None:
        """Send a message to a rank; the error of `lose` if that is lost."""

    @abstractmethod
    def _receive(self, rank: int, timeout_s: float) -> Message:
        """The next message of a rank; the error of `lose` if none comes in time."""

    def _lead(self, mine: Message, decide: Callable[[Sequence[_T]], _R]) -> _R:
        """On rank 0: collect the messages, decide, and send the result to all."""
        messages, lost = [mine], None
        until = time.monotonic() + self._timeout_s
        for rank in range(1, self.size):
            try:
                messages.append(self._receive(rank, max(0.001, until - time.monotonic())))
            except DeltasyncError as error:
                lost = error
                messages.append(Message(mine.about, None, Failure.of(error, 0)))
        try:
            _require_agreement(messages)
            result = decide([message.value for message in messages])
        except BaseException as error:
            failure = next((m.failure for m in messages if m.failure is not None), Failure.of(error, 0))
            self._send_all(Message(mine.about, None, failure))
            if lost is not None:
                raise lost from None
            raise
        self._send_all(Message(mine.about, result))
        return result

    def _follow(self, mine: Message) -> Message:
        """On the other ranks: send the message to rank 0, and receive its answer."""
        self._send(0, mine)
        return self._receive(0, 2 * self._timeout_s)

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


def _require_agreement(messages: Sequence[Message]) -> None:
    """Raise the first failure; InvalidInputError if the messages are about different things."""
    for message in messages:
        if message.failure is not None:
            raise message.failure.error()
    for rank, message in enumerate(messages):
        if message.about != messages[0].about:
            raise InvalidInputError(
                f"rank 0 publishes {messages[0].about}, rank {rank} publishes {message.about}",
                hint="call publish on all ranks, in the same order and with the same step",
            )


def lost_contact(who: str, error: BaseException) -> RankError:
    """The error of ranks that cannot reach one of them."""
    return RankError(
        f"lost contact to {who}: {error!s:.300}",
        hint="what was not committed is invisible: restart the trainer, which continues from the feed's head",
    )


SENT_ELEMENTS = 1 << 24
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
    """Bring the weights of every rank to the head, unless the files under `folder` hold them already."""

    def is_at_head() -> bool:
        with ranks.report_errors():
            mine = blocks.digest(weights) - layout_digest(weights.layout)
        return ranks.agree("the head", mine, lambda deltas: sum(deltas, layout_digest(shards.layout)) == head.digest)

    if folder is not None and is_at_head():
        return
    with ExitStack() as stack:
        with ranks.report_errors():
            source = stack.enter_context(_restored(store, head, folder)) if ranks.rank == 0 else None
        ranks.agree("the head", None, lambda _: None)
        _hand_out(ranks, source, weights, shards)
    if not is_at_head():
        raise CorruptError(
            f"the weights of all ranks together do not have the digest of version {head.version}",
            rule="shadow.digest",
            version=head.version,
            hint="the memory or network of these machines may be faulty: start again",
        )


@contextmanager
def _restored(store: Store, head: Manifest, folder: Path | None) -> Iterator[Weights]:
    """All weights of a version, in mapped files that are deleted at the end of the block."""
    place = Path(tempfile.gettempdir()) if folder is None else folder
    with temporary_folder_beside(place / "deltasync-head") as temporary:
        out = temporary / "head"
        restore(store, out, version=head.version, files=False)
        yield open_checkpoint(out).weights


def _hand_out(ranks: Ranks, source: Weights | None, weights: Weights, shards: Shards) -> None:
    """Send the rows of all tensors from rank 0, which has the source; every rank keeps its own elements of them."""
    for ordinal, box in enumerate(shards.boxes):
        dtype, row = weights.layout.tensors[ordinal].dtype.bits_dtype, math.prod(box.shape[1:])
        step = max(1, SENT_ELEMENTS // max(1, row))
        for first in range(0, box.shape[0] if row else 0, step):
            rows = np.empty(min(step, box.shape[0] - first) * row, dtype)
            if source is not None:
                rows[:] = source.arrays[ordinal][first * row : first * row + len(rows)]
            ranks.share(rows)
            if box.elements:
                box.copy_rows(weights.arrays[ordinal], rows, first)
