"""How fast a cost grows: exponents of power laws that are fitted to measurements, and requests that are counted."""

import bisect
import math
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from statistics import linear_regression

from deltasync.store.memory import MemoryStore
from deltasync.store.protocol import Data, ObjectInfo

PAGE = 1000
"""Keys in one response to a listing, on most stores."""


def exponent(costs: Mapping[float, float]) -> float:
    """The exponent e of cost = a * size ** e that fits best, by least squares of the logarithms; 0 for no cost."""
    if not all(costs.values()):
        return 0.0
    sizes = [math.log(size) for size in costs]
    return linear_regression(sizes, [math.log(cost) for cost in costs.values()]).slope


class CountingStore(MemoryStore):
    """A store in memory that counts requests and bytes. Every page of a listing is a request.

    Its keys are sorted once for many listings, as those of a real store are: a listing of a part does not take the
    time of all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.requests: Counter[str] = Counter()
        self.put_bytes = 0
        self.got_bytes = 0
        self._counting = threading.Lock()
        self._sorted: list[str] | None = None

    def reset(self) -> None:
        """Count from nothing again."""
        self.requests, self.put_bytes, self.got_bytes = Counter(), 0, 0

    def put(self, key: str, data: Data) -> None:
        self._count("put", put=len(data))
        self._sorted = None
        super().put(key, data)

    def create(self, key: str, data: Data) -> bool:
        self._count("create", put=len(data))
        self._sorted = None
        return super().create(key, data)

    def get(self, key: str) -> bytes:
        return self._got(key, slice(None))

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        return self._got(key, slice(offset, offset + length))

    def _got(self, key: str, part: slice) -> bytes:
        # Before it is read: a request that finds nothing counts, too.
        self._count("get")
        data = super().get(key)[part]
        self._count("get", requests=0, got=len(data))
        return data

    def delete(self, key: str) -> None:
        self._count("delete")
        self._sorted = None
        super().delete(key)

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectInfo]:
        with self._lock:
            keys = self._sorted
            if keys is None:
                keys = self._sorted = sorted(self._objects)
            first = bisect.bisect_right(keys, after) if after is not None and after >= prefix else 0
            first = max(first, bisect.bisect_left(keys, prefix))
            last = bisect.bisect_left(keys, prefix + "\x7f", first) if prefix else len(keys)
            found = [ObjectInfo(key, len(data), at) for key in keys[first:last] for data, at in (self._objects[key],)]
        self._count("list", requests=max(1, math.ceil(len(found) / PAGE)))
        return iter(found)

    def _count(self, verb: str, *, requests: int = 1, put: int = 0, got: int = 0) -> None:
        with self._counting:
            self.requests[verb] += requests
            self.put_bytes += put
            self.got_bytes += got
