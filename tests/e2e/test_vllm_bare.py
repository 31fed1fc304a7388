"""Servers that start from a feed alone: no checkpoint is on the disk, and the weights are loaded once."""

import os
import time
from pathlib import Path

import pytest
from support import LONG_S, processes
from support.vllm import (
    PROMPTS,
    VllmServer,
    answers,
    require_vllm,
    start_vllm,
    tiny_model,
    training_feed,
    versions_of,
    vllm_server,
)

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.every_vllm]


@pytest.fixture(autouse=True, scope="module")
def _vllm() -> None:
    require_vllm()


def home_of(server: VllmServer) -> Path:
    """The private folder of a server, once it has become vLLM."""
    while True:
        command = Path(f"/proc/{server.process.pid}/cmdline").read_text().split("\0")
        if "--model" in command:
            return Path(command[command.index("--model") + 1]).parent
        assert server.process.poll() is None, server.tail()
        time.sleep(0.05)


def test_a_server_starts_from_the_feed_and_follows_it(tmp_path: Path) -> None:
    """Tied embeddings; untied ones are below."""
    with training_feed(tiny_model("qwen3"), tmp_path) as feed:
        feed.step(fraction=0.3, scale=1.0)
        with vllm_server(None, feed.url, tmp_path / "bare") as server:
            home = home_of(server)
            # The first answer of all is of the version, before the server says that it is ready.
            first = server.complete(PROMPTS[0])
            assert versions_of(first) == ("1", "1")
            server.wait_version(1)
            status = server.wait_ready()
            # Nothing was fetched or written after the load: the version was compared with the mirror.
            assert (status["last"], status["counts"]["moves"], status["counts"]["nbytes"]) == (None, 0, 0)
            assert (status["proved_version"], status["unseen_elements"]) == (1, 0)
            assert server.control("scrub") == {"version": 1, "damaged": [], "unseen_elements": 0}
            said = {1: answers(server)}
            feed.step(fraction=0.3, scale=1.0)
            moved = server.wait_version(2)["last"]
            assert (moved["from_version"], moved["edges"]) == (1, ["delta"])
            said[2] = answers(server)
            assert [path.name for path in (tmp_path / "bare").iterdir()] == ["server.log"]
        assert said[1] != said[2]
        # It has version 1 as vLLM itself loads it.
        base = feed.restored(tmp_path / "v1", version=1)
        with vllm_server(base, feed.url, tmp_path / "fresh", DELTASYNC_WAY="push") as fresh:
            assert answers(fresh) == said[1]
            assert fresh.control("advance")["version"] == 2
            assert answers(fresh) == said[2]
        wait_gone(home)


def test_a_config_that_ties_embeddings_which_the_feed_does_not(tmp_path: Path) -> None:
    """vLLM looks into the weights for a head of their own, before it loads them. It moves only when it is asked to."""
    model = tiny_model("qwen3-untied")
    model.config.tie_word_embeddings = True
    with training_feed(model, tmp_path) as feed:
        feed.step(fraction=0.3, scale=1.0)
        with vllm_server(None, feed.url, tmp_path / "bare", DELTASYNC_WAY="push") as server:
            server.wait_version(1)
            server.wait_ready()
            said = answers(server)
            feed.step(fraction=0.3, scale=1.0)
            assert answers(server) == said
            assert server.control("advance")["version"] == 2
        with vllm_server(feed.restored(tmp_path / "v1", version=1), None, tmp_path / "fresh") as fresh:
            assert answers(fresh) == said


@pytest.mark.parametrize("is_loading", [False, True])
def test_a_server_that_is_killed_while_it_starts_leaves_nothing(tmp_path: Path, is_loading: bool) -> None:
    with training_feed(tiny_model("qwen3"), tmp_path) as feed:
        server = start_vllm(None, feed.url, tmp_path / "killed")
        try:
            home = home_of(server)
            assert (home / "model/config.json").exists()
            while is_loading and "loading version 0 of" not in server.log.read_text():
                assert server.process.poll() is None, server.tail()
                time.sleep(0.05)
            processes.kill(server.process)
            wait_gone(home)
        finally:
            processes.stop(server.process)
        assert [path.name for path in (tmp_path / "killed").iterdir()] == ["server.log"]


def wait_gone(home: Path) -> None:
    deadline = time.monotonic() + LONG_S
    while home.exists():
        assert time.monotonic() < deadline, os.listdir(home)
        time.sleep(0.05)
