"""The parts of the simulation: virtual time and its threads, choices, and how a schedule is shortened."""

import random

import pytest
from simulation.choices import Choices, shortened
from simulation.scheduler import POLL, START_S, Death, Process, new_scheduler
from simulation.virtual import Condition, Event, Executor, Lock, RLock, virtual, wait
from simulation.world import simulate


def test_threads_run_one_at_a_time_in_the_order_of_virtual_time() -> None:
    runner, seen = new_scheduler(), []

    def work(name: str, pause_s: float) -> None:
        for number in range(3):
            runner.sleep(pause_s)
            seen.append((round(runner.now_s - START_S, 3), name, number))

    for name, pause_s in (("slow", 10.0), ("quick", 4.0)):
        runner.spawn(Process(name), lambda name=name, pause_s=pause_s: work(name, pause_s))
    assert runner.run() == []
    assert seen == [
        (4, "quick", 0), (8, "quick", 1), (10, "slow", 0), (12, "quick", 2), (20, "slow", 1), (30, "slow", 2)
    ]  # fmt: skip


@pytest.mark.parametrize("kind", [Lock, RLock])
def test_a_lock_keeps_others_out(kind: type[Lock]) -> None:
    runner, lock, inside, most = new_scheduler(), kind(), 0, 0

    def work() -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
            runner.sleep(1)
            inside -= 1

    for number in range(5):
        runner.spawn(Process(str(number)), work)
    assert runner.run() == []
    assert most == 1
    assert runner.now_s == START_S + 5


def test_conditions_events_and_executors() -> None:
    runner, seen = new_scheduler(), []

    def main() -> None:
        condition, event, items = Condition(), Event(), []

        def produce() -> int:
            runner.sleep(5)
            with condition:
                items.append(1)
                condition.notify_all()
            runner.sleep(5)
            event.set()
            return 7

        with Executor(1) as pool:
            future = pool.submit(produce)
            with condition:
                seen.append(condition.wait_for(lambda: bool(items), 1))
                seen.append(condition.wait_for(lambda: bool(items)))
            seen.append(event.wait())
            wait([future])
            seen.append(future.result())

    runner.spawn(Process("main"), main)
    assert runner.run() == []
    assert seen == [False, True, True, 7]


def test_a_thread_that_waits_without_end_is_reported() -> None:
    runner = new_scheduler()
    runner.spawn(Process("stuck"), lambda: Event().wait() and None)
    assert [task.process.name for task in runner.run()] == ["stuck"]
    runner.end()


def test_the_death_of_a_process_unwinds_its_threads_and_no_other() -> None:
    runner, victim, ends = new_scheduler(), Process("victim"), []

    def work(name: str) -> None:
        try:
            runner.sleep(100)
            ends.append((name, "finished"))
        except Death:
            ends.append((name, "died"))
            raise

    def kill() -> None:
        runner.sleep(50)
        runner.kill(victim)

    runner.spawn(victim, lambda: work("one"))
    runner.spawn(victim, lambda: work("two"))
    runner.spawn(Process("other"), lambda: work("other"))
    runner.spawn(Process("killer"), kill)
    assert runner.run() == []
    assert ends == [("one", "died"), ("two", "died"), ("other", "finished")]


def test_who_only_polls_does_not_do_so_for_days() -> None:
    runner, polls = new_scheduler(), 0

    def poll() -> None:
        nonlocal polls
        while runner.now_s < START_S + 86_400:
            runner.park(1.0, idleness=POLL)
            polls += 1

    runner.spawn(Process("poller"), poll)
    runner.spawn(Process("sleeper"), lambda: runner.sleep(86_400))
    assert runner.run() == []
    assert 1 < polls < 50


def test_choices_are_the_same_for_a_seed_and_can_be_left_out() -> None:
    def made(keep: list[str] | None = None) -> list[str]:
        choices = Choices(5, keep=keep, clock=lambda: 0.0)
        stream = choices.stream("a")
        for _ in range(50):
            stream.pick([("x", 0.1), ("y", 0.1)], "what")
        return [choice.key for choice in choices.made]

    first = made()
    assert 2 < len(first) < 30
    assert made() == first
    assert made(first[1:2]) == first[1:2]
    assert made([]) == []


@pytest.mark.parametrize("seed", range(20))
def test_a_schedule_is_shortened_to_what_the_failure_needs(seed: int) -> None:
    rng = random.Random(seed)
    keys = [str(number) for number in range(rng.randint(1, 60))]
    needed = set(rng.sample(keys, min(len(keys), rng.randint(0, 4))))
    assert set(shortened(keys, lambda kept: needed <= set(kept), runs=500)) == needed


def test_some_seeds() -> None:
    with virtual():
        assert [outcome.failure for outcome in map(simulate, range(5))] == [None] * 5
