"""Fixtures for all tests. Because of this file, `support` is importable from every test: its folder is on the path."""

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
