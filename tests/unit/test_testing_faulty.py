"""A store that fails as it is told to, and counts what it is asked."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from deltasync.errors import NotFoundError, StoreError
from deltasync.store.memory import MemoryStore
from deltasync.store.protocol import Store
from deltasync.testing.faulty import Crash, Fault, FaultyStore, Operation, at, at_random, never

CALLS: dict[str, Callable[[Store], object]] = {
    "put": lambda store: store.put("a", b"new"),
    "create": lambda store: store.create("b", b"new"),
    "get": lambda store: store.get("a"),
    "get of nothing": lambda store: store.get("none"),
    "get_range": lambda store: store.get_range("a", 1, 2),
    "list": lambda store: list(store.list()),
    "delete": lambda store: store.delete("a"),
}
# What the caller sees, and whether the operation happened.
OUTCOMES: dict[Any, tuple[type[BaseException], bool]] = {
    "refuse": (StoreError, False),
    "cut": (StoreError, False),
    "lose": (StoreError, True),
    "crash_before": (Crash, False),
    "crash_after": (Crash, True),
}


def with_one_object() -> MemoryStore:
    store = MemoryStore()
    store.put("a", b"old")
    return store


def content(store: Store) -> dict[str, bytes]:
    return {item.key: store.get(item.key) for item in store.list()}


@pytest.mark.parametrize("transient", [True, False])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("kind", OUTCOMES)
def test_faults(kind: Any, call: Callable[[Store], object], transient: bool) -> None:
    seen, happens = OUTCOMES[kind]
    store, expected = with_one_object(), with_one_object()
    if happens:
        with suppress(NotFoundError):
            call(expected)
    faulty = FaultyStore(store, at(2, Fault(kind, transient=transient)))
    faulty.get("a")
    with pytest.raises(seen) as caught:
        call(faulty)
    assert content(store) == content(expected)
    if isinstance(caught.value, StoreError):
        assert caught.value.transient is transient
        assert caught.value.hint is not None
        faulty.put("later", b"works again")
        store.delete("later")
    else:
        with pytest.raises(Crash):
            faulty.get("a")
    assert content(store) == content(expected)


def test_delay() -> None:
    slept: list[float] = []
    faulty = FaultyStore(with_one_object(), at(1, Fault("delay", delay_s=2.5)), sleep=slept.append)
    assert faulty.get("a") == b"old"
    assert faulty.get("a") == b"old"
    assert slept == [2.5]


@pytest.mark.parametrize("call", [lambda store: store.get("a"), lambda store: store.get_range("a", 0, 9)])
def test_flip_changes_one_bit_of_what_is_read(call: Callable[[Store], bytes]) -> None:
    store = with_one_object()
    faulty = FaultyStore(store, at(1, Fault("flip")))
    damaged = call(faulty)
    assert (int.from_bytes(damaged) ^ int.from_bytes(b"old")).bit_count() == 1
    assert call(faulty) == b"old"
    again = FaultyStore(store, at(1, Fault("flip")))
    assert call(again) == damaged, "always the same way"


def test_flip_of_nothing_and_of_writes() -> None:
    store = MemoryStore()
    faulty = FaultyStore(store, lambda op: Fault("flip"))
    faulty.put("a", b"")
    assert faulty.get("a") == b""
    assert [item.key for item in faulty.list()] == ["a"]


def test_random_faults_depend_on_the_seed_alone() -> None:
    operations = [Operation(n, "get", "a") for n in range(1, 2001)]
    faults = [Fault("refuse"), Fault("lose")]

    def drawn(seed: int) -> list[Fault | None]:
        plan = at_random(0.1, faults, seed=seed)
        return [plan(op) for op in operations]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert 100 < sum(fault is not None for fault in drawn(1)) < 300
    assert {fault for fault in drawn(1) if fault is not None} == set(faults)
    assert at_random(0.0, faults, seed=1)(operations[0]) is None
    assert never(operations[0]) is None


def test_operations_are_counted() -> None:
    faulty = FaultyStore(with_one_object())
    for call in CALLS.values():
        with suppress(NotFoundError):
            call(faulty)
    operations = [(op.number, op.verb, op.key) for op in faulty.operations]
    assert operations == [
        (1, "put", "a"), (2, "create", "b"), (3, "get", "a"), (4, "get", "none"), (5, "get_range", "a"),
        (6, "list", ""), (7, "delete", "a"),
    ]  # fmt: skip
