"""The processes of the simulation. Each actor lives, may die at any operation, and is started again until it is done.

A further kind of process is a subclass of `Actor` that `World` starts.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deltasync import blocks
from deltasync.blocks import overwrite
from deltasync.errors import DeltasyncError, MismatchError, StoreError
from deltasync.feed.log import Log
from deltasync.format.layout import Layout
from deltasync.format.weights import Weights
from deltasync.replica.follower import Follower
from deltasync.replica.target import Damage, Staged, Target
from deltasync.state import load
from deltasync.trainer.capture import StreamSource, WeightsSource
from deltasync.trainer.publisher import FeedPublisher, PublisherOptions
from deltasync.trainer.schedule import AnchorPolicy
from deltasync.upkeep import compact
from deltasync.upkeep.prune import Retention, plan_prune, prune
from deltasync.upkeep.verify import verify

from .referee import TargetError, same_bits
from .scheduler import ROUTINE, Death
from .store import ProcessStore, SimProcess

if TYPE_CHECKING:
    from .world import World

LAYOUT = Weights.of(
    {"a": np.zeros((6, 5), np.float16), "b": np.zeros(7, np.float32), "c": np.zeros((4, 3), np.uint8)}
).layout
MINUTE_S = 60.0


class Actor:
    """A process that is started again whenever it ends before it is done."""

    role = ""

    def __init__(self, world: "World", name: str) -> None:
        self.world = world
        self.name = name
        self.lives = 0
        self.is_done = False
        self.process: SimProcess | None = None
        self.chance = world.choices.stream(f"{name} acts")

    def start(self) -> None:
        """Begin a life."""
        self.lives += 1
        self.process = process = self.new_process(f"{self.name}.{self.lives}")
        self.world.scheduler.spawn(process, lambda: self._live(process))

    def new_process(self, name: str) -> SimProcess:
        """A process of this actor."""
        offset_s = self.world.config.clock_offsets_s.get(self.name, 0.0)
        process = SimProcess(name, self.role, self.world.choices.stream(name), clock_offset_s=offset_s)
        process.deletions_seen = self.world.referee.deletions
        self.world.actors_by_process[process] = self
        return process

    def life(self, process: SimProcess, store: ProcessStore) -> None:
        """What the process does. An error that the referee allows ends this life, and the next one begins."""
        raise NotImplementedError

    def look(self, process: SimProcess) -> None:
        """Check what this process has. Called after each of its operations."""

    def died(self, process: SimProcess) -> None:
        """The process was killed: begin again, after a while."""
        self.restart()

    def restart(self) -> None:
        long = self.chance.pick([("hours later", 0.1), ("days later", 0.05)], f"{self.name} is started again")
        delay_s = 5.0 if long is None else {"h": 5, "d": 72}[long[0][0]] * 3600 * long[1]
        self.world.later(self.start, delay_s)

    def succeeded(self, process: SimProcess) -> None:
        """Something worked: the faults before it explain no later error."""
        process.succeed()
        process.deletions_seen = self.world.referee.deletions

    def _live(self, process: SimProcess) -> None:
        try:
            self.life(process, ProcessStore(self.world, process))
        except Exception as error:  # noqa: BLE001 - the referee decides
            self.world.referee.judge(process, error)
        if process.is_dead:
            raise Death
        # The process exits, and with it the threads that it has left.
        self.world.scheduler.kill(process)
        if not self.is_done:
            self.restart()

    def pause(self, most_s: float, *, idleness: int = 0) -> None:
        """Let some time pass, mostly little."""
        self.world.scheduler.park(most_s * self.chance.uniform() ** 3, idleness=idleness)


class Model:
    """Weights that a trainer changes step by step."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)
        self._arrays = [self._noise(spec.elements, spec.dtype.bits_dtype) for spec in LAYOUT.tensors]
        self._past = [[array.copy() for array in self._arrays]]

    def step(self) -> Weights:
        """The next weights: mostly a few elements change; sometimes none, all, or back to what they were."""
        how = self._random.random()
        if how < 0.08:
            self._arrays = [self._noise(array.size, array.dtype) for array in self._arrays]
        elif how < 0.2:
            self._arrays = [array.copy() for array in self._random.choice(self._past)]
        elif how < 0.92:
            self._arrays = [array.copy() for array in self._arrays]
            for _ in range(self._random.randint(1, 6)):
                array = self._random.choice(self._arrays)
                array[self._random.randrange(array.size)] ^= array.dtype.type(1 << self._random.randrange(8))
        self._past = [*self._past[-5:], self._arrays]
        return Weights(LAYOUT, tuple(self._arrays))

    def _noise(self, size: int, dtype: np.dtype) -> np.ndarray:
        return np.frombuffer(self._random.randbytes(size * dtype.itemsize), dtype).copy()


