"""Signals end every command that runs until one comes, whatever its threads do at that moment."""

import json
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from support import LONG_S, processes, repeats

from deltasync.cli.service import calling_on_signal, run_until_signal

SIGNALS = Path(__file__).parents[1] / "faults" / "signals.py"


def outcome(script: str, *, number: int = signal.SIGINT) -> tuple[int, str]:
    """The exit code and the output of a process that runs `script`, in which `kill()` sends it a signal."""
    head = f"""
import os, signal, threading, time
from deltasync.cli.service import run_until_signal
def kill(): os.kill(os.getpid(), {number})
stopped = threading.Event()
"""
    command = [sys.executable, "-c", head + script]
    done = processes.run(command)
    return done.returncode, done.stdout


UNNOTICED = """
# The signal goes to a thread that does not block it. The main thread sleeps on, and runs no handler.
ready = threading.Event()
sender = threading.Thread(target=lambda: (ready.wait(), kill()), daemon=True)
sender.start()
signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
def run():
    ready.set()
    stopped.wait()
run_until_signal(run, stopped.set)
print("stopped")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_the_main_thread_does_not_notice(number: int) -> None:
    assert outcome(UNNOTICED, number=number) == (0, "stopped\n")


SECOND = """
def run():
    kill()
    stopped.wait()
    print("stopping", flush=True)
    while True:
        time.sleep(0.01)
        kill()
run_until_signal(run, stopped.set)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_process(number: int) -> None:
    assert outcome(SECOND, number=number) == (128 + number, "stopping\n")


AT_ONCE = """
from deltasync.cli import service
service.SAME_SIGNAL_S = 3600
def run():
    kill()
    stopped.wait()
    kill()
run_until_signal(run, stopped.set)
print("stopped")
"""


def test_a_signal_that_is_sent_twice_at_once_is_one() -> None:
    """As `timeout` sends it: to the process, and to its group."""
    assert outcome(AT_ONCE) == (0, "stopped\n")


def test_signals_are_as_before_afterwards() -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    threads = threading.active_count()
    open_files = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    with suppress(ZeroDivisionError), calling_on_signal(lambda: None):
        assert signal.getsignal(signal.SIGINT) not in handlers
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert signal.set_wakeup_fd(-1) == -1
    assert threading.active_count() == threads
    if open_files:
        assert len(os.listdir("/proc/self/fd")) == open_files


def test_a_run_that_ends_by_itself() -> None:
    ended = []
    run_until_signal(lambda: ended.append(True), lambda: None)
    assert ended == [True]


@pytest.mark.soak
def test_no_signal_is_lost() -> None:
    """At random moments from the first instruction on; in `make soak` 100,000 of them."""
    count = repeats(100, soak=100_000)
    command = [sys.executable, str(SIGNALS), "--count", str(count)]
    done = processes.run(command, timeout_s=LONG_S + count / 10, check=True)
    counts = json.loads(done.stdout)
    assert counts.pop("signals") == count
    assert counts.pop("lost") == 0
    assert set(counts) <= {"ended", "before the handler"}
