"""The inside of each process of the demo: it tells by lines of JSON on stdout, and is told by lines on stdin.

When stdin ends, whatever the reason, whoever started the process is gone, and it ends too. So no process outlives the
command, even if that is killed.
"""

import json
import logging
import sys
import threading
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

from deltasync.errors import DeltasyncError

_lock = threading.Lock()


def tell(event: str, **fields: Any) -> None:
    """One event, from any thread."""
    with _lock:
        print(json.dumps({"event": event, **fields}), file=sys.__stdout__, flush=True)


class Orders:
    """What this process was told. `finish_at`: come to this version, then end in good order."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.finish_at: int | None = None

    def listen(self) -> None:
        """Read stdin in a thread that ends with the process."""
        threading.Thread(target=self._read, daemon=True, name="orders").start()

    def _read(self) -> None:
        # Not sys.stdin: its buffer would be locked while this thread waits, and the interpreter could not end.
        with open(sys.stdin.fileno(), closefd=False) as lines:
            for line in iter(lines.readline, ""):
                self.finish_at = int(line)
        self.stopped.set()


def run(main: Callable[[Orders], None]) -> int:
    """Run a process of the demo to its end; its exit code. An error on purpose is told, others are left to stderr."""
    log = logging.getLogger("deltasync")
    log.addHandler(logging.StreamHandler(sys.stderr))
    log.setLevel(logging.INFO)
    orders = Orders()
    orders.listen()
    try:
        # What a library prints is no event.
        with redirect_stdout(sys.stderr):
            main(orders)
    except DeltasyncError as error:
        tell("error", kind=error.kind, message=error.message, hint=error.hint)
        return 1
    return 0
