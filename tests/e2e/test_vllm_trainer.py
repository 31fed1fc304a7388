"""The trainer's half of vLLM's weight transfer, with a real server that it moves."""

import json
import os
from pathlib import Path

import pytest
from support import processes
from support.vllm import CORE, PYTHON, require_vllm, save, tiny_model, training_feed, vllm_server

import deltasync
from deltasync.checkpoint import open_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.long]

SCRIPT = Path(__file__).with_name("vllm_trainer.py")


def test_vllms_own_client_and_source_publish_and_move_a_server(tmp_path: Path) -> None:
    """The server is started with the weights of the second round, whose answers are the reference."""
    require_vllm()
    with training_feed(tiny_model("qwen3"), tmp_path) as feed:
        feed.step(fraction=0.3, scale=1.0)
        old, new = feed.base, save(feed.model, tmp_path / "new")
    with vllm_server(new, None, tmp_path / "server", VLLM_SERVER_DEV_MODE="1") as server:
        done = processes.run(
            [str(PYTHON), str(SCRIPT), str(tmp_path), str(old), str(new), server.url],
            env={**os.environ, "VLLM_CPU_OMP_THREADS_BIND": CORE, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
            timeout_s=600,
        )
        assert done.returncode == 0, done.stderr[-4000:] + server.tail()
    found = json.loads(done.stdout.splitlines()[-1])
    tensors = len(open_checkpoint(new).weights.layout.tensors)
    assert found["gathered"] == [2 * tensors, 2 * tensors]
    assert found["versions"] == ["anchor", "delta"]
    assert not (tmp_path / "other").exists(), "only rank 0 publishes"
    for feed_name in ("alone", "moved"):
        deltasync.restore(str(tmp_path / feed_name), tmp_path / f"{feed_name}-restored", files=False)
        assert deltasync.digest(tmp_path / f"{feed_name}-restored") == deltasync.digest(new)
    other, split, none = found["refused"]
    assert other.startswith("invalid_input: ")
    assert "only the tensors that each rank holds" in split
    assert "needs a source" in none
    assert found["failed"] == ["invalid_input", 0]
    fresh, first, second = found["answers"]
    assert first != fresh
    assert second == fresh
