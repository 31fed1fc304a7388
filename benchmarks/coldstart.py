"""What a cold start costs beside reading and writing its bytes: restore, a new replica, a publisher that resumes.

The reference reads the objects of the anchor from a local folder and writes as many bytes as the model has to a file. A
restored checkpoint is on disk when the call returns, so its reference syncs the file; the others need not be, and
neither is their reference. The store is in the page cache, so that nothing waits for reading.

Everything is measured in turns: a slow spell of the machine hits all of it alike. CPU time is that of all threads.
"""

import hashlib
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.data import synthetic
from benchmarks.data.synthetic import QWEN3_0_6B, SMALL, Shape
from benchmarks.report import Row, say
from benchmarks.sections import Section, at_most, run_sections
from benchmarks.states import states_of
from deltasync import blocks
from deltasync.checkpoint import mapped_weights
from deltasync.feed.log import Log
from deltasync.feed.route import Route
from deltasync.format import keys
from deltasync.format.layout import Layout
from deltasync.format.payload import Payload
from deltasync.format.weights import Weights, zeros
from deltasync.parallel import each, threads
from deltasync.replica.mirror import MappedState
from deltasync.state import State
from deltasync.store.local import LocalStore
from deltasync.trainer.capture import WeightsSource, capture, copy_into
from deltasync.trainer.publisher import FeedPublisher, PublisherOptions
from deltasync.upkeep.restore import restore

LIMIT = 1.5
READ, WRITE, SYNC = "read the objects", "write a file of all weights", "write and sync it"
RESTORE = "restore to a folder"
MEMORY, MAPPED = "a new replica, mirror in memory", "a new replica, mapped mirror"
RESUME = "a publisher that resumes"
COLD_STARTS = (RESTORE, MEMORY, MAPPED, RESUME)


