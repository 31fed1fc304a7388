"""What the processes that maintain a feed have done: a compactor, a pruner, a relay. For their metrics and status."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from deltasync.store.patient import PatientStore


@dataclass(slots=True)
class Upkeep:
    """Counts and times of one such process since it was created. One thread writes them, others may read them.

    No dictionary is ever changed: it is replaced by another one, so that others may read it in the meantime.

    `version`: where it is. A compactor holds the weights of this version, a copy has it as its newest one, and a
    pruner keeps everything from it on. `head`: the newest version of the feed that it has seen. `error`: what the last
    attempt failed with; None after a success. `worked_unix_s`: when the last attempt succeeded.
    """

    version: int | None = None
    head: int | None = None
    counts: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    """Time by phase."""
    figures: dict[str, int] = field(default_factory=dict)
    """What the last attempt found, which may become less."""
    error: str | None = None
    worked_unix_s: float | None = None

    @contextmanager
    def attempt(self, *stores: PatientStore) -> Iterator[None]:
        """Count what happens in the block as one attempt, which fails with an error, and the retries of `stores`."""
        retries = sum(store.retries for store in stores)
        try:
            yield
        except GeneratorExit:
            # The caller has had enough, which is no failure.
            raise
        except BaseException as error:
            self.count("failures")
            self.error = f"{type(error).__name__}: {error}"
            raise
        else:
            self.error, self.worked_unix_s = None, time.time()
        finally:
            self.count("retries", sum(store.retries for store in stores) - retries)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time that the block takes."""
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self.seconds = {**self.seconds, name: self.seconds.get(name, 0.0) + time.perf_counter() - began_s}

    def count(self, name: str, number: int = 1) -> None:
        """Add to a count."""
        self.counts = {**self.counts, name: self.counts.get(name, 0) + number}

    def why_not_ready(self) -> str | None:
        """Why this process does not do its work: it fails, or has not succeeded yet. None if it does."""
        if self.error is not None:
            return self.error
        return "it has not succeeded yet" if self.worked_unix_s is None else None
