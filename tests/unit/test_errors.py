import pickle
from pathlib import Path

import pytest

from deltasync import errors
from deltasync.errors import CorruptError, DeltasyncError, StoreError

CLASSES = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, DeltasyncError)]


def test_kinds_are_unique() -> None:
    assert len({c.kind for c in CLASSES}) == len(CLASSES)


def test_at_names_the_place_in_a_copy() -> None:
    error = CorruptError("the seal is broken", rule="manifest.sha256", hint="fetch it again")
    placed = error.at("versions/1.json", version=1)
    assert type(placed) is CorruptError
    assert str(placed) == "versions/1.json: the seal is broken [manifest.sha256] (fetch it again)"
    assert (placed.key, placed.version, placed.rule, placed.hint) == (
        "versions/1.json",
        1,
        "manifest.sha256",
        "fetch it again",
    )
    assert placed.args == (placed.message,)
    assert (error.message, error.key, error.version) == ("the seal is broken", None, None)


def test_at_takes_a_path_and_keeps_a_version() -> None:
    placed = CorruptError("the file is empty", version=3).at(Path("a/b"))
    assert (placed.message, placed.key, placed.version) == ("a/b: the file is empty", "a/b", 3)


def test_at_keeps_whether_an_error_is_transient() -> None:
    for transient in (True, False):
        placed = StoreError("no answer", transient=transient).at("feed.json")
        assert (type(placed), placed.transient, placed.key) == (StoreError, transient, "feed.json")


@pytest.mark.parametrize("cls", CLASSES)
def test_errors_can_be_pickled(cls: type[DeltasyncError]) -> None:
    details = {"transient": True} if cls is StoreError else {"rule": "r", "version": 2}
    error = cls("it failed", hint="retry", key="k", **details)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (cls, str(error), vars(error))