@dataclass(frozen=True, slots=True)
class Plan:
    shape: Shape
    repeats: int


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one call, or medians of several."""

    wall_s: float
    cpu_s: float


def run(plan: Plan) -> Section:
    """Measure the reference, the parts of a cold start one by one, and whole cold starts."""
    say("cold start: making the weights")
    rate = synthetic.find_learning_rate(0.01, "BF16", shape=plan.shape)
    weights = states_of(synthetic.make("cold start", "BF16", rate, shape=plan.shape, seed=0, threads=2)).old
    with tempfile.TemporaryDirectory(prefix="deltasync-bench-") as folder:
        return _measure(weights, Path(folder), plan.repeats)


def _measure(weights: Weights, folder: Path, repeats: int) -> Section:
    store = LocalStore(folder / "feed")
    publisher = FeedPublisher(store, PublisherOptions())
    publisher.publish(WeightsSource(weights)).wait()
    publisher.close()
    manifest = Log(store).require_head()
    objects = [keys.payload_key(ref.sha256) for ref in manifest.payloads]
    datas = [store.get(key) for key in objects]
    payloads = [Payload.parse(data, is_proved=True) for data in datas]
    decoded = zeros(weights.layout)

    def read() -> None:
        for key in objects:
            store.get(key)

    def write(*, sync: bool) -> None:
        with (folder / "written").open("wb") as file:
            for array in weights.arrays:
                file.write(array.data)
            file.flush()
            if sync:
                os.fsync(file.fileno())

    def touch() -> None:
        for array in zeros(weights.layout).arrays:
            array[:: 4096 // array.itemsize] = 1

    def decode() -> None:
        found = (block for payload in payloads for block in payload.blocks())
        blocks.decode_into(decoded, decoded, found, relative=False)

    def hash_all() -> None:
        for _ in each(lambda data: hashlib.sha256(data).digest(), datas):
            pass

    work: dict[str, Callable[[], object]] = {
        READ: read,
        WRITE: lambda: write(sync=False),
        SYNC: lambda: write(sync=True),
        "take memory for all weights": touch,
        "SHA-256 of the payloads": hash_all,
        "decode and digest the blocks": decode,
        "state digest": lambda: blocks.digest(weights),
        RESTORE: lambda: restore(store, folder / "restored", files=False),
        MEMORY: lambda: State().advance(Route(Log(store), manifest)),
        MAPPED: lambda: MappedState(folder / "mirror").advance(Route(Log(store), manifest)),
        RESUME: lambda: _resume(store, weights),
    }
    costs = _in_turns(work, folder, repeats)
    if not all(np.array_equal(a, b) for a, b in zip(decoded.arrays, weights.arrays, strict=True)):
        raise ValueError("the weights did not come back")
    section = Section()
    rows: list[Row] = []
    for name, cost in costs.items():
        write_s = costs[SYNC if name == RESTORE else WRITE].wall_s
        ratio = cost.wall_s / (costs[READ].wall_s + write_s)
        rows.append({"work": name, "s": cost.wall_s, "CPU s": cost.cpu_s, "of reading and writing": ratio})
        if name in COLD_STARTS:
            section.targets.append(at_most(f"{name}: time, of reading and writing", ratio, LIMIT))
    megabytes = f"{manifest.nbytes / 1e6:.0f} MB of payloads, {weights.layout.nbytes / 1e6:.0f} MB of weights"
    section.tables[f"cold start: {megabytes}, {len(objects)} objects, {threads()} threads"] = rows
    return section


def _in_turns(work: dict[str, Callable[[], object]], folder: Path, repeats: int) -> dict[str, Cost]:
    """Medians, after one round that does not count. What the calls leave is removed between them, and disks rest."""
    spent: dict[str, list[Cost]] = {name: [] for name in work}
    for number in range(-1, repeats):
        for name, call in work.items():
            say(f"cold start: {name}")
            os.sync()
            cost = _cost(call)
            if number >= 0:
                spent[name].append(cost)
            shutil.rmtree(folder / "restored", ignore_errors=True)
            for left in ("mirror", "mirror.json", "written"):
                (folder / left).unlink(missing_ok=True)
    return {
        name: Cost(median(c.wall_s for c in costs), median(c.cpu_s for c in costs)) for name, costs in spent.items()
    }


def run_places(plan: Plan) -> Section:
    """Measure what a shadow, or a mirror, costs by where it is: to fill it, to read all of it, to compare with it."""
    say("places: making the weights")
    states = states_of(synthetic.bf16_pair(0.01, shape=plan.shape))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="deltasync-bench-") as folder:
        places: dict[str, Callable[[], Weights]] = {
            "memory, huge pages": lambda: zeros(states.old.layout),
            "memory, pages of 4 KiB": lambda: _small_pages(states.old.layout),
            "a mapped file": lambda: mapped_weights(states.old.layout, Path(folder, "shadow")),
        }
        for name, take in places.items():
            spent: dict[str, list[Cost]] = {"fill": [], "digest": [], "compare": []}
            for _ in range(plan.repeats):
                say(f"places: {name}")
                shadow = take()
                work: dict[str, Callable[[], object]] = {
                    "fill": partial(copy_into, shadow, states.old),
                    "digest": partial(blocks.digest, shadow),
                    "compare": partial(capture, shadow, states.new),
                }
                for step, call in work.items():
                    spent[step].append(_cost(call))
                del shadow, work, call
                Path(folder, "shadow").unlink(missing_ok=True)
            row: dict[str, str | float] = {"place": name}
            for step, costs in spent.items():
                row |= {f"{step} s": median(c.wall_s for c in costs), f"{step} CPU s": median(c.cpu_s for c in costs)}
            rows.append(row)
    return Section(tables={f"places of a shadow or a mirror: {states.old.layout.nbytes / 1e6:.0f} MB": rows})


def _small_pages(layout: Layout) -> Weights:
    memory = mmap.mmap(-1, max(layout.nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    # Widest first, so that every tensor is aligned.
    begins, begin = {}, 0
    for spec in sorted(layout.tensors, key=lambda spec: -spec.dtype.width):
        begins[spec.name] = begin
        begin += spec.nbytes
    arrays = (np.frombuffer(memory, t.dtype.bits_dtype, t.elements, begins[t.name]) for t in layout.tensors)
    return Weights(layout, tuple(arrays))


def _cost(call: Callable[[], object]) -> Cost:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    call()
    return Cost(time.perf_counter() - wall_s, time.process_time() - cpu_s)


def _resume(store: LocalStore, weights: Weights) -> None:
    publisher = FeedPublisher(store, PublisherOptions(must_exist=True))
    publisher.open(WeightsSource(weights))
    publisher.close()


SECTIONS = {"coldstart": run, "places": run_places}

if __name__ == "__main__":
    run_sections(
        "coldstart",
        "A cold start against reading and writing its bytes",
        SECTIONS,
        full=Plan(QWEN3_0_6B, repeats=3),
        quick=Plan(SMALL, repeats=1),
    )
