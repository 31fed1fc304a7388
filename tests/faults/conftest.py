"""What the tests of faults share."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from deltasync import parallel


class Later:
    """Work that is done in the calling thread, once its result is asked for."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.result = work

    def cancel(self) -> bool:
        return False


class InlineExecutor:
    """Stands in for a pool of threads."""

    def submit(self, work: Callable[..., Any], /, *args: Any) -> Later:
        return Later(partial(work, *args))


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations on the store come in the same order each time, so that a number means the same. Quicker, too."""
    monkeypatch.setattr(parallel._pools, "computing", InlineExecutor)
    monkeypatch.setattr(parallel._pools, "waiting", InlineExecutor)
    monkeypatch.setattr(parallel, "wait", lambda unfinished: None)
