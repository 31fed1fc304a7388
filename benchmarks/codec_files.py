"""`deltasync diff` and `apply` on checkpoint files: how much of their time is files, and how much is computing.

Computing is the least wall time in which kernels ran, on the same weights in memory or on cached files: on files
they also wait for pages, so that their time there is an upper bound.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import ml_dtypes

from benchmarks.codec_plan import Plan, model_pair
from benchmarks.data.files import WEIGHTS_NAME, write_pair
from benchmarks.data.pair import Pair
from benchmarks.data.smol import DEFAULT_OUT
from benchmarks.kernel_clock import busy_seconds, kernel_clock
from benchmarks.machine import Call, Timing, time_rounds
from benchmarks.report import Row, say
from benchmarks.sections import Section, Target, at_most
from deltasync import oneshot

START, READ, DIFF, COPY, APPLY = "start", "cat OLD NEW", "deltasync diff", "cp OLD + fsync", "deltasync apply"
WARM, COLD = "cached", "not cached"
PLAIN = {DIFF: READ, APPLY: COPY}  # the least that a command has to do with files


@dataclass(frozen=True, slots=True)
class Folder:
    """The files of this section."""

    old: Path
    new: Path
    delta: Path
    output: Path
    copy: Path

    def weights(self) -> list[Path]:
        """The two checkpoint files."""
        return [self.old / WEIGHTS_NAME, self.new / WEIGHTS_NAME]


@dataclass(frozen=True, slots=True)
class Clock:
    """The work of one command, in memory and on cached files, and the seconds in which kernels ran in it."""

    command: str
    in_memory: Callable[[], object]
    on_files: Callable[[], object]
    computing: list[float] = field(default_factory=list)
    kernels: list[float] = field(default_factory=list)

    def calls(self) -> list[Call]:
        """Make calls that note their own seconds, to run in turns with the commands."""
        parts = (("in memory", self.in_memory, self.computing), ("on files", self.on_files, self.kernels))
        return [Call(f"{self.command} {where}", partial(_clocked, work, found), 0) for where, work, found in parts]


@dataclass(frozen=True, slots=True)
class Split:
    """Where the wall time of one command goes, in seconds."""

    command: str
    cache: str
    wall: float
    start: float
    plain: float
    computing: float
    kernels: float

    @property
    def share(self) -> float:
        """Computing as a share of the time after Python has started."""
        return self.computing / (self.wall - self.start)


def run(plan: Plan) -> Section:
    """Write a pair of checkpoints, and time the commands with the files in the page cache and out of it."""
    pair = model_pair(plan.model)
    DEFAULT_OUT.mkdir(exist_ok=True)
    with TemporaryDirectory(prefix="codec-", dir=DEFAULT_OUT) as name:
        say(f"files: writing two checkpoints of {pair.nbytes / 1e9:.2f} GB")
        root = Path(name)
        folder = Folder(*write_pair(pair, root), root / "delta.safetensors", root / "output", root / "copy")
        for file in folder.weights():
            _with_file(file, os.fsync)
        clocks = _clocks(pair, folder)
        timings = {
            WARM: _time_commands(folder, WARM, plan, [call for clock in clocks for call in clock.calls()]),
            COLD: _time_commands(folder, COLD, plan, []),
        }
        splits = [split for cache, found in timings.items() for split in _splits(cache, found, clocks)]
    rows = [_time_row(cache, name, timing) for cache, found in timings.items() for name, timing in found.items()]
    title = f"files: a pair of checkpoints of {pair.nbytes / 1e9:.2f} GB each"
    return Section(
        tables={title: rows, "files: where the time goes, in seconds": [_split_row(split) for split in splits]},
        targets=list(_targets(splits)),
    )


def _time_commands(folder: Folder, cache: str, plan: Plan, others: list[Call]) -> dict[str, Timing]:
    """Time the commands; `others` run in the same rounds, and keep their own results."""
    say(f"files: commands, files {cache}")
    files = folder.weights()
    nbytes = files[0].stat().st_size
    ready: Callable[[], None] = partial(_drop_cache, files) if cache == COLD else partial(_fill_cache, files)

    def ready_to_write() -> None:
        shutil.rmtree(folder.output, ignore_errors=True)
        folder.copy.unlink(missing_ok=True)
        ready()

    deltasync = (sys.executable, "-m", "deltasync")
    diff = (*deltasync, "diff", folder.old, folder.new, "-o", folder.delta)
    apply = (*deltasync, "apply", folder.old, folder.delta, "-o", folder.output)
    calls = [
        Call(START, partial(_command, sys.executable, "-c", "import deltasync.cli.checkpoints"), 0),
        Call(READ, partial(_command, "cat", *files), 2 * nbytes, ready),
        Call(DIFF, partial(_command, *diff), 2 * nbytes, ready),
        Call(COPY, lambda: _copy(files[0], folder.copy), nbytes, ready_to_write),
        Call(APPLY, partial(_command, *apply), nbytes, ready_to_write),
    ]
    found = time_rounds([*calls, *others], repeats=plan.file_repeats, warmup=0 if cache == COLD else 1)
    return {call.name: found[call.name] for call in calls}


def _clocks(pair: Pair, folder: Folder) -> list[Clock]:
    old, new = ({name: bits.view(ml_dtypes.bfloat16) for name, bits in side.items()} for side in (pair.old, pair.new))

    def apply_files() -> None:
        shutil.rmtree(folder.output, ignore_errors=True)
        oneshot.apply(folder.old, folder.delta, out=folder.output)

    return [
        Clock(
            command=DIFF,
            in_memory=lambda: oneshot.diff(old, new),
            on_files=lambda: oneshot.diff(folder.old, folder.new),
        ),
        Clock(
            command=APPLY,
            in_memory=lambda: oneshot.apply(old, folder.delta),
            on_files=apply_files,
        ),
    ]


def _splits(cache: str, found: dict[str, Timing], clocks: list[Clock]) -> Iterator[Split]:
    for clock in clocks:
        yield Split(
            command=clock.command,
            cache=cache,
            wall=found[clock.command].best_seconds,
            start=found[START].best_seconds,
            plain=found[PLAIN[clock.command]].best_seconds,
            computing=min(*clock.computing, *clock.kernels),
            kernels=min(clock.kernels),
        )


def _time_row(cache: str, name: str, timing: Timing) -> Row:
    return {
        "files": cache,
        "command": name,
        "seconds": timing.best_seconds,
        "median": timing.median_seconds,
        "GB/s of files": timing.best if timing.nbytes else None,
    }


def _split_row(split: Split) -> Row:
    return {
        "command": split.command,
        "files": split.cache,
        "wall": split.wall,
        "start of Python": split.start,
        "computing": split.computing,
        "files and the rest": split.wall - split.start - split.computing,
        "computing / (wall - start)": split.share,
        "kernels on cached files": split.kernels if split.cache == WARM else None,
        "plain read or copy": split.plain,
        "wall / plain": split.wall / split.plain,
    }


def _targets(splits: list[Split]) -> Iterator[Target]:
    for split in splits:
        yield at_most(f"{split.command}, files {split.cache}: computing / (wall - start)", split.share, 0.5)


def _clocked(work: Callable[[], object], found: list[float]) -> None:
    with kernel_clock() as intervals:
        work()
    found.append(busy_seconds(intervals))


def _command(*parts: str | Path) -> None:
    subprocess.run(parts, stdout=subprocess.DEVNULL, check=True)


def _copy(source: Path, target: Path) -> None:
    _command("cp", source, target)
    _with_file(target, os.fsync)


def _fill_cache(files: list[Path]) -> None:
    _command("cat", *files)


def _drop_cache(files: list[Path]) -> None:
    """Make the system forget the content of files; it must be on disk for that."""
    for file in files:
        _with_file(file, os.fsync)
        _with_file(file, lambda descriptor: os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED))


def _with_file(path: Path, act: Callable[[int], object]) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        act(descriptor)
    finally:
        os.close(descriptor)
