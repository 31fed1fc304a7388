"""What a publisher tells: the handle of one publication, and what it took."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from deltasync.errors import StoreError
from deltasync.format.manifest import Kind, Manifest

logger = logging.getLogger(__name__)

PROGRESS_S = 10.0
"""Between two lines about an anchor that takes long."""


@dataclass(frozen=True, slots=True)
class PublishEvent:
    """One committed version, or one anchor that was added to a version (`kind` is then "anchor").

    Seconds by phase: `held_s` is what the trainer waited; the others ran behind its back. `coalesced` counts the
    publications that this one carries besides its own.
    """

    kind: Kind
    version: int
    step: int | None
    elements: int
    changed: int | None
    payload_bytes: int
    held_s: float
    encode_s: float
    put_s: float
    commit_s: float
    coalesced: int
    retries: int

    def __str__(self) -> str:
        changed = "all" if self.changed is None else f"{self.changed} changed ({self.density or 0:.3%})"
        behind = f"encode {self.encode_s:.3f} s, put {self.put_s:.3f} s, commit {self.commit_s:.3f} s"
        return (
            f"version {self.version} ({self.kind}, step {self.step}): {changed}, {self.payload_bytes} bytes; "
            f"held {self.held_s:.3f} s, {behind}, {self.retries} retries, {self.coalesced} coalesced"
        )

    @property
    def density(self) -> float | None:
        """The share of elements that changed."""
        return None if self.changed is None or not self.elements else self.changed / self.elements


Observer = Callable[[PublishEvent], None]


class AnchorProgress:
    """Tells the log how far an anchor is, from time to time. Most are done before the first time."""

    def __init__(self, version: int) -> None:
        self._version = version
        self._next_s = time.monotonic() + PROGRESS_S

    def __call__(self, phase: str, done: int, total: int) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s and done < total:
            logger.info(
                "the anchor of version %d: %.0f %% of %d elements are put", self._version, 100 * done / total, total
            )
            self._next_s = now_s + PROGRESS_S


class Publication:
    """The handle of one `publish` call. What it captured is part of `version`, or of a later one that took it along."""

    def __init__(self, step: int | None) -> None:
        self.step = step
        self._done = threading.Event()
        self._manifest: Manifest | None = None
        self._error: BaseException | None = None
        self._event: PublishEvent | None = None

    @property
    def version(self) -> int | None:
        """The version that carries these weights; None while it is not committed."""
        return None if self._manifest is None else self._manifest.version

    @property
    def stats(self) -> PublishEvent | None:
        """What the commit took; None while there is none."""
        return self._event

    def wait(self, timeout_s: float | None = None) -> Manifest:
        """Wait for the commit and give its manifest; the error if it failed for good, StoreError on time-out.

        After an error nothing is lost: the next publication carries what this one did not.
        """
        if not self._done.wait(timeout_s):
            raise StoreError(
                f"step {self.step} is not committed after {timeout_s} s",
                transient=True,
                hint="it goes on in the background: wait again",
            )
        if self._manifest is None:
            raise self._error if self._error is not None else StoreError("the publisher was closed", transient=False)
        return self._manifest

    def succeed(self, manifest: Manifest, event: PublishEvent) -> None:
        """Told by the pipeline: it is committed."""
        self._manifest, self._event = manifest, event
        self._done.set()

    def fail(self, error: BaseException) -> None:
        """Told by the pipeline: it will not be."""
        self._error = error
        self._done.set()
