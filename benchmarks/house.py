"""Measure the code itself: its size, its import graph, the modules that one delta crosses, and the threads it starts.

    python -m benchmarks.house [--json]

A tiny model is published to a store in memory and followed by a torch module. What runs between the start of one
`Publisher.publish` and the end of the move to its version, in any thread, is the path of a delta. The same is followed
once more by the target for vLLM, whose engine client and workers are in this process. vLLM is not started.
"""

import argparse
import ast
import asyncio
import json
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import deltasync
from deltasync import Follower
from deltasync.torch import ModuleTarget, Publisher
from deltasync.vllm.labels import Labels
from deltasync.vllm.server import ServerEngine
from deltasync.vllm.target import VllmTarget
from tests.unit.served_model import Workers, changed, tensors

PACKAGE = Path(deltasync.__file__).parent
WARM_UP = 3
"""Versions before the one that is measured: by then every pool of threads exists."""


def module_name(path: Path) -> str:
    """The dotted name of a file of the package."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources() -> dict[str, Path]:
    """All modules of the package, by name."""
    return {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def importers() -> Counter[str]:
    """By module: how many other modules import it."""
    modules = sources()
    counts: Counter[str] = Counter(dict.fromkeys(modules, 0))
    for name, path in modules.items():
        imported = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                imported |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        counts.update((imported & modules.keys()) - {name})
    return counts


class Trace:
    """The modules of the package in which functions are called, and the threads that are started."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.threads: list[str] = []
        self._is_recording = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Watch this thread and every thread that starts in the block; count only while recording."""
        start = threading.Thread.start

        def counted_start(thread: threading.Thread) -> None:
            if self._is_recording:
                self.threads.append(thread.name)
            start(thread)

        threading.Thread.start = counted_start  # type: ignore[assignment,method-assign]
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            threading.Thread.start = start  # type: ignore[method-assign]

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording = False

    def _profile(self, frame: FrameType, event: str, _argument: object) -> None:
        if self._is_recording and event == "call":
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(PACKAGE):
                self.modules.add(module_name(path))


def measure_delta() -> dict[str, Any]:
    """Publish and follow a few versions; trace the last one."""
    model, served = (torch.nn.Linear(64, 64, bias=False).bfloat16() for _ in range(2))
    trace = Trace()

    def train() -> None:
        with torch.no_grad():
            model.weight[0] += 1

    with (
        trace.installed(),
        deltasync.open_store("memory://house") as store,
        Publisher(store) as publisher,
        Follower(store, ModuleTarget(served)) as follower,
    ):
        for _ in range(WARM_UP):
            train()
            publisher.publish(model).wait()
            follower.advance()
        train()
        with trace.recording():
            publisher.publish(model).wait()
        threads_of_a_publication, published = len(trace.threads), set(trace.modules)
        with trace.recording():
            follower.advance()
    assert torch.equal(model.weight, served.weight)
    return {
        "modules_crossed": sorted(trace.modules),
        "modules_crossed_to_vllm": sorted({*published, *crossed_by_vllm()}),
        "threads_of_a_publication": threads_of_a_publication,
        "threads_of_a_move": len(trace.threads) - threads_of_a_publication,
    }


def crossed_by_vllm() -> set[str]:
    """The modules that a move of a vLLM server to the next version crosses."""
    states = [tensors()]
    client, trace = _Client(Workers(states[0])), Trace()
    with (
        trace.installed(),
        running_loop() as loop,
        tempfile.TemporaryDirectory() as place,
        deltasync.open_store("memory://house-vllm") as store,
        Publisher(store) as publisher,
    ):
        folder, engine = Path(place), _Engine(client, loop, pause="keep", labels=Labels())
        mirror = folder / "mirror.safetensors"
        with Follower(store, VllmTarget(engine, folder=folder, mirror=mirror), mirror=mirror) as follower:
            for version in range(WARM_UP):
                publisher.publish(states[-1]).wait()
                follower.advance()
                states.append(changed(states[-1], version))
            publisher.publish(states[-1]).wait()
            with trace.recording():
                follower.advance()
    assert client.workers.hold(states[-1])
    return trace.modules


@contextmanager
def running_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """The event loop of an API server, in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class _Engine(ServerEngine):
    """Has a name without vLLM."""

    @property
    def name(self) -> str:
        return "vllm"


class _Client:
    """vLLM's engine client, with workers in this process."""

    def __init__(self, workers: Workers) -> None:
        self.workers = workers

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...]) -> list[Any]:
        return [{"result": result} for result in self.workers.call(*args)]

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None: ...

    async def resume_generation(self) -> None: ...

    async def update_weight_version(self, version: str) -> None: ...


def measure() -> dict[str, Any]:
    """All numbers."""
    modules, counts = sources(), importers()
    return {
        "files": len(modules),
        "lines": sum(len(path.read_text().splitlines()) for path in modules.values()),
        "modules_with_one_importer": sorted(name for name, count in counts.items() if count == 1),
        **measure_delta(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the code of the package.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args()
    numbers = measure()
    if options.json:
        print(json.dumps(numbers, indent=2))
        return
    for name, value in numbers.items():
        print(f"{name.replace('_', ' '):<28} {len(value) if isinstance(value, list) else value:>7,}")


if __name__ == "__main__":
    main()
