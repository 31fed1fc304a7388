"""Real vLLM servers on a CPU that receive versions: their answers equal those of servers that were started with one.

Servers with this backend run the same kernels whether they follow or not, so log-probabilities are compared to the bit.
A server takes half a minute to start, most of which goes into imports. So a server that moves only when it is asked to
(`DELTASYNC_WAY=push`) is its own reference: it is started with the newest version's checkpoint, loaded by vLLM itself,
goes back to version 0, and comes to the newest version again through deltas.
"""

import json
import re
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support import LONG_S, processes
from support.vllm import (
    PROMPTS,
    TOKEN,
    VOCABULARY,
    Response,
    TrainingFeed,
    VllmServer,
    answers,
    assert_made_by_their_label,
    records_versions,
    require_vllm,
    start_vllm,
    tiny_model,
    training_feed,
    versions_of,
    vllm_server,
)

from deltasync.torch.publisher import Publisher
from deltasync.trainer.publisher import PublisherOptions

pytestmark = [pytest.mark.e2e, pytest.mark.long]


@pytest.fixture(autouse=True, scope="module")
def _installed() -> None:
    require_vllm()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("qwen3-untied", ("--compile",)),
        ("llama", ("--tensor-parallel-size", "2")),
        ("smollm2", ()),
    ],
    ids=["untied-compiled", "llama-tp2", "smollm2"],
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
    assert server.control("scrub") == {"version": 3, "damaged": [], "unseen_elements": 0}
    assert answers(server) == fresh
    assert versions_of(server.complete(PROMPTS[0])) == ("3", "3")
    status = server.control("status")
    assert (status["version"], status["lag"], status["error"]) == (3, 0, None)


def _model(name: str) -> torch.nn.Module:
    """A tiny model, or SmolLM2-135M with its real weights."""
    if name != "smollm2":
        return tiny_model(name)
    from smollm2.weights import load_model

    model: torch.nn.Module = load_model(seed=0).to(torch.bfloat16)
    return model


@pytest.mark.every_vllm
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
        assert server.control("scrub") == {"version": feed.version, "damaged": [], "unseen_elements": 0}


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
            request.result(LONG_S)
    # One more, while nothing switches: where switches follow each other quickly, no other has a single version.
    responses.append(server.complete(PROMPTS[1], max_tokens=48, ignore_eos=True, return_token_ids=True))
    return responses


@pytest.mark.every_vllm
def test_control_routes_need_the_token_and_name_what_is_wrong(tmp_path: Path) -> None:
    """With a model of experts, which must give the answers of a fresh server, too."""
    with training_feed(tiny_model("qwen3-moe"), tmp_path) as feed:
        for _ in range(3):
            feed.step()
        newest = feed.restored(tmp_path / "v3")
        with vllm_server(newest, feed.url, tmp_path / "pushed", DELTASYNC_WAY="push") as server:
            for token in (None, "wrong"):
                for path in ("status", "advance", "nothing-here"):
                    answer = server.request(f"/deltasync/{path}", None if path == "status" else {}, token=token)
                    assert (answer.status, answer.body) == (401, {"error": {"kind": "unauthorized"}})
            assert server.request("/deltasync/ready").status == 503
            assert versions_of(server.complete(PROMPTS[0])) == ("none", "none")
            require_answers_of_a_fresh_server(server)
            assert (server.request("/deltasync/ready").status, server.request("/health").status) == (200, 200)
            unknown = server.request("/deltasync/advance", {"to": 9}, token=TOKEN)
            assert unknown.status == 404
            assert "0 to 3" in unknown.body["error"]["message"]
            assert server.control("pin", version=0)["pinned"] == 0
            assert server.control("advance")["version"] == 0
            assert server.control("pin", version=None)["pinned"] is None
            assert versions_of(server.complete(PROMPTS[0])) == ("0", "0")
            require_requested_versions(server)


