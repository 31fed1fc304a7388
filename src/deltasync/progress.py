"""How far long work is, for whoever wants to know."""

from collections.abc import Callable
from typing import Protocol


class Progress(Protocol):
    """Told how far long work is: the phase, and how many of its elements are done."""

    def __call__(self, phase: str, done: int, total: int) -> None: ...


def counting(progress: Progress | None, phase: str, total: int) -> Callable[[int], None] | None:
    """Turns counts of elements just done, as the engine tells them, into calls of `progress`."""
    if progress is None:
        return None
    done = 0

    def count(elements: int) -> None:
        nonlocal done
        done += elements
        progress(phase, done, total)

    return count
