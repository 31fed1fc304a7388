"""Work on all cores, in order and in bounded memory."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from deltasync.errors import InvalidInputError

T = TypeVar("T")
R = TypeVar("R")


def each(
    work: Callable[[T], R],
    items: Iterable[T],
    *,
    threads: int | None = None,
    on_done: Callable[[T], None] | None = None,
) -> Iterator[R]:
    """Results of `work` in the order of `items`; never more than two of them for each thread are under way."""
    workers = os.cpu_count() if threads is None else threads
    if workers is None or workers < 1:
        raise InvalidInputError(f"threads must be at least 1, not {workers}")
    source = iter(items)
    with ThreadPoolExecutor(workers, thread_name_prefix="deltasync") as pool:
        waiting: deque[tuple[T, Future[R]]] = deque()
        try:
            waiting.extend((item, pool.submit(work, item)) for item in islice(source, 2 * workers))
            while waiting:
                item, future = waiting.popleft()
                result = future.result()
                waiting.extend((following, pool.submit(work, following)) for following in islice(source, 1))
                if on_done is not None:
                    on_done(item)
                yield result
        finally:
            for _, future in waiting:
                future.cancel()
