"""A sharded trainer: several processes with a shard of the weights each, which commit versions together.

Only the connection between the ranks is another one than that of `ShardedPublisher`.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from deltasync.errors import StoreError
from deltasync.format.layout import Layout
from deltasync.format.weights import Bits, Weights, zeros
from deltasync.trainer.capture import WeightsSource
from deltasync.trainer.group import Group, Message
from deltasync.trainer.publisher import FeedPublisher, PublisherOptions
from deltasync.trainer.schedule import AnchorPolicy
from deltasync.trainer.shards import Box, Shards, chunk

from .actors import LAYOUT, Actor, Model
from .scheduler import Death
from .store import ProcessStore, SimProcess
from .virtual import Condition

if TYPE_CHECKING:
    from .world import World

TIMEOUT_S = 600.0


class Post:
    """The messages between the ranks of one group."""

    def __init__(self) -> None:
        self.arrived = Condition()
        self.boxes: dict[tuple[int, int], deque[Message | Bits]] = {}

    def box(self, sender: int, receiver: int) -> "deque[Message | Bits]":
        return self.boxes.setdefault((sender, receiver), deque())


class SimRanks(Group):
    """Ranks that exchange messages in virtual time."""

    def __init__(self, post: Post, rank: int, size: int, *, anchors: Post | None = None) -> None:
        super().__init__(rank, size, timeout_s=TIMEOUT_S)
        self._post = post
        self._anchors = anchors

    def share(self, bits: Bits) -> None:
        self.require_all()
        if self.rank == 0:
            for rank in range(1, self.size):
                self._put(rank, bits.copy())
        else:
            shared = self._take(0, 2 * TIMEOUT_S)
            assert not isinstance(shared, Message)
            bits[:] = shared

    def fork(self) -> Group:
        assert self._anchors is not None
        return SimRanks(self._anchors, self.rank, self.size)

    def close(self) -> None:
        """There is nothing to release."""

    def _send(self, rank: int, message: Message) -> None:
        self._put(rank, message)

    def _receive(self, rank: int, timeout_s: float) -> Message:
        message = self._take(rank, timeout_s)
        assert isinstance(message, Message)
        return message

    def _put(self, rank: int, item: Message | Bits) -> None:
        with self._post.arrived:
            self._post.box(self.rank, rank).append(item)
            self._post.arrived.notify_all()

    def _take(self, rank: int, timeout_s: float) -> Message | Bits:
        box = self._post.box(rank, self.rank)
        with self._post.arrived:
            if not self._post.arrived.wait_for(lambda: bool(box), timeout_s):
                raise self.lose(f"rank {rank}", TimeoutError(f"nothing came in {timeout_s} s"))
            return box.popleft()


@dataclass(frozen=True, slots=True)
class _Step:
    weights: Weights
    number: int
    is_last: bool
    pause_s: float
    """How long the trainer computes until the next step. No rank is slower than the others."""


class _Shard(WeightsSource):
    """The elements of one rank."""

    def __init__(self, weights: Weights, shards: Shards) -> None:
        super().__init__(_local(weights, shards))
        self._shards = shards

    @property
    def layout(self) -> Layout | None:
        return LAYOUT

    def shards(self, layout: Layout) -> Shards:
        return self._shards


class _Job:
    """One life of the trainer: its processes, and the weights that they publish."""

    def __init__(self) -> None:
        self.versions, self.anchors = Post(), Post()
        self.steps: list[_Step] = []
        self.processes: list[SimProcess] = []
        self.ended = 0
        self.has_failed = False


class ShardedTrainer(Actor):
    """Publishes from several processes. When one of them is lost, all are started again."""

    role = "rank"

    def __init__(self, world: "World", name: str) -> None:
        super().__init__(world, name)
        self._model = Model(f"{world.choices.seed}/{name} model")
        self._ranks = world.config.ranks
        self._folder = world.folder / f"{name}.shadows" if world.config.shadow_file else None
        self._job = _Job()

    def start(self) -> None:
        self.lives += 1
        self._job = job = _Job()
        job.processes += [self.new_process(f"{self.name}.{self.lives}r{rank}") for rank in range(self._ranks)]
        for rank, process in enumerate(job.processes):
            process.peers = job.processes
            self.world.scheduler.spawn(process, partial(self._run, job, rank, process))

    def died(self, process: SimProcess) -> None:
        for rank in range(self._ranks):
            self.world.tear(self._shadow_file(rank), self)
        process.meet("lost")
        self._fail(self._job)

    def _fail(self, job: _Job) -> None:
        """End all ranks: at once, or after they had the time to miss the one that is lost."""
        if job.has_failed:
            return
        job.has_failed = True
        is_slow = self.chance.happens(0.3, f"the ranks of {self.name} are left alone")
        self.world.later(partial(self._begin_again, job), 4 * TIMEOUT_S if is_slow else 1.0)

    def _begin_again(self, job: _Job) -> None:
        for process in job.processes:
            self.world.scheduler.kill(process)
        self.restart()

    def _run(self, job: _Job, rank: int, process: SimProcess) -> None:
        try:
            self._publish(job, rank, process, ProcessStore(self.world, process))
        except Exception as error:  # noqa: BLE001 - the referee decides
            self.world.referee.judge(process, error)
            process.meet("lost")
            self._fail(job)
        if process.is_dead:
            raise Death
        self.world.scheduler.kill(process)
        job.ended += 1
        self.is_done = job.ended == self._ranks and not job.has_failed

    def _publish(self, job: _Job, rank: int, process: SimProcess, store: ProcessStore) -> None:
        config = self.world.config
        options = PublisherOptions(
            anchors=AnchorPolicy(bytes_ratio=None, versions=config.anchor_versions),
            shadow_path=self._folder,
            retry_s=config.retry_s,
        )
        shards = Shards(LAYOUT, [_box(spec.shape, rank, self._ranks) for spec in LAYOUT.tensors])
        group = SimRanks(job.versions, rank, self._ranks, anchors=job.anchors)
        publisher = FeedPublisher(store, options, group)
        number, is_last = 0, False
        while not is_last:
            step = self._step(job, number)
            try:
                publication = publisher.publish(_Shard(step.weights, shards), step=step.number)
                if step.is_last:
                    publication.wait()
                    is_last = True
                    process.succeed()
            except StoreError as error:
                self.world.referee.judge(process, error)
            number += 1
            self.world.scheduler.sleep(step.pause_s)
        publisher.close()

    def _step(self, job: _Job, number: int) -> _Step:
        """The same weights for all ranks, whichever comes first."""
        if number == len(job.steps):
            weights = self._model.step()
            pause_s = (20 if self.world.is_calm else self.world.config.gap_s) * self.chance.uniform() ** 3
            job.steps.append(_Step(weights, self.world.referee.note_step(weights), self.world.is_calm, pause_s))
        return job.steps[number]

    def _shadow_file(self, rank: int) -> Path | None:
        name = f"shadow-{rank:05d}-of-{self._ranks:05d}.safetensors"
        return None if self._folder is None else self._folder / name


def _box(shape: Sequence[int], rank: int, ranks: int) -> Box:
    """A share of the rows of a matrix; anything else is of rank 0."""
    if len(shape) < 2:
        return (Box.whole if rank == 0 else Box.empty)(shape)
    whole = Box.whole(shape)
    return Box(whole.shape, (chunk(whole.spans[0], rank, ranks), *whole.spans[1:]))


def _local(weights: Weights, shards: Shards) -> Weights:
    """The elements of one rank."""
    local = zeros(shards.local)
    for box, mine, all_rows in zip(shards.boxes, local.arrays, weights.arrays, strict=True):
        if box.elements:
            box.copy_rows(mine, all_rows, 0)
    return local
