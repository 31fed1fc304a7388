"""The soak's own parts: what a seed determines, and what counts as growth."""

from itertools import pairwise

import pytest
from soak.processes import Life, MiB, Sample, grows
from soak.schedule import JUMPING, KILLED, SPOILED, STOPPED, Step, schedule
from support import processes

UNDONE = {"kill": "start", "stop": "continue", "fill": "empty", "jump": "return", "spoil": "release"}


def make(seed: int, *, seconds: float = 180.0) -> list[Step]:
    return schedule(seed, seconds, disk=True, clocks=True, vllm=True)


def test_a_seed_determines_the_schedule() -> None:
    assert make(1) == make(1)
    assert make(1) != make(2)


@pytest.mark.parametrize("seed", range(20))
def test_every_fault_happens_within_three_minutes_and_is_undone(seed: int) -> None:
    steps = make(seed)
    found = {(step.verb, step.subject) for step in steps}
    assert found >= {("kill", name) for name in KILLED} | {("stop", name) for name in STOPPED}
    assert found >= {("spoil", name) for name in SPOILED} | {("fill", "disk"), ("prune", "feed")}
    assert found >= {("jump", name) for name in JUMPING}
    assert all(a.at_s <= b.at_s for a, b in pairwise(steps))
    for fault, undo in UNDONE.items():
        subjects = {step.subject for step in steps if step.verb == fault and step.subject != "pruner"}
        for subject in subjects:
            verbs = [step.verb for step in steps if step.verb in (fault, undo) and step.subject == subject]
            assert verbs == [fault, undo] * (len(verbs) // 2), (fault, subject)
    assert all(step.at_s <= 180.0 for step in steps)


def test_what_a_machine_cannot_do_is_left_out() -> None:
    steps = schedule(3, 600.0, disk=False, clocks=False, vllm=False)
    assert {step.verb for step in steps}.isdisjoint({"fill", "jump"})
    assert "vllm" not in {step.subject for step in steps}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([float(i) for i in range(200)], True),
        ([10 + i / 5 + 3 * (i % 7 == 0) for i in range(200)], True),
        ([20.0] * 200, False),
        ([10.0 + 2 * (i % 5) for i in range(200)], False),
        ([float(min(i, 60)) for i in range(200)], False),
        ([10.0] * 90 + [500.0] * 5 + [10.0] * 105, False),
        ([10.0] * 100 + [60.0] * 100, False),
        ([float(i) for i in range(20)], False),
        ([10 + i / 30 for i in range(200)], False),
    ],
    ids=["line", "line with peaks", "constant", "noise", "plateau", "peak", "one step up", "too short", "little"],
)
def test_growth_is_what_goes_on(values: list[float], expected: bool) -> None:
    assert grows(values, 16) is expected
    assert grows([value * MiB for value in values], 16 * MiB) is expected


def test_growth_before_a_process_is_ready_does_not_count() -> None:
    with processes.running(["true"]) as process:
        life = Life(process, log_begin=0)
    life.samples += [Sample(float(i), i * MiB, i) for i in range(100)]
    assert life.settled == []
    life.note_ready()
    life.samples += [Sample(100.0 + i, 100 * MiB, 100) for i in range(100)]
    life.note_ready()
    assert [sample.at_s for sample in life.settled] == [100.0 + i for i in range(100)]
