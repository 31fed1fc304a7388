"""Recorded deltas: consecutive versions of feeds that real training runs have left.

    python -m benchmarks.data.recorded [--out .bench-data] [--only demo|trl]

Runs the demo and the TRL example, each with its own learning rate, and keeps some neighbouring versions from
the middle of their feeds as files of bf16 states. Data that is there is kept. Any other feed can be recorded with
`--feed URL --name NAME`.
"""

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.data.files import read_pair, write_checkpoint
from benchmarks.data.pair import Pair
from benchmarks.data.smol import DEFAULT_OUT
from deltasync.feed.log import Log
from deltasync.state import load
from deltasync.store import open_store

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "recorded"
STATES = 3
"""Neighbouring versions that are kept of a feed."""
DEMO_STEPS, TRL_STEPS = 40, 20


def record(url: str, folder: Path) -> None:
    """Write the middle versions of a feed as states; the folder appears whole or not at all."""
    store = open_store(url)
    log = Log(store)
    head = log.require_head()
    first = (head.version - STATES + 1) // 2
    if first < 0:
        raise SystemExit(f"error: the feed has {head.version + 1} versions, {STATES} are needed (record a longer run)")
    partial = folder.with_name(folder.name + ".part")
    shutil.rmtree(partial, ignore_errors=True)
    for number in range(STATES):
        weights = load(log, log.read(first + number))
        kinds = {spec.dtype.name for spec in weights.layout.tensors}
        if len(kinds) != 1:
            raise SystemExit(f"error: the feed mixes {', '.join(sorted(kinds))} (the benchmark takes one type)")
        tensors = {
            spec.name: bits.reshape(spec.shape)
            for spec, bits in zip(weights.layout.tensors, weights.arrays, strict=True)
        }
        write_checkpoint(_state(partial, number), tensors, dtype=kinds.pop())
    store.close()
    partial.rename(folder)


def run_demo(folder: Path) -> str:
    """Run the second act of the demo; its feed."""
    command = [sys.executable, "-m", "demo", "--out", folder / "out", "--real-steps", 0, "--steps", DEMO_STEPS]
    _run(command, environment={**os.environ, "PYTHONPATH": str(ROOT / "examples")})
    return str(folder / "out" / "feeds" / "wordle")


def run_trl(folder: Path) -> str:
    """Run the TRL example; its feed."""
    from tests.support.servers import free_port
    from tests.support.vllm import PYTHON

    environment = {
        **os.environ,
        "OUT": str(folder),
        "PYTHON": sys.executable,
        "VLLM_PYTHON": str(PYTHON),
        "SERVER_PORT": str(free_port()),
        "ENVIRONMENT_PORT": str(free_port()),
    }
    _run([ROOT / "examples/trl_wordle/run_local.sh", "--steps", TRL_STEPS], environment=environment)
    return str(folder / "feed")


RUNS: dict[str, Callable[[Path], str]] = {"demo": run_demo, "trl": run_trl}


def generate(name: str, out: Path = DEFAULT_OUT, *, log: Callable[[str], None] = print) -> Path:
    """Run one of the training runs and record its feed, unless that is there; return its folder."""
    folder = out / FOLDER / name
    if folder.exists():
        log(f"{FOLDER}/{name}: already there")
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        log(f"{FOLDER}/{name}: training")
        record(RUNS[name](Path(temporary)), folder)
    return folder


def load_pairs(out: Path = DEFAULT_OUT) -> Iterator[Pair]:
    """Read, one by one, the consecutive pairs of everything that was recorded."""
    for folder in sorted(path for path in (out / FOLDER).glob("*") if not path.name.endswith(".part")):
        files = itertools.takewhile(Path.exists, (_state(folder, number) for number in itertools.count()))
        for number, (old, new) in enumerate(itertools.pairwise(files), 1):
            yield read_pair(f"recorded {folder.name} step {number}", old, new)


def _state(folder: Path, number: int) -> Path:
    return folder / f"state-{number}.safetensors"


def _run(command: list[object], *, environment: dict[str, str] | None = None) -> None:
    done = subprocess.run([str(word) for word in command], env=environment, cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(f"error: {command[0]} ended with {done.returncode}")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="where the data goes")
    parser.add_argument("--only", choices=RUNS, help="record one of the two runs")
    parser.add_argument("--feed", metavar="URL", help="record this feed instead")
    parser.add_argument("--name", help="what to call it")
    options = parser.parse_args()
    if (options.feed is None) != (options.name is None):
        parser.error("--feed and --name go together")
    if options.feed is not None:
        folder = options.out / FOLDER / options.name
        folder.parent.mkdir(parents=True, exist_ok=True)
        record(options.feed, folder)
        return
    for name in RUNS if options.only is None else [options.only]:
        generate(name, options.out)


if __name__ == "__main__":
    main()
