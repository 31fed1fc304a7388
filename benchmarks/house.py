"""Measure the code itself: its size, its import graph, the modules that one delta crosses, and the threads it starts.

    python benchmarks/house.py [--json]

A tiny model is published to a store in memory and followed by a torch module. What runs between the start of one
`Publisher.publish` and the end of the move to its version, in any thread, is the path of a delta. vLLM is not started:
its modules are added to the count in place of the torch module's.
"""

import argparse
import ast
import json
import sys
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
        threads_of_a_publication = len(trace.threads)
        with trace.recording():
            follower.advance()
    assert torch.equal(model.weight, served.weight)
    crossed = sorted(trace.modules)
    vllm = [name for name in sources() if name.startswith("deltasync.vllm.")]
    return {
        "modules_crossed": crossed,
        "modules_crossed_to_vllm": sorted({*crossed, *vllm} - {"deltasync.torch.module"}),
        "threads_of_a_publication": threads_of_a_publication,
        "threads_of_a_move": len(trace.threads) - threads_of_a_publication,
    }


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
