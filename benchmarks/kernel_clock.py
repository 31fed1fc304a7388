"""When kernels run: wraps the kernels of this process with a clock, to separate computing from everything else."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from deltasync.kernels import Kernels, kernels

Interval = tuple[float, float]

KERNEL_NAMES = tuple(name for name, member in vars(Kernels).items() if callable(member) and not name.startswith("_"))


@contextmanager
def kernel_clock() -> Iterator[list[Interval]]:
    """Record begin and end of every call of a kernel, from any thread, while the block runs."""
    intervals: list[Interval] = []
    running = kernels()
    for name in KERNEL_NAMES:
        setattr(running, name, _timed(getattr(running, name), intervals))
    try:
        yield intervals
    finally:
        for name in KERNEL_NAMES:
            delattr(running, name)


def busy_seconds(intervals: list[Interval]) -> float:
    """Return the wall time in which at least one kernel ran."""
    total, reached = 0.0, 0.0
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _timed(kernel: Callable[..., Any], intervals: list[Interval]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        try:
            return kernel(*args, **options)
        finally:
            intervals.append((begin, time.perf_counter()))

    return call
