"""Makes `helpers` and `crafting` importable from every test: this folder comes onto the path."""

from collections.abc import Iterator

import pytest

from deltasync.kernels import VARIABLE, available, kernels
from deltasync.store import retry


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
