"""The ranks of a sharded trainer: which elements each rank publishes, and how the ranks agree."""

import logging
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from deltasync.errors import DeltasyncError, InvalidInputError, RankError, StoreError
from deltasync.format.weights import Bits
from deltasync.trainer.shards import Box, Spans, chunk, joined


def owned(name: str, tensor: torch.Tensor, rank: int) -> tuple[Box, torch.Tensor]:
    """What this rank publishes of a tensor: its box in the tensor, and the elements, in the local shape of the box.

    Of a DTensor it is the shard of this rank. Where several ranks have the same elements, the first of them along the
    mesh publishes them; where several meshes have a copy of the tensor each, the mesh of rank 0 does. Any other tensor
    is the same on all ranks, and rank 0 publishes it.
    """
    if isinstance(tensor, DTensor):
        box, local = _box(name, tensor), tensor.to_local()
    else:
        box, local = (Box.whole if rank == 0 else Box.empty)(tensor.shape), tensor
    if not box.elements:
        return box, local.new_empty(0)
    if local.numel() != box.elements:
        raise InvalidInputError(
            f"rank {rank} has {list(local.shape)} of tensor {name!r:.200} where {list(box.local_shape)} belongs",
            hint="make the DTensor from the shape and placements that its shards have",
        )
    return box, local.reshape(box.local_shape)


def _box(name: str, tensor: DTensor) -> Box:
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    box = Box.whole(tensor.shape)
    if coordinate is None or not bool((mesh.mesh == 0).any()):
        return Box.empty(tensor.shape)
    spans = list(box.spans)
    for number, parts, placement in zip(coordinate, mesh.shape, tensor.placements, strict=True):
        if placement.is_replicate():
            if number:
                return Box.empty(tensor.shape)
        elif isinstance(placement, _StridedShard | Shard):
            spans[placement.dim] = _part(spans[placement.dim], number, parts, placement)
        else:
            raise InvalidInputError(
                f"tensor {name!r:.200} is placed as {placement}, which cannot be published",
                hint="redistribute it to Shard or Replicate first",
            )
    return Box(box.shape, tuple(spans))


def _part(spans: Spans, number: int, parts: int, placement: Placement) -> Spans:
    if not isinstance(placement, _StridedShard):
        return chunk(spans, number, parts)
    # Sharded from right to left: another mesh dimension cut it first, and this one cut each of the results again.
    factor = int(placement.split_factor)
    return joined(chunk(chunk(spans, first, factor), number, parts) for first in range(factor))


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
class _Message:
    """What one rank contributes to an agreement, or the error that it had instead."""

    about: str
    value: Any
    failure: Failure | None = None


