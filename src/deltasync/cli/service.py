"""What commands that run until SIGINT or SIGTERM share: signals, and health, status and metrics over HTTP."""

import argparse
import importlib.util
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from deltasync.cli.output import Output, OutputError
from deltasync.errors import InvalidInputError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from deltasync.observe import Collector
    from deltasync.replica.loop import Loop

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAME_SIGNAL_S = 0.1
"""Signals that follow the first one so closely count as one: `timeout` sends each to the process and to its group."""


@contextmanager
def calling_on_signal(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on SIGINT or SIGTERM during the block, in a thread of its own. A second signal ends the process.

    Python runs signal handlers in the main thread, between two instructions. A signal that comes just before that
    thread waits for a lock is not noticed until the wait is over, which here only the signal could end. So the thread
    reads signals from a pipe, which the interpreter writes to at once, whatever the main thread does.
    """

    def watch() -> None:
        first_s: float | None = None
        while received := os.read(readable, 1):
            if received[0] not in _STOP_SIGNALS:
                continue
            if first_s is None:
                first_s = time.monotonic()
                stop()
            elif time.monotonic() - first_s > SAME_SIGNAL_S:
                os._exit(128 + received[0])

    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    watcher = threading.Thread(target=watch, name="deltasync-signals", daemon=True)
    watcher.start()
    wakeup_before = signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    # A handler of ours, as the pipe gets only signals that have one. What it would do, the thread does.
    before = {each: signal.signal(each, lambda number, frame: None) for each in _STOP_SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        signal.set_wakeup_fd(wakeup_before)
        os.close(writable)
        watcher.join()
        os.close(readable)


def run_until_signal(run: Callable[[], None], stop: Callable[[], None]) -> None:
    """Call `run`, and on SIGINT or SIGTERM `stop`, after which `run` has to return."""
    with calling_on_signal(stop):
        run()


def poll_until_signal(
    step: Callable[[], bool], loop: "Loop | None" = None, *, final: tuple[type[Exception], ...] = ()
) -> None:
    """Call `step` in a poll loop until SIGINT or SIGTERM, or an error that a retry cannot fix, such as `final` ones."""
    from deltasync.replica.loop import Loop

    loop = Loop() if loop is None else loop
    run_until_signal(lambda: loop.run(step, final=(OutputError, *final)), loop.stop)


def require_address(args: argparse.Namespace, *, follows: bool, without: str) -> None:
    """InvalidInputError if `--listen` has no effect because the command ends by itself, or `--metrics` without it."""
    if args.listen is not None and not follows:
        raise InvalidInputError(f"--listen has no effect {without}", hint="leave it out, or follow the feed")
    if args.metrics and args.listen is None:
        raise InvalidInputError("--metrics needs an address", hint="add --listen HOST:PORT")


@contextmanager
def listening(
    args: argparse.Namespace,
    out: Output,
    status: "Callable[[], DataclassInstance]",
    collector: "Collector",
    *,
    why_not_ready: Callable[[], str | None],
    details: Callable[[], Mapping[str, Any]] = dict,
) -> Iterator[None]:
    """Serve during the block, if `--listen` asks for it, and print the address on standard error."""
    from deltasync import observe

    if args.listen is None:
        yield
        return
    exposed = None
    if args.metrics or importlib.util.find_spec("prometheus_client") is not None:
        exposed = observe.exposition(collector)
    token = os.environ.get("DELTASYNC_TOKEN") or None
    with observe.listening(
        status, *args.listen, token=token, metrics=exposed, why_not_ready=why_not_ready, details=details
    ) as url:
        text = json.dumps({"listening": url}) if out.is_json else f"listening on {url}"
        print(text, file=sys.stderr, flush=True)
        yield
