"""docs/benchmarks.md says what the files of results say, and nothing else."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.page import PAGE, VIEWS, View, markdown, read_results, rendered
from benchmarks.report import RESULTS

RESULT = {"tables": {"held: bf16": [{"way": "ours", "s": 0.123456, "n": 12345, "ok": True, "none": None}]}}


def test_the_tables_are_those_of_the_results() -> None:
    """If this fails, `python -m benchmarks.plots` writes the page and its plots again."""
    page = PAGE.read_text()
    assert rendered(page, read_results()) == page


def test_every_view_is_on_the_page_or_has_no_results() -> None:
    shown = set(re.findall(r"<!-- table: ([\w-]+) -->", PAGE.read_text()))
    measured = {name for name, view in VIEWS.items() if (RESULTS / f"{view.benchmark}.json").exists()}
    assert measured <= shown


def test_every_plot_is_there_and_is_shown() -> None:
    linked = set(re.findall(r"\(img/(bench-[\w-]+\.svg)\)", PAGE.read_text()))
    assert linked == {path.name for path in (PAGE.parent / "img").glob("bench-*.svg")}


def test_a_changed_result_changes_the_page() -> None:
    page = "text\n<!-- table: held -->\nold\n<!-- end -->\nmore\n"
    results = {"publish": {"tables": {"held: bf16, 596 M": [{"way": "ours", "held s, best": 0.2}]}}}
    first = rendered(page, results)
    assert "| ours |" in first
    assert "old" not in first
    assert first.startswith("text\n")
    assert first.endswith("more\n")
    results["publish"]["tables"]["held: bf16, 596 M"][0]["held s, best"] = 0.3
    assert rendered(first, results) != first
    assert rendered(first, results) == rendered(page, results)


def test_cells() -> None:
    rows = View("publish", "held").rows({"publish": RESULT})
    assert markdown(rows).splitlines()[2] == "| ours | 0.123 | 12,345 | yes |  |"


@pytest.mark.parametrize("name", ["nothing", "held"])
def test_a_table_that_is_not_there_is_an_error(name: str) -> None:
    with pytest.raises(KeyError):
        rendered(f"<!-- table: {name} -->\n<!-- end -->", {"publish": {"tables": {}}})


def test_partial_results_are_left_out(tmp_path: Path) -> None:
    for name in ("codec", "codec-partial"):
        (tmp_path / f"{name}.json").write_text(json.dumps(RESULT))
    assert list(read_results(tmp_path)) == ["codec"]