def require_requested_versions(server: VllmServer) -> None:
    """`server` is at version 0 of 3, and moves only when it is asked to."""
    asked = {"x-deltasync-min-version": "2"}
    refused = server.complete(PROMPTS[0], headers=asked)
    assert (refused.status, refused.body["version"], refused.headers["retry-after"]) == (409, 0, "1")
    assert "at least version 2, but version 0 is live" in refused.body["error"]["message"]
    wrong = server.complete(PROMPTS[0], headers={"x-deltasync-version": "newest"})
    assert (wrong.status, "x-deltasync-version" in wrong.body["error"]["message"]) == (400, True)
    with ThreadPoolExecutor(1) as clients:
        waiting = clients.submit(server.complete, PROMPTS[0], headers={**asked, "x-deltasync-wait-s": "60"})
        assert server.control("advance", to=1)["version"] == 1
        assert server.control("advance", to=2)["version"] == 2
        served = waiting.result(LONG_S)
    assert (served.status, spans_of(served)) == (200, spans("0-7=2"))
    options = {"n": 2, "temperature": 1, "max_tokens": 3, "ignore_eos": True}
    both = server.complete([PROMPTS[0], PROMPTS[1]], headers={"x-deltasync-version": "2"}, **options)
    assert spans_of(both) == spans(";".join(["0-2=2"] * 4))


def spans_of(response: Response) -> str | None:
    return response.headers.get("x-deltasync-versions")


def spans(expected: str) -> str | None:
    """What `spans_of` gives where vLLM records the versions of tokens; None where it does not."""
    return expected if records_versions() else None


PREFIX = [7 + 3 * i % 300 for i in range(100)]
"""Long enough for three blocks of the prefix cache."""

LONG = 600
"""Tokens of a stream that takes seconds."""


@pytest.mark.every_vllm
def test_kept_caches_are_never_read_by_a_later_request(tmp_path: Path) -> None:
    """With one sequence at a time, so that a request waits at the switch while another one is in flight."""
    options = ("--block-size", "32", "--max-num-seqs", "1", "--max-model-len", "1024", "--enable-prompt-tokens-details")
    # A token of this model takes longer than the server needs to pass one on, also on a busy machine.
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "max_position_embeddings": 1024}
    with training_feed(tiny_model("qwen3", **sizes), tmp_path) as feed:
        for _ in range(3):
            feed.step(fraction=0.3, scale=1.0)
        newest = feed.restored(tmp_path / "v3")
        environment = {"DELTASYNC_WAY": "push", "DELTASYNC_CACHE": "keep"}
        with vllm_server(newest, feed.url, tmp_path / "pushed", *options, **environment) as server:
            fresh = server.complete(PREFIX)
            assert cached_tokens(fresh) == 0
            server.control("advance", to=0)
            older = server.complete(PREFIX)
            assert scores(older) != scores(fresh)
            assert cached_tokens(server.complete(PREFIX)) == 96
            require_own_salts(server)

            lines, waiting = over_a_switch(server, to=3)
            comments = [line for line in lines if line.startswith(": ")]
            assert lines[-2 - len(comments) :] == ["", *comments, ""]
            assert comments[0] == ": x-deltasync-last-version: 3"
            versions = rf": x-deltasync-versions: 0-\d+=0,\d+-{LONG - 1}=3"
            assert len(comments) == 1 + records_versions()
            assert all(re.fullmatch(versions, line) for line in comments[1:]), comments
            assert server.metric("vllm:num_preemptions_total") == 0
            # The same prompt waited at the switch, when its blocks of version 0 were in the cache.
            assert spans_of(waiting) == spans("0-7=3")
            assert (cached_tokens(waiting), scores(waiting)) == (0, scores(fresh))
            # What the other request went on to compute after the switch has KV of version 0 in it.
            tokens = [token for line in lines if "token_ids" in line for token in token_ids(line)]
            assert len(tokens) == LONG
            assert cached_tokens(server.complete([*PROMPTS[0], *tokens])) == 0
            assert cached_tokens(server.complete(PREFIX)) == 96

            server.control("advance", to=0)
            back = server.complete(PREFIX)
            assert (cached_tokens(back), scores(back)) == (0, scores(older))
            assert server.control("scrub") == {"version": 0, "damaged": [], "unseen_elements": 0}


def over_a_switch(server: VllmServer, *, to: int) -> tuple[list[str], Response]:
    """The lines of a stream that is in flight at the switch, and the response to a request that waits at it."""
    options = {"max_tokens": LONG, "ignore_eos": True, "return_token_ids": True}
    for _ in range(5):
        with ThreadPoolExecutor(1) as clients, server.stream(PROMPTS[0], **options) as stream:
            first = next(stream)
            waiting = clients.submit(server.complete, PREFIX)
            if is_waiting(server, waiting):
                assert server.control("advance", to=to)["version"] == to
                return [first, *stream], waiting.result(LONG_S)
    raise AssertionError("every stream was over before another request had to wait for it")


def token_ids(line: str) -> list[int]:
    ids: list[int] = json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
    return ids


