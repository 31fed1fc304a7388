"""vLLM servers for end-to-end tests: tiny models, a feed to follow, and checks of their answers."""

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from deltasync.checkpoint import companion_files, open_checkpoint
from deltasync.store import open_store
from deltasync.torch.publisher import Publisher
from deltasync.trainer.publisher import PublisherOptions
from deltasync.upkeep.restore import restore

from . import LONG_S, processes
from .servers import Server, free_port, missing

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("DELTASYNC_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
TOKEN = "a token for tests"
CORE = str(int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % (os.cpu_count() or 1))
"""What a server computes on: tests that run side by side take a core each."""

_UP_WITHIN_S = 2 * LONG_S
_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": CORE,
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True)
class Response:
    """An answer over HTTP, of whatever status."""

    status: int
    headers: dict[str, str]
    body: Any


@dataclass(slots=True)
class VllmServer:
    """A server that is up."""

    url: str
    model: str
    process: subprocess.Popen[bytes]
    log: Path
    token: str | None = field(default=TOKEN)

    def request(
        self,
        path: str,
        body: Any = None,
        *,
        token: str | None = None,
        timeout_s: float = LONG_S,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """A GET, or a POST where there is a body."""
        headers = {"content-type": "application/json", **({} if headers is None else headers)}
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=timeout_s) as r:
                return Response(r.status, {k.lower(): v for k, v in r.headers.items()}, json.loads(r.read() or b"null"))
        except urllib.error.HTTPError as error:
            return Response(error.code, dict(error.headers.items()), json.loads(error.read() or b"null"))

    def control(self, verb: str, **fields: Any) -> Any:
        """A control route with the right token, which must succeed."""
        body = None if verb == "status" else fields
        answer = self.request(f"/deltasync/{verb}", body, token=self.token)
        assert answer.status == 200, answer
        return answer.body

    def complete(
        self,
        prompt: Sequence[int] | Sequence[Sequence[int]],
        *,
        timeout_s: float = LONG_S,
        headers: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Response:
        """Greedy completion with log-probabilities."""
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": 8,
            "temperature": 0,
            "logprobs": 5,
            **options,
        }
        return self.request("/v1/completions", body, timeout_s=timeout_s, headers=headers)

    @contextmanager
    def stream(self, prompt: Sequence[int], **options: Any) -> Iterator[Iterator[str]]:
        """The lines of a greedy completion that is streamed. It is in flight when the first one is read."""
        body = {"model": self.model, "prompt": list(prompt), "temperature": 0, "stream": True, **options}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=LONG_S) as lines:
            yield (line.decode().rstrip("\n") for line in lines)

    def metric(self, name: str) -> float:
        """The value of a metric of vLLM's, over all of its labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=LONG_S) as answer:
            lines = [line.decode() for line in answer]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    def wait_status(self, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The status once it is as wanted. Other threads of the server change it at any time."""
        deadline = time.monotonic() + LONG_S
        while not is_so(status := self.control("status")):
            assert time.monotonic() < deadline, f"{status}\n{self.tail()}"
            time.sleep(0.05)
        return status

    def wait_version(self, version: int) -> dict[str, Any]:
        """The status once this version, or a later one, is live."""
        return self.wait_status(lambda status: status["version"] is not None and status["version"] >= version)

    def wait_ready(self) -> dict[str, Any]:
        """The status once the server is ready: the poll that confirms a version ends after it is live."""
        deadline = time.monotonic() + LONG_S
        while (answer := self.request("/deltasync/ready")).status != 200:
            assert time.monotonic() < deadline, f"{answer}: {self.control('status')}\n{self.tail()}"
            time.sleep(0.05)
        status: dict[str, Any] = self.control("status")
        return status

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-60:])


def require_vllm() -> None:
    """Skip where vLLM is not installed; fail in CI."""
    if not PYTHON.exists():
        missing(f"there is no vLLM at {PYTHON} (`make test-e2e` installs it)")


@contextmanager
def vllm_server(
    model: Path | None, feed: str | None, folder: Path, *arguments: str, **environment: str
) -> Iterator[VllmServer]:
    """A server that is up; without a feed it has the backend but follows nothing. See `start_vllm`."""
    server = start_vllm(model, feed, folder, *arguments, **environment)
    try:
        wait_up(server)
        yield server
    finally:
        processes.stop(server.process)


