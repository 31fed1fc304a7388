"""Real vLLM servers on a CPU that follow a feed: their answers equal those of servers that were started with a version.

Servers with this backend run the same kernels whether they follow or not, so log-probabilities are compared to the bit.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.vllm import (
    PROMPTS,
    TOKEN,
    VOCABULARY,
    Response,
    TrainingFeed,
    VllmServer,
    answers,
    assert_made_by_their_label,
    require_vllm,
    tiny_model,
    training_feed,
    versions_of,
    vllm_server,
)

pytestmark = pytest.mark.e2e


@pytest.fixture(autouse=True, scope="module")
def _installed() -> None:
    require_vllm()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("qwen3", ()),
        ("qwen3-untied", ("--compile",)),
        ("qwen3-moe", ()),
        ("llama", ("--tensor-parallel-size", "2")),
        ("smollm2", ()),
    ],
    ids=["tied", "untied-compiled", "moe", "llama-tp2", "smollm2"],
)
def test_a_follower_answers_as_a_fresh_server_does(name: str, arguments: tuple[str, ...], tmp_path: Path) -> None:
    with training_feed(_model(name), tmp_path) as feed:
        with vllm_server(feed.base, feed.url, tmp_path / "following", *arguments) as server:
            server.wait_version(0)
            before = answers(server)
            for _ in range(3):
                server.wait_version(feed.step())
            assert server.control("scrub") == {"version": 3, "damaged": []}
            live = answers(server)
            assert versions_of(server.complete(PROMPTS[0])) == ("3", "3")
            status = server.control("status")
        assert (status["version"], status["lag"], status["error"]) == (3, 0, None)
        assert before != live
        with vllm_server(feed.restored(tmp_path / "v3"), None, tmp_path / "fresh", *arguments) as fresh:
            assert answers(fresh) == live


def _model(name: str) -> torch.nn.Module:
    """A tiny model, or SmolLM2-135M with its real weights."""
    if name != "smollm2":
        return tiny_model(name)
    from benchmarks.data.gguf_model import load_model

    model: torch.nn.Module = load_model(seed=0).to(torch.bfloat16)
    return model


def test_requests_in_flight_go_on_and_are_labelled_with_what_made_them(tmp_path: Path) -> None:
    with training_feed(tiny_model("qwen3"), tmp_path) as feed:
        with vllm_server(feed.base, feed.url, tmp_path / "following") as server:
            server.wait_version(0)
            cached = server.complete(PROMPTS[2])
            found = _while_stepping(server, feed, steps=6)
            server.wait_version(feed.version)
            again = server.complete(PROMPTS[2])
            assert [response.status for response in found] == [200] * len(found)
            assert {len(response.body["choices"][0]["logprobs"]["tokens"]) for response in found} == {48}
            spans = [versions_of(response) for response in found]
            assert any(first != last for first, last in spans), "no request was in flight at a switch"
            assert any(first == last for first, last in spans)
            assert_made_by_their_label(found, feed, tmp_path)
        assert cached.body["choices"][0]["logprobs"] != again.body["choices"][0]["logprobs"]
        with vllm_server(feed.restored(tmp_path / "last"), None, tmp_path / "fresh") as fresh:
            # The prompt was in the prefix cache, computed with older weights.
            assert fresh.complete(PROMPTS[2]).body["choices"] == again.body["choices"]


def _while_stepping(server: VllmServer, feed: TrainingFeed, *, steps: int) -> list[Response]:
    """Responses to requests that two clients send without a break while versions are published."""
    done = threading.Event()
    found: list[Response] = []

    def ask(seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        while not done.is_set():
            prompt = torch.randint(2, VOCABULARY, (6,), generator=random).tolist()
            found.append(server.complete(prompt, max_tokens=48, ignore_eos=True, return_token_ids=True))

    with ThreadPoolExecutor(2) as clients:
        asked = [clients.submit(ask, seed) for seed in range(2)]
        try:
            for _ in range(steps):
                server.wait_version(feed.step(fraction=0.3, scale=1.0))
        finally:
            done.set()
        for request in asked:
            request.result()
    return found


def test_control_needs_the_token_and_names_what_is_wrong(tmp_path: Path) -> None:
    other = tmp_path / "other"
    with (
        training_feed(tiny_model("qwen3"), tmp_path / "ours") as feed,
        training_feed(tiny_model("qwen3", num_hidden_layers=3), other) as wrong,
        vllm_server(feed.base, feed.url, tmp_path / "pushed", DELTASYNC_WAY="push") as server,
    ):
        for token in (None, "wrong"):
            for path in ("status", "advance", "nothing-here"):
                answer = server.request(f"/deltasync/{path}", None if path == "status" else {}, token=token)
                assert (answer.status, answer.body) == (401, {"error": {"kind": "unauthorized"}})
        assert server.control("status")["version"] is None
        assert versions_of(server.complete(PROMPTS[0])) == ("none", "none")
        feed.step()
        assert server.control("advance", to=0)["version"] == 0
        assert server.control("advance")["version"] == 1
        unknown = server.request("/deltasync/advance", {"to": 9}, token=TOKEN)
        assert unknown.status == 404
        assert "0 to 1" in unknown.body["error"]["message"]
        assert server.control("pin", version=0)["pinned"] == 0
        assert server.control("advance")["version"] == 0
        assert server.control("pin", version=None)["pinned"] is None
        assert versions_of(server.complete(PROMPTS[0])) == ("0", "0")
        with vllm_server(feed.base, wrong.url, tmp_path / "refused", DELTASYNC_WAY="push") as refusing:
            before = refusing.complete(PROMPTS[0]).body["choices"]
            refused = refusing.request("/deltasync/advance", {}, token=TOKEN)
            assert refused.status == 409
            assert "model.layers.2." in refused.body["error"]["message"]
            assert refusing.complete(PROMPTS[0]).body["choices"] == before
