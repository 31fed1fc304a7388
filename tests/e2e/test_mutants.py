"""Some mutants for real: each is killed, and what is not killed is reported. `make mutants` tries all of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mutants.mutant import Mutant
from mutants.sandbox import KILLED, ROOT, SURVIVED, UNKNOWN, Sandbox
from support import processes

pytestmark = pytest.mark.e2e

NAMES = (
    "seal-unchecked",
    "lock-through-a-link",
    "lease-ignored",
    "prune-reads-the-clock-late",
    "shadow-advanced-early",
    "folder-not-proved",
)

HARMLESS = Mutant(
    name="harmless",
    harm="None: only a docstring differs.",
    path="src/deltasync/errors.py",
    old='"""The error tree: ',
    new='"""A tree of errors: ',
    killers=("tests/unit/test_errors.py::test_kinds_are_unique",),
)
STALE = Mutant(
    name="stale",
    harm="None: the code has no such text.",
    path="src/deltasync/errors.py",
    old="no such text",
    new="",
    killers=HARMLESS.killers,
)
UNIMPORTABLE = Mutant(
    name="unimportable",
    harm="No test can run, so none has noticed anything.",
    path="src/deltasync/errors.py",
    old="import copy\n",
    new="import copy, no_such_module\n",
    killers=HARMLESS.killers,
)


def test_mutants_of_several_rooms_are_killed(tmp_path: Path) -> None:
    report = tmp_path / "results" / "mutants.json"
    done = processes.run(
        [sys.executable, "-m", "mutants", *NAMES, "--json", str(report)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        stderr=subprocess.STDOUT,
        timeout_s=600,
    )
    assert done.returncode == 0, done.stdout
    results = json.loads(report.read_text())
    assert {result["mutant"]: result["result"] for result in results} == dict.fromkeys(NAMES, KILLED)
    assert all(result["killer"].startswith("tests/") and result["killer"] in done.stdout for result in results)


def test_what_is_not_killed_is_reported() -> None:
    before = (ROOT / HARMLESS.path).read_text()
    with Sandbox() as sandbox:
        trials = [sandbox.try_out(mutant) for mutant in (HARMLESS, STALE, UNIMPORTABLE)]
    assert [(trial.result, trial.killer) for trial in trials] == [(SURVIVED, None), (UNKNOWN, None), (UNKNOWN, None)]
    assert "does not apply" in trials[1].note
    assert "no_such_module" in trials[2].note
    assert (ROOT / HARMLESS.path).read_text() == before
