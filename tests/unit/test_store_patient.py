"""Patience with a store: transient errors are repeated, lasting ones are not, and a lost answer is settled."""

import threading

import pytest

from deltasync.errors import StoreError
from deltasync.store.memory import MemoryStore
from deltasync.store.patient import PatientStore
from deltasync.testing.faulty import Fault, FaultyStore, Operation

CALLS = {
    "put": lambda store: store.put("a", b"new"),
    "create": lambda store: store.create("b", b"new"),
    "get": lambda store: store.get("a"),
    "get_range": lambda store: store.get_range("a", 0, 2),
    "list": lambda store: [item.key for item in store.list()],
    "delete": lambda store: store.delete("a"),
}


def failing(times: int, fault: Fault) -> FaultyStore:
    """A store with one object, whose first operations fail."""
    store = MemoryStore()
    store.put("a", b"old")
    return FaultyStore(store, lambda operation: fault if operation.number <= times else None)


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("verb", CALLS)
def test_every_verb_is_repeated(verb: str) -> None:
    store = PatientStore(failing(3, Fault("refuse")), 60.0)
    expected = CALLS[verb](failing(0, Fault("refuse")))
    assert CALLS[verb](store) == expected
    assert store.retries == (2 if verb == "create" else 3), "a create that fails reads back, which fails too"


@pytest.mark.parametrize("verb", CALLS)
def test_a_lasting_error_is_raised_at_once(verb: str) -> None:
    faulty = failing(1, Fault("refuse", transient=False))
    store = PatientStore(faulty, 60.0)
    with pytest.raises(StoreError):
        CALLS[verb](store)
    assert (store.retries, len(faulty.operations)) == (0, 1)


@pytest.mark.parametrize("verb", CALLS)
def test_without_a_limit_nothing_is_repeated(verb: str) -> None:
    store = PatientStore(failing(9, Fault("refuse")), 0.0)
    with pytest.raises(StoreError):
        CALLS[verb](store)
    assert store.retries == 0


def test_the_limit_counts_from_the_first_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long operation that fails at its end is repeated all the same."""
    now_s = [0.0]
    monkeypatch.setattr("deltasync.store.patient.time.monotonic", lambda: now_s[0])
    monkeypatch.setattr("deltasync.store.patient.FIRST_PAUSE_S", 0.001)

    def slowly(operation: Operation) -> Fault | None:
        now_s[0] += 3600.0
        return Fault("refuse") if operation.number == 1 else None

    store = PatientStore(FaultyStore(MemoryStore(), slowly), 60.0)
    store.put("a", b"new")
    assert store.retries == 1


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize(
    ("slept_s", "is_repeated"), [(0.0, True), (100.0, True), (86_400.0, False), (-86_400.0, False)]
)
def test_a_create_is_not_repeated_after_a_sleep(
    monkeypatch: pytest.MonkeyPatch, slept_s: float, is_repeated: bool
) -> None:
    """What the object names may have been removed meanwhile: the caller checks again."""
    now_unix_s = [1_700_000_000.0]
    monkeypatch.setattr("deltasync.store.patient.time.time", lambda: now_unix_s[0])

    def sleepily(operation: Operation) -> Fault | None:
        if operation.number == 1:
            now_unix_s[0] += slept_s
            return Fault("refuse")
        return None

    store = FaultyStore(MemoryStore(), sleepily)
    if is_repeated:
        assert PatientStore(store, 60.0).create("a", b"new")
    else:
        with pytest.raises(StoreError):
            PatientStore(store, 60.0).create("a", b"new")
        assert [operation.verb for operation in store.operations] == ["create", "get_range"]


@pytest.mark.parametrize("limit_s", [0.0, 60.0])
def test_a_create_whose_answer_was_lost(limit_s: float) -> None:
    assert PatientStore(failing(1, Fault("lose")), limit_s).create("b", b"new") is True


@pytest.mark.parametrize("limit_s", [0.0, 60.0])
@pytest.mark.usefixtures("no_pauses")
def test_an_object_of_another_is_not_ours(limit_s: float) -> None:
    """The answer that there is one was lost, and its bytes are others, or only begin with ours."""
    for stored in (b"other", b"new and more", b"n"):
        store = MemoryStore()
        store.put("b", stored)
        faulty = FaultyStore(store, lambda operation: Fault("lose") if operation.number == 1 else None)
        if limit_s:
            assert PatientStore(faulty, limit_s).create("b", b"new") is False
        else:
            with pytest.raises(StoreError):
                PatientStore(faulty, limit_s).create("b", b"new")
        assert store.get("b") == stored


def test_a_lasting_error_is_not_a_lost_answer() -> None:
    """A disk that cannot sync: the object can be read back now, and still be lost in a power cut."""
    with pytest.raises(StoreError):
        PatientStore(failing(1, Fault("lose", transient=False)), 60.0).create("b", b"new")


def test_once_stopped_nothing_is_read_and_nothing_waited_for() -> None:
    stop = threading.Event()
    faulty = failing(1, Fault("refuse"))
    store = PatientStore(faulty, 1e6, stop=stop)
    stop.set()
    for verb in ("get", "get_range", "list"):
        with pytest.raises(StoreError) as caught:
            CALLS[verb](store)
        assert not caught.value.transient
    assert faulty.operations == []
    with pytest.raises(StoreError, match="refused"):
        CALLS["put"](store)
    CALLS["put"](store)


def test_retries_of_two_tasks_are_counted_apart() -> None:
    one = PatientStore(failing(1, Fault("lose")), 60.0)
    two = one.beside()
    one.put("a", b"new")
    assert (one.retries, two.retries) == (1, 0)
    assert two.get("a") == b"new"
