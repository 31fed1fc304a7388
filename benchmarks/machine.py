"""What the machine can do, and what a call takes of it: read bandwidth, run time, and peak extra memory."""

import ctypes
import gc
import hashlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"
READ_BYTES = 1 << 29  # far beyond any cache
HASH_BYTES = 1 << 20  # inside any cache
HASH_PIECES = 64

Memory = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Call:
    """Something to time that passes over `nbytes`; `prepare` runs before every repeat and is not timed."""

    name: str
    run: Callable[[], object]
    nbytes: int
    prepare: Callable[[], object] | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """Wall times of repeated calls that each passed over `nbytes`."""

    nbytes: int
    seconds: tuple[float, ...]

    @property
    def best_seconds(self) -> float:
        """The fastest run."""
        return min(self.seconds)

    @property
    def median_seconds(self) -> float:
        """The median run."""
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        """Gigabytes (10^9) per second in the fastest run."""
        return self.nbytes / self.best_seconds / 1e9

    @property
    def median(self) -> float:
        """Gigabytes (10^9) per second in the median run."""
        return self.nbytes / self.median_seconds / 1e9


def time_rounds(calls: Sequence[Call], *, repeats: int, warmup: int = 1) -> dict[str, Timing]:
    """Time calls in turns, after `warmup` rounds that do not count.

    A slow spell of the machine then hits all of them alike. A name that comes more than once in a round is
    timed each time.
    """
    seconds: dict[str, list[float]] = {call.name: [] for call in calls}
    for number in range(-warmup, repeats):
        for call in calls:
            if call.prepare is not None:
                call.prepare()
            start = time.perf_counter()
            result = call.run()
            elapsed = time.perf_counter() - start
            del result  # freeing it is not part of the call
            if number >= 0:
                seconds[call.name].append(elapsed)
    return {call.name: Timing(nbytes=call.nbytes, seconds=tuple(seconds[call.name])) for call in calls}


def fill_memory(nbytes: int = READ_BYTES) -> Memory:
    """Return an array to read, written once so that every page is real."""
    return np.full(nbytes // 8, 0x0101010101010101, np.uint64)


def read_calls(memory: Memory, *, threads: int) -> list[Call]:
    """Return the ways to read an array once, each thread its part; `bandwidth` takes the fastest of them."""
    parts = np.array_split(memory, threads)

    def read_all(reader: Callable[[Memory], object]) -> None:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(reader, parts))

    return [
        Call(_read_name(method, threads), partial(read_all, reader), memory.nbytes)
        for method, reader in _readers().items()
    ]


def bandwidth(timings: Mapping[str, Timing], *, threads: int) -> Timing:
    """Pick the fastest way to read from timings that hold those of `read_calls`."""
    return max((timings[_read_name(method, threads)] for method in _readers()), key=lambda timing: timing.best)


def _read_name(method: str, threads: int) -> str:
    return f"read by {method}, {threads} threads"


def _readers() -> dict[str, Callable[[Memory], object]]:
    """Ways to read an array once; all of them release the interpreter lock."""
    libc = ctypes.CDLL(None)
    libc.memchr.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
    libc.memchr.restype = ctypes.c_void_p
    return {
        "memchr of an absent byte": lambda part: libc.memchr(part.ctypes.data, 0, part.nbytes),
        "numpy bitwise_or.reduce": np.bitwise_or.reduce,
        "numpy add.reduce": np.add.reduce,
        "numpy maximum.reduce": np.maximum.reduce,
    }


def computing_call(*, threads: int) -> Call:
    """Return a call that computes and hardly touches memory: what more threads gain in it, the machine has to give."""
    piece = bytes(HASH_BYTES)

    def hash_all() -> None:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda _: hashlib.sha256(piece).digest(), range(HASH_PIECES)))

    return Call(computing_name(threads), hash_all, HASH_BYTES * HASH_PIECES)


def computing_name(threads: int) -> str:
    """Return the name of the call of `computing_call`."""
    return f"SHA-256, {threads} threads"


def peak_extra_bytes(call: Callable[[], object]) -> int:
    """Return the most resident memory that a call holds beyond what was resident before it, its result included.

    Memory that was freed before is returned to the system first, so that its reuse counts. Pages of mapped
    files count too: touch the inputs beforehand.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = _status_bytes("VmRSS")
    CLEAR_REFS.write_text(RESET_PEAK)
    result = call()
    peak = _status_bytes("VmHWM")
    del result
    return max(0, peak - before)


def _status_bytes(field: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in the status of this process")
