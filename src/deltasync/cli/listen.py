"""The options `--listen` and `--metrics` of commands that follow a feed: health, status and metrics over HTTP."""

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from deltasync import metrics
from deltasync.cli.output import Output
from deltasync.errors import InvalidInputError
from deltasync.metrics import Collector

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


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