def is_waiting(server: VllmServer, response: Future[Response]) -> bool:
    """Whether the request of a response is seen to wait in the engine before it is answered."""
    while not response.done():
        if server.metric("vllm:num_requests_waiting"):
            return True
        time.sleep(0.02)
    return False


def require_own_salts(server: VllmServer) -> None:
    """The salts of users still keep their requests apart."""
    found = [cached_tokens(server.complete(PREFIX, cache_salt=salt)) for salt in ("one", "one", "two", "two", "one")]
    assert found == [0, 96, 0, 96, 96]


def cached_tokens(response: Response) -> int:
    details = response.body["usage"].get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


def scores(response: Response) -> tuple[str, dict[str, object]]:
    choice = response.body["choices"][0]
    return choice["text"], choice["logprobs"]


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
        assert refused.body["error"]["message"] in server.control("status")["error"]
        assert server.request("/deltasync/ready").status == 503


def test_a_server_that_follows_a_feed_of_another_model_ends(tmp_path: Path) -> None:
    with (
        training_feed(tiny_model("qwen3"), tmp_path / "ours") as feed,
        training_feed(tiny_model("qwen3", num_hidden_layers=3), tmp_path / "other") as wrong,
    ):
        server = start_vllm(feed.base, wrong.url, tmp_path / "refused")
        try:
            assert server.process.wait(2 * LONG_S) == 3, server.tail()
        finally:
            processes.stop(server.process)
        log = server.log.read_text()
        assert "model.layers.2." in log
        assert "the server ends with exit code 3" in log
        assert "Application shutdown complete" in log, server.tail()


def test_an_adapter_follows_a_feed_of_its_own(tmp_path: Path) -> None:
    """The server has the newest version as an adapter of its own, too: as the reference. Its weights follow as well."""
    states = [_adapter(seed) for seed in range(3)]
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "o_proj"], "bias": "none"}
    options = PublisherOptions(files={"adapter_config.json": json.dumps(config).encode()})
    url, reference = str(tmp_path / "adapter"), tmp_path / "reference"
    with (
        training_feed(tiny_model("llama"), tmp_path / "weights") as feed,
        Publisher(url, options=options) as publisher,
    ):
        for state in states[:2]:
            publisher.publish(state).wait(LONG_S)
        reference.mkdir()
        save_file(states[2], reference / "adapter_model.safetensors")
        (reference / "adapter_config.json").write_text(json.dumps(config))
        arguments = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "3", "--lora-modules", f"ref={reference}")
        environment = {"DELTASYNC_ADAPTERS": f"policy={url}"}
        with vllm_server(feed.base, feed.url, tmp_path / "server", *arguments, **environment) as server:
            _wait_for_adapter(server, 1)
            server.wait_version(0)
            server.wait_ready()
            plain, wanted = (_said(server, model) for model in (server.model, "ref"))
            before = _said(server, "policy")
            assert len({json.dumps(said) for said in (plain, wanted, before)}) == 3
            publisher.publish(states[2]).wait(LONG_S)
            _wait_for_adapter(server, 2)
            # The prompts are in the prefix cache, computed with version 1.
            assert _said(server, "policy") == wanted
            assert _said(server, server.model) == plain
            response = server.complete(PROMPTS[0], model="policy")
            assert response.headers["x-deltasync-adapter-version"] == "2"
            assert "x-deltasync-adapter-version" not in server.complete(PROMPTS[0], model="ref").headers
            feed.step()
            server.wait_version(1)
            assert _said(server, server.model) != plain
            assert server.control("scrub")["damaged"] == []
            assert _said(server, "policy") == _said(server, "ref") != wanted


def _adapter(seed: int) -> dict[str, torch.Tensor]:
    """Large enough to change what the model says."""
    random = torch.Generator().manual_seed(seed)
    shapes = {name: tensor.shape for name, tensor in tiny_model("llama").state_dict().items()}
    adapter = {}
    for name, shape in shapes.items():
        if name.endswith(("q_proj.weight", "o_proj.weight")):
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            adapter[f"{prefix}.lora_A.weight"] = torch.randn(4, shape[1], generator=random)
            adapter[f"{prefix}.lora_B.weight"] = torch.randn(shape[0], 4, generator=random)
    return adapter


def _wait_for_adapter(server: VllmServer, version: int) -> None:
    server.wait_status(lambda status: status["adapters"]["policy"]["version"] == version)


def _said(server: VllmServer, model: str) -> list[Any]:
    return [server.complete(prompt, model=model).body["choices"][0]["logprobs"] for prompt in PROMPTS]