class Trainer(Actor):
    """Publishes from one process. `is_rival`: it is a second writer, which ends when the faults do."""

    def __init__(self, world: "World", name: str, *, role: str = "trainer") -> None:
        super().__init__(world, name)
        self.role = role
        self._model = Model(f"{world.choices.seed}/{name} model")
        self.shadow_path = world.folder / f"{name}.shadow" if world.config.shadow_file else None

    def life(self, process: SimProcess, store: ProcessStore) -> None:
        world, config = self.world, self.world.config
        options = PublisherOptions(
            anchors=AnchorPolicy(bytes_ratio=None, versions=config.anchor_versions),
            wait=config.wait,
            shadow_path=self.shadow_path,
            files={"config.json": b"{}"} if config.files else {},
            retry_s=config.retry_s,
            skips=(2, 4) if config.writes_skips else (),
        )
        publisher = FeedPublisher(store, options)
        publications = 0
        while not self.is_done:
            is_last = world.is_calm
            if is_last and self.role == "rival":
                self.is_done = True
                break
            weights = self._model.step()
            step = world.referee.note_step(weights)
            try:
                if self.chance.happens(0.1, f"{process.name} publishes tensor by tensor"):
                    publication = publisher.publish(
                        StreamSource(zip(LAYOUT.tensors, weights.arrays, strict=True)), step=step
                    )
                else:
                    is_anchor = self.chance.happens(0.1, f"{process.name} asks for an anchor")
                    publication = publisher.publish(WeightsSource(weights), step=step, anchor=is_anchor)
                if is_last or self.chance.happens(0.5, f"{process.name} waits for its publication"):
                    publication.wait()
                    self.succeeded(process)
                    self.is_done = is_last
            except StoreError as error:
                world.referee.judge(process, error)
            publications += 1
            if publications >= 2 and self.chance.happens(0.07, f"{process.name} closes and opens the feed again"):
                publisher.close()
                publisher, publications = FeedPublisher(store, options), 0
            self.pause(20 if is_last else config.gap_s)
        publisher.close()

    def died(self, process: SimProcess) -> None:
        self.world.tear(self.shadow_path, self)
        super().died(process)


