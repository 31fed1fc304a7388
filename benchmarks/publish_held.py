"""How long a trainer is held up by one publication, against reading its weights and the shadow once."""

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.codec_plan import MODEL_DENSITY, THREADS
from benchmarks.data import synthetic
from benchmarks.data.synthetic import Shape
from benchmarks.machine import Call, Timing, bandwidth, fill_memory, read_calls, time_rounds
from benchmarks.publish_ways import Announced, State, write_full
from benchmarks.report import Row, say
from benchmarks.sections import Section, Target, at_most
from deltasync.store.local import LocalStore
from deltasync.torch.publisher import Publisher
from deltasync.trainer.events import PublishEvent
from deltasync.trainer.publisher import PublisherOptions
from deltasync.trainer.schedule import AnchorPolicy

HELD_LIMIT = 1.5
PUBLISHED = torch.bfloat16

OURS = "deltasync"
FULL = "full safetensors file + fsync"
ANNOUNCED = {threads: f"torch.ne + u16 gaps + safetensors + put, torch on {threads}" for threads in (1, THREADS)}


@dataclass(frozen=True, slots=True)
class Case:
    """States of a trainer, one step apart. `read_bytes` is what one look at the weights and the shadow takes."""

    name: str
    states: tuple[State, ...]

    @property
    def elements(self) -> int:
        return sum(tensor.numel() for tensor in self.states[0].values())

    @property
    def model_bytes(self) -> int:
        return self.elements * PUBLISHED.itemsize

    @property
    def read_bytes(self) -> int:
        return self.model_bytes + sum(tensor.nbytes for tensor in self.states[0].values())


def cases(shape: Shape) -> Iterator[Case]:
    """Weights that are bf16, and float32 master weights whose bf16 view is published; one at a time."""
    rate = synthetic.find_learning_rate(MODEL_DENSITY, "BF16", shape=shape)
    for name, dtype in (("bf16", "BF16"), ("fp32 master, published as bf16", "F32")):
        say(f"held: making the {name} weights")
        pair = synthetic.make(name, dtype, rate, shape=shape, seed=0, threads=THREADS)
        yield Case(name, (_tensors(pair.old, dtype), _tensors(pair.new, dtype)))


def run(shape: Shape, *, repeats: int) -> Section:
    """Time all ways in turns, each between reads of plain memory."""
    section = Section()
    for case in cases(shape):
        say(f"held: {case.name}, {repeats} rounds")
        with tempfile.TemporaryDirectory(prefix="deltasync-bench-") as folder:
            timings, events, sizes = _measure(case, Path(folder), repeats)
        read = bandwidth(timings, threads=THREADS)
        title = f"held: {case.name}, {case.elements / 1e6:.0f} M elements, {MODEL_DENSITY:.0%} changed"
        section.tables[title] = [_row(case, way, timings[way], read, events, sizes[way]) for way in sizes]
        section.tables[f"behind the trainer's back: {case.name}"] = [_phases(events)]
        section.targets.append(_target(case, timings[OURS], read))
    return section


def _measure(
    case: Case, folder: Path, repeats: int
) -> tuple[dict[str, Timing], Sequence[PublishEvent], dict[str, int]]:
    store = LocalStore(folder / "feed")
    events: list[PublishEvent] = []
    memory = fill_memory()
    sizes = dict.fromkeys((OURS, FULL, *ANNOUNCED.values()), 0)
    with Publisher(
        store, dtype=PUBLISHED, options=PublisherOptions(anchors=AnchorPolicy(bytes_ratio=None), observer=events.append)
    ) as publisher:
        publisher.publish(case.states[0]).wait()
        announced = {n: Announced(case.states[0], store, dtype=PUBLISHED, threads=n) for n in ANNOUNCED}
        state = case.states[0]

        def step() -> None:
            nonlocal state
            publisher.wait()
            state = case.states[1] if state is case.states[0] else case.states[0]

        def full() -> None:
            sizes[FULL] = write_full(state, folder / "full.safetensors", dtype=PUBLISHED)

        def sparse(threads: int) -> None:
            sizes[ANNOUNCED[threads]] = announced[threads].publish(state)

        calls = [
            *read_calls(memory, threads=THREADS),
            Call(OURS, lambda: publisher.publish(state), case.read_bytes, prepare=step),
            # What runs behind is waited for: here it would take its share of the cores.
            *read_calls(memory, threads=THREADS),
            Call(FULL, full, case.model_bytes, prepare=publisher.wait),
            *(Call(way, partial(sparse, threads), case.read_bytes) for threads, way in ANNOUNCED.items()),
        ]
        calls = [_after(call, publisher) for call in calls]
        timings = time_rounds(calls, repeats=repeats)
    deltas = [event for event in events if event.kind == "delta"]
    sizes[OURS] = deltas[-1].payload_bytes
    return timings, deltas[-repeats:], sizes


def _after(call: Call, publisher: Publisher) -> Call:
    return call if call.prepare is not None else Call(call.name, call.run, call.nbytes, prepare=publisher.wait)


def _row(case: Case, way: str, timing: Timing, read: Timing, events: Sequence[PublishEvent], sent_bytes: int) -> Row:
    one_pass = case.read_bytes / (read.best * 1e9)
    behind = [event.encode_s + event.put_s + event.commit_s for event in events] if way == OURS else [0.0]
    return {
        "way": way,
        "held s, best": timing.best_seconds,
        "held s, median": timing.median_seconds,
        "/ one pass of reading, best": timing.best_seconds / one_pass,
        "/ one pass of reading, median": timing.median_seconds / (case.read_bytes / (read.median * 1e9)),
        "until it is in the store s": timing.median_seconds + statistics.median(behind),
        "MB": sent_bytes / 1e6,
    }


def _phases(events: Sequence[PublishEvent]) -> Row:
    return {
        "changed %": 100 * statistics.mean(event.density or 0.0 for event in events),
        "held s": statistics.median(event.held_s for event in events),
        "encode s": statistics.median(event.encode_s for event in events),
        "put s": statistics.median(event.put_s for event in events),
        "commit s": statistics.median(event.commit_s for event in events),
        "bits per changed element": statistics.mean(
            8 * event.payload_bytes / event.changed for event in events if event.changed
        ),
    }


def _target(case: Case, timing: Timing, read: Timing) -> Target:
    one_pass = case.read_bytes / (read.best * 1e9)
    claim = f"{case.name}: seconds held / one pass of reading weights and shadow, best rounds"
    return at_most(claim, timing.best_seconds / one_pass, HELD_LIMIT)


def _tensors(arrays: object, dtype: str) -> dict[str, torch.Tensor]:
    assert isinstance(arrays, dict)
    kind, signed = (torch.bfloat16, np.int16) if dtype == "BF16" else (torch.float32, np.int32)
    return {name: torch.from_numpy(bits.view(signed)).view(kind) for name, bits in arrays.items()}
