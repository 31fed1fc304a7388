"""One run of the simulation: what takes part, when faults end, and when all is settled."""

import hashlib
import tempfile
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from traceback import format_exception
from typing import NoReturn
from unittest import mock

from deltasync.store.memory import MemoryStore

from .actors import Actor, Compactor, Pruner, Reader, Replica, Trainer
from .choices import Choice, Choices, Stream
from .ranks import ShardedTrainer
from .referee import Referee
from .scheduler import START_S, Death, Process, new_scheduler
from .store import FAULTS, Operation, SimProcess
from .virtual import reset

DAY_S = 86_400.0
STEPS_MOST = 30_000
"""No seed needs as many: some processes repeat the same error without end."""

CALM_STEPS = 2_000
"""Operations within which everything has to settle once there are no faults and all processes are awake."""
CALM_S = 30 * DAY_S
"""The virtual time within which everything has to settle once there are no faults, sleepers included."""


@dataclass(frozen=True, slots=True)
class Config:
    """What a seed makes of the system."""

    faults: tuple[tuple[str, float], ...]
    fencing: str
    ranks: int
    has_rival: bool
    followers: int
    has_pruner: bool
    has_reader: bool
    mirror_file: bool
    shadow_file: bool
    target_survives: bool
    reads_mirror: bool
    controls: bool
    target_faults: float
    rot: float
    scrub_s: float | None
    files: bool
    wait: bool
    anchor_versions: int
    keep_anchors: int
    keep_versions: int
    retry_s: float
    gap_s: float
    prune_gap_s: float
    steps: int
    clock_offsets_s: dict[str, float]
    has_compactor: bool
    writes_skips: bool

    @classmethod
    def of(cls, chance: Stream) -> "Config":
        """By default there is one trainer and one follower, and no fault."""

        def one_of(default: object, about: str, *options: tuple[object, float]) -> object:
            picked = chance.pick(options, about)
            return default if picked is None else picked[0]

        def happens(about: str, rate: float) -> bool:
            return chance.happens(rate, about)

        factors = {fault: chance.draw([(1.0, 0.3), (4.0, 0.2), (10.0, 0.06)]) or (0.0, 0.0) for fault in FAULTS}
        faults = tuple((fault, rate * factors[fault][0]) for fault, rate in FAULTS.items())
        fencing = str(one_of("create", "the store", ("none", 0.12), ("ignored", 0.06)))
        rots = happens("memory loses bits", 0.1)
        offsets = {}
        if fencing == "create" and happens("the clock of the trainer is wrong by days", 0.2):
            offsets["trainer"] = 20 * DAY_S * (chance.uniform() - 0.5)
        if happens("the clock of the pruner is wrong by days", 0.2):
            offsets["pruner"] = 20 * DAY_S * (chance.uniform() - 0.5)
        return cls(
            faults=faults,
            fencing=fencing,
            ranks=int(one_of(1, "ranks", (2, 0.2), (3, 0.1))),  # type: ignore[call-overload]
            has_rival=happens("a second trainer", 0.25),
            followers=int(one_of(1, "followers", (2, 0.3))),  # type: ignore[call-overload]
            has_pruner=happens("a pruner", 0.85),
            has_reader=happens("a reader", 0.4),
            mirror_file=happens("mirrors in files", 0.25),
            shadow_file=happens("shadows in files", 0.25),
            target_survives=happens("targets survive their process", 0.3),
            reads_mirror=happens("targets read the mirror", 0.3),
            controls=happens("operators of replicas", 0.3),
            target_faults=0.1 if happens("targets fail", 0.3) else 0.0,
            rot=0.01 if rots else 0.0,
            scrub_s=30.0 if rots or happens("scrubs", 0.2) else None,
            files=happens("files beside the weights", 0.2),
            wait=happens("publications wait", 0.3),
            anchor_versions=int(one_of(3, "versions per anchor", (1, 0.15), (2, 0.3))),  # type: ignore[call-overload]
            keep_anchors=int(one_of(1, "anchors kept", (2, 0.3))),  # type: ignore[call-overload]
            keep_versions=int(one_of(1, "versions kept", (3, 0.3))),  # type: ignore[call-overload]
            retry_s=float(one_of(60.0, "seconds of retries", (0.0, 0.15))),  # type: ignore[arg-type]
            gap_s=float(one_of(30.0, "seconds between publications", (2.0, 0.25), (3600.0, 0.2))),  # type: ignore[arg-type]
            prune_gap_s=float(one_of(200.0, "seconds between prunes", (6 * 3600.0, 0.4))),  # type: ignore[arg-type]
            steps=60 + int(200 * chance.uniform()),
            clock_offsets_s=offsets,
            has_compactor=happens("a compactor", 0.3),
            writes_skips=happens("publishers that write skips", 0.3),
        )