def start_vllm(model: Path | None, feed: str | None, folder: Path, *arguments: str, **environment: str) -> VllmServer:
    """Start a server of a checkpoint folder, and do not wait for it. `--compile` is ours; without it nothing is.

    Without a folder, `deltasync serve` starts the server, with the model of the feed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port, log = free_port(), folder / "server.log"
    env = {**os.environ, **_ENVIRONMENT, "VLLM_PLUGINS": "deltasync", "DELTASYNC_TOKEN": TOKEN, **environment}
    if feed is not None:
        env["DELTASYNC_FEED"] = feed
    if "--tensor-parallel-size" in arguments:
        env["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    if model is None:
        name, command = Path(feed or "").name, [str(PYTHON), "-m", "deltasync", "serve", "--"]
    else:
        name, command = str(model), [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--weight-transfer-config", '{"backend": "deltasync"}']
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--max-model-len", "256"]
    command += [argument for argument in arguments if argument != "--compile"]
    if "--compile" not in arguments:
        command.append("--enforce-eager")
        # vLLM still compiles one small function at its first answer, which takes seconds.
        env["TORCH_COMPILE_DISABLE"] = "1"
    with log.open("ab") as output:
        process = processes.start(command, env=env, cwd=folder, stdout=output, stderr=output)
    return VllmServer(f"http://127.0.0.1:{port}", name, process, log)


def wait_up(server: VllmServer) -> float:
    """Wait until a server answers; the seconds that this took."""
    begun = time.monotonic()
    while time.monotonic() < begun + _UP_WITHIN_S:
        if server.process.poll() is not None:
            raise AssertionError(f"the server ended with {server.process.returncode}:\n{server.tail()}")
        try:
            if server.request("/v1/models", timeout_s=5).status == 200:
                return time.monotonic() - begun
        except (OSError, urllib.error.URLError):
            time.sleep(0.2)
    raise AssertionError(f"the server is not up after {_UP_WITHIN_S:g} s:\n{server.tail()}")


VOCABULARY = 320
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    # Untrained weights at the usual scale give nearly flat answers, which hide mistakes.
    "initializer_range": 0.15,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}

NAMES = ("qwen3", "qwen3-untied", "qwen3-moe", "llama")


def tiny_model(name: str, *, seed: int = 0, **sizes: Any) -> PreTrainedModel:
    """A model with random bf16 weights; `sizes` replace fields of its config."""
    torch.manual_seed(seed)
    fields = {**_SIZES, **sizes}
    model: PreTrainedModel
    if name == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**fields, tie_word_embeddings=True))
    elif name == "qwen3-untied":
        model = Qwen3ForCausalLM(Qwen3Config(**fields, tie_word_embeddings=False))
    elif name == "qwen3-moe":
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**fields, **_EXPERTS, **sizes}, tie_word_embeddings=False))
    elif name == "llama":
        model = LlamaForCausalLM(LlamaConfig(**fields, tie_word_embeddings=False))
    else:
        raise ValueError(name)
    return model.to(torch.bfloat16)


def save(model: PreTrainedModel, folder: Path) -> Path:
    """The model and a tokenizer of one token for each word `w0`, `w1`, …"""
    model.save_pretrained(folder)
    words = {"<unk>": 0, "</s>": 1, **{f"w{i}": i for i in range(2, model.config.vocab_size)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>").save_pretrained(folder)
    return folder


class TrainingFeed:
    """`base` is the checkpoint of version 0. Each step changes answers visibly."""

    def __init__(self, model: torch.nn.Module, base: Path, publisher: Publisher, url: str) -> None:
        self.model = model
        self.base = base
        self.url = url
        self._publisher = publisher
        self._random = torch.Generator().manual_seed(7)
        self._begun = [(p.detach().float().mean(), p.detach().float().std()) for p in model.parameters()]
        self._base_weights = [p.detach().clone() for p in model.parameters()]
        self._publisher.publish(model, step=0).wait(LONG_S)
        self.version = 0

    def step(self, *, fraction: float = 0.05, scale: float = 0.1) -> int:
        """Move some elements of every parameter and publish; the version. No number of steps lets them grow."""
        with torch.no_grad():
            for parameter, (mean, std) in zip(self.model.parameters(), self._begun, strict=True):
                chosen = torch.rand(parameter.shape, generator=self._random) < fraction
                drawn = mean + std * torch.randn(parameter.shape, generator=self._random)
                parameter[chosen] = parameter.float().lerp(drawn, scale).to(parameter.dtype)[chosen]
        self.version = self._publisher.publish(self.model).wait(LONG_S).version
        return self.version

    def back_to_base(self) -> int:
        """Publish the weights of version 0 again, as a new version; its number."""
        with torch.no_grad():
            for parameter, weights in zip(self.model.parameters(), self._base_weights, strict=True):
                parameter.copy_(weights)
        self.version = self._publisher.publish(self.model).wait(LONG_S).version
        return self.version

    def restored(self, folder: Path, *, version: int | None = None) -> Path:
        """The checkpoint of a version, for a server that never followed anything."""
        store = open_store(self.url)
        restore(store, folder, version=version)
        store.close()
        return folder


@contextmanager
def training_feed(model: torch.nn.Module, folder: Path, server: Server | None = None) -> Iterator[TrainingFeed]:
    """A new feed, in `folder` or on a server."""
    base = save(model, folder / "base")
    url = (folder / "feed").as_uri() if server is None else server.url("feed")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in () if server is None else server.environment.items():
            patch.setenv(name, value)
        with Publisher(url, options=PublisherOptions(files=companion_files(open_checkpoint(base)))) as publisher:
            yield TrainingFeed(model, base, publisher, url)


PROMPTS = [[5, 17, 99, 240, 33, 8], [300, 2, 2, 2, 51], list(range(10, 60))]

_ANSWERS_OF_A_VERSION = 4


def answers(server: VllmServer) -> list[Any]:
    """What a server says, with all its log-probabilities."""
    found = [server.complete(prompt, prompt_logprobs=3) for prompt in PROMPTS]
    assert all(answer.status == 200 for answer in found), found
    choices = [answer.body["choices"][0] for answer in found]
    return [(choice["text"], choice["logprobs"], choice["prompt_logprobs"]) for choice in choices]


@cache
def records_versions() -> bool:
    """Whether the vLLM of the tests records the version that each token was sampled under: since 0.32."""
    code = "from importlib.metadata import version; print(version('vllm_cpu'))"
    release = processes.run([PYTHON, "-c", code], check=True).stdout
    return tuple(map(int, release.split(".")[:2])) >= (0, 32)


def versions_of(response: Response) -> tuple[str, str]:
    """The oldest and the newest version, by the headers."""
    only = response.headers["x-deltasync-version"]
    first, last = (response.headers.get(f"x-deltasync-{which}-version") for which in ("first", "last"))
    assert (first is None) == (last is None)
    return (only, only) if first is None or last is None else (first, last)


def assert_made_by_their_label(found: Sequence[Response], feed: TrainingFeed, folder: Path) -> None:
    """Log-probabilities of answers with one version are those of its weights, by another implementation.

    Neighbouring versions must differ by far more than the two implementations do.
    """
    labelled = [(versions_of(response), response.body["choices"][0]) for response in found if response.status == 200]
    single = [(first, choice) for (first, last), choice in labelled if first == last]
    for version in sorted({version for version, _ in single}):
        # Before its first version a server has the checkpoint that it was started with.
        model = AutoModelForCausalLM.from_pretrained(
            feed.base if version == "none" else feed.restored(folder / f"label-{version}", version=int(version)),
            dtype=torch.bfloat16,
        )
        for choice in [choice for label, choice in single if label == version][:_ANSWERS_OF_A_VERSION]:
            ids = torch.tensor([choice["prompt_token_ids"] + choice["token_ids"]])
            with torch.no_grad():
                expected = model(ids).logits.float().log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
            served = torch.tensor(choice["logprobs"]["token_logprobs"])
            difference = (expected[-len(served) :] - served).abs()
            assert difference.mean() < 0.05, (version, difference)
