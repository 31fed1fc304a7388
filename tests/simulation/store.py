"""The store as one process sees it: slow, and with the faults that its choices make. `FAULTS` is the model of faults.

What the protocol says that nothing guards against does not happen here:

- Between the last look at an orphan and its deletion lies one round trip. It takes no time.
- A publisher whose commit itself took hours puts its payloads again afterwards. It does not die, and the store does not
  fail it, before it has done so.
- A lease needs clocks that agree to within a minute and writers that do not stop between its check and the `put`. On a
  store without create-if-absent clocks are nearly right, nothing arrives late, and no writer sleeps if there are two.
- A `put` that keeps nothing goes unnoticed, unless it is a probe, or a shard of an anchor, which is listed before the
  commit.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from deltasync.errors import StoreError
from deltasync.format import keys
from deltasync.store.protocol import Capabilities, Data, ObjectInfo, Store

from .choices import Stream
from .scheduler import Death, Process

if TYPE_CHECKING:
    from .world import World

_T = TypeVar("_T")

FAULTS: dict[str, float] = {
    "refuse": 0.02,
    "deny": 0.001,
    "lose": 0.012,
    "late": 0.006,
    "flip": 0.012,
    "vanish": 0.03,
    "delay": 0.03,
    "nap": 0.006,
    "nap after": 0.004,
    "sleep": 0.004,
    "sleep after": 0.004,
    "die": 0.004,
    "die after": 0.004,
    "clock": 0.004,
}
"""The probability of each fault at one operation, before a seed makes it more frequent or leaves it out.

`refuse`: the operation fails and has no effect. `deny`: the same, and a retry does not help. `lose`: it has its
effect, and the response is lost. `late`: it fails, and has its effect minutes later. `flip`: one bit of what is read is
flipped. `vanish`: a `put` that is reported as done keeps nothing. `delay`: the request takes up to a minute. `nap` and
`sleep`: the whole process stops for minutes to hours, or for hours to days, before or after the effect. `die`: the
process dies before or after the effect. `clock`: the clock of the process is set, by up to five minutes.
"""

ERRORS = frozenset({"refuse", "deny", "lose", "late", "vanish"})
"""After these a StoreError may be raised."""

_STOPS = frozenset({"nap", "nap after", "sleep", "sleep after"})
_LATE_KEYS = (keys.VERSIONS, keys.ANCHORS, keys.SKIPS, keys.PAYLOADS, keys.REPLICAS)
_WRITERS = frozenset({"trainer", "rival", "rank"})
_READS = frozenset({"get", "get_range"})
_HOUR_S = 3600.0
_RECENT_OPERATIONS = 40
SAFE_OPERATIONS = 60
"""How long a publisher that slept in a commit is spared, counted in operations."""


class SimProcess(Process):
    """One life of a simulated process. `met`: the faults that may explain an error, since something succeeded."""

    def __init__(self, name: str, role: str, faults: Stream, *, clock_offset_s: float) -> None:
        super().__init__(name, clock_offset_s=clock_offset_s)
        self.role = role
        self.faults = faults
        self.met: dict[str, int] = {}
        self.operations = 0
        self.commits = 0
        """How many operations that are part of a commit are in progress."""
        self.safe_operations = 0
        self.deletions_seen = 0
        self.peers: Sequence[SimProcess] = (self,)
        """The processes whose faults may explain an error: errors of one rank are raised on all."""

    def meet(self, fault: str) -> None:
        """Something happened that may explain an error."""
        self.met[fault] = self.operations

    def succeed(self) -> None:
        """Something worked: what happened long before explains no later error. Other threads may still be at it."""
        self.met = {fault: at for fault, at in self.met.items() if at > self.operations - _RECENT_OPERATIONS}


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of the store by a process, and the fault that it met."""

    at_s: float
    process: str
    verb: str
    key: str
    fault: str

    def __str__(self) -> str:
        return f"{self.at_s:12.2f} s  {self.process:12} {self.verb:9} {_short(self.key)}  {self.fault}".rstrip()


