"""Measure the code itself: its size, and what one publication, advance, restore and relay of a tiny model run through.

    python -m benchmarks.house [--json] [--limits]

What runs between the start of `Publisher.publish` and its commit, in any thread, is the path of a publication. The
other paths are measured in the same way. One of them leads through the target for vLLM, whose engine client and workers
are in this process: vLLM is not started. `--limits` exits with 1 if a figure is above its limit.
"""

import argparse
import ast
import asyncio
import json
import logging
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import deltasync
from deltasync import FolderTarget, Follower
from deltasync.torch import ModuleTarget, Publisher
from deltasync.vllm.labels import Labels
from deltasync.vllm.server import ServerEngine
from deltasync.vllm.target import VllmTarget
from tests.unit.served_model import Workers, changed, tensors

PACKAGE = Path(deltasync.__file__).parent
POOL = "deltasync.parallel"
WARM_UP = 3
"""Versions before the one that is measured: by then every pool of threads exists."""
EDGES = [
    [room]
    for room in (
        *("cli", "ui", "estimate", "interop", "sglang"),
        *("frameworks", "nemo_rl", "trackers", "transformers", "trl", "verl"),
    )
]
"""What is not the core: the commands, the page, and the doors to frameworks."""
LIMITS = {
    "files": 140,
    "lines": 29_700,
    "lines_of_the_core": 21_800,
    "classes": 243,
    "private_functions_called_once": 220,
    "functions_of_publish": 200,
    "depth_of_publish": 18,
    "functions_of_advance": 260,
    "depth_of_advance": 20,
    "pairs_of_publish": 2,
    "pairs_of_advance": 3,
    "pairs_of_restore": 2,
    "pairs_of_relay": 2,
    "modules_crossed_to_vllm": 50,
}
"""At most. Lower a limit when a change makes room: 28,500 lines, 18,500 of them in the core, 220 classes, 180 functions
of a publication, 230 of an advance and 40 modules on the way to vLLM are wanted."""


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