class MemoryTarget(Target):
    """A target in memory that fails, takes its time, and loses bits by chance."""

    engine = "simulated"

    def __init__(self, actor: "Replica") -> None:
        self._actor = actor
        self.reads_state = actor.world.config.reads_mirror
        self.weights = Weights(LAYOUT, tuple(np.zeros(t.elements, t.dtype.bits_dtype) for t in LAYOUT.tensors))
        self._chance = actor.world.choices.stream(f"{actor.name} target")

    def require(self, layout: Layout) -> None:
        if layout != LAYOUT:
            raise MismatchError("the feed is of another model")

    def stage(self, staged: Staged) -> bool | None:
        self._maybe("stage")
        if staged.changes is not None and staged.start != self.version:
            self._actor.world.fail("target.start", f"changes from {staged.start} for a target at {self.version}")
        return None

    def commit(self, staged: Staged) -> float:
        self.version = None
        if staged.changes is None:
            for ordinal, (mine, new) in enumerate(zip(self.weights.arrays, staged.weights.arrays, strict=True)):
                mine[:] = new
                if ordinal == 0:
                    self._maybe("commit")
        else:
            for number, changes in enumerate(staged.changes):
                overwrite(self.weights, changes)
                if number == 0:
                    self._maybe("commit")
        self.version = staged.version
        return 0.0

    def scrub(self, weights: Weights, tensors: Sequence[int], *, repair: bool) -> list[Damage]:
        damages = []
        for ordinal in tensors:
            mine, right = self.weights.arrays[ordinal], weights.arrays[ordinal]
            differing = int((mine != right).sum())
            if differing:
                damages.append(Damage(LAYOUT.tensors[ordinal].name, differing))
                if repair:
                    mine[:] = right
        return damages

    def _maybe(self, where: str) -> None:
        rate = self._actor.world.config.target_faults
        picked = self._chance.pick([("fails", rate), ("takes long", rate)], f"target of {self._actor.name}, {where}")
        if picked is not None and picked[0] == "takes long":
            self._actor.world.scheduler.sleep(600 * picked[1])
        elif picked is not None:
            process = self._actor.process
            assert process is not None
            process.meet("target")
            self._actor.world.count("target fails")
            raise TargetError(where)


