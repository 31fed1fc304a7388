"""The plots of docs/benchmarks.md are those of the results: drawn again, they have the same bytes."""

import importlib.util

import pytest
from support.servers import missing

from benchmarks.page import PAGE, read_results

pytestmark = pytest.mark.e2e


def test_plots_are_up_to_date() -> None:
    """If this fails, `python -m benchmarks.plots` draws them again."""
    if importlib.util.find_spec("matplotlib") is None:
        missing("the package matplotlib is not installed")
    from benchmarks.plots import plots

    drawn = plots(read_results())
    assert drawn
    assert [name for name, plot in drawn.items() if plot != (PAGE.parent / "img" / f"{name}.svg").read_bytes()] == []
