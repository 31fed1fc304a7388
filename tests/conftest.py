"""Fixtures for all tests. Because of this file, `support` is importable from every test: its folder is on the path."""

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from deltasync.kernels import VARIABLE, available, kernels
from deltasync.store import retry

# A deadline is an assertion of wall-clock time, which fails on a busy machine.
settings.register_profile("deltasync", deadline=None)
settings.load_profile("deltasync")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs with SIGINT ignored, and child processes inherit that. They do not inherit a
    # handler, so this one lets tests interrupt their children while the test run itself still ignores SIGINT.
    signal.signal(signal.SIGINT, lambda number, frame: None)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start long tests first: one that starts last keeps a single core busy while the others wait for it.

    pytest-xdist cuts the list into one run of tests for each worker, and an idle worker steals from the end of another
    one's run. So every run begins with its share of the long tests, and goes on with the others in their usual order.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    long = [item for item in items if item.get_closest_marker("long")]
    others = [item for item in items if not item.get_closest_marker("long")]
    ordered: list[pytest.Item] = []
    for worker in range(workers):
        share = long[worker::workers]
        room = max(0, len(items) * (worker + 1) // workers - len(ordered) - len(share))
        ordered += share + others[:room]
        del others[:room]
    items[:] = ordered + others


@pytest.fixture(params=available())
def every_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Runs the test once on each set of kernels that this machine has; gives its name."""
    monkeypatch.setenv(VARIABLE, request.param)
    kernels.cache_clear()
    yield request.param
    kernels.cache_clear()


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing store is asked again at once."""
    monkeypatch.setattr(retry, "_BACKOFF_FIRST_S", 0.001)
    monkeypatch.setattr(retry, "_BACKOFF_MOST_S", 0.002)