def private_functions() -> tuple[int, int]:
    """How many functions with a leading underscore are called once in their module, and how many there are."""
    once = total = 0
    for path in sources().values():
        nodes = list(ast.walk(ast.parse(path.read_text())))
        used = Counter(node.id for node in nodes if isinstance(node, ast.Name))
        used.update(node.attr for node in nodes if isinstance(node, ast.Attribute))
        names = [node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        private = [name for name in names if name.startswith("_") and not name.startswith("__")]
        once += sum(used[name] == 1 for name in private)
        total += len(private)
    return once, total


@dataclass(slots=True)
class Recording:
    """The functions of the package that run, how deep they call each other, and the threads that are started."""

    functions: set[CodeType] = field(default_factory=set)
    calls: set[tuple[str, str]] = field(default_factory=set)
    depth: int = 0
    threads: int = 0

    @property
    def modules(self) -> set[str]:
        return {module_of(code) for code in self.functions}

    @property
    def pairs(self) -> list[str]:
        """The modules that call each other both ways. The thread pool does not count: it calls whatever it is given."""
        return sorted(f"{a} - {b}" for a, b in self.calls if a < b and (b, a) in self.calls)

    def add(self, frame: FrameType) -> None:
        """A function of the package is called."""
        stack: list[CodeType] = []
        at: FrameType | None = frame
        while at is not None:
            if is_ours(at.f_code):
                stack.append(at.f_code)
            at = at.f_back
        self.functions.add(frame.f_code)
        self.depth = max(self.depth, len(stack))
        callee, *callers = (module_of(code) for code in stack)
        caller = next((name for name in callers if name != POOL), callee)
        if POOL not in (caller, callee) and caller != callee:
            self.calls.add((caller, callee))


class Trace:
    """Watches this thread and every thread that starts in its block; counts only while it is recording."""

    def __init__(self) -> None:
        self._recording: Recording | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        start = threading.Thread.start

        def counted_start(thread: threading.Thread) -> None:
            if self._recording is not None:
                self._recording.threads += 1
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
    def recording(self) -> Iterator[Recording]:
        self._recording = found = Recording()
        try:
            yield found
        finally:
            self._recording = None

    def _profile(self, frame: FrameType, event: str, _argument: object) -> None:
        recording = self._recording
        if recording is not None and event == "call" and is_ours(frame.f_code):
            recording.add(frame)


@cache
def is_ours(code: CodeType) -> bool:
    return Path(code.co_filename).is_relative_to(PACKAGE)


@cache
def module_of(code: CodeType) -> str:
    return module_name(Path(code.co_filename))


def measure_paths() -> dict[str, Any]:
    """Publish a few versions and take them to a module, a folder, a restored checkpoint and another store."""
    model, served = (torch.nn.Linear(64, 64, bias=False).bfloat16() for _ in range(2))
    trace, found = Trace(), dict[str, Recording]()
    with (
        trace.installed(),
        tempfile.TemporaryDirectory() as place,
        deltasync.open_store(f"{place}/feed") as store,
        deltasync.open_store(f"{place}/copy") as copy,
        Publisher(store) as publisher,
        Follower(store, ModuleTarget(served)) as follower,
        Follower(store, FolderTarget(f"{place}/live"), mirror=f"{place}/mirror.safetensors") as keeper,
    ):
        for version in range(WARM_UP + 1):
            with torch.no_grad():
                model.weight[0] += 1
            with trace.recording() as found["publish"]:
                publisher.publish(model).wait()
            with trace.recording() as found["module"]:
                follower.advance()
            with trace.recording() as found["advance"]:
                keeper.advance()
            with trace.recording() as found["restore"]:
                deltasync.restore(store, f"{place}/restored-{version}")
            with trace.recording() as found["relay"]:
                deltasync.relay(store, copy)
    assert torch.equal(model.weight, served.weight)
    publish, module, advance = found["publish"], found["module"], found["advance"]
    return {
        "functions_of_publish": len(publish.functions),
        "depth_of_publish": publish.depth,
        "functions_of_advance": len(advance.functions),
        "depth_of_advance": advance.depth,
        **{f"pairs_of_{name}": found[name].pairs for name in ("publish", "advance", "restore", "relay")},
        "modules_crossed": sorted(publish.modules | module.modules),
        "modules_crossed_to_vllm": sorted(publish.modules | crossed_by_vllm()),
        "threads_of_a_publication": publish.threads,
        "threads_of_a_move": module.threads,
    }


def crossed_by_vllm() -> set[str]:
    """The modules that a move of a vLLM server to the next version crosses."""
    states = [tensors()]
    client, trace = _Client(Workers(states[0])), Trace()
    with (
        trace.installed(),
        running_loop() as loop,
        tempfile.TemporaryDirectory() as place,
        deltasync.open_store(f"{place}/feed") as store,
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
            with trace.recording() as found:
                follower.advance()
    assert client.workers.hold(states[-1])
    return found.modules


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
    """All figures."""
    modules, counts = sources(), importers()
    lines = {name: len(path.read_text().splitlines()) for name, path in modules.items()}
    trees = [ast.parse(path.read_text()) for path in modules.values()]
    once, private = private_functions()
    return {
        "files": len(modules),
        "lines": sum(lines.values()),
        "lines_of_the_core": sum(n for name, n in lines.items() if name.split(".")[1:2] not in EDGES),
        "classes": sum(isinstance(node, ast.ClassDef) for tree in trees for node in ast.walk(tree)),
        "private_functions": private,
        "private_functions_called_once": once,
        "modules_with_one_importer": sorted(name for name, count in counts.items() if count == 1),
        **measure_paths(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the code of the package.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--limits", action="store_true", help="exit with 1 if a figure is above its limit")
    options = parser.parse_args()
    # A model without a configuration, as here, is published and followed with warnings.
    logging.disable(logging.WARNING)
    found = measure()
    if options.json:
        print(json.dumps(found, indent=2))
        return
    above = []
    for name, value in found.items():
        figure, limit = len(value) if isinstance(value, list) else value, LIMITS.get(name)
        above += [name] if limit is not None and figure > limit else []
        print(f"{name.replace('_', ' '):<30} {figure:>7,}" + ("" if limit is None else f"  at most {limit:,}"))
    if options.limits and above:
        sys.exit(f"above the limit: {', '.join(above)}")


if __name__ == "__main__":
    main()
