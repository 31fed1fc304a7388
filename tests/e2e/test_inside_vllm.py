"""Parts of the plugin that no server shows on a CPU: experts that are stacked but not packed, vLLM's own protocol."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support import processes
from support.vllm import CORE, PYTHON, require_vllm, save, tiny_model, training_feed

pytestmark = [pytest.mark.e2e, pytest.mark.long]

SCRIPT = Path(__file__).with_name("inside_vllm.py")


def run(*arguments: str) -> Any:
    require_vllm()
    done = processes.run(
        [str(PYTHON), str(SCRIPT), *arguments], env={**os.environ, "VLLM_CPU_OMP_THREADS_BIND": CORE}, timeout_s=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_changes_reach_stacked_experts_through_the_map(tmp_path: Path) -> None:
    with training_feed(tiny_model("qwen3-moe"), tmp_path) as feed:
        feed.step()
        found = run("experts", str(feed.base), str(save(feed.model, tmp_path / "new")))
    assert not found["is_computed"]
    assert found["differing"] == []
    assert len(found["stacked"]) == 4


@pytest.mark.every_vllm
def test_vllms_own_protocol_brings_versions(tmp_path: Path) -> None:
    """The engine is started with version 1, whose answers are the reference."""
    with training_feed(tiny_model("qwen3"), tmp_path) as feed:
        feed.step(fraction=0.3, scale=1.0)
        found = run("protocol", str(feed.restored(tmp_path / "new")), "--feed", feed.url)
    fresh, *answers = found["answers"]
    assert answers[0] != fresh
    assert answers == [answers[0], fresh, answers[0], answers[0]]
    assert len(found["refused"]) == 2
    assert all("update_weights" in refused for refused in found["refused"])
