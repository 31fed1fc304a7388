"""Run `run_until_signal` in many short processes, each of which gets one signal at a random moment.

    python tests/faults/signals.py --count 100000 --seed 0 [--within-ms 3]

Prints as JSON how many processes ended by themselves, how many by the signal's default action because it came before
the handler, and how many were still there after `--limit-s`: these have lost their signal.
"""

import argparse
import gc
import json
import os
import random
import select
import signal
import threading
import time

from deltasync.cli.service import run_until_signal

SIGNALS = (signal.SIGINT, signal.SIGTERM)
RUNNING, ENDED = b"r", b"e"
LATER_SHARE = 0.25
"""Of the signals, sent only when the process is known to wait."""


def child(ready: int) -> None:
    """Wait until a signal comes, as the commands do."""
    stopped = threading.Event()

    def run() -> None:
        os.write(ready, RUNNING)
        stopped.wait(600)

    run_until_signal(run, stopped.set)
    os.write(ready, ENDED)


def outcome(random_: random.Random, *, within_s: float, limit_s: float) -> str:
    """Start a process, send it a signal at a random moment, and say how it ended."""
    readable, writable = os.pipe()
    # What runs after a fork, before `child`, is no part of a command: signals wait for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    process = os.fork()
    if process == 0:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        child(writable)
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    os.close(writable)
    is_later = random_.random() < LATER_SHARE
    if is_later:
        os.read(readable, 1)
    until_s = time.perf_counter() + random_.random() * within_s
    while time.perf_counter() < until_s:
        pass
    os.kill(process, number := random_.choice(SIGNALS))
    # The pipe is at its end once the process is gone.
    deadline_s = time.monotonic() + limit_s
    seen = b""
    while (left_s := deadline_s - time.monotonic()) > 0 and select.select([readable], [], [], left_s)[0]:
        data = os.read(readable, 8)
        if not data:
            break
        seen += data
    else:
        os.kill(process, signal.SIGKILL)
    os.close(readable)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if status == -signal.SIGKILL:
        return "lost"
    if status == 0 and seen.endswith(ENDED):
        return "ended"
    return "before the handler" if not is_later and status == -number else f"wrong: {status}"


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--within-ms", type=float, default=3.0)
    parser.add_argument("--limit-s", type=float, default=20.0)
    args = parser.parse_args()
    random_ = random.Random(args.seed)
    gc.freeze()
    counts: dict[str, int] = {}
    for _ in range(args.count):
        name = outcome(random_, within_s=args.within_ms / 1e3, limit_s=args.limit_s)
        counts[name] = counts.get(name, 0) + 1
    print(json.dumps({"signals": args.count, "lost": 0, **counts}))


if __name__ == "__main__":
    main()
