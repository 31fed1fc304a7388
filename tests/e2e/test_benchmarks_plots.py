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
    from benchmarks.plots import PLOTS, drawn

    results = read_results()
    stale = [
        name
        for name, draw in PLOTS.items()
        if drawn(draw, results) != (PAGE.parent / "img" / f"{name}.svg").read_bytes()
    ]
    assert not stale