@dataclass(frozen=True, slots=True)
class Failure:
    """A broken rule. `trace` is that of an error that is not allowed."""

    rule: str
    message: str
    trace: str = ""

    def __str__(self) -> str:
        return f"{self.rule}: {self.message}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened in a run."""

    seed: int
    failure: Failure | None
    choices: list[Choice]
    operations: list[Operation]
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def trace_sha256(self) -> str:
        """A hash of all that happened."""
        return hashlib.sha256("\n".join(map(str, (*self.choices, *self.operations))).encode()).hexdigest()


class Objects(MemoryStore):
    """What is really in the store."""

    def has(self, key: str) -> bool:
        return key in self._objects

    def find(self, key: str) -> bytes | None:
        found = self._objects.get(key)
        return None if found is None else found[0]

    def modified_unix_s(self, key: str) -> float:
        return self._objects[key][1]


class World:
    """One run. `keep`: take only these choices of the seed, and the defaults everywhere else."""

    def __init__(self, seed: int, folder: Path, *, keep: Collection[str] | None = None) -> None:
        reset()
        self.scheduler = new_scheduler()
        self.scheduler.on_error = self._raised
        self.folder = folder
        self.choices = Choices(seed, keep=keep, clock=lambda: self.elapsed_s)
        self.config = Config.of(self.choices.stream("config"))
        self.objects = Objects(clock=lambda: self.scheduler.now_s)
        self.referee = Referee(self)
        self.failure: Failure | None = None
        self.operations: list[Operation] = []
        self.counts: Counter[str] = Counter()
        self.actors_by_process: dict[Process, Actor] = {}
        self._network = Process("network")
        self._calm_since: int | None = None
        self._calm_s = 0.0
        self._awake_s = 0.0
        """When the last of the processes that are to be started again is."""
        self._is_stopping = False
        is_sharded = self.config.ranks > 1
        self.writers: list[Actor] = [(ShardedTrainer if is_sharded else Trainer)(self, "trainer")]
        if self.config.has_rival:
            self.writers.append(Trainer(self, "rival", role="rival"))
        self.replicas = [Replica(self, f"follower-{i + 1}") for i in range(self.config.followers)]
        self.others: list[Actor] = [Pruner(self, "pruner")] if self.config.has_pruner else []
        if self.config.has_reader:
            self.others.append(Reader(self, "reader"))
        if self.config.has_compactor:
            self.others.append(Compactor(self, "compactor"))

    # --- the run ------------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Run until all is settled or a rule is broken."""
        try:
            for actor in (*self.writers, *self.replicas, *self.others):
                self.later(actor.start, 30 * actor.chance.uniform() ** 2)
            left = self.scheduler.run()
            if self.failure is None:
                if left:
                    names = sorted({task.process.name for task in left})
                    self.fail("waits", f"{', '.join(names)} wait without end")
                self.referee.require_whole_feed()
        except Death:
            pass
        finally:
            self.scheduler.end()
        self.counts.update(
            seeds=1,
            steps=self.scheduler.steps,
            operations=len(self.operations),
            versions=len(self.referee.versions),
            anchors=self.referee.anchors,
            pruned=self.referee.deletions,
            restores=self.referee.restores,
            lives=sum(actor.lives for actor in (*self.writers, *self.replicas, *self.others)),
        )
        return Outcome(self.choices.seed, self.failure, self.choices.made, self.operations, self.counts)

    def fail(self, rule: str, message: str, error: BaseException | None = None) -> NoReturn:
        """A rule is broken: end the run."""
        if self.failure is None:
            self.failure = Failure(rule, message, "" if error is None else "".join(format_exception(error)))
        self.scheduler.stop()
        self.scheduler.current.process.is_dead = True
        raise Death

    @property
    def elapsed_s(self) -> float:
        """The virtual time since the beginning."""
        return self.scheduler.now_s - START_S

    @property
    def is_calm(self) -> bool:
        """Whether there are no faults any more."""
        return self.choices.is_calm

    @property
    def are_writers_done(self) -> bool:
        return all(writer.is_done for writer in self.writers)

    def count(self, what: str) -> None:
        self.counts[what] += 1

    # --- what processes do --------------------------------------------------------------------------------------------

    def note(self, operation: Operation) -> None:
        """An operation begins."""
        self.operations.append(operation)
        if operation.fault:
            self.counts[f"fault: {operation.fault}"] += 1
        if self._calm_since is None:
            if len(self.operations) >= self.config.steps:
                self.choices.is_calm = True
                self._calm_since = len(self.operations)
                self._calm_s = self.scheduler.now_s
        elif self.scheduler.now_s > self._calm_s + CALM_S or len(self.operations) > STEPS_MOST:
            self._fail_to_settle()
        elif self._awake_s > self.scheduler.now_s or self._is_any_asleep():
            self._calm_since = len(self.operations)
        elif len(self.operations) - self._calm_since > CALM_STEPS:
            self._fail_to_settle()

    def look(self, process: SimProcess) -> None:
        """An operation has had its effect."""
        actor = self.actors_by_process.get(process)
        if actor is not None and not process.is_dead:
            actor.look(process)
        if self.is_calm and not self._is_stopping:
            others = all(actor.is_done for actor in self.others)
            if self.are_writers_done and others and all(replica.is_settled for replica in self.replicas):
                self._is_stopping = True
                for replica in self.replicas:
                    assert replica.follower is not None
                    replica.follower.stop()

    def write(self, process: SimProcess, key: str, data: bytes) -> None:
        before = self.objects.find(key)
        self.objects.put(key, data)
        self.referee.wrote(process, key, data, before)

    def delete(self, process: SimProcess, key: str) -> None:
        before = self.objects.find(key)
        self.objects.delete(key)
        self.referee.deleted(process, key, before)

    def later(self, act: Callable[[], None], delay_s: float) -> None:
        """Let something happen outside of all processes."""

        def run() -> None:
            self.scheduler.sleep(delay_s)
            act()

        self._awake_s = max(self._awake_s, self.scheduler.now_s + delay_s)
        self.scheduler.spawn(self._network, run)

    def die(self, process: SimProcess) -> NoReturn:
        """A process dies, with all its threads."""
        self.count("deaths")
        self.scheduler.kill(process)
        self.actors_by_process[process].died(process)
        raise Death

    def tear(self, path: Path | None, actor: Actor) -> None:
        """Perhaps the machine of a process that died lost its power: its file has old bytes in some places."""
        if path is None or not path.exists() or not actor.chance.happens(0.3, f"power cut under {path.name}"):
            return
        data = bytearray(path.read_bytes())
        for _ in range(3):
            data[-1 - int(actor.chance.uniform() * 60)] ^= 0x55
        path.write_bytes(data)
        self.count("power cuts")

    def _is_any_asleep(self) -> bool:
        return any(process.asleep_until_s > self.scheduler.now_s for process in self.actors_by_process)

    def _raised(self, process: Process, error: BaseException) -> None:
        """An error ended a task or a future."""
        if isinstance(process, SimProcess):
            with suppress(Death):
                self.referee.judge(process, error)
        elif self.failure is None:
            with suppress(Death):
                self.fail(f"error.{type(error).__name__}", f"{process.name}: {error!r}", error)

    def _fail_to_settle(self) -> NoReturn:
        waiting = [actor.name for actor in (*self.writers, *self.others) if not actor.is_done]
        behind = [replica.name for replica in self.replicas if not replica.is_settled]
        self.fail("settle", f"there are no faults any more, but {waiting} are not done, {behind} not at the head")


def simulate(seed: int, *, keep: Collection[str] | None = None) -> Outcome:
    """Run one seed. Called inside of `virtual`."""
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="simulation-", dir=place) as folder, mock.patch("tempfile.tempdir", folder):
        return World(seed, Path(folder), keep=keep).run()
