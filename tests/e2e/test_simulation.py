"""The simulation of the whole system: no seed breaks a rule, a seed replays exactly, and planted faults are found."""

import os
import sys
from pathlib import Path

import pytest
from simulation.__main__ import explain, run, table
from simulation.planted import PLANTED
from simulation.virtual import virtual
from simulation.world import simulate
from support import processes, repeats

pytestmark = pytest.mark.e2e

SEEDS = repeats(500, soak=10_000)
CHUNKS = 10
TESTS = Path(__file__).parents[1]


@pytest.mark.long
@pytest.mark.soak
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_no_seed_breaks_a_rule(chunk: int) -> None:
    with virtual():
        counts, failed = run(range(chunk * SEEDS // CHUNKS, (chunk + 1) * SEEDS // CHUNKS))
        assert not failed, "\n\n".join(map(explain, failed[:2]))
    print(table(counts))
    for happened in ("versions", "anchors", "pruned", "restores", "deaths", "fault: sleep", "fault: lose"):
        assert counts[happened] > SEEDS // CHUNKS // 50, happened


def test_a_seed_replays_exactly() -> None:
    """Also in another process, where the order of sets of strings is another one."""
    seeds = range(20)
    script = (
        "from simulation.virtual import virtual\n"
        "from simulation.world import simulate\n"
        f"with virtual():\n    print(*(simulate(seed).trace_sha256 for seed in {seeds!r}))"
    )
    traces = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONPATH": str(TESTS), "PYTHONHASHSEED": hash_seed}
        done = processes.run([sys.executable, "-c", script], env=environment, check=True, timeout_s=600)
        traces.append(done.stdout.split())
    with virtual():
        here = [simulate(seed).trace_sha256 for seed in seeds]
    assert traces == [here, here]
    assert len(set(here)) == len(seeds)


@pytest.mark.long
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name: str) -> None:
    with virtual(), PLANTED[name]():
        _, failed = run(range(2_000), stop_at_first=True)
    assert failed, "no seed finds it"


def test_a_failure_is_explained_by_a_short_schedule() -> None:
    with virtual(), PLANTED["changes for a target at another version"]():
        _, (failed,) = run(range(2_000), stop_at_first=True)
        lines = explain(failed).splitlines()
    assert lines[0].startswith(f"seed {failed.seed} breaks the rule target.start")
    command, _, listed = lines[2].partition(" --keep ")
    assert command.endswith(f"--seeds {failed.seed}-{failed.seed} --trace")
    keys = listed.strip("'").split(",")
    kept, made = int(lines[3].split()[0]), int(lines[3].split()[2])
    assert kept == len(keys) < made == len(failed.choices)
    with virtual(), PLANTED["changes for a target at another version"]():
        for key in keys:
            without = simulate(failed.seed, keep=[other for other in keys if other != key]).failure
            assert without is None or without.rule != "target.start", f"{key} can be left out"
