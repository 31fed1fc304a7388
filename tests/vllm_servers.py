"""Real vLLM servers on a CPU, in their own virtual environment, each on a free port."""

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.servers import free_port

ROOT = Path(__file__).parent.parent
PYTHON = Path(os.environ.get("DELTASYNC_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
TOKEN = "a token for tests"
CORE = str(int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % (os.cpu_count() or 1))
"""What a server computes on: tests that run side by side take a core each."""

_UP_WITHIN_S = 600.0
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

    def request(self, path: str, body: Any = None, *, token: str | None = None, timeout_s: float = 120.0) -> Response:
        """A GET, or a POST where there is a body."""
        headers = {"content-type": "application/json"}
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

    def complete(self, prompt: Sequence[int], *, timeout_s: float = 120.0, **options: Any) -> Response:
        """Greedy completion with log-probabilities."""
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": 8,
            "temperature": 0,
            "logprobs": 5,
            **options,
        }
        return self.request("/v1/completions", body, timeout_s=timeout_s)

    def wait_version(self, version: int, *, within_s: float = 120.0) -> dict[str, Any]:
        """The status once this version, or a later one, is live."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            status: dict[str, Any] = self.control("status")
            if status["version"] is not None and status["version"] >= version:
                return status
            time.sleep(0.05)
        raise AssertionError(f"version {version} did not get live: {self.control('status')}\n{self.tail()}")

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-60:])


def require_vllm() -> None:
    """Skip where vLLM is not installed; fail in CI."""
    if PYTHON.exists():
        return
    told = f"no vLLM at {PYTHON}: `make test-vllm` installs it"
    if os.environ.get("CI"):
        pytest.fail(told)
    pytest.skip(told)


@contextmanager
def vllm_server(
    model: Path, feed: str | None, folder: Path, *arguments: str, **environment: str
) -> Iterator[VllmServer]:
    """A server that is up; without a feed it has the backend but follows nothing."""
    server = start_vllm(model, feed, folder, *arguments, **environment)
    try:
        wait_up(server)
        yield server
    finally:
        stop(server.process)


def start_vllm(model: Path, feed: str | None, folder: Path, *arguments: str, **environment: str) -> VllmServer:
    """Start a server of a checkpoint folder, and do not wait for it. `--compile` is ours; without it nothing is."""
    folder.mkdir(parents=True, exist_ok=True)
    port, log = free_port(), folder / "server.log"
    env = {**os.environ, **_ENVIRONMENT, "VLLM_PLUGINS": "deltasync", "DELTASYNC_TOKEN": TOKEN, **environment}
    if feed is not None:
        env["DELTASYNC_FEED"] = feed
    if "--tensor-parallel-size" in arguments:
        env["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--max-model-len", "256"]
    command += ["--weight-transfer-config", '{"backend": "deltasync"}']
    command += [argument for argument in arguments if argument != "--compile"]
    if "--compile" not in arguments:
        command.append("--enforce-eager")
        # vLLM still compiles one small function at its first answer, which takes seconds.
        env["TORCH_COMPILE_DISABLE"] = "1"
    with log.open("ab") as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True)
    return VllmServer(f"http://127.0.0.1:{port}", str(model), process, log)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server and all that it started, gently first."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
    kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a server and all that it started, at once."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


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
