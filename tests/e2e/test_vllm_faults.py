"""What a vLLM server that follows a feed lives through: kills, and a store that fails, stalls, lies or is gone."""

import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path

import pytest
from support import LONG_S, join, processes, repeats
from support.servers import proxied, seaweed
from support.vllm import (
    PROMPTS,
    Response,
    TrainingFeed,
    VllmServer,
    answers,
    assert_made_by_their_label,
    require_vllm,
    start_vllm,
    tiny_model,
    training_feed,
    versions_of,
    vllm_server,
    wait_up,
)

pytestmark = [pytest.mark.e2e, pytest.mark.long]

KILLS = repeats(2, soak=30)


@pytest.fixture(autouse=True, scope="module")
def _installed() -> None:
    require_vllm()


@pytest.mark.soak
def test_kills_at_any_time_leave_no_answer_with_mixed_weights(tmp_path: Path) -> None:
    """The server is killed while it starts, fetches, writes and answers; the next one continues from its mirror."""
    when = random.Random(1)
    found: list[Response] = []
    start_s: list[float] = []
    mirror = {"DELTASYNC_MIRROR": str(tmp_path / "mirror")}
    with training_feed(tiny_model("qwen3"), tmp_path) as feed:
        with stepping(feed, every_s=1.0):
            for number in range(KILLS):
                server = start_vllm(feed.base, feed.url, tmp_path / "killed", **mirror)
                try:
                    if number % 2 == 1:
                        time.sleep(when.uniform(0.0, max(start_s)))
                    else:
                        start_s.append(wait_up(server))
                        ask_until_killed(server, found, after_s=when.uniform(0.0, 4.0))
                    assert server.process.poll() in (None, -signal.SIGKILL), server.tail()
                finally:
                    processes.kill(server.process)
        assert found
        with vllm_server(feed.base, feed.url, tmp_path / "last", DELTASYNC_WAY="push", **mirror) as server:
            # These are the weights of version 0, as vLLM itself loads them.
            fresh = answers(server)
            assert server.control("advance")["version"] == feed.version
            assert server.control("scrub") == {"version": feed.version, "damaged": [], "unseen_elements": 0}
            found.append(ask(server))
            assert answers(server) != fresh
            assert server.control("advance", to=feed.back_to_base())["version"] == feed.version
            assert answers(server) == fresh
        assert_made_by_their_label(found, feed, tmp_path)


def test_a_store_that_fails_is_outlived(tmp_path: Path) -> None:
    with seaweed() as store, proxied(store) as proxy, training_feed(tiny_model("qwen3"), tmp_path, store) as feed:
        environment = {**store.environment, "AWS_ENDPOINT_URL": proxy.endpoint, "AWS_ENDPOINT": proxy.endpoint}
        with vllm_server(feed.base, feed.url, tmp_path / "following", **environment) as server:
            server.wait_version(0)
            flipped: list[str] = []

            def flip_each_payload_once(method: str, path: str) -> str:
                if "/payloads/" not in path or path in flipped:
                    return ""
                flipped.append(path)
                return "flip"

            proxy.spoil = flip_each_payload_once
            server.wait_version(feed.step())
            assert flipped
            assert server.control("status")["counts"]["refetched"] >= 1
            # Until `release`, however long the server takes to answer below.
            proxy.stall_s = 10 * LONG_S
            for how in ("stall", "503", "cut"):
                proxy.spoil = lambda method, path, how=how: how
                version = feed.step()
                while not proxy.spoiled[how]:
                    assert server.process.poll() is None, server.tail()
                    time.sleep(0.05)
                time.sleep(2.0)
                assert server.complete(PROMPTS[0]).status == 200
                assert versions_of(server.complete(PROMPTS[0])) == (str(version - 1), str(version - 1))
                proxy.release()
                server.wait_version(version)
                # It is cleared when the poll has ended, which is a moment after the version is live.
                server.wait_status(lambda status: status["error"] is None)
            assert server.control("scrub") == {"version": feed.version, "damaged": [], "unseen_elements": 0}


@contextmanager
def stepping(feed: TrainingFeed, *, every_s: float) -> Iterator[None]:
    """A trainer that keeps publishing."""
    done = threading.Event()

    def train() -> None:
        while not done.wait(every_s):
            feed.step(fraction=0.3, scale=1.0)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        yield
    finally:
        done.set()
        join(thread)


def ask(server: VllmServer) -> Response:
    return server.complete(PROMPTS[0], max_tokens=16, ignore_eos=True, return_token_ids=True)


def ask_until_killed(server: VllmServer, found: list[Response], *, after_s: float) -> None:
    """Ask for completions, and kill the server in the middle of them, so long after the first one."""
    found.append(ask(server))
    killer = threading.Timer(after_s, processes.kill, [server.process])
    killer.start()
    try:
        while True:
            found.append(ask(server))
    except (OSError, HTTPException):
        join(killer)
