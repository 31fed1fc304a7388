"""Build the native targets, and run them: under libFuzzer where clang is, else with the driver of our own."""

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

from support import LONG_S, processes

from .loop import CORPUS, Result

NATIVE = ("relative", "absolute", "planes", "sequence", "crafted", "large")
"""The targets of decode_fuzz.cpp."""

BUILD = Path(os.environ.get("FUZZ_BUILD", "build/fuzz"))
_ROOT = Path(__file__).parents[2]
_SANITIZERS = {"UBSAN_OPTIONS": "print_stacktrace=1"}


def compiler() -> str | None:
    """The compiler that `build` uses: CXX, clang++ or g++; None if there is none."""
    return next((name for name in (os.environ.get("CXX", "clang++"), "g++") if shutil.which(name)), None)


def build() -> Path:
    """The program with all native targets, with sanitizers; AssertionError if it cannot be built."""
    done = processes.run([_ROOT / "tests/fuzz/build.sh"], check=True, timeout_s=4 * LONG_S)
    return _ROOT / done.stdout.strip()


def run_native(program: Path, name: str, *, seconds: float, seed: int) -> Result:
    """Replay the corpus of a native target, then fuzz it. What fails lies in the folder of the build as `crash-*`."""
    kept, new = CORPUS / name, _ROOT / BUILD / "corpus" / name
    new.mkdir(parents=True, exist_ok=True)
    running = program.parent / f"running-{name}"
    if (program.parent / "libfuzzer").exists():
        options = [f"-artifact_prefix={program.parent}/", "-max_len=4096", "-timeout=300", "-rss_limit_mb=3072"]
        # 0 would mean without end.
        options += [f"-max_total_time={max(1, round(seconds))}", f"-seed={seed + 1}", "-print_final_stats=1"]
        command = [program, *options, *(["-runs=0"] if seconds == 0 else []), new, kept]
    else:
        command = [program, str(seconds), str(seed), new, kept]
    since = time.monotonic()
    done = processes.run(
        command,
        env={**os.environ, **_SANITIZERS, "FUZZ_TARGET": name, "FUZZ_INPUT": str(running)},
        stderr=subprocess.STDOUT,
        errors="replace",
        timeout_s=seconds + 4 * LONG_S,
    )
    printed = done.stdout
    result = Result(f"native {name}", seconds=time.monotonic() - since)
    found = re.findall(r"(?:number_of_executed_units: |executions: |^Done )([0-9]+)", printed, re.MULTILINE)
    result.executions = max(map(int, found), default=0)
    peak = re.search(r"peak_rss_mb: ([0-9]+)", printed)
    result.peak_megabytes = 0.0 if peak is None else float(peak[1])
    if done.returncode != 0:
        result.failure = f"{printed[-8000:]}\n{name} ended with {done.returncode}; see {program.parent}"
    return result
