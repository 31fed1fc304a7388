"""A vLLM server that follows a feed: how long it is held up, and by what.

Needs vLLM in an environment of its own; `make bench-replica` sets it up. The model has the shape of Qwen3-0.6B and
random weights; a version changes 1 % of its elements by one unit in the last place.
"""

import json
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, get_args

import torch

from benchmarks.replica_start import measure_starts
from benchmarks.report import Row, say
from benchmarks.sections import Section, at_least, at_most, run_sections
from deltasync.torch.publisher import Publisher
from deltasync.vllm.settings import CachePolicy
from tests.support.vllm import PYTHON, ROOT, VllmServer, save, tiny_model, vllm_server

QWEN3_06B = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "initializer_range": 0.02,
}
EXPERTS_06B = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "moe_intermediate_size": 768,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "initializer_range": 0.02,
}
"""As many weights as Qwen3-0.6B has, nearly all of them in stacked experts."""
PROMPT = list(range(2, 34))
LONG_PROMPT = list(range(2, 258))
STREAMS = 4
_WINDOW_S = 4.0
"""Seconds before a switch, and around it, in which tokens are counted."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much of everything."""

    sizes: dict[str, Any]
    experts: dict[str, Any]
    rounds: int
    versions: int
    idle_s: float
    starts: int


@dataclass(frozen=True, slots=True)
class Feed:
    """A feed that grows by hand, and the checkpoint of its first version."""

    model: torch.nn.Module
    base: Path
    url: str
    publisher: Publisher
    random: torch.Generator

    def step(self) -> int:
        """Change 1 % of the elements and publish."""
        change(self.model, self.random)
        return self.publisher.publish(self.model).wait().version


def main() -> None:
    """Run from the command line."""
    run_sections(
        "replica",
        __doc__ or "",
        {
            "scatter": scatter_section,
            "experts": experts_section,
            "server": server_section,
            "caches": caches_section,
            "starts": starts_section,
        },
        full=Plan(QWEN3_06B, EXPERTS_06B, rounds=7, versions=6, idle_s=15.0, starts=3),
        quick=Plan({}, {}, rounds=2, versions=3, idle_s=3.0, starts=1),
    )


