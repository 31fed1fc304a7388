"""Real vLLM servers on a CPU that receive versions: their answers equal those of servers that were started with one.

Servers with this backend run the same kernels whether they follow or not, so log-probabilities are compared to the bit.
A server takes half a minute to start, most of which goes into imports. So a server that moves only when it is asked to
(`DELTASYNC_WAY=push`) is its own reference: it is started with the newest version's checkpoint, loaded by vLLM itself,
goes back to version 0, and comes to the newest version again through deltas.
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
        ("qwen3-untied", ("--compile",)),
        ("qwen3-moe", ()),
        ("llama", ("--tensor-parallel-size", "2")),
        ("smollm2", ()),
    ],
    ids=["untied-compiled", "moe", "llama-tp2", "smollm2"],
)
def test_deltas_give_the_answers_of_a_fresh_server(name: str, arguments: tuple[str, ...], tmp_path: Path) -> None:
    with training_feed(_model(name), tmp_path) as feed:
        for _ in range(3):
            feed.step()
        newest = feed.restored(tmp_path / "v3")
        with vllm_server(newest, feed.url, tmp_path / "pushed", *arguments, DELTASYNC_WAY="push") as server:
            require_answers_of_a_fresh_server(server)


def require_answers_of_a_fresh_server(server: VllmServer) -> None:
    """`server` was started with version 3, has not moved yet, and moves only when it is asked to."""
    assert server.control("status")["version"] is None
    fresh = answers(server)
    for version in range(4):
        assert server.control("advance", to=version)["version"] == version
        if version == 0:
            assert answers(server) != fresh
    assert server.control("scrub") == {"version": 3, "damaged": []}
    assert answers(server) == fresh
    assert versions_of(server.complete(PROMPTS[0])) == ("3", "3")
    status = server.control("status")
    assert (status["version"], status["lag"], status["error"]) == (3, 0, None)


def _model(name: str) -> torch.nn.Module:
    """A tiny model, or SmolLM2-135M with its real weights."""
    if name != "smollm2":
        return tiny_model(name)
    from benchmarks.data.gguf_model import load_model

    model: torch.nn.Module = load_model(seed=0).to(torch.bfloat16)
    return model


def test_requests_in_flight_continue_and_are_labelled_with_the_versions_that_made_them(tmp_path: Path) -> None:
    with (
        training_feed(tiny_model("qwen3"), tmp_path) as feed,
        vllm_server(feed.base, feed.url, tmp_path / "following") as server,
    ):
        server.wait_version(0)
        # These prompts are in the prefix cache from now on, computed with the weights of version 0.
        first = answers(server)
        responses = _while_stepping(server, feed, steps=6)
        server.wait_version(feed.version)
        assert [response.status for response in responses] == [200] * len(responses)
        assert {len(response.body["choices"][0]["logprobs"]["tokens"]) for response in responses} == {48}
        labels = [versions_of(response) for response in responses]
        assert any(first != last for first, last in labels), "no request was in flight at a switch"
        assert any(first == last for first, last in labels)
        assert_made_by_their_label(responses, feed, tmp_path)
        assert answers(server) != first
        server.wait_version(feed.back_to_base())
        assert answers(server) == first
        assert server.control("scrub") == {"version": feed.version, "damaged": []}


def _while_stepping(server: VllmServer, feed: TrainingFeed, *, steps: int) -> list[Response]:
    """Responses to requests that two clients send without a break while versions are published."""
    done = threading.Event()
    responses: list[Response] = []

    def ask(seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        while not done.is_set():
            prompt = torch.randint(2, VOCABULARY, (6,), generator=random).tolist()
            responses.append(server.complete(prompt, max_tokens=48, ignore_eos=True, return_token_ids=True))

    with ThreadPoolExecutor(2) as clients:
        asked = [clients.submit(ask, seed) for seed in range(2)]
        try:
            for _ in range(steps):
                server.wait_version(feed.step(fraction=0.3, scale=1.0))
        finally:
            done.set()
        for request in asked:
            request.result()
    # One more, while nothing switches: where switches follow each other quickly, no other has a single version.
    responses.append(server.complete(PROMPTS[1], max_tokens=48, ignore_eos=True, return_token_ids=True))
    return responses


def test_control_routes_need_the_token_and_name_what_is_wrong(tmp_path: Path) -> None:
    """With a tied model, which must give the answers of a fresh server, too."""
    with training_feed(tiny_model("qwen3"), tmp_path) as feed:
        for _ in range(3):
            feed.step()
        newest = feed.restored(tmp_path / "v3")
        with vllm_server(newest, feed.url, tmp_path / "pushed", DELTASYNC_WAY="push") as server:
            for token in (None, "wrong"):
                for path in ("status", "advance", "nothing-here"):
                    answer = server.request(f"/deltasync/{path}", None if path == "status" else {}, token=token)
                    assert (answer.status, answer.body) == (401, {"error": {"kind": "unauthorized"}})
            assert versions_of(server.complete(PROMPTS[0])) == ("none", "none")
            require_answers_of_a_fresh_server(server)
            unknown = server.request("/deltasync/advance", {"to": 9}, token=TOKEN)
            assert unknown.status == 404
            assert "0 to 3" in unknown.body["error"]["message"]
            assert server.control("pin", version=0)["pinned"] == 0
            assert server.control("advance")["version"] == 0
            assert server.control("pin", version=None)["pinned"] is None
            assert versions_of(server.complete(PROMPTS[0])) == ("0", "0")


def test_a_feed_of_another_model_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    with (
        training_feed(tiny_model("qwen3"), tmp_path / "ours") as feed,
        training_feed(tiny_model("qwen3", num_hidden_layers=3), tmp_path / "other") as wrong,
        vllm_server(feed.base, wrong.url, tmp_path / "refused", DELTASYNC_WAY="push") as server,
    ):
        before = answers(server)
        refused = server.request("/deltasync/advance", {}, token=TOKEN)
        assert refused.status == 409
        assert "model.layers.2." in refused.body["error"]["message"]
        assert answers(server) == before