class _JudgedFollower(Follower):
    """A follower that reports each error of its loop to the referee, also those that it retries."""

    def __init__(self, judge: Callable[[Exception], None], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._judge = judge

    def _step(self) -> bool:
        try:
            return super()._step()
        except Exception as error:
            self._judge(error)
            raise


class Replica(Actor):
    """Follows the feed with a mirror and a target."""

    role = "follower"

    def __init__(self, world: "World", name: str) -> None:
        super().__init__(world, name)
        self.mirror_path: Path | None = world.folder / f"{name}.mirror" if world.config.mirror_file else None
        self.target = MemoryTarget(self)
        self.follower: Follower | None = None
        self.is_rotten = False

    def life(self, process: SimProcess, store: ProcessStore) -> None:
        config = self.world.config
        if not config.target_survives:
            self.target = MemoryTarget(self)
        follower = _JudgedFollower(
            lambda error: self.world.referee.judge(process, error),
            store,
            self.target,
            mirror=self.mirror_path,
            replica=self.name,
            scrub_s=config.scrub_s,
            observer=lambda advance: self.succeeded(process),
        )
        self.follower = follower
        if config.controls:
            self.world.scheduler.spawn(process, lambda: self._control(process, follower))
        try:
            follower.follow()
        finally:
            self.follower = None
        follower.close()
        self.is_done = True

    def look(self, process: SimProcess) -> None:
        follower, world = self.follower, self.world
        if follower is None or process is not self.process:
            return
        mirror, target = follower._mirror, self.target
        if self.is_rotten:
            is_right = self._is_right(mirror.version, mirror.weights)
            self.is_rotten = not (is_right and self._is_right(target.version, target.weights))
            return
        if mirror.version is not None and mirror.weights is not None:
            world.referee.require_version(f"the mirror of {self.name}", mirror.version, mirror.weights, mirror.digest)
        if target.version is not None:
            world.referee.require_version(f"the target of {self.name}", target.version, target.weights)
        self._maybe_rot(process)

    @property
    def is_settled(self) -> bool:
        """Whether it has the newest version, in mirror and target."""
        head, follower = self.world.referee.head, self.follower
        if follower is None or self.is_rotten or follower.error is not None:
            return False
        return head == self.target.version == follower._mirror.version

    def died(self, process: SimProcess) -> None:
        self.follower = None
        self.world.tear(self.mirror_path, self)
        super().died(process)

    def _is_right(self, version: int | None, weights: Weights | None) -> bool:
        return version is None or weights is None or same_bits(weights, self.world.referee.versions[version].weights)

    def _maybe_rot(self, process: SimProcess) -> None:
        """A bit of the target or of the mirror flips in memory. A scrub has to find it."""
        rate, mirror = self.world.config.rot, None if self.follower is None else self.follower._mirror.weights
        if not rate or mirror is None:
            return
        picked = self.chance.pick([("target", rate), ("mirror", rate)], f"a bit flips in the memory of {self.name}")
        if picked is not None:
            weights = self.target.weights if picked[0] == "target" else mirror
            weights.arrays[0][int(picked[1] * weights.arrays[0].size)] ^= np.uint16(1)
            self.is_rotten = True
            process.meet("rot")
            self.world.count("rot")

    def _control(self, process: SimProcess, follower: Follower) -> None:
        """An operator pins versions, pauses and scrubs."""
        while not self.world.is_calm:
            self.pause(20 * MINUTE_S, idleness=ROUTINE)
            options = [("pin", 0.2), ("unpin", 0.2), ("pause", 0.1), ("resume", 0.2), ("scrub", 0.1)]
            picked = self.chance.pick(options, f"operator of {self.name}")
            head = self.world.referee.head
            try:
                if picked is None or head is None:
                    continue
                if picked[0] == "pin":
                    follower.pin(max(0, head - int(3 * picked[1])))
                elif picked[0] == "unpin":
                    follower.pin(None)
                elif picked[0] == "pause":
                    follower.pause()
                elif picked[0] == "resume":
                    follower.resume()
                elif follower._mirror.version is not None:
                    follower.scrub()
            except DeltasyncError as error:
                if self.follower is follower:
                    self.world.referee.judge(process, error)
        follower.pin(None)
        follower.resume()


class Pruner(Actor):
    """Prunes repeatedly."""

    role = "pruner"

    def life(self, process: SimProcess, store: ProcessStore) -> None:
        world, config = self.world, self.world.config
        while not self.is_done:
            self.pause(10 * MINUTE_S if world.is_calm else config.prune_gap_s, idleness=ROUTINE)
            is_last = world.is_calm and world.are_writers_done
            self.succeeded(process)
            world.referee.begin_pruning(process)
            try:
                planned = plan_prune(store, Retention(anchors=config.keep_anchors, versions=config.keep_versions))
                prune(store, planned)
                world.count("prunes")
                self.is_done = is_last
            except DeltasyncError as error:
                world.referee.judge(process, error)


class Compactor(Actor):
    """Writes skips repeatedly."""

    role = "compactor"

    def life(self, process: SimProcess, store: ProcessStore) -> None:
        world, compactor = self.world, compact.Compactor(store, levels=(2, 4))
        while not self.is_done:
            self.pause(10 * MINUTE_S if world.is_calm else world.config.gap_s * 3, idleness=ROUTINE)
            is_last = world.is_calm and world.are_writers_done
            self.succeeded(process)
            try:
                for _ in compactor.advance():
                    world.count("skips")
                self.is_done = is_last
            except DeltasyncError as error:
                world.referee.judge(process, error)


class Reader(Actor):
    """Restores versions from the store alone, and verifies the feed."""

    role = "reader"

    def life(self, process: SimProcess, store: ProcessStore) -> None:
        world, log = self.world, Log(store)
        while not self.is_done:
            self.pause(10 * MINUTE_S if world.is_calm else world.config.gap_s * 6, idleness=ROUTINE)
            is_last = world.is_calm and world.are_writers_done
            self.succeeded(process)
            try:
                if self.chance.happens(0.3, f"{process.name} verifies"):
                    self._verify(process, store)
                else:
                    self._restore(process, log)
                self.is_done = is_last
            except DeltasyncError as error:
                world.referee.judge(process, error)

    def _restore(self, process: SimProcess, log: Log) -> None:
        head, referee = log.require_head(), self.world.referee
        version = max(0, head.version - int(self.chance.uniform() * 3))
        if version < referee.floor:
            version = head.version
        weights = load(log, log.read(version))
        referee.require_version(process.name, version, weights, blocks.digest(weights))
        referee.restores += 1

    def _verify(self, process: SimProcess, store: ProcessStore) -> None:
        found = verify(store, deep=self.chance.uniform() < 0.5)
        if found.damages and "flip" not in process.met:
            self.world.referee.judge_damage(process, found.damages)