def change(model: torch.nn.Module, random: torch.Generator) -> None:
    """One unit in the last place, for 1 % of the elements of each parameter."""
    with torch.no_grad():
        for parameter in model.parameters():
            bits = parameter.view(-1).view(torch.int16)
            chosen = torch.randint(0, bits.numel(), (max(1, bits.numel() // 100),), generator=random).unique()  # type: ignore[no-untyped-call]
            bits[chosen] += 1


def scatter_section(plan: Plan) -> Section:
    """Changed elements into a model in memory: our scatter, vLLM's sparse loader, a whole reload."""
    return _scatter("qwen3", plan.sizes, plan.rounds)


def experts_section(plan: Plan) -> Section:
    """The same for stacked experts, which vLLM fuses, transposes and packs while it loads them."""
    return _scatter("qwen3-moe", plan.experts, plan.rounds)


def _scatter(name: str, sizes: dict[str, Any], rounds: int) -> Section:
    say(f"{name}: making two checkpoints")
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(name, **sizes)
        old = save(model, Path(folder) / "old")
        change(model, torch.Generator().manual_seed(1))
        new = save(model, Path(folder) / "new")
        del model
        command = [str(PYTHON), "-m", "benchmarks.replica_scatter", str(old), str(new), "--rounds", str(rounds)]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(run.stderr[-2000:])
    found = json.loads(run.stdout.splitlines()[-1])
    seconds, exact = found["seconds"], found["exact"]
    rows: list[Row] = [
        {"way": way, "ms": 1000 * s, "times the scatter": s / seconds["scatter"], "exact": exact.get(way, True)}
        for way, s in seconds.items()
    ]
    rows.append({"way": "map (once)", "ms": 1000 * found["describe_s"], "times the scatter": None, "exact": True})
    rows.append({"way": "stage (beside)", "ms": 1000 * found["stage_s"], "times the scatter": None, "exact": True})
    memory: list[Row] = [
        {
            "model MB": found["model_bytes"] / 1e6,
            "peak while the map is made MB": found["describe_bytes"] / 1e6,
            "/ model": found["describe_bytes"] / found["model_bytes"],
            "map as JSON MB": found["map_bytes"] / 1e6,
        }
    ]
    return Section(
        {
            f"{name}, into the model: {found['changed']:,} of {found['elements']:,} elements": rows,
            f"{name}: memory of the map": memory,
        },
        [
            at_least(f"{name}: {way} / scatter", seconds[way] / seconds["scatter"], 8.0)
            for way in ("native sparse loader", "full reload")
        ],
    )


def starts_section(plan: Plan) -> Section:
    """Servers that start with a checkpoint, and from the feed alone."""
    return measure_starts(plan.sizes, rounds=plan.starts)


def server_section(plan: Plan) -> Section:
    """Pauses as a client sees them, and generation while a version is staged."""
    with tempfile.TemporaryDirectory() as folder, _feed(plan, Path(folder)) as feed:
        say("server: starting")
        with vllm_server(feed.base, feed.url, Path(folder) / "server") as server:
            server.wait_version(0)
            pauses = _pauses(server, feed, plan)
            idle, staging = _rates(server, plan)
    rows: list[Row] = [
        {
            "version": moved["version"],
            "gap between tokens ms": 1000 * gap,
            "usual gap ms": 1000 * usual,
            "pause ms": 1000 * moved["seconds"]["pause"],
            "stage ms": 1000 * moved["seconds"]["stage"],
            "decode ms": 1000 * moved["seconds"]["decode"],
            "fetch ms": 1000 * moved["seconds"]["fetch"],
        }
        for moved, gap, usual in pauses
    ]
    rates: list[Row] = [
        {"while": "idle", "tokens per second": idle},
        {"while": "an anchor is fetched, decoded and staged", "tokens per second": staging},
    ]
    return Section(
        {"switches of a server that generates": rows, "generation on one core": rates},
        [at_least("tokens per second while staging / idle", staging / idle, 0.9)],
    )


def caches_section(plan: Plan) -> Section:
    """For each cache policy: the gap that clients see at a switch, and their tokens per second around it."""
    found = {policy: _switches(policy, plan) for policy in get_args(CachePolicy)}
    rows: list[Row] = [
        {
            "caches": policy,
            "gap at a switch ms": 1000 * median(switch.gap_s for switch in switches),
            "usual gap ms": 1000 * median(switch.usual_s for switch in switches),
            "times the usual gap": median(switch.gap_s / switch.usual_s for switch in switches),
            "tokens per second around it / before it": median(switch.rate_ratio for switch in switches),
            "pause ms": 1000 * median(switch.pause_s for switch in switches),
        }
        for policy, switches in found.items()
    ]
    gap_s = {policy: median(switch.gap_s for switch in switches) for policy, switches in found.items()}
    title = f"{STREAMS} streams with prompts of {len(LONG_PROMPT)} tokens, {plan.versions} switches"
    return Section({title: rows}, [at_most("gap of kept caches / cleared ones", gap_s["keep"] / gap_s["clear"], 1.0)])


@dataclass(frozen=True, slots=True)
class _Switch:
    """What the clients of a server see at one switch."""

    gap_s: float
    usual_s: float
    rate_ratio: float
    pause_s: float


def _switches(policy: str, plan: Plan) -> list[_Switch]:
    with tempfile.TemporaryDirectory() as folder, _feed(plan, Path(folder)) as feed:
        say(f"caches: starting a server that is to {policy} them")
        options = ("--max-model-len", "512")
        with vllm_server(feed.base, feed.url, Path(folder) / "server", *options, DELTASYNC_CACHE=policy) as server:
            server.wait_version(0)
            switches = []
            for _ in range(plan.versions):
                switches.append(_switch(server, feed))
                say(f"caches: {policy}, gap {switches[-1].gap_s:.3f} s, usually {switches[-1].usual_s:.3f} s")
            return switches


def _switch(server: VllmServer, feed: Feed) -> _Switch:
    """One switch while several streams run. The median of their longest gaps counts."""
    with ExitStack() as held:
        streams = [held.enter_context(_Stream(server, [*LONG_PROMPT, 2 + i])) for i in range(STREAMS)]
        for stream in streams:
            stream.wait(20)
        begun_s = time.perf_counter()
        time.sleep(_WINDOW_S)
        change_s = time.perf_counter()
        moved = server.wait_version(feed.step())["last"]
        live_s = time.perf_counter()
        # A gap ends with a token: with cleared caches the next one may take longer than the window.
        for stream, tokens in [(stream, len(stream.times)) for stream in streams]:
            stream.wait(tokens + 2)
        time.sleep(max(0.0, live_s + _WINDOW_S / 2 - time.perf_counter()))
        end_s = time.perf_counter()
    before = [_gaps(stream, begun_s, change_s) for stream in streams]
    around = [_gaps(stream, change_s, end_s) for stream in streams]
    rate = sum(map(len, before)) / (change_s - begun_s)
    window = live_s - _WINDOW_S / 2, live_s + _WINDOW_S / 2
    return _Switch(
        gap_s=median(max(gaps) for gaps in around),
        # Tokens arrive in bursts where the machine is busy, so that a median would say little.
        usual_s=STREAMS / rate,
        rate_ratio=sum(len(_gaps(stream, *window)) for stream in streams) / _WINDOW_S / rate,
        pause_s=moved["seconds"]["pause"],
    )


def _gaps(stream: "_Stream", begin_s: float, end_s: float) -> list[float]:
    """Seconds before each token that came in this time."""
    pairs = zip(stream.times, stream.times[1:], strict=False)
    return [after - before for before, after in pairs if begin_s <= after <= end_s]


@contextmanager
def _feed(plan: Plan, folder: Path) -> Iterator[Feed]:
    model = tiny_model("qwen3", **plan.sizes)
    base = save(model, folder / "base")
    url = (folder / "feed").as_uri()
    with Publisher(url) as publisher:
        publisher.publish(model).wait()
        yield Feed(model, base, url, publisher, torch.Generator().manual_seed(1))


def _pauses(server: VllmServer, feed: Feed, plan: Plan) -> list[tuple[dict[str, Any], float, float]]:
    """For each version: the move, the longest gap between two tokens around it, and the median gap."""
    found = []
    for _ in range(plan.versions):
        with _Stream(server) as stream:
            stream.wait(5)
            moved = server.wait_version(feed.step())["last"]
            stream.wait(len(stream.times) + 3)
        gaps = [after - before for before, after in zip(stream.times, stream.times[1:], strict=False)]
        found.append((moved, max(gaps), sorted(gaps)[len(gaps) // 2]))
        say(f"server: version {moved['version']}, gap {max(gaps):.3f} s, pause {moved['seconds']['pause']:.3f} s")
    return found


def _rates(server: VllmServer, plan: Plan) -> tuple[float, float]:
    """Tokens per second of one stream: left alone, and while a version is brought back from the anchor."""
    with _Stream(server) as stream:
        stream.wait(3)
        begun, first = time.perf_counter(), len(stream.times)
        time.sleep(plan.idle_s)
        idle = (len(stream.times) - first) / (time.perf_counter() - begun)
    with _Stream(server) as stream:
        stream.wait(3)
        begun = time.perf_counter()
        server.control("pin", version=0)
        while server.control("status")["version"] != 0:
            time.sleep(0.1)
        moved = server.control("status")["last"]["seconds"]
        # The switch itself is measured above: what counts here is the time before it.
        end = time.perf_counter() - moved["commit"]
        during = [at for at in stream.times if begun <= at <= end]
    say(f"server: {len(during)} tokens in {end - begun:.1f} s of staging")
    return idle, len(during) / (end - begun)


class _Stream:
    """Requests, one after the other, that stream tokens until this is left; `times` are when they came."""

    def __init__(self, server: VllmServer, prompt: list[int] = PROMPT) -> None:
        self._server = server
        self._prompt = prompt
        self._is_done = False
        self.times: list[float] = []
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> "_Stream":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_done = True
        self._thread.join()

    def wait(self, tokens: int) -> None:
        """Until there are this many tokens."""
        while len(self.times) < tokens:
            if not self._thread.is_alive():
                raise RuntimeError(f"the stream ended after {len(self.times)} tokens")
            time.sleep(0.01)

    def _read(self) -> None:
        asked = {"model": self._server.model, "prompt": self._prompt, "max_tokens": 200}
        body = json.dumps({**asked, "ignore_eos": True, "stream": True, "temperature": 0}).encode()
        request = urllib.request.Request(
            f"{self._server.url}/v1/completions", body, {"content-type": "application/json"}
        )
        while not self._is_done:
            with urllib.request.urlopen(request, timeout=600) as response:
                for line in response:
                    if self._is_done:
                        return
                    if line.startswith(b"data: {"):
                        self.times.append(time.perf_counter())


if __name__ == "__main__":
    main()
