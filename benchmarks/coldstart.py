"""What a cold start costs beside reading and writing its bytes: restore, a new replica, a publisher that resumes.

All of it is CPU time of the process, all threads together: on a machine that does other work as well, wall-clock times
say little. The link or the disk comes on top, and overlaps with it (`benchmarks.overlap`). The reference is one pass
that reads the objects of the anchor from a local folder and writes as many bytes as the model has to a file.
"""

import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.data import synthetic
from benchmarks.data.synthetic import QWEN3_0_6B, SMALL, Shape
from benchmarks.report import Row, say
from benchmarks.sections import Section, at_most, run_sections
from benchmarks.states import states_of
from deltasync import blocks
from deltasync.checkpoint import open_checkpoint
from deltasync.feed.log import Log
from deltasync.feed.replay import restore, zeros
from deltasync.format import keys
from deltasync.format.payload import Payload
from deltasync.format.weights import Weights
from deltasync.parallel import each
from deltasync.replica.mirror import Mirror
from deltasync.store.local import LocalStore
from deltasync.trainer.publisher import FeedPublisher, PublisherOptions

LIMIT = 1.5


@dataclass(frozen=True, slots=True)
class Plan:
    shape: Shape
    repeats: int


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
    publisher.publish(weights).wait()
    publisher.close()
    manifest = Log(store).require_head()
    objects = [keys.payload_key(ref.sha256) for ref in manifest.payloads]
    datas = [store.get(key) for key in objects]
    payloads = [Payload.parse(data) for data in datas]
    decoded = zeros(weights.layout)

    def read() -> None:
        for key in objects:
            store.get(key)

    def write() -> None:
        with (folder / "written").open("wb") as file:
            for array in weights.arrays:
                file.write(array.data)
            file.flush()
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

    parts: dict[str, Callable[[], object]] = {
        "read the objects": read,
        "write a file of all weights": write,
        "take memory for all weights": touch,
        "SHA-256 of the payloads": hash_all,
        "SHA-256 of the blocks, decode, overwrite": decode,
        "state digest": lambda: blocks.digest(weights),
    }
    wholes: dict[str, Callable[[], object]] = {
        "restore to a folder": lambda: _restore(store, folder / "restored"),
        "a new replica, mirror in memory": lambda: Mirror(Log(store)).advance(manifest, lambda layout: None),
        "a new replica, mapped mirror": lambda: _mapped(store, folder / "mirror"),
        "a publisher that resumes": lambda: _resume(store, weights),
    }
    rows: list[Row] = []
    section = Section()
    cpu_s: dict[str, float] = {}
    for name, work in {**parts, **wholes}.items():
        say(f"cold start: {name}")
        cpu_s[name] = median(_cpu_s(work) for _ in range(repeats))
    both_s = cpu_s["read the objects"] + cpu_s["write a file of all weights"]
    for name, seconds in cpu_s.items():
        rows.append({"work": name, "CPU s": seconds, "of reading and writing": seconds / both_s})
        if name in wholes:
            section.targets.append(at_most(f"{name}: CPU time, of reading and writing", seconds / both_s, LIMIT))
    if not all(np.array_equal(a, b) for a, b in zip(decoded.arrays, weights.arrays, strict=True)):
        raise ValueError("the weights did not come back")
    megabytes = f"{manifest.nbytes / 1e6:.0f} MB of payloads, {weights.layout.nbytes / 1e6:.0f} MB of weights"
    section.tables[f"cold start: {megabytes}, {len(objects)} objects"] = rows
    return section


def _cpu_s(work: Callable[[], object]) -> float:
    """CPU time of all threads."""
    since = time.process_time()
    work()
    return time.process_time() - since


def _restore(store: LocalStore, out: Path) -> None:
    restore(store, out, files=False)
    for file in open_checkpoint(out).path.iterdir():
        file.unlink()
    out.rmdir()


def _mapped(store: LocalStore, path: Path) -> None:
    log = Log(store)
    Mirror(log, path=path).advance(log.require_head(), lambda layout: None)
    for file in (path, path.with_name(f"{path.name}.json")):
        with suppress(FileNotFoundError):
            file.unlink()


def _resume(store: LocalStore, weights: Weights) -> None:
    publisher = FeedPublisher(store, PublisherOptions(must_exist=True))
    publisher.open(weights.layout)
    publisher.close()


SECTIONS = {"coldstart": run}

if __name__ == "__main__":
    run_sections(
        "coldstart",
        "CPU time of a cold start against reading and writing its bytes",
        SECTIONS,
        full=Plan(QWEN3_0_6B, repeats=3),
        quick=Plan(SMALL, repeats=1),
    )
