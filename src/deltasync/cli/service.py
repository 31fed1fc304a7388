"""What commands that run until SIGINT or SIGTERM share: signals, and health, status and metrics over HTTP."""

import argparse
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from deltasync import metrics
from deltasync.cli.output import Output, OutputError
from deltasync.errors import InvalidInputError
from deltasync.metrics import Collector
from deltasync.replica.loop import Loop

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def calling_on_signal(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on SIGINT or SIGTERM during the block. A second signal ends the process."""

    def handle(number: int, frame: FrameType | None) -> None:
        for each in _STOP_SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        stop()

    before = {each: signal.signal(each, handle) for each in _STOP_SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def run_until_signal(run: Callable[[], None], stop: Callable[[], None]) -> None:
    """Call `run`, and on SIGINT or SIGTERM `stop`, after which `run` has to return.

    It runs in a thread of its own: a signal handler runs in this one, and must not meet a lock that `run` holds.
    """
    with ThreadPoolExecutor(1) as pool, calling_on_signal(stop):
        pool.submit(run).result()


def poll_until_signal(
    step: Callable[[], bool], loop: Loop | None = None, *, final: tuple[type[Exception], ...] = ()
) -> None:
    """Call `step` in a poll loop until SIGINT or SIGTERM, or an error that a retry cannot fix, such as `final` ones."""
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
    collector: Collector,
    *,
    why_not_ready: Callable[[], str | None],
    details: Callable[[], Mapping[str, Any]] = dict,
) -> Iterator[None]:
    """Serve during the block, if `--listen` asks for it, and print the address on standard error."""
    if args.listen is None:
        yield
        return
    exposed = None
    if args.metrics or importlib.util.find_spec("prometheus_client") is not None:
        exposed = metrics.exposition(collector)
    token = os.environ.get("DELTASYNC_TOKEN") or None
    with metrics.listening(
        status, *args.listen, token=token, metrics=exposed, why_not_ready=why_not_ready, details=details
    ) as url:
        text = json.dumps({"listening": url}) if out.is_json else f"listening on {url}"
        print(text, file=sys.stderr, flush=True)
        yield
