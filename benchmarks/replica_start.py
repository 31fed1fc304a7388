"""How a vLLM server starts: seconds until it is ready, and the bytes of weights that it fetches and reads.

The feed is on an S3 server on loopback, behind a proxy that counts what it sends.
"""

import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from benchmarks.report import Row, say
from benchmarks.sections import Section, at_most
from deltasync.checkpoint import companion_files, open_checkpoint
from deltasync.torch.publisher import Publisher
from deltasync.trainer.publisher import PublisherOptions
from tests.support.processes import stop
from tests.support.servers import Proxy, proxied, seaweed
from tests.support.vllm import PYTHON, VllmServer, save, start_vllm, tiny_model

CHECKPOINT = "a checkpoint on the disk, then the feed"
RESTORED = "restore to the disk, then the feed"
BARE = "the feed alone"


def measure_starts(sizes: dict[str, int], rounds: int) -> Section:
    """Start servers of one model in three ways, in turn."""
    with tempfile.TemporaryDirectory() as name, _feed(sizes, Path(name)) as (proxy, url, base):
        folder = Path(name)
        weights = open_checkpoint(base).weights.layout.nbytes

        def restored(i: int) -> Path:
            out = folder / f"restored-{i}"
            subprocess.run([str(PYTHON), "-m", "deltasync", "restore", url, "-o", str(out), "--quiet"], check=True)
            return out

        models: dict[str, Callable[[int], Path | None]] = {
            CHECKPOINT: lambda i: base,
            RESTORED: restored,
            BARE: lambda i: None,
        }
        found: dict[str, list[_Start]] = {way: [] for way in models}
        for i in range(rounds):
            for way, model in models.items():
                say(f"start: {way}")
                found[way].append(
                    _start(proxy, url, folder / f"server-{i}-{list(models).index(way)}", partial(model, i))
                )
    best = {way: min(starts, key=lambda start: start.ready_s) for way, starts in found.items()}
    rows: list[Row] = [
        {
            "way": way,
            "up s": start.up_s,
            "ready s": start.ready_s,
            "fetched, times the weights": start.fetched_bytes / weights,
            "read from a checkpoint, times the weights": float(way != BARE),
            "times loaded": start.loads,
        }
        for way, start in best.items()
    ]
    alone, restored_first = best[BARE], best[RESTORED]
    return Section(
        {f"starts of a server with {weights:,} bytes of weights": rows},
        [
            at_most(
                "bytes fetched: the feed alone / restored", alone.fetched_bytes / restored_first.fetched_bytes, 0.51
            ),
            at_most("seconds to ready: the feed alone / restored", alone.ready_s / restored_first.ready_s, 1.0),
            at_most("seconds to ready: the feed alone / a checkpoint", alone.ready_s / best[CHECKPOINT].ready_s, 1.1),
            at_most("loads of the weights, the feed alone", alone.loads, 1),
        ],
    )


@dataclass(frozen=True, slots=True)
class _Start:
    """One start. `loads`: how often all weights were written to the model."""

    up_s: float
    ready_s: float
    fetched_bytes: int
    loads: int


def _start(proxy: Proxy, url: str, folder: Path, model: Callable[[], Path | None]) -> _Start:
    sent, began = proxy.sent_bytes, time.monotonic()
    server = start_vllm(model(), url, folder)
    try:
        up_s = _wait(server, "/v1/models") - began
        ready_s = _wait(server, "/deltasync/ready") - began
        moves = server.control("status")["counts"]["moves"]
    finally:
        stop(server.process)
    return _Start(up_s, ready_s, proxy.sent_bytes - sent, 1 + moves)


def _wait(server: VllmServer, path: str) -> float:
    """The time when a route is first 200."""
    while True:
        if server.process.poll() is not None:
            raise SystemExit(server.tail())
        with suppress(OSError):
            if server.request(path, timeout_s=5).status == 200:
                return time.monotonic()
        time.sleep(0.05)


@contextmanager
def _feed(sizes: dict[str, int], folder: Path) -> Iterator[tuple[Proxy, str, Path]]:
    base = save(tiny_model("qwen3", **sizes), folder / "base")
    options = PublisherOptions(files=companion_files(open_checkpoint(base)))
    with seaweed() as server, proxied(server) as proxy, pytest.MonkeyPatch.context() as patch:
        for name, value in {**server.environment, "AWS_ENDPOINT_URL": proxy.endpoint}.items():
            patch.setenv(name, value)
        url = server.url("feed")
        with Publisher(url, options=options) as publisher:
            publisher.publish(tiny_model("qwen3", **sizes)).wait()
        yield proxy, url, base
