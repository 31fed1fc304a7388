"""The inside of a process of the demo: it sends events as lines of JSON on stdout, and receives orders on stdin.

When its stdin is closed, the command has ended for whatever reason, and the process ends too: none outlives the
command, even if that is killed.
"""

import json
import logging
import sys
import threading
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict
from typing import Any

from deltasync import Advance, DeltasyncError, PublishEvent

_send_lock = threading.Lock()


def send(event: str, **fields: Any) -> None:
    """Send one event to the command. Any thread may call this."""
    with _send_lock:
        print(json.dumps({"event": event, **fields}), file=sys.__stdout__, flush=True)


def send_version(event: PublishEvent) -> None:
    """Send what a publisher reports."""
    send("published", **asdict(event))


def send_move(moved: Advance) -> None:
    """Send what a follower reports."""
    send(
        "moved",
        version=moved.version,
        from_version=moved.from_version,
        edges=list(moved.edges),
        nbytes=moved.nbytes,
        pause_s=moved.seconds.pause,
    )


class Orders:
    """The orders that this process has received. `finish_at`: reach this version, report, and end."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.finish_at: int | None = None

    def listen(self) -> None:
        """Read stdin in a daemon thread."""
        threading.Thread(target=self._read, daemon=True, name="orders").start()

    def _read(self) -> None:
        # Not sys.stdin: its buffer would be locked while this thread waits, and the interpreter could not exit.
        with open(sys.stdin.fileno(), closefd=False) as lines:
            for line in iter(lines.readline, ""):
                self.finish_at = int(line)
        self.stopped.set()


def run_child(main: Callable[[Orders], None]) -> int:
    """Run the main function of a process and return its exit code.

    A DeltasyncError is sent to the command. Any other exception is left to the interpreter, which prints it to stderr.
    """
    logger = logging.getLogger("deltasync")
    logger.addHandler(logging.StreamHandler(sys.stderr))
    logger.setLevel(logging.INFO)
    orders = Orders()
    orders.listen()
    try:
        # Output that a library prints is not an event.
        with redirect_stdout(sys.stderr):
            main(orders)
    except DeltasyncError as error:
        send("error", kind=error.kind, message=error.message, hint=error.hint)
        return 1
    return 0
