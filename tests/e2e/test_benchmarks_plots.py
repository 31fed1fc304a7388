"""The plots of docs/benchmarks.md are those of the results: drawn again, they are the same."""

import importlib.util
import re

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
    kept = {name: (PAGE.parent / "img" / f"{name}.svg").read_bytes() for name in drawn}
    assert [name for name, plot in drawn.items() if without_ids(plot) != without_ids(kept[name])] == []


def without_ids(plot: bytes) -> bytes:
    """Without the ids of clip paths: hashes of coordinates, whose last bit depends on the processor."""
    return re.sub(rb"\bp[0-9a-f]{10}\b", b"p", plot)
