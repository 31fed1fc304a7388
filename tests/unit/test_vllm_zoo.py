"""The table of the zoo, and the places that repeat it."""

from pathlib import Path

import pytest
from zoo.models import MODELS
from zoo.page import rows

from deltasync.vllm.releases import TESTED, warn_if_not_in_zoo

PAGE = Path(__file__).parents[2] / "docs/vllm.md"


def test_the_package_lists_the_architectures_of_the_zoo() -> None:
    assert sorted(TESTED) == sorted({model.architecture for model in MODELS.values() if not model.unserved})


def test_the_page_has_a_row_for_each_model_and_no_result_is_bad() -> None:
    outcomes = {name: row.split("|")[-3].strip() for name, row in rows(PAGE.read_text()).items()}
    assert outcomes == {name: "not served" if model.unserved else "equal" for name, model in MODELS.items()}


def test_an_architecture_outside_the_zoo_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    warn_if_not_in_zoo(["LlamaForCausalLM", "NewForCausalLM"])
    assert [record.args for record in caplog.records] == [("NewForCausalLM",)]
