"""The memory that a trainer needs while it publishes, beyond its weights and the shadow."""

import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.codec_plan import MODEL_DENSITY, THREADS
from benchmarks.data.synthetic import Shape
from benchmarks.machine import peak_extra_bytes
from benchmarks.publish_held import PUBLISHED, Case, cases
from benchmarks.publish_ways import State
from benchmarks.report import Row, say
from benchmarks.sections import Section, at_most
from deltasync.store.local import LocalStore
from deltasync.torch.publisher import Publisher
from deltasync.trainer.publisher import PublisherOptions
from deltasync.trainer.schedule import AnchorPolicy

SHARE_LIMIT = 0.10

Work = Callable[[Publisher, Case], None]


def run(shape: Shape) -> Section:
    """Measure each case in a process of its own, so that nothing freed earlier can be used again."""
    rows: list[Row] = []
    for number in range(2):
        say("memory: in a fresh process")
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            rows += pool.submit(_measure, shape, number).result()
    targets = [
        at_most(
            f"{row['weights']}: {row['work']}, peak beyond weights and shadow, % of model", share, 100 * SHARE_LIMIT
        )
        for row in rows
        if isinstance(share := row["% of model"], float)
    ]
    return Section(tables={f"memory: peak beyond weights and shadow, {THREADS} threads": rows}, targets=targets)


def _measure(shape: Shape, number: int) -> list[Row]:
    torch.set_num_threads(THREADS)
    case = next(one for index, one in enumerate(cases(shape)) if index == number)
    case = replace(case, states=(*case.states, _stepped(case.states[1])))
    rows: list[Row] = []
    for work, do in _WORK.items():
        with (
            tempfile.TemporaryDirectory(prefix="deltasync-bench-") as folder,
            Publisher(
                LocalStore(Path(folder)),
                dtype=PUBLISHED,
                options=PublisherOptions(anchors=AnchorPolicy(bytes_ratio=None)),
            ) as publisher,
        ):
            publisher.publish(case.states[0]).wait()
            publisher.wait()
            extra = peak_extra_bytes(partial(_whole, do, publisher, case))
        rows.append(
            {
                "weights": case.name,
                "work": work,
                "model MB": case.model_bytes / 1e6,
                "peak extra MB": extra / 1e6,
                "% of model": 100 * extra / case.model_bytes,
            }
        )
    return rows


def _stepped(state: State) -> State:
    """One more step: another 1 % of the elements moves by one unit in the last place of bf16."""
    every = round(1 / MODEL_DENSITY)
    found = {}
    for name, tensor in state.items():
        moved = tensor.clone()
        bits = moved.view(-1).view(torch.int16 if tensor.element_size() == 2 else torch.int32)
        bits[every // 2 :: every] ^= 1 if tensor.element_size() == 2 else 1 << 16
        found[name] = moved
    return found


def _whole(do: Work, publisher: Publisher, case: Case) -> None:
    do(publisher, case)
    publisher.wait()


def _one(publisher: Publisher, case: Case) -> None:
    publisher.publish(case.states[1])


def _two(publisher: Publisher, case: Case) -> None:
    """The second is captured while the first is encoded: what differs from the shadow are two steps."""
    publisher.publish(case.states[1])
    publisher.publish(case.states[2])


def _with_anchor(publisher: Publisher, case: Case) -> None:
    publisher.publish(case.states[1], anchor=True)
    publisher.close()


_WORK: dict[str, Work] = {
    "one publication": _one,
    "one more behind it": _two,
    "one publication and an anchor": _with_anchor,
}
