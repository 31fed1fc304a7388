"""When a follower polls: often around the time of the next version, seldom before and after."""

from random import Random

import pytest

from deltasync.replica import loop

POLLS = {
    "nothing is known": ([], 4.0, 0.5),
    "nothing is known, for long": ([], 100.0, 2.0),
    "one version": ([5.0], 9.0, 0.5),
    "half the time is over": ([0.0, 4.0], 6.0, 0.25),
    "the next one is due": ([0.0, 4.0], 8.0, 0.05),
    "the next one is overdue": ([0.0, 4.0], 10.0, 0.25),
    "the next one is far": ([0.0, 60.0], 61.0, 2.0),
    "training has stopped": ([0.0, 1.0], 1000.0, 2.0),
    "the last interval counts": ([0.0, 60.0, 62.0], 63.2, 0.1),
}


@pytest.mark.parametrize(("arrivals", "now_s", "pause_s"), POLLS.values(), ids=POLLS.keys())
def test_polls_are_dense_around_the_time_of_the_next_version(
    arrivals: list[float], now_s: float, pause_s: float
) -> None:
    clock = iter([0.0, *arrivals, now_s])
    cadence = loop.Cadence(clock=lambda: next(clock))
    for _ in arrivals:
        cadence.note()
    assert cadence.pause_s() == pytest.approx(pause_s)


def test_the_loop_asks_the_cadence_after_each_poll_that_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    running, steps, events = loop.Loop(), [True, False, False, True, False], list[str]()

    class Recorded(loop.Cadence):
        def note(self) -> None:
            events.append("version")

        def pause_s(self) -> float:
            events.append("pause")
            return 0.01

    monkeypatch.setattr(loop, "Cadence", Recorded)

    def step() -> bool:
        found = steps.pop(0)
        if not steps:
            running.stop()
        return found

    running.run(step)
    assert events == ["version", "pause", "pause", "version", "pause"]


def test_polls_and_delay_of_a_version_every_ten_seconds() -> None:
    """The figures of docs/replicas.md: intervals that vary by a tenth, and 50 ms for a request."""
    random, now_s, due_s, polls, delays = Random(0), 0.0, 10.0, 0, list[float]()
    cadence = loop.Cadence(clock=lambda: now_s)
    while len(delays) < 1000:
        polls += 1
        asked_s, now_s = now_s + 0.025, now_s + 0.05
        if asked_s < due_s:
            now_s += cadence.pause_s()
            continue
        delays.append(now_s - due_s)
        cadence.note()
        due_s += random.uniform(9.0, 11.0)
    assert polls / len(delays) == pytest.approx(24, abs=1)
    assert sum(delays) / len(delays) == pytest.approx(0.1, abs=0.01)