class ProcessStore(Store):
    """The store for one process. Every operation is a step of the simulation."""

    def __init__(self, world: "World", process: SimProcess) -> None:
        self._world = world
        self._process = process

    @property
    def url(self) -> str:
        return "simulated://feed"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(create_if_absent=self._world.config.fencing != "none")

    def put(self, key: str, data: Data) -> None:
        copied = bytes(data)
        self._do("put", key, lambda: self._world.write(self._process, key, copied), data=copied)

    def create(self, key: str, data: Data) -> bool:
        copied = bytes(data)

        def act() -> bool:
            if self._world.config.fencing == "create" and self._world.objects.has(key):
                return False
            self._world.write(self._process, key, copied)
            return True

        if self._world.config.fencing == "none":
            raise StoreError("this store has no create-if-absent", transient=False)
        return self._do("create", key, act, data=copied)

    def get(self, key: str) -> bytes:
        return self._do("get", key, lambda: self._world.objects.get(key))

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        return self._do("get_range", key, lambda: self._world.objects.get_range(key, offset, length))

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectInfo]:
        return iter(self._do("list", prefix, lambda: [*self._world.objects.list(prefix, after=after)]))

    def delete(self, key: str) -> None:
        self._do("delete", key, lambda: self._world.delete(self._process, key))

    def close(self) -> None:
        """There is nothing to close."""

    def _do(self, verb: str, key: str, act: Callable[[], _T], *, data: bytes = b"") -> _T:
        if self._process.is_dead:
            raise Death
        is_commit = self._is_commit(verb, key)
        self._process.commits += is_commit
        try:
            return self._operate(verb, key, act, data)
        finally:
            self._process.commits -= is_commit

    def _operate(self, verb: str, key: str, act: Callable[[], _T], data: bytes) -> _T:
        world, process = self._world, self._process
        about = f"{process.name} {verb} {_short(key)}"
        fault, scale = process.faults.pick(self._options(verb, key, data), about) or ("", 0.0)
        latency_s = 0.002 + 0.05 * process.faults.uniform()
        world.note(Operation(world.elapsed_s, process.name, verb, key, fault))
        process.operations += 1
        process.safe_operations -= 1
        if fault:
            process.meet(fault)
        if self._is_unguarded_delete(verb, key):
            latency_s = 0.0
        else:
            world.scheduler.sleep(latency_s + (40 * scale if fault == "delay" else 0))
        stop_s = _stop_s(fault, scale)
        if fault in ("nap", "sleep"):
            self._stop(stop_s)
        if fault == "clock":
            process.clock_offset_s += 600 * scale - 300 if abs(process.clock_offset_s) <= 300 else 0
        if fault == "die":
            world.die(process)
        if fault == "late":
            world.later(lambda: self._arrive(key, act), 20 * 60 * scale)
        if fault in ("refuse", "deny", "late"):
            raise _error(verb, key, fault)
        result = None if fault == "vanish" else self._effect(act)
        if fault == "die after":
            world.die(process)
        if fault in ("nap after", "sleep after"):
            self._stop(stop_s)
        if fault == "lose":
            raise _error(verb, key, fault)
        if verb == "list" and key == keys.VERSIONS and not result:
            process.meet("empty")
        if verb in _READS:
            world.referee.read(process, key, is_flipped=fault == "flip")
        if fault == "flip" and isinstance(result, bytes) and result:
            return _flipped(result, scale)  # type: ignore[return-value]
        return result  # type: ignore[return-value]

    def _effect(self, act: Callable[[], _T]) -> _T:
        try:
            return act()
        finally:
            self._world.look(self._process)

    def _arrive(self, key: str, act: Callable[[], object]) -> None:
        """A request arrives after its sender has given it up. A `create` of a key that is taken by then fails."""
        if not self._world.objects.has(key):
            self._world.referee.arrived_late(key)
        act()

    def _stop(self, seconds: float) -> None:
        """The whole process stops."""
        if self._process.commits and seconds > _HOUR_S:
            self._process.safe_operations = SAFE_OPERATIONS
        self._world.count("sleeps")
        self._process.asleep_until_s = self._world.scheduler.now_s + seconds
        self._world.scheduler.sleep(seconds)

    def _is_commit(self, verb: str, key: str) -> bool:
        """Whether this is the creation of an object, which takes several operations on a store without `create`."""
        if self._world.config.fencing == "create" or self._process.role not in _WRITERS:
            return verb == "create"
        return key == keys.LEASE or key.startswith((keys.VERSIONS, keys.ANCHORS))

    def _is_unguarded_delete(self, verb: str, key: str) -> bool:
        return verb == "delete" and self._process.role == "pruner" and key.startswith(keys.PAYLOADS)

    def _options(self, verb: str, key: str, data: bytes) -> Sequence[tuple[str, float]]:
        """The faults that may happen to this operation, with their probabilities."""
        return [
            (fault, rate) for fault, rate in self._world.config.faults if rate and self._may(fault, verb, key, data)
        ]

    def _may(self, fault: str, verb: str, key: str, data: bytes) -> bool:
        world, process = self._world, self._process
        is_write = process.role in _WRITERS
        if process.safe_operations > 0 and fault not in ("delay", "flip", "clock"):
            return False
        if fault == "flip":
            return verb in _READS
        if fault == "vanish":
            return verb == "put" and (key.startswith(keys.PROBES) or world.referee.is_new_shard(key, data))
        if fault == "late":
            return verb in ("put", "create") and world.config.fencing == "create" and key.startswith(_LATE_KEYS)
        if fault == "clock":
            return process.role != "pruner" and (world.config.fencing == "create" or not is_write)
        if fault in _STOPS:
            if self._is_unguarded_delete(verb, key):
                return False
            return not (is_write and world.config.fencing != "create" and world.config.has_rival)
        if fault == "delay":
            return not self._is_unguarded_delete(verb, key)
        return True


def _stop_s(fault: str, scale: float) -> float:
    if fault.startswith("nap"):
        return 120.0 * 150.0**scale
    return 7 * _HOUR_S * 14.0**scale if fault.startswith("sleep") else 0.0


def _error(verb: str, key: str, fault: str) -> StoreError:
    return StoreError(
        f"{verb} {key} failed by chance: {fault}", transient=fault != "deny", key=key, hint="this fault is injected"
    )


def _flipped(data: bytes, scale: float) -> bytes:
    place = random.Random(scale).randrange(8 * len(data))
    damaged = bytearray(data)
    damaged[place // 8] ^= 1 << place % 8
    return bytes(damaged)


def _short(key: str) -> str:
    """A key without most of its zeros and hashes."""
    folder, _, name = key.rpartition("/")
    stem = name.split(".")[0]
    return f"{folder}/{stem.lstrip('0')[:8] or '0'}" if folder and stem else key
