"""A store that fails on purpose, reproducibly, at the operations that a plan chooses.

    store = FaultyStore(MyStore(...), at(7, Fault("lose")))

Operations are counted from 1 in the order in which they begin. `store.operations` lists them: run once without faults
to count them, then loop over their numbers to put a fault at each.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from deltasync.errors import StoreError
from deltasync.store.patient import WrapperStore
from deltasync.store.protocol import Data, ObjectInfo, Store

Verb = Literal["put", "create", "get", "get_range", "list", "delete"]
Kind = Literal["refuse", "cut", "lose", "delay", "flip", "crash_before", "crash_after"]

_T = TypeVar("_T")


class Crash(BaseException):
    """A simulated death of the process. No error handler catches it, and the store raises it from then on."""


@dataclass(frozen=True, slots=True)
class Fault:
    """The fault of one operation.

    `refuse`: it does not happen, and the caller gets a StoreError. `cut`: the same, halfway through the transfer; a
    put is whole or nothing, so it has no effect. `lose`: it happens, but the response is lost, and the caller gets a
    StoreError. `delay`: it happens `delay_s` later. `flip`: one bit of what is read is flipped. `crash_before` and
    `crash_after`: the process dies before or after the operation happens.
    """

    kind: Kind
    transient: bool = True
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of a store. `key` is the prefix for a list."""

    number: int
    verb: Verb
    key: str


Plan = Callable[[Operation], Fault | None]
"""Returns the fault of an operation, or None. It is called once for each, from several threads."""


def never(operation: Operation) -> None:
    """A plan without faults: the store only counts operations."""


def at(number: int, fault: Fault) -> Plan:
    """A plan of one fault, at the operation of that number."""
    return lambda operation: fault if operation.number == number else None


def at_random(rate: float, faults: Sequence[Fault], *, seed: int) -> Plan:
    """A plan where each operation has one of `faults` with probability `rate`. Equal seeds give equal plans."""

    def plan(operation: Operation) -> Fault | None:
        # Seeded by number, so that the order of threads does not matter.
        rng = random.Random(f"{seed}:{operation.number}")
        return rng.choice(faults) if rng.random() < rate else None

    return plan


class FaultyStore(WrapperStore):
    """Any store, with the faults of a plan. `operations` lists all calls so far, except `close`."""

    def __init__(self, store: Store, plan: Plan = never, *, sleep: Callable[[float], None] = time.sleep) -> None:
        super().__init__(store)
        self.operations: list[Operation] = []
        self._plan = plan
        self._sleep = sleep
        self._lock = threading.Lock()
        self._is_dead = False

    def put(self, key: str, data: Data) -> None:
        self._do("put", key, lambda: self._store.put(key, data))

    def create(self, key: str, data: Data) -> bool:
        return self._do("create", key, lambda: self._store.create(key, data))

    def get(self, key: str) -> bytes:
        return self._do("get", key, lambda: self._store.get(key), damage=_flipped)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        return self._do("get_range", key, lambda: self._store.get_range(key, offset, length), damage=_flipped)

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectInfo]:
        # Collected at once, so that it is one operation with a before and an after.
        return iter(self._do("list", prefix, lambda: [*self._store.list(prefix, after=after)]))

    def delete(self, key: str) -> None:
        self._do("delete", key, lambda: self._store.delete(key))

    def _do(
        self, verb: Verb, key: str, act: Callable[[], _T], *, damage: Callable[[_T, Operation], _T] | None = None
    ) -> _T:
        with self._lock:
            if self._is_dead:
                raise Crash("the process is dead")
            operation = Operation(len(self.operations) + 1, verb, key)
            self.operations.append(operation)
        fault = self._plan(operation)
        if fault is None:
            return act()
        if fault.kind == "crash_before":
            raise self._death(operation)
        if fault.kind in ("refuse", "cut"):
            raise _error(operation, fault)
        if fault.kind == "delay":
            self._sleep(fault.delay_s)
        try:
            result = act()
        finally:
            # An error of the store is a response as well, and is lost like any other.
            if fault.kind == "crash_after":
                raise self._death(operation)
            if fault.kind == "lose":
                raise _error(operation, fault)
        return damage(result, operation) if fault.kind == "flip" and damage is not None else result

    def _death(self, operation: Operation) -> Crash:
        with self._lock:
            self._is_dead = True
        return Crash(f"at operation {operation.number}: {operation.verb} {operation.key}")


def _error(operation: Operation, fault: Fault) -> StoreError:
    message = {"refuse": "was refused", "cut": "was cut off halfway", "lose": "gave no answer"}[fault.kind]
    return StoreError(
        f"operation {operation.number}, {operation.verb} {operation.key}, {message}",
        transient=fault.transient,
        hint="this fault is injected: retry" if fault.transient else "this fault is injected",
        key=operation.key,
    )


def _flipped(data: bytes, operation: Operation) -> bytes:
    """The data with one bit flipped, whose place depends on the number of the operation only."""
    if not data:
        return data
    place = random.Random(operation.number).randrange(8 * len(data))
    damaged = bytearray(data)
    damaged[place // 8] ^= 1 << place % 8
    return bytes(damaged)