class Ranks:
    """All ranks of the trainer, in a process group of their own that does not interfere with those of the training.

    One thread uses it at a time. Once a rank is lost, no further agreement is possible.
    """

    def __init__(self, group: dist.ProcessGroup, *, timeout_s: float) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._group = group
        self._timeout_s = timeout_s
        self._lost: RankError | None = None

    @classmethod
    def open(cls, *, timeout_s: float) -> "Ranks":
        """Called by all ranks. `timeout_s` is how long rank 0 waits for the slowest of the others."""
        if not dist.is_available() or not dist.is_initialized():
            raise InvalidInputError(
                "torch.distributed is not initialized",
                hint="call init_process_group first, or use Publisher where there is one process",
            )
        try:
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=2 * timeout_s))
        except RuntimeError as error:
            raise _lost_contact("another rank", error) from error
        return cls(group, timeout_s=timeout_s)

    @contextmanager
    def report_errors(self) -> Iterator[None]:
        """Report an error inside the block to the other ranks, which raise it at their next agreement."""
        self._require_all()
        try:
            yield
        except BaseException as error:
            message = _Message("", None, Failure.of(error, self.rank))
            with suppress(DeltasyncError):
                _ = self._lead(message, lambda _: None) if self.rank == 0 else self._follow(message)
            raise

    def agree(self, about: str, mine: _T, decide: Callable[[Sequence[_T]], _R]) -> _R:
        """Call `decide` on rank 0, with what every rank gave, in their order; returns its result on all ranks.

        If it fails, or a rank reports an error instead, every rank raises that error. `about` must be the same on all.
        """
        self._require_all()
        message = _Message(about, mine)
        if self.rank == 0:
            return self._lead(message, decide)
        answer = self._follow(message)
        if answer.failure is not None:
            raise answer.failure.error()
        result: _R = answer.value
        return result

    def share(self, bits: Bits) -> None:
        """Overwrite `bits` on all ranks with those of rank 0. They must have the same size everywhere."""
        self._require_all()
        try:
            dist.broadcast(torch.from_numpy(bits.view("u1")), group_src=0, group=self._group)
        except RuntimeError as error:
            raise self._lose("another rank", error) from error

    def close(self) -> None:
        """Release the process group. The other ranks need not do so at the same time."""
        if dist.is_initialized():
            dist.destroy_process_group(self._group)

    def _lead(self, mine: _Message, decide: Callable[[Sequence[_T]], _R]) -> _R:
        """On rank 0: collect the messages, decide, and send the result to all."""
        messages, lost = [mine], None
        until = time.monotonic() + self._timeout_s
        for rank in range(1, self.size):
            try:
                messages.append(self._receive(rank, max(0.001, until - time.monotonic())))
            except DeltasyncError as error:
                lost = error
                messages.append(_Message(mine.about, None, Failure.of(error, 0)))
        try:
            _require_agreement(messages)
            result = decide([message.value for message in messages])
        except BaseException as error:
            failure = next((m.failure for m in messages if m.failure is not None), Failure.of(error, 0))
            self._send_all(_Message(mine.about, None, failure))
            if lost is not None:
                raise lost from None
            raise
        self._send_all(_Message(mine.about, result))
        return result

    def _follow(self, mine: _Message) -> _Message:
        """On the other ranks: send the message to rank 0, and receive its answer."""
        self._send(0, mine)
        return self._receive(0, 2 * self._timeout_s)

    def _send_all(self, message: _Message) -> None:
        for rank in range(1, self.size):
            try:
                self._send(rank, message)
            except DeltasyncError as error:
                # The decision stands. The next agreement will fail.
                logger.warning("the decision about %s did not reach rank %d: %s", message.about, rank, error)

    def _send(self, rank: int, message: _Message) -> None:
        data = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
        try:
            dist.send(torch.tensor([data.numel()]), group=self._group, group_dst=rank)
            dist.send(data, group=self._group, group_dst=rank)
        except RuntimeError as error:
            raise self._lose(f"rank {rank}", error) from error

    def _receive(self, rank: int, timeout_s: float) -> _Message:
        size = torch.zeros(1, dtype=torch.int64)
        try:
            self._fill(size, rank, timeout_s)
            data = torch.zeros(int(size), dtype=torch.uint8)
            self._fill(data, rank, timeout_s)
        except RuntimeError as error:
            raise self._lose(f"rank {rank}", error) from error
        message: _Message = pickle.loads(data.numpy().tobytes())
        return message

    def _fill(self, tensor: torch.Tensor, rank: int, timeout_s: float) -> None:
        work = dist.irecv(tensor, group=self._group, group_src=rank)
        if work is None:
            raise RuntimeError("this rank is not in the group")
        work.wait(timedelta(seconds=timeout_s))

    def _lose(self, who: str, error: BaseException) -> RankError:
        self._lost = _lost_contact(who, error) if self._lost is None else self._lost
        return self._lost

    def _require_all(self) -> None:
        if self._lost is not None:
            raise self._lost


def _require_agreement(messages: Sequence[_Message]) -> None:
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


def _lost_contact(who: str, error: BaseException) -> RankError:
    return RankError(
        f"lost contact to {who}: {error!s:.300}",
        hint="what was not committed is invisible: restart the trainer, which continues from the feed's head",
    )
