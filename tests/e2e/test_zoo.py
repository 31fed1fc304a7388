"""A part of the zoo: models of different kinds that follow a feed inside vLLM. `make zoo` runs all of them."""

import json
import os

import pytest
from support import processes
from support.vllm import PYTHON, ROOT, require_vllm

pytestmark = [pytest.mark.e2e, pytest.mark.long]

NAMES = (
    "llama-tp2",
    "llama-fp8",
    "solar",
    "qwen3_moe-odd",
    "gpt_oss",
    "phi",
    "deepseek_v3",
    "mamba2",
    "gemma3",
    "bloom",
)


def test_models_of_different_kinds_follow_a_feed_to_the_bits_of_a_fresh_server() -> None:
    require_vllm()
    done = processes.run(
        [str(PYTHON), "-m", "zoo", *NAMES], env={**os.environ, "PYTHONPATH": str(ROOT / "tests")}, timeout_s=900
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert {result["name"]: result["problems"] for result in results} == {name: [] for name in NAMES}, done.stderr[
        -4000:
    ]
    assert all(result["mapped"] + result["computed"] > 200_000 for result in results), results
    assert "was not tested with" not in done.stderr
