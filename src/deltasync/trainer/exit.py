"""Finish accepted publications when the interpreter exits, although their publisher was not closed.

Python has no exit status of its own for work that fails this late, except one: 120, if the standard streams cannot be
flushed at the very end. A publication that is lost makes that happen, so that a script that forgot to close its
publisher does not report success. Other exit handlers run as usual.
"""

import atexit
import concurrent.futures.thread  # noqa: F401 - its handler must be registered first, so that it is called last
import logging
import os
import sys
import threading
import time
import warnings
from typing import Any
from weakref import WeakKeyDictionary

from deltasync.trainer.pipeline import Pipeline

logger = logging.getLogger(__name__)

QUIET_S = 1.0
"""Exits that take no longer than this say nothing."""

PROGRESS_S = 10.0
"""Seconds between two log lines about an exit that takes long."""

_unclosed: WeakKeyDictionary[Pipeline, float] = WeakKeyDictionary()
_is_registered = False


def finish_at_exit(pipeline: Pipeline, limit_s: float) -> None:
    """Wait for what was submitted to `pipeline`, for up to `limit_s`, if the interpreter exits before it is closed."""
    global _is_registered  # noqa: PLW0603
    _unclosed[pipeline] = limit_s
    if not _is_registered:
        _is_registered = True
        # Before concurrent.futures refuses work, which clients of stores submit. An `atexit` handler would be too late.
        getattr(threading, "_register_atexit", atexit.register)(_finish_all)


def _finish_all() -> None:
    lost = []
    for pipeline, limit_s in list(_unclosed.items()):
        if pipeline.is_closed:
            continue
        warnings.warn(pipeline.forgotten, ResourceWarning, stacklevel=2)
        try:
            message = _finish(pipeline, limit_s)
        except KeyboardInterrupt:
            message = f"{pipeline.unpublished() or 'the anchor was not written'}, because the exit was interrupted"
        if message is not None:
            lost.append(message)
    if lost and sys.stderr is not None:
        hint = "call close(), or use the publisher in a `with` block, to handle this yourself"
        print(*(f"deltasync: error: {message} ({hint})" for message in lost), sep="\n", file=sys.stderr)
    if lost and sys.stdout is not None:
        sys.stdout = _FailingStream(sys.stdout)


def _finish(pipeline: Pipeline, limit_s: float) -> str | None:
    """Wait for the pipeline and its anchors, then release the lease; returns what is lost."""
    url, deadline_s = pipeline.versions.upload.store.url, time.monotonic() + limit_s

    def is_done(wait_s: float) -> bool:
        return pipeline.wait_idle(wait_s) and pipeline.wait_anchors(wait_s)

    wait_s = min(QUIET_S, limit_s)
    while not is_done(wait_s) and (left_s := deadline_s - time.monotonic()) > 0:
        logger.warning("exiting, but first finishing what was published to %s, for up to %.0f s", url, left_s)
        wait_s = min(PROGRESS_S, left_s)
    lost = pipeline.unpublished()
    if not pipeline.wait_idle(0):
        return f"{lost} within {limit_s:g} s"
    if not pipeline.wait_anchors(0):
        logger.error("an anchor of %s was not finished within %g s; the feed is complete without it", url, limit_s)
    else:
        pipeline.close()
        pipeline.versions.upload.close()
    return lost


class _FailingStream:
    """A standard stream whose last flush fails: the exit status of the process is then 120."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        self._stream.flush()
        if sys.is_finalizing():
            # What was lost is already reported: this error need not be shown.
            hook = sys.unraisablehook

            def ignore_once(_: object) -> None:
                sys.unraisablehook = hook

            sys.unraisablehook = ignore_once
            raise RuntimeError("a publication was lost")


def _after_fork() -> None:
    global _unclosed  # noqa: PLW0603
    _unclosed = WeakKeyDictionary()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
