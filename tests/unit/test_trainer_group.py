"""Errors of one rank, as the other ranks raise them."""

import pytest

from deltasync.errors import (
    ConflictError,
    CorruptError,
    DeltasyncError,
    InvalidInputError,
    MismatchError,
    RankError,
    StoreError,
)
from deltasync.trainer.group import Failure


@pytest.mark.parametrize(
    "error",
    [
        StoreError("down", transient=True, hint="wait", key="k"),
        StoreError("gone", transient=False),
        ConflictError("taken", key="k", hint="stop"),
        MismatchError("other", rule="layout.differs", version=3, hint="look"),
        CorruptError("bad", rule="r"),
        InvalidInputError("wrong"),
    ],
)
def test_errors_cross_to_other_ranks_as_what_they_are(error: DeltasyncError) -> None:
    there = Failure.of(error, 3).error()
    assert type(there) is type(error)
    assert there.message == f"rank 3: {error.message}"
    assert {**vars(there), "message": ""} == {**vars(error), "message": ""}


def test_other_errors_cross_as_text() -> None:
    there = Failure.of(KeyError("x"), 1).error()
    assert (type(there), there.message) == (RankError, "rank 1: KeyError: 'x'")
