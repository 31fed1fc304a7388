"""The loop that runs a Python target: replay a corpus, then mutate it, in a child process with bounds.

Why a loop of our own and not atheris: nearly every byte that a reader refuses lies behind a SHA-256 or a seal, and a
mutation that does not compute them again ends there. Both ran on a reader of heartbeats that could end in a
RecursionError: atheris did not find it in 250,000 executions, because coverage does not lead to a seal that fits, and
this loop found it with two of three seeds, in 234 and 461. Coverage is replaced by what an input was refused for, and
where: an input with a new error, or one that is raised from a new line, joins those that are mutated. That needs no
dependency, and a seed gives the same inputs again.

The child has a bound on memory (its address space) and on processor time for each input. The input that is running is
in memory that the parent shares, so that it is still there after a crash.
"""

import gc
import hashlib
import logging
import mmap
import multiprocessing
import os
import resource
import signal
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType

from deltasync.errors import DeltasyncError
from deltasync.kernels import kernels

from .mutations import Mutator
from .targets import TARGETS, Target

CORPUS = Path(__file__).parent / "corpus"
INPUT_BYTES_MAX = 64 << 10
INPUT_CPU_S = 20
"""Processor time for one input. None takes a tenth of it; this is for a hang."""

_POOL_MAX = 400
_KEPT_BYTES_MAX = 8 << 10
"""Longer inputs are not worth a place in a corpus that is kept."""


@dataclass
class Result:
    """What a run of a target did. `failure` says what went wrong, `failed` is the input."""

    target: str
    executions: int = 0
    refused: int = 0
    kept: int = 0
    seconds: float = 0.0
    peak_megabytes: float = 0.0
    rules: list[str] = field(default_factory=list)
    failure: str | None = None
    failed: bytes | None = None


class HangError(BaseException):
    """An input took too long."""


def run_target(name: str, *, seconds: float, runs: int | None, seed: int, new: Path | None = None) -> Result:
    """Run a target in a child process. Inputs that reach something new are written to the folder `new`."""
    shared = mmap.mmap(-1, INPUT_BYTES_MAX + 8)
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            receiver.close()
            _child(name, shared, sender, seconds, runs, seed, new)
            code = 0
        finally:
            os._exit(code)
    sender.close()
    try:
        result: Result = receiver.recv()
    except EOFError:
        result = Result(name)
    _, status = os.waitpid(child, 0)
    if status != 0 and result.failure is None:
        result.failure = f"the process ended with status {status}"
    if result.failure is not None:
        result.failed = shared[8 : 8 + int.from_bytes(shared[:8], "little")]
    return result


def corpus_of(name: str, seed: int) -> list[bytes]:
    """The inputs that are kept for a target, in a fixed order; of some targets only a part."""
    target = TARGETS[name]
    folder = CORPUS / (target.corpus or name.replace(" ", "-"))
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path.read_bytes() for path in paths[seed % target.parts :: target.parts]]


def _child(
    name: str,
    shared: mmap.mmap,
    sender: Connection,
    seconds: float,
    runs: int | None,
    seed: int,
    new: Path | None,
) -> None:
    target, result, since = TARGETS[name], Result(name), time.monotonic()
    # Warnings about damage would be most of the work.
    logging.getLogger("deltasync").setLevel(logging.CRITICAL)
    kernels()
    begin = [*target.seeds(), *corpus_of(name, seed)]
    signal.signal(signal.SIGPROF, _hang)
    _limit(target.megabytes)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    grown: list[bytes] = []
    seen: set[str] = set()
    rules: set[str] = set()
    try:
        for count, data in enumerate(_inputs(target, begin, grown, seed)):
            if count >= len(begin) and (time.monotonic() - since > seconds or (runs is not None and count >= runs)):
                break
            shared[:8], shared[8 : 8 + len(data)] = len(data).to_bytes(8, "little"), data
            reached, rule = _execute(target, data)
            result.executions += 1
            result.refused += rule is not None
            rules.update([] if rule is None else [rule])
            if reached not in seen:
                seen.add(reached)
                if count >= len(begin) and new is not None and len(data) <= _KEPT_BYTES_MAX:
                    result.kept += 1
                    new.mkdir(parents=True, exist_ok=True)
                    (new / hashlib.sha256(data).hexdigest()[:32]).write_bytes(data)
                if len(grown) < _POOL_MAX:
                    grown.append(data)
    except (Exception, HangError):  # noqa: BLE001 - whatever it is, it is a finding
        result.failure = traceback.format_exc()
    result.seconds = time.monotonic() - since
    result.peak_megabytes = max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    result.rules = sorted(rules)
    sender.send(result)


def _inputs(target: Target, begin: list[bytes], grown: list[bytes], seed: int) -> Iterator[bytes]:
    """The inputs to begin with, then mutations of them and of those that the caller adds to `grown`, without end."""
    yield from (data[:INPUT_BYTES_MAX] for data in begin)
    mutator = Mutator(seed)

    def any_input() -> bytes:
        at = mutator.random.randrange(len(begin) + len(grown))
        return begin[at] if at < len(begin) else grown[at - len(begin)]

    while True:
        data = any_input()
        for _ in range(mutator.random.choice((1, 1, 1, 2, 4))):
            data = target.mutate(mutator, data, any_input)[:INPUT_BYTES_MAX]
        yield data


def _execute(target: Target, data: bytes) -> tuple[str, str | None]:
    """What the input reached, as a text, and the rule that it was refused by."""
    signal.setitimer(signal.ITIMER_PROF, INPUT_CPU_S)
    try:
        value = target.run(data)
    except DeltasyncError as error:
        if type(error).kind == DeltasyncError.kind or not str(error):
            raise AssertionError(f"{error!r} has no kind of its own") from error
        frames = traceback.extract_tb(error.__traceback__)[-3:]
        places = " ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames)
        return f"{error.kind} {error.rule} {places}", f"{error.kind} {error.rule}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return f"{type(value).__name__} {value!r:.200}" if isinstance(value, (list, tuple, str)) else "value", None


def _limit(megabytes: int) -> None:
    """Let this process have that much more memory than it has now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + (megabytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _hang(number: int, frame: FrameType | None) -> None:
    raise HangError(f"one input took more than {INPUT_CPU_S} s of processor time")
