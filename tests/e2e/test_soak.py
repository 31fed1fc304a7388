"""A short soak of the whole system. `make soak` runs a long one, with a vLLM server."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from soak.schedule import JUMPING, KILLED, SPOILED, STOPPED, schedule
from support import LONG_S, processes
from support.servers import missing
from support.vllm import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.long]

MINUTES = 3.0
SEED = 1
CANNOT_RUN = 2


def test_every_fault_happens_at_least_once() -> None:
    steps = schedule(SEED, 60 * MINUTES, disk=True, clocks=True, vllm=False)
    faults = {"kill": KILLED, "stop": STOPPED, "spoil": SPOILED, "jump": JUMPING, "fill": ("disk",), "prune": ("feed",)}
    wanted = {(verb, subject) for verb, subjects in faults.items() for subject in subjects}
    assert wanted <= {(step.verb, step.subject) for step in steps}


def test_the_system_survives_faults_and_ends_with_equal_bits(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "soak", "--minutes", str(MINUTES), "--seed", str(SEED)]
    command += ["--folder", str(tmp_path / "soak"), "--json", str(tmp_path / "report.json")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with processes.running(command, env=environment, **pipes) as process:
        try:
            output, _ = process.communicate(timeout=60 * MINUTES + 4 * LONG_S)
        finally:
            # It ends what it started, which takes a while.
            process.terminate()
            process.wait(LONG_S)
    if process.returncode == CANNOT_RUN:
        missing(output[-1000:])
    assert process.returncode == 0, output[-20_000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["problems"] == []
    # It was not idle: versions went on, and faults of all kinds were survived.
    assert report["versions"] > 20
    assert report["served_versions_compared"] > 20
    assert set(report["kills"]) >= {"trainer", "torch", "folder"}
    assert set(report["stops"]) >= {"trainer", "torch", "steady", "folder", "store"}
    assert len(report["spoiled_answers"]) >= 6
    if "left out" not in output:
        assert report["full_disks"]
        assert report["clock_jumps"]
