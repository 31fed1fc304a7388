"""Progress bars on stderr, only where a person sees them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from deltasync.progress import Progress as Tell


@contextmanager
def bars() -> Iterator[Tell | None]:
    """One bar for each phase; None where stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("{task.description:<8}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        tasks: dict[str, TaskID] = {}

        def tell(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = shown.add_task(phase, total=total)
            shown.update(tasks[phase], completed=done)

        yield tell
