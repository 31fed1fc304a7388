"""All fuzz targets: their corpora, then new inputs for `FUZZ_SECONDS` (60) in all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz.native import NATIVE, compiler
from fuzz.targets import TARGETS
from support import processes
from support.servers import missing

pytestmark = [pytest.mark.e2e, pytest.mark.long]

ROOT = Path(__file__).parents[2]


def fuzz(tmp_path: Path, *options: str, **environment: str) -> dict[str, dict[str, object]]:
    """The row of each target."""
    done = processes.run(
        [sys.executable, "-m", "fuzz", "--json", str(tmp_path / "results.json"), *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests"), **environment},
        stderr=subprocess.STDOUT,
        timeout_s=1800,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-20_000:]
    return {row["target"]: row for row in json.loads((tmp_path / "results.json").read_text())["targets"]}


def test_readers_and_decoders_survive_fuzzing(tmp_path: Path) -> None:
    if compiler() is None:
        missing("the native fuzz targets need clang++ or g++, which are not installed")
    rows = fuzz(tmp_path, "--seconds", os.environ.get("FUZZ_SECONDS", "60"))
    assert rows.keys() == {*TARGETS, *(f"native {name}" for name in NATIVE)}
    for name, row in rows.items():
        assert row["executions"] > 0, f"{name} did nothing"


def test_the_driver_for_other_compilers(tmp_path: Path) -> None:
    """Where there is no clang, the native targets run without libFuzzer."""
    if processes.run(["g++", "--version"]).returncode != 0:
        missing("this needs g++")
    chosen = ("--target", "native relative", "--target", "native planes")
    rows = fuzz(tmp_path, "--seconds", "2", *chosen, CXX="g++", FUZZ_OPTIMIZE="0", FUZZ_BUILD="build/fuzz-quick")
    assert all(row["executions"] > 100 for row in rows.values())


@pytest.mark.parametrize("name", ["manifest", "payload", "kernels relative"])
def test_a_seed_gives_the_same_inputs(name: str) -> None:
    from fuzz.mutations import Mutator

    target, seeds = TARGETS[name], TARGETS[name].seeds()

    def inputs(seed: int) -> list[bytes]:
        mutator = Mutator(seed)
        return [target.mutate(mutator, seeds[0], lambda: seeds[-1]) for _ in range(50)]

    assert inputs(1) == inputs(1)
    assert inputs(1) != inputs(2)
